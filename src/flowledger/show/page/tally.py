"""What a large run comes to, step by step: added up from its rows as they are written, and never kept.

A run of 1,024 ranks and 1,000 steps has some twenty million rows. What a page shows of all of them is one number a step, or one
a step and stage: those are kept here, under the names and by the rules of the ledger's views (`metrics_by_step`, `stages`,
`step_seconds`, `cut_steps`, `peaks`), so that a page cannot tell the difference. The latest steps stay open, process by
process; of earlier ones a row is left.

What a view works out of rows of several ranks together is not made here and is null: how long ranks waited for one another, and
shares where stages of one process overlap.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from flowledger.ledger.directory import Process
from flowledger.ledger.growth import Growth, Piece
from flowledger.show.page.tally_memory import PARTS, Memory, Moment
from flowledger.show.page.tally_metrics import Metrics
from flowledger.show.page.tally_rows import decoded
from flowledger.show.page.tally_times import Times, Who

TABLES = ("spans", "memory", "metrics", "findings")
REPLICA = ("tp", "pp", "cp", "sp")  # ranks that differ along these work on the same samples
Row = dict[str, Any]


class Tally:
    """A run, added up as it is written. What it gives are rows with the columns of the ledger's views."""

    def __init__(self, path: Path) -> None:
        self.growth = Growth(path, TABLES)
        self.times, self.memory, self.metrics = Times(), Memory(), Metrics()
        self.names: list[str] = []  # of processes, by number
        self.processes: list[Process | None] = []
        self._numbers: dict[str, int] = {}

    def look(self, most: int = 1 << 40, *, over: bool = False, timed: Callable[[], None] | None = None) -> bool:
        """Add what is new, `most` bytes of it or a little more; whether there was anything. `over`: the run has ended.

        `timed`: called when all times are there, which is how far the run has come, before anything else is added.
        """
        before, told = self.growth.read, timed is None
        for piece in self.growth.pieces(most, "spans"):
            if not told and piece.table != "spans":
                told = True
                if self.growth.read > before + len(piece.lines) and not self.growth.left and timed is not None:
                    timed()
            self._add(piece)
        over = over and not self.growth.left
        self.memory.settle(over=over)
        self.metrics.settle(self.times.began, over=over)
        self.times.settle()
        return self.growth.read > before

    def _add(self, piece: Piece) -> None:
        process = self._number(piece.part)
        if piece.table == "findings":
            return
        rows = decoded(piece.table, piece.lines)
        known = self.processes[process]
        apart = known.wall_ns - known.monotonic_ns if known else 0
        if piece.table == "spans":
            self.times.add(process, rows, apart)
        elif piece.table == "memory":
            self.memory.add(process, rows)
        else:
            self.metrics.add(process, rows, apart)

    def _number(self, part: str) -> int:
        if part not in self._numbers:
            known = _process(self.growth.where(part))
            self._numbers[part] = self.times.meet(_who(known))
            self.names.append(part)
            self.processes.append(known)
        number = self._numbers[part]
        if self.processes[number] is None and (known := _process(self.growth.where(part))) is not None:
            self.processes[number] = known
            self.times.correct(number, _who(known))
        return number

    def latest(self) -> Row | None:
        """The last step that is whole, with its seconds; else the last that has any."""
        timed = None
        for step in reversed(self.times.steps()[-8:]):
            found = self.times.of(step)
            if found.seconds is not None:
                timed = step if timed is None else timed
                if not found.cut:
                    return {"step": step, "seconds": found.seconds}
        return None if timed is None else self.step_seconds([timed])[0]

    def read_share(self) -> float:
        """How much of what is there has been read."""
        return self.growth.read / max(1, self.growth.read + self.growth.left)

    # ------------------------------------------------------------------------------------------------ rows of the views

    def step_seconds(self, steps: Iterable[int]) -> list[Row]:
        """As the view of that name has them; so are those that follow."""
        return [{"step": step, "seconds": self.times.of(step).seconds} for step in steps]

    def cut_steps(self, steps: Iterable[int]) -> list[Row]:
        return [{"step": step} for step in steps if self.times.of(step).cut]

    def stages(self, steps: Iterable[int]) -> list[Row]:
        rows = []
        for step in steps:
            peaks = self.memory.stages_of(step)
            for one in self.times.of(step).stages:
                logical, valid, computed = one.tokens
                speed = valid / one.seconds if valid is not None and computed is not None and one.seconds else None
                rows.append({
                    "step": step, "stage": one.stage, "role": one.role, "calls": one.calls, "open_calls": one.open_calls,
                    "seconds": one.seconds, "share": one.share, "slowest_rank": one.slowest_rank, "waited_seconds": None,
                    "tokens_logical": logical, "tokens_valid": valid, "tokens_computed": computed, "tokens_per_s": speed,
                    "peak_bytes": peaks.get(one.stage),
                })  # fmt: skip
        return rows

    def metrics_by_step(self, steps: Iterable[int | None]) -> list[Row]:
        return [
            {"step": step, "name": name, "raw_name": one.raw_name, "value": one.value(name), "special": one.special,
             "recomputed": one.recomputed, "stage": one.stage}
            for step in steps for name, one in self.metrics.steps[step].items()
        ]  # fmt: skip

    def peaks(self, steps: Iterable[int]) -> list[Row]:
        """The fullest process of each step alone."""
        return [self.moment(one) for step in steps if (one := self.memory.peak_of(step)) is not None]

    def peaks_of_ranks(self, step: int) -> list[Row]:
        """Every process's peak in one of the latest steps."""
        return [self.moment(one) for one in self.memory.peaks_of(step)]

    def balance(self, step: int) -> list[Row]:
        """What each rank spent in each stage of one of the latest steps, as the macro `balance_at` has it."""
        found: dict[tuple[int, str], float | None] = {}
        for process, (_, stage), seconds in self.times.by_process(step):
            before = found.get((process, stage))
            found[process, stage] = before if seconds is None else seconds + (before or 0.0)
        return [
            {"step": step, "stage": stage, "rank": self.rank(process), "seconds": seconds, "process": self.names[process]}
            for (process, stage), seconds in found.items()
        ]  # fmt: skip

    def rank(self, process: int) -> int | None:
        """The rank of a process."""
        known = self.processes[process]
        return known.rank if known else None

    def moment(self, one: Moment) -> Row:
        """A moment as the views of memory have it."""
        return {
            "process": self.names[one.process], "rank": self.rank(one.process), "step": one.step, "stage": one.stage,
            "phase": one.phase, "epoch": one.epoch, "mini_batch": one.mini_batch, "micro_batch": one.micro_batch,
            "instant": one.instant, **dict(zip(PARTS, one.kinds, strict=True)), "residue": one.residue, "known": one.known,
            "allocated": one.allocated, "reserved": one.reserved, "reserved_peak_since_stage": one.reserved_peak,
            "device_used": one.device_used, "host_used": one.host_used, "limit": one.limit,
            "fragmentation": one.fragmentation, "peak": one.peak,
        }  # fmt: skip


def _who(known: Process | None) -> Who:
    """A process that has not told its place counts, as in the views."""
    if known is None:
        return Who(None, None, True)
    return Who(known.role, known.rank, not any(known.coordinates.get(axis, 0) for axis in REPLICA))


def _process(folder: Path) -> Process | None:
    try:
        return msgspec.json.decode((folder / "process.json").read_bytes(), type=Process)
    except (OSError, msgspec.MsgspecError):
        return None
