"""A GPU that is played: an allocator with torch's figures, a stream that works through what it is given, NVML."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


class Rows(list[Any]):
    """A stand-in for the writer."""

    def put(self, row: Any) -> None:
        self.append(row)

    def of(self, table: str, **where: Any) -> list[Any]:
        """Rows of one table with the values given."""
        return [row for row in self if row.table == table and all(getattr(row, k) == v for k, v in where.items())]


class Counter:
    """One of the allocator's figures."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, change: int) -> None:
        self.current += change
        self.peak = max(self.peak, self.current)
        self.allocated += max(change, 0)
        self.freed += max(-change, 0)


class Allocator:
    """torch._C as far as memory goes: blocks that lie one behind the other, each in a segment of its own that is kept."""

    def __init__(self, devices: int = 1) -> None:
        self.counters = [{name: Counter() for name in ("allocated_bytes", "reserved_bytes")} for _ in range(devices)]
        self.blocks: list[dict[int, dict[str, Any]]] = [{} for _ in range(devices)]  # by address, alive or not
        self.traces: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
        self.next = 0x7F00_0000_0000
        self.resets = 0
        self.module = SimpleNamespace(
            _cuda_memoryStats=self.stats, _cuda_resetPeakMemoryStats=self.reset,
            _accelerator_getDeviceStats=self.stats, _accelerator_resetPeakStats=self.reset,
        )  # fmt: skip

    def stats(self, device: int) -> dict[str, Any]:
        figures = {name: {"all": dict(vars(one))} for name, one in self.counters[device].items()}
        return {**figures, "num_ooms": 0}

    def reset(self, device: int) -> None:
        self.resets += 1
        for counter in self.counters[device].values():
            counter.peak = counter.current

    def take(self, size: int, device: int = 0, *, at: int | None = None, time_us: int = 0, frames: Any = ()) -> int:
        address = self.next if at is None else at
        self.next += size
        self.counters[device]["allocated_bytes"].add(size)
        self.counters[device]["reserved_bytes"].add(size)
        block = {"size": size, "requested_size": size, "address": address, "state": "active_allocated"}
        self.blocks[device][address] = block | {"frames": list(frames)}
        self.traces[device].append({"action": "alloc", "addr": address, "size": size, "time_us": time_us})
        return address

    def give_back(self, address: int, device: int = 0) -> None:
        block = self.blocks[device][address]
        block["state"] = "inactive"
        self.counters[device]["allocated_bytes"].add(-block["size"])

    def empty_cache(self, device: int = 0) -> None:
        for address, block in list(self.blocks[device].items()):
            if block["state"] == "inactive":
                del self.blocks[device][address]
                self.counters[device]["reserved_bytes"].add(-block["size"])


class Event:
    """A mark in the one stream; waiting for it is not played, since nobody may."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.at_ms = gpu, 0.0
        gpu.events += 1

    def record(self) -> None:
        self.at_ms = self.gpu.queued_ms

    def query(self) -> bool:
        self.gpu.asked += 1
        return self.gpu.done_ms >= self.at_ms

    def elapsed_time(self, later: "Event") -> float:
        assert self.query() and later.query(), "torch raises where an event has not passed"
        return later.at_ms - self.at_ms


class Gpu:
    """What flowledger.record.gpu.cuda.Gpu asks for. `foreign`: bytes on the device that are not this allocator's."""

    def __init__(self, devices: int = 1, total: int = 80 * GIB, foreign: int = 0) -> None:
        self.allocator = Allocator(devices)
        self.total, self.foreign = total, foreign
        self.current = 0
        self.capturing = False
        self.queued_ms = self.done_ms = 0.0
        self.events = self.asked = self.memory_asked = 0
        self.history: list[int | None] = []
        self.others_history = False

    def launch(self, ms: float) -> None:
        """Work for the stream, which has not begun with it."""
        self.queued_ms += ms

    def work(self) -> None:
        """The stream does all that it was given."""
        self.done_ms = self.queued_ms

    def find(self) -> "Gpu | None":
        return None if self.capturing else self

    def device(self) -> int:
        return self.current

    def stats(self, device: int) -> Any:
        return self.allocator.module._cuda_memoryStats(device)  # as torch.cuda does: by name, at each call

    def counters(self) -> Any:
        return self.allocator.module

    def memory(self, device: int) -> Any:
        self.memory_asked += 1
        reserved = self.allocator.counters[device]["reserved_bytes"].current
        return SimpleNamespace(used=reserved + self.foreign, total=self.total)

    def uuid(self, device: int) -> str:
        return f"GPU-{device}"

    def event(self) -> Event:
        return Event(self)

    def keeps_history(self) -> bool:
        return self.others_history or bool(self.history and self.history[-1])

    def keep_history(self, entries: int | None) -> None:
        self.history.append(entries)

    def snapshot(self) -> Any:
        segments = [
            {"device": device, "address": address, "total_size": block["size"], "blocks": [block]}
            for device, blocks in enumerate(self.allocator.blocks)
            for address, block in blocks.items()
        ]
        return {"segments": segments, "device_traces": self.allocator.traces}


class Nvml:
    """pynvml as far as it is asked. `processes`: (pid, bytes) on every device."""

    def __init__(self, *processes: tuple[int, int | None], price_ns: int = 0) -> None:
        self.processes = processes or ((os.getpid(), 10 * GIB),)
        self.calls: list[str] = []
        self.now, self.price_ns = 1_000, price_ns

    def clock(self) -> int:
        return self.now

    def nvmlInit(self) -> None:  # noqa: N802  NVIDIA's names
        self.calls.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.calls.append(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        self.calls.append("processes")
        self.now += self.price_ns
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]


def played_job(monkeypatch, name):
    """A module of this name whose functions a test fills in."""
    module = ModuleType(name)
    module.step = lambda: (module.rollout(), module.update())
    module.rollout = module.update = module.forward = lambda: None
    monkeypatch.setitem(sys.modules, name, module)
    return module
