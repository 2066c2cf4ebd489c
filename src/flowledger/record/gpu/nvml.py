"""What the driver says that this process holds on its GPU: with torch's part taken off, what no tensor explains.

That is the CUDA context, loaded kernels, NCCL's buffers, and what libraries allocate past torch. It comes from NVML,
through the optional package `nvidia-ml-py`; without it, or where NVML knows this process under another number (a container
with process numbers of its own), there is no such reading. A question may take the driver milliseconds, so it is asked seldom.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

FLOOR_NS = 10_000_000_000  # between two questions, at least
_SHARE = 1 / 2000  # of the time, at most


class Named(Protocol):
    """Who knows the name by which the driver knows a device (`GPU-…`)."""

    def uuid(self, device: int) -> str: ...


class ProcessMemory:
    """The reading of one process."""

    def __init__(
        self,
        load: Callable[[], Any] = lambda: import_module("pynvml"),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._load, self._clock = load, clock
        self._nvml: Any = None
        self._absent = False
        self._handles: dict[int, Any] = {}
        self._next = 0  # when it may be asked again

    def used(self, gpu: Named, device: int) -> int | None:
        """Bytes of this process on a device; None where nobody says, or not yet again. Raises what NVML raises, once."""
        if self._absent or self._clock() < self._next:
            return None
        self._absent = True  # for good, unless all goes well
        if self._nvml is None and not self._open():
            return None
        if device not in self._handles:
            self._handles[device] = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid(device))
        began = self._clock()
        found = self._of_this_process(self._handles[device])
        self._absent = found is None
        now = self._clock()
        self._next = now + max(FLOOR_NS, int((now - began) / _SHARE))
        return found

    def close(self) -> None:
        """Let NVML go."""
        nvml, self._nvml, self._absent = self._nvml, None, True
        if nvml is not None:
            nvml.nvmlShutdown()

    def _open(self) -> bool:
        try:
            nvml = self._load()
        except ImportError:
            return False
        nvml.nvmlInit()
        self._nvml = nvml
        return True

    def _of_this_process(self, handle: Any) -> int | None:
        """NVML counts by process; the size is None where the driver keeps it to itself (Windows)."""
        sizes = [
            process.usedGpuMemory
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if process.pid == os.getpid()
        ]
        return int(sizes[0]) if sizes and sizes[0] is not None else None
