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
_SHARE, _SHARE_AT_STEPS = 1 / 2000, 1 / 6000  # of the time, for readings (glibc walks its free lists: 10 to 400 µs)
_ADVANCE_NS, _MOST_NS = 1_000_000_000, 40_000_000_000  # the time that counts at the very begin, and at most


class Readings:
    """Reads and writes; the highest reading of a stage is kept on its frame.

    A step is read at its end, whatever that costs, and above level `steps` at its begin too; so is the
    end of a long stage. In between readings live on a small share of the
    time: stages are read if it can be paid, and phases if a stage could be too.
    """

    def __init__(self, put: Put, limit: int | None, *, level: str) -> None:
        self._put, self._limit = put, limit
        self._share = _SHARE_AT_STEPS if level == "steps" else _SHARE
        self._last = Reading()
        self._when = self._price = 0
        self._credit, self._counted = _ADVANCE_NS * self._share, time.monotonic_ns()
        self.free = False  # while a step is watched closely: every boundary is read

    def read(self, frame: Frame, instant: str, now: int) -> None:
        """A row of kind `total`, if a reading can be had."""
        stage = frame.stage_frame
        due = frame.scope == "step" and (instant == "end" or self._share == _SHARE)
        long = instant == "end" and frame is stage and (now - frame.start_ns) * self._share > 2 * self._price
        if not (self.free or due or long or self._affordable(frame, instant, now)):
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

    def _affordable(self, frame: Frame, instant: str, now: int) -> bool:
        self._credit = min(_MOST_NS * self._share, self._credit + (now - self._counted) * self._share)
        self._counted = now
        if frame.scope == "stage" and now - self._when <= _SAME_NS:
            return True
        readings = 1 if instant == "end" and frame.scope == "stage" else 2  # the end of a stage matters most
        return self._credit >= readings * self._price

    def _look(self, now: int) -> Reading:
        """A reading; the one before where a stage begins right after another has ended."""
        if now - self._when > _SAME_NS:
            before = time.monotonic_ns()
            self._last = _reading()
            self._when = time.monotonic_ns()
            self._price = self._when - before
            self._credit -= self._price
        return self._last


def _reading() -> Reading:
    torch = sys.modules.get("torch")
    return device_reading(torch) if torch is not None and torch.cuda.is_initialized() else host_reading()
