"""The GPU of this process as a recorder may look at it: only where the job works on it, and never to its cost.

torch is not imported and CUDA not initialised for this; no call here waits for the device. Nothing is asked while a CUDA
graph is captured, which a foreign call may spoil, nor of a device on which this process has allocated nothing: there the
question alone would make a context of some hundred MiB.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

Stats = Mapping[Any, Any]  # as torch.cuda.memory_stats_as_nested_dict has them


class OnDevice(NamedTuple):
    """Bytes of a device in use by anyone, and all that it has."""

    used: int
    total: int


class Event(Protocol):
    """A mark in a stream of the device."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, later: Any, /) -> float: ...


class Gpu(Protocol):
    """What is asked of torch. `device` is an index, sizes are bytes."""

    def device(self) -> int: ...
    def stats(self, device: int) -> Stats: ...
    def counters(self) -> Any: ...
    def memory(self, device: int) -> OnDevice: ...
    def uuid(self, device: int) -> str: ...
    def event(self) -> Event: ...
    def keeps_history(self) -> bool: ...
    def keep_history(self, entries: int | None) -> None: ...
    def snapshot(self) -> Mapping[str, Any]: ...


class TorchGpu:
    """`torch.cuda`, with its private functions in one place."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._cuda = torch, torch.cuda

    def device(self) -> int:
        """The current device of this thread."""
        return int(self._cuda.current_device())

    def stats(self, device: int) -> Stats:
        """Figures of the caching allocator: a look at its counters."""
        return self._cuda.memory_stats_as_nested_dict(device)  # type: ignore[no-any-return]  # torch has no types here

    def counters(self) -> Any:
        """The module whose functions read and reset these figures (see `peaks`)."""
        return self._torch._C

    def memory(self, device: int) -> OnDevice:
        free, total = self._cuda.mem_get_info(device)
        return OnDevice(used=int(total - free), total=int(total))

    def uuid(self, device: int) -> str:
        return f"GPU-{self._cuda.get_device_properties(device).uuid}"

    def event(self) -> Event:
        return self._cuda.Event(enable_timing=True)  # type: ignore[no-any-return]  # as above

    def keeps_history(self) -> bool:
        """Whether somebody has asked the allocator to remember what it does."""
        asked = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return bool(asked is not None and asked())

    def keep_history(self, entries: int | None) -> None:
        """Remember the last `entries` allocations and releases, and who made what is alive; None: no more."""
        if entries is None:
            self._cuda.memory._record_memory_history(enabled=None)
        else:
            self._cuda.memory._record_memory_history(
                enabled="all", context="state", stacks="python", max_entries=entries
            )

    def snapshot(self) -> Mapping[str, Any]:
        """Every block of the allocator, as torch.cuda.memory._snapshot describes it."""
        return self._cuda.memory._snapshot()  # type: ignore[no-any-return]  # as above


Find = Callable[[], Gpu | None]
_known: dict[int, TorchGpu] = {}  # by the id of torch, which is imported once


def found() -> Gpu | None:
    """torch's GPU, where the job has initialised CUDA in this process and captures no graph now."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return None
    return _known.setdefault(id(torch), TorchGpu(torch))


class InUse:
    """The current device, once the job has allocated on it."""

    def __init__(self, find: Find | None = None) -> None:
        self._find = find or found
        self.met: set[int] = set()  # devices that have been in use

    def here(self) -> tuple[Gpu, int] | None:
        """(the GPU, its index), None where there is nothing to look at."""
        gpu = self._find()
        if gpu is None:
            return None
        device = gpu.device()
        if device not in self.met:
            if not figure(gpu.stats(device), "reserved_bytes", "allocated"):  # of all time
                return None
            self.met.add(device)
        return gpu, device


def figure(stats: Stats, name: str, part: str = "current") -> int:
    """One number of an allocator's figures, 0 where it does not have it."""
    return int(stats.get(name, {}).get("all", {}).get(part, 0))
