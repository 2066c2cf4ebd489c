"""The lives of storages, by weak references: first seen, last read, freed, and held beyond what the flow declares.

A storage gets a number of its own (addresses are used again, numbers are not). Its death is noted at once and written
at the next occasion, since a finaliser may run anywhere. Nothing here keeps a storage alive.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import Row, StorageRow
from flowledger.record.holders import holders
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_SHARE, _ADVANCE_NS = 1 / 4000, 5_000_000  # of the time for searching holders, and what may be spent at once
_SHORT = ("batch", "temporary", "activation", "kv_cache")  # kinds whose overstaying is worth a row


class Life:
    """One storage as the probes know it."""

    __slots__ = (
        "born_in",
        "bytes",
        "graph",
        "held",
        "id",
        "kind",
        "lifetime",
        "name",
        "pointer",
        "read_in",
        "read_ns",
        "ref",
    )

    def __init__(self, number: int, pointer: int, size: int, name: str, graph: bool) -> None:
        facts = tensor(name)
        self.id, self.pointer, self.bytes, self.name, self.graph = number, pointer, size, name, graph
        self.kind, self.lifetime = facts.kind, facts.lifetime
        self.held = False
        self.born_in: Frame | None = None
        self.read_in: Frame | None = None
        self.read_ns = 0
        self.ref: object = None


class Lives:
    """Every storage that is alive and was seen at a probe."""

    def __init__(self, put: Put, here: Callable[[], Frame]) -> None:
        self.number_of: Callable[[int], int | None] | None = None  # set while operators are watched
        self._put, self._here = put, here
        self._alive: dict[int, Life] = {}
        self.dead: deque[tuple[Life, int, Frame]] = deque()
        self._next = 0
        self._holder_of: dict[str, str] = {}  # what held a tensor of that name when it was looked for last
        self._credit, self._counted = float(_ADVANCE_NS), time.monotonic_ns()  # nanoseconds to search in

    def new_number(self) -> int:
        self._next += 1
        return self._next

    def name_of(self, value: Any) -> str | None:
        """The tensor of the flow by which a tensor's storage is known, if it is."""
        life = self._alive.get(value.untyped_storage()._cdata)
        return None if life is None else life.name

    def alive(self) -> Iterator[tuple[Any, str]]:
        """Storages that are alive, and what kind of memory each is."""
        for life in list(self._alive.values()):
            storage = life.ref() if isinstance(life.ref, weakref.ref) else None
            if storage is not None:
                yield storage, life.kind

    def see(self, value: Any, name: str, access: str, frame: Frame, now: int) -> int:
        """Note an access to a tensor's storage; returns the storage's number."""
        storage = value.untyped_storage()
        pointer = storage._cdata
        life = self._alive.get(pointer)
        if life is None:
            life = self._meet(storage, pointer, value, name, access, frame, now)
        elif life.name != name and access == "write":
            life.name = name
        if access == "read":
            life.read_in, life.read_ns = frame, now
        return life.id

    def _meet(self, storage: Any, pointer: int, value: Any, name: str, access: str, frame: Frame, now: int) -> Life:
        known = self.number_of(pointer) if self.number_of is not None else None
        number = known if known is not None else self.new_number()
        life = Life(number, pointer, storage.nbytes(), name, value.requires_grad and not value.is_leaf)
        life.ref = weakref.ref(storage, partial(self._died, life))
        life.born_in = frame
        self._alive[pointer] = life
        if access == "write" and known is None:  # a storage with a number was born under the eyes of the operators
            self._put(StorageRow(storage=life.id, event="born", bytes=life.bytes, kind=life.kind), frame, now)
        return life

    def _died(self, life: Life, _: object) -> None:
        if self._alive.get(life.pointer) is life:
            del self._alive[life.pointer]
        self.dead.append((life, time.monotonic_ns(), self._here()))

    def settle(self) -> None:
        """Write the deaths since the last call."""
        while self.dead:
            life, when, frame = self.dead.popleft()
            self._last_read(life)
            self._put(StorageRow(storage=life.id, event="freed", bytes=life.bytes, kind=life.kind), frame, when)

    def _overdue(self, frame: Frame) -> Iterator[Life]:
        """Storages that the flow wants gone when `frame` (a stage or a step) ends, each reported once."""
        short = ("micro_batch", "stage") if frame.scope == "stage" else ("micro_batch", "stage", "step")
        for life in list(self._alive.values()):
            due = life.lifetime in short and life.kind in _SHORT and not life.held
            if due and life.born_in is not None and life.born_in.within(frame):
                life.held = True
                yield life

    def look_for_holders(self, frame: Frame) -> None:
        """Write which storages are still alive after their release, and who holds them."""
        overdue = list(self._overdue(frame))
        found = self._search(overdue) if overdue else {}
        for life in overdue:
            who = found.get(life.pointer) or ("autograd graph" if life.graph else "unknown")
            row = StorageRow(storage=life.id, event="held", bytes=life.bytes, kind=life.kind, holder=who)
            self._put(row, frame, time.monotonic_ns())

    def _search(self, overdue: list[Life]) -> dict[int, str]:
        """Who holds them; where a search cannot be paid for, whoever held one of the same name before."""
        began = time.monotonic_ns()
        self._credit = min(_ADVANCE_NS, self._credit + (began - self._counted) * _SHARE)
        self._counted = began
        if self._credit <= 0:
            known = self._holder_of
            return {life.pointer: known[life.name] for life in overdue if life.name in known}
        found = holders(life.pointer for life in overdue)
        self._credit -= time.monotonic_ns() - began
        self._holder_of |= {life.name: found[life.pointer] for life in overdue if life.pointer in found}
        return found

    def close(self) -> None:
        """Write what is known of the storages that outlive the recording."""
        self.settle()
        for life in list(self._alive.values()):
            life.ref = None  # no finaliser after the end
            self._last_read(life)
        self._alive.clear()

    def _last_read(self, life: Life) -> None:
        """Only where operators are watched, or for what lasts: elsewhere the accesses to the tensor say it."""
        if life.read_in is not None and (self.number_of is not None or life.lifetime == "persistent"):
            row = StorageRow(storage=life.id, event="last_read", bytes=life.bytes, kind=life.kind)
            self._put(row, life.read_in, life.read_ns)
