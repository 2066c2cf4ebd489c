"""What is new in a run that goes on: the lines that its processes have added since the last look, step by step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowledger.ledger.directory import Process
from flowledger.ledger.growth import Growth
from flowledger.ledger.manifest import Process as Known

TABLES = ("metrics", "memory", "spans", "samples", "tensors", "findings")  # of which alarms ask
MOST = 32 << 20  # bytes in one look: a long run is read in pieces
STEP = ("step", "rl_step")  # what a span is called that is a whole step


class _Line(msgspec.Struct):
    """What must be known of a line to place it."""

    step: int | None = None
    stage: str | None = None
    name: str | None = None
    end_ns: int | None = None


@dataclass(slots=True)
class _Part:
    """One process: how far it was read, and how far it has come."""

    process: Process | None = None
    reached: int = -1  # the last step that it has a line of
    ended: int = -1  # the last step whose end it has told
    grown: float = 0.0  # when it was last seen to grow
    rows: int = 0

    @property
    def who(self) -> tuple[str, int] | int:
        """Its role and rank: another process may take these over. One without a rank is itself alone."""
        known = self.process
        return id(self) if known is None or known.rank is None else (known.role, known.rank)

    @property
    def role(self) -> str:
        return self.process.role if self.process else ""

    @property
    def began(self) -> int:
        return self.process.wall_ns if self.process else 0


class Tail:
    """The lines of a run that belong to finished steps and were not handed out yet."""

    def __init__(self, path: Path) -> None:
        self._growth = Growth(path, TABLES)
        self._parts: dict[str, _Part] = {}
        self._lines: defaultdict[tuple[str, str, int], list[bytes]] = defaultdict(list)  # part, table, step
        self.resumed: set[int] = set()  # steps at which a process took over the rank of another

    def read(self, now: float | None = None) -> bool:
        """Take in what is new; whether there may be more at once."""
        now = time.monotonic() if now is None else now
        self._growth.list_parts()
        for name in self._growth.parts:
            part = self._parts.setdefault(name, _Part(grown=now))
            if part.process is None or part.process.ended is None:
                part.process = _process(self._growth.where(name)) or part.process
        for name, table, lines in self._growth.pieces(MOST):
            part = self._parts.setdefault(name, _Part(grown=now))
            part.grown = now
            for line in lines.splitlines():
                self._place(part, name, table, line)
        return self._growth.left > 0

    def _place(self, part: _Part, name: str, table: str, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            return  # a torn line
        part.rows += 1
        if told.step is not None:
            if part.reached < 0:
                self._take_over(part, told.step)
            part.reached = max(part.reached, told.step)
        if (
            table == "spans"
            and told.step is not None
            and told.end_ns is not None
            and told.stage is None
            and told.name in STEP
        ):
            part.ended = max(part.ended, told.step)
        self._lines[name, table, part.reached if told.step is None else told.step].append(line)

    def finished(self, *, all_of_it: bool = False) -> int:
        """The last step that every process which takes steps has ended; with `all_of_it` the last that there is."""
        walking = [part for part in self._parts.values() if part.reached >= 0]
        if all_of_it or not walking:
            return max((part.reached for part in walking), default=-1)
        roles = {part.role for part in walking if part.ended >= 0}
        walking = [part for part in walking if part.role in roles] or walking
        latest = {part.who: part for part in sorted(walking, key=lambda part: part.began)}
        there = [part for part in latest.values() if not _gone(part)] or list(latest.values())
        return min(max(part.ended, part.reached - 1) for part in there)

    @property
    def reached(self) -> int:
        """The last step that any process has a line of."""
        return max((part.reached for part in self._parts.values()), default=-1)

    def _take_over(self, part: _Part, step: int) -> None:
        """A process begins at this step. What another of its rank had left of this step and later ones is done again."""
        before = {
            name
            for name, other in self._parts.items()
            if other is not part and other.who == part.who and other.reached >= 0
        }
        if before:
            self.resumed.add(step)
            for key in [key for key in self._lines if key[0] in before and key[2] >= step]:
                del self._lines[key]

    def take(self, last: int) -> Iterator[tuple[str, str, list[bytes]]]:
        """(part, table, lines) of the steps up to `last` that were not taken before, with what came late for an earlier one."""
        for key in sorted(self._lines):
            if key[2] <= last:
                yield key[0], key[1], self._lines.pop(key)

    def silent(self, now: float | None = None) -> dict[int, float]:
        """rank -> seconds since it last wrote, of ranks that take steps and have not said that they ended."""
        now = time.monotonic() if now is None else now
        latest: dict[int, float] = {}
        roles = {part.role for part in self._parts.values() if part.ended >= 0}
        for part in self._parts.values():
            known = part.process
            if known is not None and known.rank is not None and known.ended is None and part.role in roles:
                latest[known.rank] = min(latest.get(known.rank, float("inf")), now - part.grown)
        return latest


def _process(folder: Path) -> Process | None:
    try:
        return msgspec.json.decode((folder / "process.json").read_bytes(), type=Process)
    except (OSError, msgspec.MsgspecError):
        return None


def _gone(part: _Part) -> bool:
    """Whether a process has said that it ended, or has certainly died."""
    process = part.process
    if process is None:
        return False
    return process.ended is not None or Known(host=process.host, pid=process.pid, started=process.started).is_gone()
