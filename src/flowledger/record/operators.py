"""Every storage that is born and dies within one step, operator by operator, and the live bytes by kind at any instant.

A dispatch mode sees the tensors that operators return; weak references see their storages die. What an operator takes
and frees within itself is not visible here (a few dozen bytes against torch's own profiler on a training step), but for
the copies that gloo makes in its collectives: those are as large as what travels, and known.
The kind of a storage is decided at the end of the step, when all that was learnt of it is known.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from flowledger.flow.kinds import classify
from flowledger.flow.seams import Function, replaced
from flowledger.record.position import Frame

_LIFT = torch.ops.aten.lift_fresh.default  # how torch.tensor(...) hands over what it has just made
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_UNSIGNED: frozenset[str] = frozenset()
_kind = cache(classify)  # of a handful of sets
# Functions that return tensors which no operator has made; activation checkpointing keeps one for each call.
_MAKERS = ("torch:get_rng_state", "torch.random:get_rng_state")
_WAIT = "torch._C._distributed_c10d:Work.wait"  # gloo hands over there what it has made inside
# Collective -> the argument (-1: the result) whose bytes gloo takes once more while it runs (torch 2.13, seen by its
# profiler): the flat buffer that parts arrive in, and a copy to add the parts of others to.
_COPIED_BY_GLOO = {
    "c10d::_allgather_base_": 0, "c10d::allgather_": 0, "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::_reduce_scatter_base_": 1, "c10d::reduce_scatter_": 1, "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::all_gather_into_tensor": -1, "_c10d_functional::reduce_scatter_tensor": 0,
}  # fmt: skip


class Born:
    """One storage within a step; `old` when it was there before the step."""

    __slots__ = ("began", "number", "old", "ref", "shared", "signs", "size")

    def __init__(self, size: int, old: bool) -> None:
        self.size = self.began = size  # bytes now, and when first seen
        self.old = old
        self.number: int | None = None  # its number in the ledger, where it has one
        self.shared = False  # the probes saw it too, and write its death themselves
        self.signs = _UNSIGNED
        self.ref: object = None


class Instant(NamedTuple):
    """Live bytes by kind at one moment; `label` begin, end or peak."""

    label: str
    frame: Frame
    t_ns: int
    live: dict[str, int]


class Event(NamedTuple):
    """A birth, a death or a change of size that the ledger should have a row of."""

    name: str  # born, freed
    storage: Born
    kind: str
    size: int
    frame: Frame
    t_ns: int


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Watches while it is entered. `quiet` while the recorder itself computes."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.quiet = False
        self.own_ns = 0
        self.collective = 0  # collectives open now
        self._waits = 0  # calls that wait for one
        self._closed = False
        self._live: dict[int, Born] = {}
        self._before: list[Born] = []
        self._events: list[tuple[Born, int, int]] = []  # storage, change in bytes, time
        self._marks: list[tuple[int, Frame, Frame, str, int]] = [(0, frame, frame, "", time.monotonic_ns())]
        self._device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and not _PLAIN.issuperset(types):
            if FakeTensor in types:  # DTensor asks for a shape: nothing is made
                return func(*args, **kwargs)
            return NotImplemented  # a DTensor unpacks itself; its local operators come here again
        if self.quiet:
            return func(*args, **kwargs)
        began, live = time.monotonic_ns(), self._live
        old = func is not _LIFT and not self._waits
        for value in args:  # most are tensors that are known already: no more than one look-up for those
            if type(value) not in _PLAIN:
                self._walk(value, old, began)
            elif value.untyped_storage()._cdata not in live:
                self._see(value, old, began)
        for value in kwargs.values():
            self._walk(value, True, began)
        between = time.monotonic_ns()
        result = func(*args, **kwargs)
        after = time.monotonic_ns()
        self._walk(result, False, after)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._copied(func.name(), args, result, after)
        self.own_ns += between - began + time.monotonic_ns() - after
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until left; what no operator shows is seen too: direct changes of size, and copies of random state."""
        torch.UntypedStorage.resize_ = _resizing(self)  # type: ignore[method-assign, assignment]
        try:
            with replaced([*((target, self._making) for target in _MAKERS), (_WAIT, self._waiting)]), self:
                yield
        finally:
            del torch.UntypedStorage.resize_  # the inherited one again
            self._closed = True

    def _making(self, function: Function) -> Function:
        @wraps(function)
        def made(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not self.quiet:
                self._walk(result, False, time.monotonic_ns())
            return result

        return made

    def _waiting(self, function: Function) -> Function:
        @wraps(function)
        def waited(*args: Any, **kwargs: Any) -> Any:
            self._waits += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._waits -= 1

        return waited

    def _copied(self, name: str, args: Any, result: Any, now: int) -> None:
        """A collective has begun: what its backend has of its own comes and goes, as an event that ends at once."""
        place = _COPIED_BY_GLOO.get(name)
        if place is None or self._device != "cpu":
            return
        size = sum(tensor.nbytes for tensor in tree_iter(result if place < 0 else args[place]))
        born = Born(size, False)
        born.signs = frozenset({"collective"})
        self._events += [(born, size, now), (born, -size, now)]

    def sign(self, value: Tensor, evidence: str) -> Born:
        """Note what a tensor is; one that no operator has shown yet was there before."""
        born = self._see(_inside(value), True, time.monotonic_ns())
        if evidence not in born.signs:  # each set of signs is made anew only when it grows
            born.signs = born.signs | {evidence}
        return born

    def find(self, pointer: int) -> Born | None:
        """The storage at an address, if it was born within this step."""
        born = self._live.get(pointer)
        return None if born is None or born.old else born

    def mark(self, frame: Frame, after: Frame, label: str, now: int) -> None:
        """A call begins or ends: `frame` is that call, `after` the one that runs from now on."""
        self._marks.append((len(self._events), frame, after, label, now))

    def replay(self, small: int = 0) -> Iterator[Instant | Event]:
        """The step once more, in order: births, deaths and the instants that were marked; then the peak of every stage.

        The peak of the step is the highest of them. Storages of fewer than `small` bytes count, and are no events.
        """
        live = dict.fromkeys(sorted({_kind(one.signs) for one in self._born()}), 0)
        for born in self._before:
            live[_kind(born.signs)] += born.began
        highest, peaks = self._highest(sum(live.values())), []
        marks = iter([*self._marks, (len(self._events) + 1, self._marks[0][1], self._marks[0][1], "", 0)])
        mark, here = next(marks), self._marks[0][1]
        for index, (born, change, now) in enumerate(self._events):
            while mark[0] <= index:
                here = mark[2]
                if mark[3]:
                    yield Instant(mark[3], mark[1], mark[4], dict(live))
                mark = next(marks)
            kind = _kind(born.signs)
            live[kind] += change
            if index in highest:
                peaks.append(Instant("peak", here, now, dict(live)))
            if not born.old and (abs(change) >= small or born.shared):
                yield Event("born" if change > 0 else "freed", born, kind, abs(change), here, now)
        while mark[0] <= len(self._events):
            if mark[3]:
                yield Instant(mark[3], mark[1], mark[4], dict(live))
            mark = next(marks)
        yield from peaks

    def _born(self) -> Iterator[Born]:
        yield from self._before
        yield from (born for born, _, _ in self._events)

    def _highest(self, total: int) -> set[int]:
        """The event at which each stage has the most live bytes, the first of equals; `total` lives at the begin."""
        peaks: dict[str | None, tuple[int, int]] = {}
        stage, at, marks = self._marks[0][1].stage, 0, self._marks
        for index, (_, change, _) in enumerate(self._events):
            while at < len(marks) and marks[at][0] <= index:
                stage, at = marks[at][2].stage, at + 1
            total += change
            if stage not in peaks or total > peaks[stage][0]:
                peaks[stage] = total, index
        return {index for _, index in peaks.values()}

    @property
    def peak_growth(self) -> int:
        """The most that the live bytes ever stood above where they began."""
        total = top = 0
        for _, change, _ in self._events:
            total += change
            top = max(top, total)
        return top

    def forget(self) -> None:
        """Let go of everything; no finaliser runs after this."""
        self._closed = True
        for born in self._live.values():
            born.ref = None
        self._live.clear()

    def _walk(self, value: Any, old: bool, now: int) -> None:
        if type(value) in _PLAIN:
            self._see(value, old, now)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                self._walk(inner, old, now)

    def _see(self, value: Tensor, old: bool, now: int) -> Born:
        storage = value.untyped_storage()
        pointer = storage._cdata
        born = self._live.get(pointer)
        if born is None:
            return self._enter(storage, pointer, old, now)
        if born.size != storage.nbytes():
            self._resized(storage)
        return born

    def _enter(self, storage: torch.UntypedStorage, pointer: int, old: bool, now: int) -> Born:
        counted = storage.nbytes() if storage.device.type == self._device else 0
        born = Born(counted, old)
        if self.collective and not old:
            born.signs = frozenset({"collective"})
        born.ref = weakref.ref(storage, lambda _: self._died(pointer, born))
        self._live[pointer] = born
        if old:
            self._before.append(born)
        else:
            self._events.append((born, counted, now))
        return born

    def _known(self, storage: torch.UntypedStorage) -> None:
        """What no operator has shown in this step was there before, be it empty (a parameter that FSDP gathers)."""
        if not self._closed and storage._cdata not in self._live:
            self._enter(storage, storage._cdata, True, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        born, size = self._live.get(storage._cdata), storage.nbytes()
        if born is not None and not self._closed and born.size != size and storage.device.type == self._device:
            if not (born.size and size):  # emptied or filled again: a whole parameter that FSDP puts together
                born.signs |= {"collective"}
            self._events.append((born, size - born.size, time.monotonic_ns()))
            born.size = size

    def _died(self, pointer: int, born: Born) -> None:
        if self._live.get(pointer) is born:
            del self._live[pointer]
        if not self._closed:
            self._events.append((born, -born.size, time.monotonic_ns()))


def _inside(value: Tensor) -> Tensor:
    """The tensor with the bytes: a wrapper (DTensor, a result that is still on its way) has a storage in name only."""
    while is_traceable_wrapper_subclass(value):
        value = getattr(value, value.__tensor_flatten__()[0][0])
    return value


def _resizing(watch: Operators) -> Callable[[torch.UntypedStorage, int], Any]:
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        watch._known(storage)
        result = original(storage, size)
        watch._resized(storage)
        return result

    return resize_
