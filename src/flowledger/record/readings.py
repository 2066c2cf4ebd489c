"""Memory at the boundaries of stages and phases: what the allocator says, and kinds that can be counted at any time."""

import sys
from collections.abc import Callable

from flowledger.ledger.rows import MemoryRow, Row
from flowledger.record.host_memory import Reading, device_reading, host_reading
from flowledger.record.layers import Layers
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]


class Readings:
    """Reads and writes; the highest reading of a stage is kept on its frame."""

    def __init__(self, put: Put, limit: int | None) -> None:
        self._put, self._limit = put, limit

    def read(self, frame: Frame, instant: str, now: int) -> None:
        """A row of kind `total`."""
        seen, stage = _reading(), frame.stage_frame
        if instant == "begin" and frame is stage:
            stage.peak_before = seen.peak
        # A device's own peak belongs to this stage if it rose within it; its counter is the job's and is never reset.
        grown = seen.peak if seen.peak is not None and seen.peak > (stage.peak_before or 0) else None
        highest = [value for value in (stage.peak, seen.allocated, grown) if value is not None]
        stage.peak = max(highest) if highest else None
        row = MemoryRow(
            instant=instant, kind="total", allocated=seen.allocated, reserved=seen.reserved,
            device_used=seen.device_used, host_used=seen.host_used, peak_since_stage=stage.peak, limit=self._limit,
            fragmentation=seen.fragmentation,
        )  # fmt: skip
        self._put(row, frame, now)

    def known(self, layers: Layers, frame: Frame, now: int) -> None:
        """Rows of the kinds that models, optimizers and caches account for, at the end of a stage."""
        for kind, size in layers.bytes_by_kind().items():
            self._put(MemoryRow(instant="end", kind=kind, allocated=size), frame, now)


def _reading() -> Reading:
    torch = sys.modules.get("torch")
    return device_reading(torch) if torch is not None and torch.cuda.is_initialized() else host_reading()
