"""When a GPU's memory runs out: what was asked for and what was there, and what filled it, by kind and by stage.

The allocator's figures and the text of the error are always at hand. With a history (`FLOWLEDGER_MEMORY_HISTORY`: how many
allocations and releases it goes back) its snapshot is taken too, where the error is first seen and its locals still live, and
every block gets a kind and a stage (`blocks`). A history that the job keeps for itself is used as it is, and left alone.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flowledger.ledger.rows import MemoryRow, Row
from flowledger.record.gpu.blocks import Held, Moment, held
from flowledger.record.gpu.cuda import Gpu
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.gpu.peaks import Peak
from flowledger.record.gpu.shortage import Shortage, finding, said, shortage_in
from flowledger.record.host_memory import Reading
from flowledger.record.layers import Layers
from flowledger.record.layers import held as local
from flowledger.record.position import Frame
from flowledger.record.storages import Lives

Put = Callable[[Row, Frame, int], None]
Known = Callable[[], Iterator[tuple[int, str]]]  # addresses of storages, and their kinds
MOST = 3  # that a process tells of: who tries again in smaller pieces may meet many
MOMENTS = 65_536  # at which a stage began or ended, that are kept


class OutOfMemory:
    """The shortages of one process. `history`: entries that the allocator is to remember; 0: none."""

    def __init__(
        self, put: Put, memory: DeviceMemory, known: Known, guard: Callable[..., Any], *, history: int, who: str
    ) -> None:
        self._put, self._memory, self._known, self._guard = put, memory, known, guard
        self._history, self._who = history, who  # `rank 1: `, where there are several
        self._kept = self._ours = False  # a history; by this
        self._moments: deque[Moment] = deque(maxlen=MOMENTS)
        self._told = 0
        self._error = 0  # the id of the last one, which itself would keep its frames' tensors alive
        self._first: Frame | None = None  # the innermost call that it left

    def entered(self, stage: str | None) -> None:
        """From now on the process is in this stage, or in none."""
        if not self._history:
            return
        if not self._kept:
            here = self._memory.in_use.here()
            if here is None:
                return
            self._kept = True
            if not here[0].keeps_history():
                here[0].keep_history(self._history)
                self._ours = True
        self._moments.append(Moment(time.time_ns() // 1000, stage))

    def passed(self, frame: Frame, error: BaseException, now: int) -> None:
        """An exception leaves a call; of one that means a shortage the first call tells."""
        short = shortage_in(error)
        if short is None or self._told >= MOST:
            return
        if self._first is not None and self._error == id(short) and self._first.within(frame):
            return
        self._error, self._first = id(short), frame
        here = self._memory.in_use.here()
        if here is not None:  # else it is another process's, which tells of it itself
            self._told += 1
            self._tell(frame, short, now, *here)

    def close(self) -> None:
        """Stop the history, if it is this one's."""
        here = self._memory.in_use.here() if self._ours else None
        if here is not None:
            here[0].keep_history(None)
        self._ours = False

    def _tell(self, frame: Frame, error: BaseException, now: int, gpu: Gpu, device: int) -> None:
        blocks = self._guard(self._blocks, gpu, device) or [] if self._kept else []
        seen, counted = self._memory.reading() or Reading(), self._memory.peak(frame.stage_frame)
        if blocks:  # of the same moment as the kinds
            seen = seen._replace(allocated=sum(one.bytes for one in blocks))
        row = MemoryRow(
            instant="oom", kind="total", allocated=seen.allocated, reserved=seen.reserved,
            device_used=seen.device_used, host_used=seen.host_used, fragmentation=seen.fragmentation,
            peak_since_stage=counted.allocated if counted is not None else None,
            reserved_peak_since_stage=counted.reserved if counted is not None else None,
        )  # fmt: skip
        self._put(row, frame, now)
        short = Shortage(
            where=self._who + place(frame), said=said(str(error)), allocated=seen.allocated, reserved=seen.reserved,
            peak=self._peak(frame, counted), held=blocks,
        )  # fmt: skip
        for kind, size in short.kinds.items():
            self._put(MemoryRow(instant="oom", kind=kind, allocated=size), frame, now)
        self._made(blocks, frame, now)
        self._put(finding(short), frame, now)

    def _blocks(self, gpu: Gpu, device: int) -> list[Held]:
        known: dict[int, str] = {}
        for address, kind in self._known():
            known.setdefault(address, kind)  # of two that share an address the surer counts
        return held(gpu.snapshot(), device, known, list(self._moments))

    def _made(self, blocks: list[Held], frame: Frame, now: int) -> None:
        """A row for each stage that made something and each kind of it."""
        sums: dict[tuple[str, str], int] = {}
        for one in blocks:
            if one.stage is not None:
                sums[one.stage, one.kind] = sums.get((one.stage, one.kind), 0) + one.bytes
        for (stage, kind), size in sums.items():
            made_in = Frame(stage, "stage")
            made_in.stage, made_in.step, made_in.role = stage, frame.step, frame.role
            self._put(MemoryRow(instant="made", kind=kind, allocated=size), made_in, now)

    def _peak(self, frame: Frame, counted: Peak | None) -> tuple[int, str] | None:
        """The highest of the process so far, this stage included."""
        found = [] if counted is None else [(counted.allocated, frame.step, frame.stage)]
        found += [] if self._memory.highest is None else [self._memory.highest]
        if not found:
            return None
        size, step, stage = max(found, key=lambda one: one[0])
        return size, f"{stage or 'no stage'}{f', step {step}' if step is not None else ''}"


def addresses(layers: Layers, lives: Lives) -> Iterator[tuple[int, str]]:
    """Where the storages lie that a recorder knows, and what kind each is: what is surest first."""
    for module in layers.modules():
        yield from (_at(tensor, "param") for tensor in (*module.parameters(), *module.buffers()))
    for module in layers.modules():
        yield from (_at(tensor.grad, "grad") for tensor in module.parameters() if tensor.grad is not None)
    yield from (_at(tensor, "optimizer") for tensor in layers.optimizer_tensors())
    yield from (_at(tensor, "kv_cache") for tensor in layers.cache_tensors())
    yield from ((storage.data_ptr(), kind) for storage, kind in lives.alive())


def place(frame: Frame) -> str:
    """`update_actor/forward`."""
    return "/".join(part for part in (frame.stage, frame.phase) if part) or frame.name


def _at(tensor: Any, kind: str) -> tuple[int, str]:
    try:
        return int(local(tensor).untyped_storage().data_ptr()), kind
    except (RuntimeError, NotImplementedError):  # sparse, nested or fake tensors lie nowhere
        return 0, kind
