"""The numbers of steps; and steps of a process that is not told of them: a worker is called for one stage after another."""

from collections.abc import Callable
from typing import Any

from flowledger.flow.seams import Probe
from flowledger.flow.stages import stages
from flowledger.ledger.rows import FindingRow
from flowledger.record.edges import Edges
from flowledger.record.watch import Watch


class Numbers:
    """Counts steps, and finds fault where a number comes again."""

    def __init__(self, find: Callable[[FindingRow], None]) -> None:
        self._find = find
        self._next = 0
        self._told = False

    def number(self, told: Any, known: int | None) -> int:
        """The number of a step that begins: the one told, else the next, but none before one that is known to be over."""
        if told is None:
            number = max(self._next, known or 0)
        else:
            number = int(told)
            if number < self._next and not self._told:
                self._told = True
                self._find(repeated(number))
        self._next = max(self._next, number + 1) if told is None else number + 1
        return number


def repeated(step: int) -> FindingRow:
    """A step that a process makes twice: its rows stand among those of the first time."""
    message = f"step {step} begins again in one process, so rows of both stand together: a second trainer, or one that went back"
    return FindingRow(
        id="step_repeated", verdict="warn", severity="warning", message=message,
        next_step="give each training a process and a run of its own",
    )  # fmt: skip


class ImpliedSteps:
    """Opens a step before a stage that comes earlier in the flow than the one before it, or where none is open."""

    def __init__(self, edges: Edges, level: str) -> None:
        self._edges = edges
        self._watch = Watch(Probe(stage=None, target="flowledger:step", scope="step"), edges.begin, level)
        self._last: int | None = None  # place in the flow of the stage before

    def before(self, stage: str) -> None:
        """A stage is about to begin. One that comes again belongs to the same step: it is done in parts."""
        place = list(stages()).index(stage)
        if self._last is None or place < self._last:
            self._edges.begin(self._watch, (), {})
        self._last = place

    def end(self) -> None:
        """The step has ended."""
        if self._last is not None:
            self._edges.end("step")
        self._last = None
