"""What a recorder does on a GPU, beside what it does anywhere: device times of spans, and a shortage taken apart."""

from collections.abc import Callable
from typing import Any

from flowledger.ledger.rows import Row
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.gpu.device_spans import DeviceSpans
from flowledger.record.gpu.out_of_memory import OutOfMemory, addresses
from flowledger.record.observe import Observer
from flowledger.record.position import Frame
from flowledger.record.watch import Watch

Put = Callable[[Row, Frame, int], None]
_LOOKED_AT = ("step", "stage", "epoch", "mini_batch")


class Device:
    """The GPU of one recorder: nothing happens before the job works on one.

    `guard` runs a function and turns what it raises into a row. `history`: how many allocations the allocator is to remember
    for the case that memory runs out; 0: none.
    """

    def __init__(
        self, put: Put, guard: Callable[..., Any], observer: Observer, *, history: int = 0, who: str = "",
        memory: DeviceMemory | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory or DeviceMemory(guard)
        self.on = False  # whether the process worked on a GPU when it was looked at last
        self._guard = guard
        self._spans = DeviceSpans(put, self.memory.in_use)
        self._shortages = OutOfMemory(
            put, self.memory, lambda: addresses(observer.layers, observer.lives), guard, history=history, who=who
        )

    def awake(self, scope: str) -> bool:
        """Whether there is a GPU to watch, looked at anew when something begins that is no single pass."""
        if scope in _LOOKED_AT:
            self.on = self.memory.there()
        return self.on

    def entered(self, watch: Watch, frame: Frame) -> None:
        """A call begins."""
        if watch.scope in ("step", "stage"):
            self._guard(self._shortages.entered, frame.stage)
        if _timed(watch):
            self._guard(self._spans.begin, frame)

    def left(self, watch: Watch, frame: Frame, now: int) -> None:
        """A call has ended, however."""
        if watch.scope in ("step", "stage"):
            self._guard(self._shortages.entered, frame.parent.stage if frame.parent is not None else None)
        if _timed(watch):
            self._guard(self._spans.end, frame, watch.name, watch.span_kind, now)

    def raised(self, frame: Frame, error: BaseException, now: int) -> None:
        """An exception leaves a call."""
        self._guard(self._shortages.passed, frame, error, now)

    def close(self) -> None:
        """Write what is still to be said."""
        for part in (self._spans, self._shortages, self.memory):
            self._guard(part.close)


def _timed(watch: Watch) -> bool:
    """Decode steps and calls without a phase are too many, and too short."""
    return watch.scope not in ("decode", "call") or watch.probe.phase is not None
