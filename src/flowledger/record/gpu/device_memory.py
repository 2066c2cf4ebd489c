"""A GPU's memory stage by stage: what the allocator and the device say, the peaks since each stage began, and what is outside."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flowledger.record.gpu.cuda import InUse, figure
from flowledger.record.gpu.nvml import ProcessMemory
from flowledger.record.gpu.peaks import Peak, Peaks, Since
from flowledger.record.host_memory import Reading, resident
from flowledger.record.position import Frame


class Highest(NamedTuple):
    """The stage that had most allocated so far."""

    bytes: int
    step: int | None
    stage: str | None


class Outside(NamedTuple):
    """Bytes of this process on its device: all, and what torch's allocator has not taken (context, NCCL, libraries)."""

    used: int
    outside: int


class DeviceMemory:
    """The memory of this process's GPU, nothing where it has none.

    `guard` runs a function and turns what it raises into a row: a reading that fails is one that is not there.
    """

    def __init__(
        self, guard: Callable[..., Any], in_use: InUse | None = None, process: ProcessMemory | None = None
    ) -> None:
        self.highest: Highest | None = None
        self.in_use = in_use or InUse()
        self._guard, self._process = guard, process or ProcessMemory()
        self._peaks: Peaks | None = None  # from the first stage on a GPU on
        self._since: dict[int, Since] = {}  # by the span of an open step or stage

    def begin(self, stage: Frame) -> None:
        """Count the peaks of a step or stage from now on."""
        self._guard(self._begin, stage)

    def end(self, stage: Frame) -> None:
        """A step or stage has ended."""
        if stage.id in self._since:
            self._guard(self._end, stage, self._since.pop(stage.id))

    def there(self) -> bool:
        """Whether this process works on a GPU, and may be asked for it now."""
        return self._guard(self.in_use.here) is not None

    @property
    def met(self) -> bool:
        """Whether it has worked on one when it was looked at last: before that there is nothing to ask."""
        return bool(self.in_use.met)

    def peak(self, stage: Frame) -> Peak | None:
        """The peaks of an open step or stage so far, where they are counted."""
        since = self._since.get(stage.id)
        return None if since is None or self._peaks is None else self._guard(self._peaks.peak, since)

    def reading(self) -> Reading | None:
        """What the caching allocator and the device say, without a synchronisation; None where there is no GPU.

        Where it cannot be asked just now (a graph is captured) there is only what the host uses, and never its allocator's figures.
        """
        seen: Reading | None = self._guard(self._reading)
        return Reading(host_used=resident()) if seen is None and self.in_use.met else seen

    def outside(self) -> Outside | None:
        """What the driver says of this process, as often as that can be paid."""
        return self._guard(self._outside)  # type: ignore[no-any-return]  # what it guards, or None

    def close(self) -> None:
        """Count no more."""
        self._since.clear()
        if self._peaks is not None:
            self._guard(self._peaks.close)
        self._guard(self._process.close)

    def _begin(self, stage: Frame) -> None:
        here = self.in_use.here()
        if here is None:
            return
        gpu, device = here
        if self._peaks is None:
            self._peaks = Peaks(gpu.counters(), self._guard)
        since = self._peaks.begin(device)
        if since is not None:
            self._since[stage.id] = since

    def _end(self, stage: Frame, since: Since) -> None:
        if self._peaks is None:
            return
        top = self._peaks.peak(since).allocated
        self._peaks.end(since)
        if stage.stage is not None and (self.highest is None or top > self.highest.bytes):
            self.highest = Highest(top, stage.step, stage.stage)

    def _reading(self) -> Reading | None:
        here = self.in_use.here()
        if here is None:
            return None
        gpu, device = here
        stats = gpu.stats(device)
        return Reading(
            allocated=figure(stats, "allocated_bytes"), reserved=figure(stats, "reserved_bytes"),
            device_used=gpu.memory(device).used, host_used=resident(),
        )  # fmt: skip

    def _outside(self) -> Outside | None:
        here = self.in_use.here()
        if here is None or (used := self._process.used(*here)) is None:
            return None
        gpu, device = here
        return Outside(used, used - figure(gpu.stats(device), "reserved_bytes"))
