"""Where a reader is in a log: file, line, step."""

from dataclasses import dataclass, field

from flowledger.ledger.rows import Row
from flowledger.record.importers.notes import Notes

MOST_WAITING = 5_000  # rows of a step whose number is not known yet


@dataclass(slots=True)
class Place:
    """The place in one file.

    `done`: the last step whose numbers were printed. `now`: the step that is going on, where the log says so or it
    follows from the last one. `waiting`: rows of a step that has no number yet; it is the one before the first that ends.
    """

    name: str
    notes: Notes
    line: int = 0
    done: int | None = None
    now: int | None = None
    epoch: int = 1
    progress: tuple[int, int] | None = None  # of the last progress bar: steps done, of how many
    finished: bool = False  # the log says that the training came to its end
    steps_said: int = 0  # how many lines ended a step
    said: bool = False  # whether the log said anything of use
    waiting: list[Row] = field(default_factory=list)
    ready: list[Row] = field(default_factory=list)

    @property
    def framework(self) -> str | None:
        return self.notes.framework

    def of(self, framework: str) -> None:
        """Whose log this is, as a line of numbers shows; the first word counts."""
        self.said = True
        self.notes.of(framework)

    def began(self, step: int) -> None:
        """A step begins; its numbers follow."""
        self.now = self.done = step
        self.steps_said += 1
        self._number(step)

    def ended(self, step: int) -> None:
        """A step's numbers are printed, and with them it ends."""
        self.done, self.now = step, step + 1
        self.steps_said += 1
        self.finished = False
        self._number(step)

    def put(self, row: Row, *, of_a_step: bool) -> None:
        """A row without a number of its own: of the step that goes on. Before the first one, what is of a step waits for it."""
        self.said = True
        if self.now is None and of_a_step and len(self.waiting) < MOST_WAITING:
            self.waiting.append(row)
            return
        row.step = self.now
        self.ready.append(row)

    def skip(self, reason: str, what: str = "") -> None:
        self.notes.skip(reason, f"{self.name}:{self.line}{f': {what[:120]}' if what else ''}")

    def take(self) -> list[Row]:
        """The rows that are ready, once."""
        taken, self.ready = self.ready, []
        return taken

    def close(self) -> list[Row]:
        """What still waits, without a step."""
        self.ready += self.waiting
        self.waiting = []
        return self.take()

    def _number(self, step: int) -> None:
        for row in self.waiting:
            row.step = step
        self.ready += self.waiting
        self.waiting = []
