"""The ranks of a run and each other's fate: who they are, who has died, and why the run ends.

Words pass through the store that the ranks met at, over a connection of their own. The first rank to say why the run
ends speaks for all: what the others meet from then on (a broken connection, a request to end) follows from it.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

SILENCE_S = 20.0  # without one, a rank on another machine counts as dead
LEAVING_S = 8.0  # for all ranks to close their parts
STORE_S = 10.0  # that the store may take to answer; one that does not has died with its machine

Kind = Literal["closed", "bad_input", "crashed", "died", "hung", "interrupted"]


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as a process."""

    rank: int
    host: str
    pid: int
    started: float  # seconds since 1970; a reused pid has another start

    @classmethod
    def this(cls, rank: int) -> "Member":
        return cls(rank, socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def is_gone(self) -> bool:
        """Whether it has certainly ended; only of a process on this machine can that be seen."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return bool(process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > 2)
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, slots=True)
class Word:
    """Why a run ends, and the rank that said so."""

    rank: int
    kind: Kind
    text: str


class Company:
    """All ranks of a run, from the point of view of one. The default process group must exist."""

    def __init__(self, members: list[Member], rank: int, store: Store) -> None:
        self.members, self.rank, self._store = members, rank, store
        self._beats = 0
        self._heard: tuple[int, float] = (0, time.monotonic())  # the neighbour's last beat, and when it was new

    @classmethod
    def join(cls) -> "Company":
        """Meet the other ranks; returns when all are there."""
        rank, size = dist.get_rank(), dist.get_world_size()
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # its stub lacks it
        store.set_timeout(timedelta(seconds=STORE_S))
        store.set(_beat_of(rank), "0")
        members: list[Member] = [Member.this(rank)] * size
        dist.all_gather_object(members, members[rank])
        return cls(members, rank, store)

    @property
    def this(self) -> Member:
        return self.members[self.rank]

    def say(self, kind: Kind, text: str) -> Word:
        """Say why the run ends, unless that has been said; returns what was said first."""
        mine = Word(self.rank, kind, text)
        try:
            return _word(self._store.compare_set(END, "", json.dumps(asdict(mine))))
        except RuntimeError:  # the store is gone, and with it whoever could object
            return mine

    def said(self) -> Word | None:
        """Why the run ends, where that has been said. Raises RuntimeError where the store is gone."""
        return _word(self._store.get(END)) if self._store.check([END]) else None

    def dead(self) -> Member | None:
        """A rank that is no more: any of this machine, and the next rank wherever it is, by its silence."""
        return next((member for member in self.members if member.is_gone()), None) or self._silent()

    def beat(self) -> None:
        """Give a sign of life, and take the next rank's. Raises RuntimeError where the store is gone."""
        self._beats += 1
        self._store.set(_beat_of(self.rank), str(self._beats))
        heard = int(self._store.get(_beat_of(self._next)))
        if heard != self._heard[0]:
            self._heard = heard, time.monotonic()

    def leave(self) -> None:
        """Say that this rank has closed its part, after a run that does not end well."""
        with suppress(RuntimeError):
            self._store.set(_left(self.rank), "")

    def all_left(self) -> bool:
        """Whether every rank has closed its part or is no more; waits LEAVING_S for that."""
        until = time.monotonic() + LEAVING_S
        waiting = list(self.members)
        while waiting and time.monotonic() < until:
            try:
                waiting = [one for one in waiting if not (one.is_gone() or self._store.check([_left(one.rank)]))]
            except RuntimeError:
                return False
            time.sleep(0.1 if waiting else 0)
        return not waiting

    @property
    def _next(self) -> int:
        return (self.rank + 1) % len(self.members)

    def _silent(self) -> Member | None:
        return self.members[self._next] if time.monotonic() - self._heard[1] > SILENCE_S else None


END = "flowledger/end"


def _beat_of(rank: int) -> str:
    return f"flowledger/beat/{rank}"


def _left(rank: int) -> str:
    return f"flowledger/left/{rank}"


def _word(text: bytes) -> Word:
    return Word(**json.loads(text))
