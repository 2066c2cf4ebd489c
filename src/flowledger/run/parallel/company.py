"""The ranks of a run and each other's fate: who they are, who has died, and why the run ends.

Words pass through the store that the ranks met at, over a connection of their own. The first rank to say why the run
ends speaks for all: what the others meet from then on (a broken connection, a request to end) follows from it.
"""

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, Protocol

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

SILENCE_S = 20.0  # without a sign of life a rank is given up, unless it is seen to run on this machine
LEAVING_S = 8.0  # for all ranks to close their parts
STORE_S = 10.0  # that the store may take to answer; one that does not has died with its machine

Kind = Literal["closed", "bad_input", "crashed", "died", "silent", "hung", "interrupted"]
LOST = ("died", "silent")  # what others say of a rank: its process has ended; it gives no sign of life


class Process(Protocol):
    """A process as others know it. It can be pickled."""

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def is_gone(self) -> bool:
        """Whether it has certainly ended; only of a process on this machine can that be seen."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as a process."""

    rank: int
    process: Process

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process.host}, pid {self.process.pid})"

    @property
    def silence(self) -> str:
        """What can be said of a rank that gives no sign of life."""
        here = self.process.host == socket.gethostname() and is_stopped(self.process.pid)
        why = "it was stopped by SIGSTOP" if here else "stopped, cut off, or dead with its machine?"
        return f"has given no sign of life for {SILENCE_S:.0f} s ({why})"


@dataclass(frozen=True, slots=True)
class Word:
    """Why a run ends, and the rank that said so."""

    rank: int
    kind: Kind
    text: str
    about: int | None = None  # died, silent: the rank that is


class Company:
    """All ranks of a run, from the point of view of one. The default process group must exist."""

    def __init__(self, members: list[Member], rank: int, store: Store) -> None:
        self.members, self.rank, self._store = members, rank, store
        self._beats = 0
        self._listened = time.monotonic()
        self._heard: tuple[int, float] = (0, self._listened)  # the neighbour's last beat, and when it was new

    @classmethod
    def join(cls, process: Process) -> "Company":
        """Meet the other ranks, as this process; returns when all are there."""
        rank, size = dist.get_rank(), dist.get_world_size()
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # its stub lacks it
        store.set_timeout(timedelta(seconds=STORE_S))
        store.set(_beat_of(rank), "0")
        members = [Member(rank, process)] * size
        dist.all_gather_object(members, members[rank])
        return cls(members, rank, store)

    @property
    def this(self) -> Member:
        return self.members[self.rank]

    def say(self, kind: Kind, text: str, about: int | None = None) -> Word:
        """Say why the run ends, unless that has been said; returns what was said first."""
        mine = Word(self.rank, kind, text, about)
        try:
            return _word(self._store.compare_set(END, "", json.dumps(asdict(mine))))
        except RuntimeError:  # the store is gone, and with it whoever could object
            return mine

    def said(self) -> Word | None:
        """Why the run ends, where that has been said. Raises RuntimeError where the store is gone."""
        return _word(self._store.get(END)) if self._store.check([END]) else None

    def dead(self) -> Member | None:
        """A rank of this machine that is no more."""
        return next((member for member in self.members if member.process.is_gone()), None)

    def silent(self) -> Member | None:
        """The next rank, where it gives no sign of life, and nobody can see that it runs.

        One that runs here and is silent only holds the interpreter for long; the limit of a hang is for that.
        """
        member = self.members[self._next]
        return member if time.monotonic() - self._heard[1] > SILENCE_S and not _runs_here(member.process) else None

    def beat(self) -> None:
        """Give a sign of life, and take the next rank's. Raises RuntimeError where the store is gone."""
        self._beats, now = self._beats + 1, time.monotonic()
        self._store.set(_beat_of(self.rank), str(self._beats))
        heard = int(self._store.get(_beat_of(self._next)))
        if heard != self._heard[0] or now - self._listened > SILENCE_S / 2:  # who was stopped itself begins anew
            self._heard = heard, now
        self._listened = now

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
                waiting = [
                    one for one in waiting if not (one.process.is_gone() or self._store.check([_left(one.rank)]))
                ]
            except RuntimeError:
                return False
            time.sleep(0.1 if waiting else 0)
        return not waiting

    @property
    def _next(self) -> int:
        return (self.rank + 1) % len(self.members)


END = "flowledger/end"


def _runs_here(process: Process) -> bool:
    """Whether a process is seen to live on this machine, and nobody has stopped it."""
    return process.host == socket.gethostname() and not process.is_gone() and not is_stopped(process.pid)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped (SIGSTOP), and waits to be continued."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _beat_of(rank: int) -> str:
    return f"flowledger/beat/{rank}"


def _left(rank: int) -> str:
    return f"flowledger/left/{rank}"


def _word(text: bytes) -> Word:
    return Word(**json.loads(text))
