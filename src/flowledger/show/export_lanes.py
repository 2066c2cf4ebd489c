"""Processes and threads of a trace: a process a rank, and as many threads of a kind as keep intervals nested.

Viewers draw intervals of one thread as a stack: what overlaps without lying inside of another needs a thread of its own.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from flowledger.ledger.reader import Ledger

Event = dict[str, Any]
Who = tuple[str | None, int | str]  # role, and rank or, where there is none, the name
Naming = Generator[Event, None, int]
RUN = ""  # the process that has what belongs to no rank: metrics of the whole job
STAGES = "stages"
PHASES = {"compute": "phases and micro-batches", "comm": "communication", "wait": "waits"}  # span kind -> thread
THREADS = (STAGES, *PHASES.values(), "host")
FAR = 1 << 62


@dataclass(slots=True)
class _Process:
    """One process of the trace. `ends`: of each thread the ends of the intervals that are open, outermost first."""

    pid: int
    ends: dict[str, list[list[int]]] = field(default_factory=dict)


class Lanes:
    """Where each interval is drawn. Its generators yield the events that name what is new, and return the place."""

    def __init__(self, ledger: Ledger) -> None:
        rows = ledger.rows(
            "FROM processes WHERE source <> 'plan' ORDER BY rank NULLS LAST, role, cardinality(coordinates) = 0, wall_ns, process"
        )
        self._several = len({row["role"] for row in rows if row["rank"] is not None}) > 1
        self._axes = {axis for axis, degree in ledger.mesh.items() if degree > 1}
        self._who: dict[str, Who] = {RUN: (None, RUN)}
        self._names: dict[Who, str] = {}
        for row in rows:
            who = (row["role"], row["process"] if row["rank"] is None else row["rank"])
            self._who[row["process"]] = who
            self._names.setdefault(who, self._named(row))
        self._names[None, RUN] = f"run {ledger.run}"
        self._pids = {who: at for at, who in enumerate(self._names, 1)}  # viewers take 0 for the kernel
        self._found: dict[Who, _Process] = {}

    def ranks(self) -> Iterator[Event]:
        """Names of the ranks, before anything of theirs: who reads the trace as a stream knows from then on whose an event is."""
        for process, (_, who) in [*self._who.items()]:
            if isinstance(who, int):
                yield from self._process(process)

    def process(self, name: str) -> Naming:
        """The number of the rank that a process of the ledger is; another process that took a rank over has the same."""
        yield from ()
        return (yield from self._process(name)).pid

    def place(
        self, process: str, thread: str, began: int, ended: int | None
    ) -> Generator[Event, None, tuple[int, int]]:
        """(process, thread) of an interval; they come in order of their begin, the outer before the inner."""
        found = yield from self._process(process)
        end = FAR if ended is None else ended
        lanes = found.ends.setdefault(thread, [])
        for at, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= began:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                open_ends.append(end)
                return found.pid, _tid(thread, at)
        lanes.append([end])
        at = len(lanes) - 1
        tid = _tid(thread, at)
        yield _meta("thread_name", found.pid, tid, name=thread if not at else f"{thread} ({at + 1})")
        yield _meta("thread_sort_index", found.pid, tid, sort_index=tid)
        return found.pid, tid

    def _process(self, name: str) -> Generator[Event, None, _Process]:
        who = self._who.setdefault(name, (None, name))
        if who not in self._found:
            pid = self._pids.setdefault(who, len(self._pids) + 1)
            self._found[who] = _Process(pid)
            yield _meta("process_name", pid, 0, name=self._names.get(who, name))
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        return self._found[who]

    def _named(self, row: dict[str, Any]) -> str:
        """`rank 3 dp0 tp1 · host`: the axes that cut something; the role where there are several."""
        if row["rank"] is None:
            return f"{row['role'] or row['process']} · {row['host']}"
        role = f"{row['role']} " if self._several and row["role"] else ""
        axes = [f"{axis}{at}" for axis, at in (row["coordinates"] or {}).items() if axis in self._axes]
        return " ".join([f"{role}rank {row['rank']}", *axes, "·", str(row["host"])])


def _tid(thread: str, lane: int) -> int:
    return (THREADS.index(thread) + 1) * 1000 + lane


def _meta(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
