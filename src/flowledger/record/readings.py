"""Memory at the boundaries of stages and phases: what the allocator says, and kinds that can be counted at any time."""

import time
from collections.abc import Callable

from flowledger.ledger.rows import MemoryRow, Row
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.host_memory import Reading, host_reading, resident
from flowledger.record.layers import Layers
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_SAME_NS = 500_000  # younger than this, a reading is still the present
_SHARE, _SHARE_AT_STEPS = 1 / 4000, 1 / 12000  # of the time, for readings (glibc walks its free lists: 10 µs to 2 ms)
_ADVANCE_NS, _MOST_NS = 1_000_000_000, 40_000_000_000  # the time that counts at the very begin, and at most


class Readings:
    """Reads and writes; the highest reading of a stage is kept on its frame.

    A step is read at its end; so is the end of a long stage, and on a GPU, whose peaks belong to stages, of every one. Other
    readings live on a small share of the time: begins of steps and stages are read if it can be paid, and phases if a stage
    could be too. Where the allocator of the host is too dear at the end of a step, its process's memory alone is read.
    A process beside the ranks that train (`trains`: no) has little that changes: its steps and long stages are enough.
    """

    def __init__(self, put: Put, limit: int | None, *, level: str, device: DeviceMemory, trains: bool = True) -> None:
        self._put, self._limit, self._device, self._trains = put, limit, device, trains
        self._share = _SHARE_AT_STEPS if level == "steps" else _SHARE
        self._last = Reading()
        self._when = self._price = 0
        self._credit, self._counted = _ADVANCE_NS * self._share, time.monotonic_ns()
        self.free = False  # while a step is watched closely: every boundary is read

    def read(self, frame: Frame, instant: str, now: int) -> None:
        """A row of kind `total`, if a reading can be had."""
        edge = instant if frame is frame.stage_frame else None
        if edge == "begin" and self._device.met:
            self._device.begin(frame)
        if self._due(frame, instant, now):
            self._write(frame, instant, now)
        if edge == "end" and self._device.met:
            self._device.end(frame)
            if (seen := self._device.outside()) is not None:
                row = MemoryRow(instant="nvml", kind="residue", allocated=seen.outside, device_used=seen.used)
                self._put(row, frame, now)

    def known(self, layers: Layers, frame: Frame, now: int) -> None:
        """Rows of the kinds that models, optimizers and caches account for, at the end of a stage."""
        for kind, size in layers.bytes_by_kind("cuda" if self._device.there() else None).items():
            self._put(MemoryRow(instant="end", kind=kind, allocated=size), frame, now)

    def _due(self, frame: Frame, instant: str, now: int) -> bool:
        stage = frame.stage_frame
        due = frame.scope == "step" and instant == "end"
        if instant == "end" and frame is stage:
            due |= (now - frame.start_ns) * self._share > 2 * self._price or self._device.there()
        return self.free or due or (self._trains and self._affordable(frame, instant, now))

    def _write(self, frame: Frame, instant: str, now: int) -> None:
        stage = frame.stage_frame
        paid = self.free or frame.scope != "step" or self._affordable(frame, instant, now)
        seen = self._look(now) if paid else self._cheap(now)
        counted = self._device.peak(stage) if self._device.met else None
        allocated, reserved = counted if counted is not None else (None, None)
        highest = [value for value in (stage.peak, seen.allocated, allocated) if value is not None]
        stage.peak = max(highest) if highest else None
        row = MemoryRow(
            instant=instant, kind="total", allocated=seen.allocated, reserved=seen.reserved,
            device_used=seen.device_used, host_used=seen.host_used, peak_since_stage=stage.peak,
            reserved_peak_since_stage=reserved, limit=self._limit, fragmentation=seen.fragmentation,
        )  # fmt: skip
        self._put(row, frame, now)

    def _affordable(self, frame: Frame, instant: str, now: int) -> bool:
        self._credit = min(_MOST_NS * self._share, self._credit + (now - self._counted) * self._share)
        self._counted = now
        if frame.scope == "stage" and now - self._when <= _SAME_NS:
            return True
        readings = 1 if instant == "end" and frame.scope in ("stage", "step") else 2  # these matter most
        return self._credit >= readings * self._price

    def _cheap(self, now: int) -> Reading:
        """What can be had without the host's allocator: a GPU's, the reading that is still the present, or the process's memory."""
        if self._device.met and (seen := self._device.reading()) is not None:
            return seen
        return self._last if now - self._when <= _SAME_NS else Reading(host_used=resident())

    def _look(self, now: int) -> Reading:
        """A reading; of the host the one before where a stage begins right after another has ended."""
        before = time.monotonic_ns()
        seen = self._device.reading() if self._device.met else None
        if seen is not None or now - self._when > _SAME_NS:
            self._last = seen or host_reading()
            self._when = time.monotonic_ns()
            self._price = self._when - before
            self._credit -= self._price
        return self._last
