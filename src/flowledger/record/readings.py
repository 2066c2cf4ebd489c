"""Memory at the boundaries of stages and phases: what the allocator says, and kinds that can be counted at any time."""

import sys
import time
from collections.abc import Callable

from flowledger.ledger.rows import MemoryRow, Row
from flowledger.record.host_memory import Reading, device_reading, host_reading
from flowledger.record.layers import Layers
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_SAME_NS = 500_000  # younger than this, a reading is still the present
# The time since the last reading must be so many times its price (glibc walks its free lists: 5 to 200 µs).
_PHASE, _SPARED_STAGE = 1000, 200


class Readings:
    """Reads and writes; the highest reading of a stage is kept on its frame. `spare`: pass over very short stages."""

    def __init__(self, put: Put, limit: int | None, *, spare: bool) -> None:
        self._put, self._limit, self._spare = put, limit, spare
        self._last = Reading()
        self._when = self._price = 0

    def read(self, frame: Frame, instant: str, now: int) -> None:
        """A row of kind `total`; at the end of a phase, and where sparing of a stage, only if it is not too dear."""
        stage = frame.stage_frame
        least = _PHASE if frame.scope not in ("stage", "step") else _SPARED_STAGE if self._spare else 0
        if least and frame.scope != "step" and now - self._when < least * self._price:
            return
        seen = self._look(now)
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

    def _look(self, now: int) -> Reading:
        """A reading; the one before where a stage begins right after another has ended."""
        if now - self._when > _SAME_NS:
            before = time.monotonic_ns()
            self._last = _reading()
            self._when = time.monotonic_ns()
            self._price = self._when - before
        return self._last


def _reading() -> Reading:
    torch = sys.modules.get("torch")
    return device_reading(torch) if torch is not None and torch.cuda.is_initialized() else host_reading()
