"""Where imported rows go: one part a rank, written behind a bounded queue that is waited for and never overrun."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import RunDirectory
from flowledger.ledger.rows import MetricRow, Row, SampleRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.record.importers.resumed import MOST_STEP, Seen

QUEUE = 40_000  # rows; a reader that is ahead by half of it waits
LOOK = 2_000  # rows between two looks at the queue
MOST_PARTS = 512  # ranks with a part of their own; what further ones say goes to the driver's, with their rank on it
MOST_ROWS = 10_000_000  # of one part: a ledger is read as a whole when it is opened
COUNTED = (MetricRow, SampleRow, SpanRow)  # what makes a step one that the sources tell of


class TooMany(Exception):  # noqa: N818  (no error: reading ends here)
    """A part has as many rows as a ledger can have and still be looked at."""


class Steps:
    """Which steps came by."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.count = 0
        self._known: set[int] = set()

    def add(self, step: int) -> None:
        """One step; again and again the same counts once."""
        if step in self._known:
            return
        self.count += 1
        if len(self._known) < 1_000_000:
            self._known.add(step)
        self.first = step if self.first is None else min(self.first, step)
        self.last = step if self.last is None else max(self.last, step)


@dataclass(slots=True)
class Part:
    """One open part, and how many rows it was given."""

    ink: Writer
    files: str
    seen: Seen
    put: int = 0

    def wait(self, ahead: int = QUEUE // 2) -> None:
        """Until the writer is no more than so many rows behind. Raises BadInput where it cannot write any more."""
        while self.ink.failure is None and self._behind() > ahead:
            self.ink.hurry()
            time.sleep(0.001)
        if self.ink.failure is not None:
            raise BadInput(f"cannot write to {self.files}: {self.ink.failure.strerror or self.ink.failure}")

    def _behind(self) -> int:
        stats = self.ink.stats()
        return self.put - stats.rows - stats.dropped


class Parts:
    """The parts of a run that is imported. `several`: more than one format speaks of metrics."""

    def __init__(self, book: RunDirectory, *, several: bool = False):
        self._book = book
        self._several = several
        self._parts: dict[int | None, Part] = {}
        self.steps = Steps()

    def put(self, rows: Iterable[Row], form: str, *, ordered: bool = True) -> None:
        """Take the rows of one file of a format. Raises BadInput where they cannot be written, or are too many.

        `ordered`: the file was written while the run went on, so that a step that goes back means that it was resumed.
        """
        of: int | None = None
        step: int | None = None
        part = self._begun(of, form, ordered)
        last, watched, put = part.seen.last, part.seen.watched, part.ink.put
        for row in rows:
            if row.rank != of:
                of = row.rank
                part = self._begun(of, form, ordered)
                last, watched, put = part.seen.last, part.seen.watched, part.ink.put
            if row.step != step and row.step is not None and type(row) in COUNTED:
                step = row.step
                self.steps.add(step)
            if type(row) is MetricRow:
                name, at = row.raw_name, row.step
                if watched or at is None or last.get(name, MOST_STEP) >= at:  # else it is later than its last
                    if not part.seen.takes(row, part.put):
                        continue
                else:
                    last[name] = at
            put(row)
            part.put += 1
            if not part.put % LOOK:
                part.wait()
                if part.put >= MOST_ROWS:
                    raise TooMany

    def close(self) -> dict[str, int]:
        """Write what is queued and take out what later rows have replaced; rows by table. Raises BadInput as `put` does."""
        written: dict[str, int] = {}
        for part in self._parts.values():
            part.wait(0)
            part.ink.close()
            for table, rows in part.ink.stats().by_table.items():
                written[table] = written.get(table, 0) + rows
            for table, rows in part.seen.leave_out(part.files).items():
                written[table] -= rows
        return {table: rows for table, rows in sorted(written.items()) if rows}

    def stop(self) -> None:
        """End the writing threads; safe at any time."""
        for part in self._parts.values():
            part.ink.close()

    @property
    def figures(self) -> dict[str, int]:
        """What the manifest keeps of the writing."""
        every = [part.ink.stats().figures for part in self._parts.values()]
        return {name: sum(figures[name] for figures in every) for name in ("rows", "bytes", "dropped")}

    @property
    def ranks(self) -> set[int]:
        """The ranks that rows are of."""
        return {rank for rank in self._parts if rank is not None}

    @property
    def resumed(self) -> list[tuple[int, int]]:
        """(last step, step it went back to), each time once."""
        return sorted({one for part in self._parts.values() for one in part.seen.resumed})

    @property
    def rows(self) -> int:
        """How many rows were given."""
        return sum(part.put for part in self._parts.values())

    @property
    def repeated(self) -> int:
        return sum(part.seen.repeated for part in self._parts.values())

    def _begun(self, rank: int | None, form: str, ordered: bool) -> Part:
        if rank not in self._parts and len(self._parts) > MOST_PARTS:
            rank = None
        if rank not in self._parts:
            files = self._book.part("driver" if rank is None else "actor", rank, source="import")
            self._parts[rank] = Part(Writer(files, capacity=2 * QUEUE), str(files), Seen(self._several))
        part = self._parts[rank]
        part.seen.begin(form, part.put, ordered)
        return part
