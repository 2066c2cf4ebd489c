"""Seconds, calls and tokens of every step and stage, added up as spans are written: by the rules of `stages` and `step_seconds`."""

from array import array
from collections.abc import Iterator, Sequence
from math import isnan
from typing import NamedTuple

from flowledger.flow.stages import stages
from flowledger.show.page.tally_rows import Span

STEP_NAMES = ("step", "rl_step")
ROOM = 40 << 20  # bytes for steps that are kept process by process: some 120 of 1,024 ranks
LEAST_OPEN = 16
OF_STEP, OF_STAGE = 18, 60  # bytes a process takes in a step, and in each stage of it
NAN = float("nan")
Place = tuple[str | None, str]  # role, stage


class Who(NamedTuple):
    """What must be known of a process: by whom a step was walked, and whose tokens count."""

    role: str | None
    rank: int | None
    counts: bool  # it stands first among the ranks that work on the same samples


class StageTimes(NamedTuple):
    """A stage of a step, as the view `stages` has it; waiting and peaks left out."""

    role: str | None
    stage: str
    calls: int
    open_calls: int
    seconds: float | None
    share: float | None
    slowest_rank: int | None
    tokens: tuple[int | None, int | None, int | None]  # logical, valid, computed


class StepTimes(NamedTuple):
    """A whole step. `cut`: not every process that should have has ended it; None where none walks steps."""

    seconds: float | None
    cut: bool | None
    stages: tuple[StageTimes, ...]


class _Stage:
    """One stage of one step, process by process."""

    __slots__ = ("calls", "ms", "open", "tokens")

    def __init__(self, processes: int) -> None:
        self.ms = array("d", [NAN]) * processes
        self.calls = array("H", [0]) * processes
        self.open = array("h", [0]) * processes
        self.tokens: tuple[array[int], ...] | None = None  # logical, valid, computed: of its own spans, of all inside


class _Step:
    """One step, process by process."""

    __slots__ = ("closed", "last_ns", "overlap", "places", "walked", "whole_ms")

    def __init__(self, processes: int) -> None:
        self.places: dict[Place, _Stage] = {}
        self.whole_ms = array("d", [NAN]) * processes
        self.walked = bytearray(processes)
        self.closed = bytearray(processes)
        self.last_ns = array("q", [0]) * processes
        self.overlap = False


