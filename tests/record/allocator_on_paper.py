"""An allocator that is played and writes its snapshot as torch does, and remembers what was in use at every moment."""

from typing import Any

SITE = "/venv/lib/python3.11/site-packages/"
START = 0x7F00_0000_0000


def rounded(size: int) -> int:
    """Blocks come in steps of 512 bytes."""
    return max((size + 511) // 512 * 512, 512)


def frames(*lines: str) -> list[dict[str, Any]]:
    """`file:function`, the innermost first."""
    return [{"filename": file, "line": 7, "name": name} for file, _, name in (line.partition(":") for line in lines)]


class Paper:
    """One device. Every block has a segment of its own, which stays reserved until `release`."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.alive: dict[int, tuple[int, Any]] = {}  # address -> bytes it takes, who asked
        self.segments: dict[int, int] = {}
        self.trace: list[dict[str, Any]] = []
        self.course: list[tuple[int, int, dict[int, int]]] = []  # after each entry: in use, reserved, and where
        self.now, self.next = 1_700_000_000_000_000, START

    def take(self, size: int, who: Any = (), *, address: int | None = None) -> int:
        """Memory for somebody: in a segment that was kept, or in a new one."""
        where = self.next if address is None else address
        if address is None:
            self.next += 1 << 40
            self.segments[where] = rounded(size)
            self._note("segment_alloc", where, rounded(size), [])
        self.alive[where] = rounded(size), who
        self._note("alloc", where, size, who)
        return where

    def give_back(self, address: int, size: int) -> None:
        del self.alive[address]
        self._note("free_requested", address, size, [])
        self._note("free_completed", address, size, [])

    def release(self, address: int) -> None:
        self._note("segment_free", address, self.segments.pop(address), [])

    def run_out(self, size: int, free: int, who: Any = ()) -> None:
        self._note("oom", None, size, who, device_free=free)

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """As torch.cuda.memory._snapshot has it; of the history the last `keep` entries."""
        segments = []
        for address, size in self.segments.items():
            used, who = self.alive.get(address, (0, ()))
            blocks = []
            if used:
                blocks.append(
                    {
                        "address": address,
                        "size": used,
                        "requested_size": used,
                        "state": "active_allocated",
                        "frames": list(who),
                    }
                )
            if used < size:
                blocks.append(
                    {
                        "address": address + used,
                        "size": size - used,
                        "requested_size": 0,
                        "state": "inactive",
                        "frames": [],
                    }
                )
            segments.append({
                "device": self.device, "address": address, "total_size": size, "allocated_size": used, "active_size": used,
                "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
            })  # fmt: skip
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        history = self.trace if keep is None else self.trace[len(self.trace) - keep :]
        return {
            "segments": segments,
            "device_traces": [*traces, history],
            "allocator_settings": {"expandable_segments": False},
        }

    def _note(self, action: str, address: int | None, size: int, who: Any, **more: int) -> None:
        self.now += 7
        entry = {"action": action, "size": size, "stream": 0, "time_us": self.now, "frames": list(who), **more}
        self.trace.append(entry if address is None else {**entry, "addr": address})
        sizes = {where: size for where, (size, _) in self.alive.items()}
        self.course.append((sum(sizes.values()), sum(self.segments.values()), sizes))
