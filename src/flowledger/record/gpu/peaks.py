"""Peaks since many begins, out of the one counter that a device's allocator has.

A peak belongs to a stage only if the counter began with it, so it is reset there. What stood in it before is kept for all
who count from earlier: stages around this one, and the job, whose own readings must not change. So the functions of
`torch._C` by which Python reads and resets the counter (`torch.cuda.max_memory_allocated`, `memory_stats`, `torch.accelerator.memory`
and all else end in them) are replaced: the job is told the highest since its own last reset. Where they are not as expected nothing is reset.

What is not covered: code in C++ that reads the counter itself, and a peak of another thread in the microseconds between
reading and resetting.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from flowledger.record.gpu.cuda import Stats, figure

# (reads, resets) of torch._C; the first pair must be there, the second is torch.accelerator's and newer.
PAIRS = (
    ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),
    ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
)


class Peak(NamedTuple):
    """Bytes."""

    allocated: int
    reserved: int


class Since:
    """A stage that counts from some moment on: what the counters held when they were reset meanwhile."""

    __slots__ = ("device", "held")

    def __init__(self, device: int) -> None:
        self.device, self.held = device, Peak(0, 0)

    def with_now(self, stats: Stats) -> Peak:
        """The highest so far, the counters included."""
        now = (figure(stats, name, "peak") for name in ("allocated_bytes", "reserved_bytes"))
        return Peak(*map(max, self.held, now))


class Peaks:
    """The counters of a process, all of its devices. `module`: torch._C; `guard` turns what a function raises into a row."""

    def __init__(self, module: Any, guard: Callable[..., Any]) -> None:
        self._module, self._guard = module, guard
        self._lock = threading.RLock()
        self._open: list[Since] = []
        self._job: dict[int, dict[Any, Any]] = {}  # by device: the job's own peaks, which a reset of ours has cut off
        self._replaced: dict[str, tuple[Any, Any]] = {}  # name -> the original, ours
        self._closed = False

    def begin(self, device: int) -> Since | None:
        """Count from now on; None where that would change what the job reads."""
        with self._lock:
            if not (self._replaced or self._replace()):
                return None
            read, reset = (self._replaced[name][0] for name in PAIRS[0])
            self._job.setdefault(device, {})
            self._fold(device, read)
            reset(device)
            since = Since(device)
            self._open.append(since)
            return since

    def peak(self, since: Since) -> Peak:
        """The highest since then."""
        with self._lock:
            return since.with_now(self._replaced[PAIRS[0][0]][0](since.device))

    def end(self, since: Since) -> None:
        """Count no more."""
        with self._lock:
            if since in self._open:
                self._open.remove(since)

    def close(self) -> None:
        """Put torch's functions back: at once, or when the job next resets, for until then only this knows its peak."""
        with self._lock:
            self._open.clear()
            self._closed = True
            if not self._job:
                self._put_back()

    def _fold(self, device: int, read: Callable[[int], Stats]) -> None:
        """Keep what is about to be reset."""
        stats = read(device)
        for since in self._open:
            if since.device == device:
                since.held = since.with_now(stats)
        if (held := self._job.get(device)) is not None:
            _raise(held, stats, grow=True)

    def _replace(self) -> bool:
        pairs = [pair for pair in PAIRS if all(hasattr(self._module, name) for name in pair)]
        if PAIRS[0] not in pairs or self._closed:
            return False
        for read, reset in pairs:
            for name, make in ((read, self._reading), (reset, self._resetting)):
                original = getattr(self._module, name)
                self._replaced[name] = original, make(original)
                setattr(self._module, name, self._replaced[name][1])
        return True

    def _put_back(self) -> None:
        for name, (original, ours) in self._replaced.items():
            if getattr(self._module, name) is ours:  # else somebody has replaced it too, and calls ours
                setattr(self._module, name, original)

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(device: int) -> Any:
            with self._lock:
                stats = original(device)
                if held := self._job.get(device):
                    self._guard(_lift, stats, held)
                return stats

        return read

    def _resetting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        read = self._replaced[PAIRS[0][0]][0]

        @functools.wraps(original)
        def reset(device: int) -> Any:
            with self._lock:
                self._job.pop(device, None)  # from here on the counter itself is the job's again
                self._guard(self._fold, device, read)
                result = original(device)
                if self._closed and not self._job:
                    self._put_back()
                return result

        return reset


def _lift(stats: dict[Any, Any], held: Stats) -> None:
    """Tell the job the highest since its own last reset."""
    _raise(stats, held, grow=False)


def _raise(target: dict[Any, Any], by: Stats, *, grow: bool) -> None:
    """Raise every peak in nested figures to what it is in others; `grow`: those that are not there yet too."""
    for key, value in by.items():
        if isinstance(value, dict):
            inner = target.setdefault(key, {}) if grow else target.get(key)
            if inner is not None:
                _raise(inner, value, grow=grow)
        elif key == "peak" and value > target.get(key, 0):
            target[key] = value
