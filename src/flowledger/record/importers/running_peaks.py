"""verl's own peaks of memory, metrics of a step: as readings, so that a run's peak is theirs.

`perf/max_memory_allocated_gb` is `torch.cuda.max_memory_allocated() / 1024**3` of one worker, never reset: the most since
that process began. What was allocated and what was reserved at most were so at different moments: a reading each, for
together they would tell of a fragmentation that never was.
"""

import math
import re
from collections.abc import Iterator

from flowledger.ledger.rows import MemoryRow, MetricRow, Row
from flowledger.record.importers.memory_lines import GIB

END = "_gb"
NAME = re.compile(r"(?:.*/)?perf/max_memory_(?P<what>allocated|reserved)_gb")
MOST = 1 << 62  # bytes that a ledger's column holds


def with_readings(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, and behind each such metric a reading; its limit is the device's, where a reading before has told it."""
    limit: int | None = None
    for row in rows:
        yield row
        if type(row) is MetricRow:
            if row.raw_name.endswith(END) and (reading := _reading(row, limit)) is not None:
                yield reading
        elif type(row) is MemoryRow:
            limit = row.limit or limit


def _reading(row: MetricRow, limit: int | None) -> MemoryRow | None:
    found, value = NAME.fullmatch(row.raw_name), row.value
    if found is None or value is None or not math.isfinite(value) or not 0 < value * GIB < MOST:
        return None
    allocated, size = found["what"] == "allocated", round(value * GIB)
    return MemoryRow(
        instant=f"max_memory_{found['what']} so far", kind="total", step=row.step, rank=row.rank, limit=limit,
        allocated=size if allocated else None, reserved=None if allocated else size,
    )  # fmt: skip