class Times:
    """The times of a run. `changed`: steps whose numbers are others than when they were taken last."""

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self.began: dict[int, int] = {}  # step -> when its first process began it, by the clock of all
        self.late = 0  # rows of steps that were closed already
        self._who: list[Who] = []
        self._open: dict[int, _Step] = {}
        self._known: dict[int, StepTimes] = {}  # of open steps, until a row of theirs comes
        self._done: dict[int, StepTimes] = {}
        self._last = -1
        self._walkers: set[str | None] = set()  # roles of which some process walks steps
        self._rollout = {name for name, row in stages().items() if (row.reads_on or row.mesh) == "rollout"}

    def meet(self, who: Who) -> int:
        """A new process: its number."""
        self._who.append(who)
        for step in self._open.values():
            _widen(step)
        return len(self._who) - 1

    def correct(self, process: int, who: Who) -> None:
        """What a process has said of itself since."""
        self._who[process] = who

    def add(self, process: int, rows: Sequence[Span], apart: int) -> None:
        """Rows of one process, in the order in which they were written; `apart`: of its clock from that of all."""
        number, step = -1, None
        counts = self._who[process].counts
        for row in rows:
            if row.step is None or row.event == "device":
                continue
            if row.step != number or step is None:
                number = row.step
                step = self._at(number)
            if step is None:
                continue
            if row.stage is None:
                if row.name in STEP_NAMES and row.span_kind != "comm":
                    self._walk(step, number, process, row, apart)
                continue
            of_stage, stage = row.span_kind == "stage", step.places.get((row.role, row.stage))
            if stage is None:
                stage = step.places[row.role, row.stage] = _Stage(len(step.whole_ms))
            if of_stage:
                _spend(step, stage, process, row)
            if (counts or row.stage in self._rollout) and (
                row.tokens_computed is not None or row.tokens_valid is not None or row.tokens_logical is not None
            ):
                _count(stage, process, row, own=of_stage)

    def _at(self, number: int) -> _Step | None:
        if number in self._done:
            self.late += 1
            return None
        if number not in self._open:
            self._open[number] = _Step(len(self._who))
            self._last = max(self._last, number)
        self.changed.add(number)
        self._known.pop(number, None)
        return self._open[number]

    def _walk(self, step: _Step, number: int, process: int, row: Span, apart: int) -> None:
        step.walked[process] = 1
        self._walkers.add(self._who[process].role)
        began = row.start_ns + apart
        self.began[number] = min(began, self.began.get(number, began))
        if row.end_ns is not None:
            step.closed[process] = 1
        ms = _ms(row)
        if ms is not None:
            before = step.whole_ms[process]
            step.whole_ms[process] = ms if isnan(before) else max(ms, before)

    def settle(self) -> None:
        """Close the steps that are furthest back, where there is no room to keep all open."""
        stages = max((len(step.places) for step in self._open.values()), default=0)
        room = max(LEAST_OPEN, ROOM // max(1, len(self._who) * (OF_STEP + OF_STAGE * stages)))
        for number in [one for one in self._open if one <= self._last - room]:
            self._done[number] = self.of(number)
            self._known.pop(number)
            del self._open[number]

    def steps(self) -> list[int]:
        """Every step of which there is something."""
        return sorted(self._done.keys() | self._open.keys())

    def __contains__(self, step: int) -> bool:
        return step in self._done or step in self._open

    def of(self, step: int) -> StepTimes:
        """A step as it stands."""
        if step in self._done:
            return self._done[step]
        if step not in self._known:
            self._known[step] = self._made(self._open[step])
        return self._known[step]

    def by_process(self, step: int) -> Iterator[tuple[int, Place, float | None]]:
        """(process, role and stage, seconds if it has ended) of one of the latest steps; nothing of earlier ones."""
        if step in self._open:
            for place, stage in self._open[step].places.items():
                for process, calls in enumerate(stage.calls):
                    if calls:
                        yield process, place, None if isnan(stage.ms[process]) else stage.ms[process] / 1e3

    def _made(self, step: _Step) -> StepTimes:
        whole = [ms / 1e3 for ms in step.whole_ms if not isnan(ms)]
        spent = {place: [ms / 1e3 for ms in stage.ms if not isnan(ms)] for place, stage in step.places.items()}
        parts = sum(map(sum, spent.values()))
        seconds = max(whole) if whole else parts if any(spent.values()) else None
        total = None if step.overlap else self._total(step, max(whole, default=None))
        made = (
            self._stage(place, stage, sum(spent[place]) / total if total and spent[place] else None)
            for place, stage in step.places.items()
            if any(stage.calls)
        )
        return StepTimes(seconds, self._cut(step), tuple(made))

    def _total(self, step: _Step, longest: float | None) -> float:
        """All processes' time: of each its own step, or what its stages come to if that is more."""
        known = [0.0] * len(step.whole_ms)
        there = bytearray(len(known))
        for stage in step.places.values():
            for process, ms in enumerate(stage.ms):
                if not isnan(ms):
                    known[process] += ms / 1e3
                    there[process] = 1
        total = 0.0
        for process, seconds in enumerate(known):
            if there[process]:
                own = step.whole_ms[process]
                total += max(seconds, (longest or 0.0) if isnan(own) else own / 1e3)
        return total

    def _stage(self, place: Place, stage: _Stage, share: float | None) -> StageTimes:
        role, name = place
        timed = [(ms, self._who[process].rank) for process, ms in enumerate(stage.ms) if not isnan(ms)]
        ms = max((ms for ms, _ in timed), default=None)
        # The slowest worked longest, of equals the lowest rank; how long ranks waited is not known here.
        slowest = max(((ms, -rank) for ms, rank in timed if rank is not None), default=None)
        ranks = {self._who[process].rank for process, calls in enumerate(stage.calls) if calls} - {None}
        logical, valid, computed = (self._tokens(name, stage, which) for which in range(3))
        return StageTimes(
            role, name, max(stage.calls), max(0, *stage.open), None if ms is None else ms / 1e3, share,
            -slowest[1] if slowest is not None and len(ranks) > 1 else None, (logical, valid, computed),
        )  # fmt: skip

    def _tokens(self, name: str, stage: _Stage, which: int) -> int | None:
        """Over the processes whose tokens count: of the stage's own spans where those know them, else of all inside it."""
        if stage.tokens is None:
            return None
        total, is_known = 0, False
        for process, (own, of_all) in enumerate(zip(stage.tokens[which], stage.tokens[which + 3], strict=True)):
            if of_all >= 0 and (name in self._rollout or self._who[process].counts):
                total, is_known = total + (of_all if own < 0 else own), True
        return total if is_known else None

    def _cut(self, step: _Step) -> bool | None:
        if not any(step.walked):
            return None
        closed = {self._who[process][:2] for process, done in enumerate(step.closed) if done}
        return len(closed) < len({who[:2] for who in self._who if who.role in self._walkers})


def _spend(step: _Step, stage: _Stage, process: int, row: Span) -> None:
    """Add a span of a stage: its begin, its end, or all of it."""
    if row.event == "end":
        stage.open[process] -= 1
    else:
        stage.calls[process] += 1
        stage.open[process] += row.end_ns is None
    ms = _ms(row)
    if ms is None:
        return
    before = stage.ms[process]
    stage.ms[process] = ms if isnan(before) else before + ms
    if row.end_ns is None or row.start_ns < step.last_ns[process]:
        step.overlap = True
    else:
        step.last_ns[process] = row.end_ns


def _count(stage: _Stage, process: int, row: Span, *, own: bool) -> None:
    if stage.tokens is None:
        stage.tokens = tuple(array("q", [-1]) * len(stage.ms) for _ in range(6))
    for which, tokens in enumerate((row.tokens_logical, row.tokens_valid, row.tokens_computed)):
        if tokens is not None:
            for part in (which, which + 3) if own else (which + 3,):
                sums = stage.tokens[part]
                sums[process] = max(sums[process], 0) + tokens


def _ms(row: Span) -> float | None:
    if row.latency_ms is not None:
        return row.latency_ms
    return None if row.end_ns is None else (row.end_ns - row.start_ns) / 1e6


def _widen(step: _Step) -> None:
    """Make room for one process more."""
    step.whole_ms.append(NAN)
    step.walked.append(0)
    step.closed.append(0)
    step.last_ns.append(0)
    for stage in step.places.values():
        stage.ms.append(NAN)
        stage.calls.append(0)
        stage.open.append(0)
        for sums in stage.tokens or ():
            sums.append(-1)
