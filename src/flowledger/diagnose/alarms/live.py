"""Alarms while a run goes on. Finished steps are taken out of it as they come, as a small ledger of their own, and judged like any.

`Watch.look` says what is new since the last look: alarms that fired, alarms that are over, and what the run's own recorder
has found. It keeps histories, not rows: a look costs what the run has written since the one before.
"""

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from flowledger.diagnose.alarms.evaluation import Change, Evaluation
from flowledger.diagnose.alarms.numbers import Numbers, facts_of, numbers_of
from flowledger.diagnose.alarms.rules import Rule, compiled
from flowledger.diagnose.alarms.stopping import stop
from flowledger.diagnose.alarms.tail import TABLES, Tail
from flowledger.diagnose.alarms.verdicts import ORDER, fired
from flowledger.ledger.directory import MANIFEST, RunDirectory, open_run
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

NOW = "silent_s"  # the one number that does not wait for the end of a step
STILL_S = 1800.0  # nothing from any rank: the least that is called standing still
STILL_STEPS = 6.0  # and so many times the usual step

Kind = Literal["fired", "over", "found", "still"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something new: an alarm fired or is over, the recorder found something, nothing is written any more."""

    kind: Kind
    finding: FindingRow
    step: int | None

    @property
    def counts(self) -> bool:
        """Whether something is wrong."""
        return self.kind != "over"


class Watch:
    """One run, looked at again and again. Raises BadInput where it is none, or a rule cannot be taken."""

    def __init__(self, path: Path, rules: Sequence[Rule], lang: str = "en") -> None:
        self._path, self._rules, self._lang = path, rules, lang
        compiled(rules)
        self._begin(open_run(path))

    def _begin(self, book: RunDirectory) -> None:
        self._made = book.manifest.created, book.manifest.run
        self._tail = Tail(self._path)
        self._evaluation: Evaluation | None = None
        self._now: Evaluation | None = None
        self._told: set[tuple[str, str]] = set()
        self._steps_s: list[float] = []
        self._still = False
        self._strange: set[str] = set()
        self.last_step: int | None = None

    @property
    def state(self) -> str:
        """open, closed, interrupted, crashed, or died: without a word, so that it may come back."""
        book = open_run(self._path)
        return "died" if book.state == "crashed" and book.manifest.state == "open" else book.state

    def stop(self) -> str:
        """Ask the run to end; what was done, or why nothing was."""
        return stop(open_run(self._path).manifest.launcher)

    def strangers(self) -> list[str]:
        """Metrics that alarms ask for and this run does not have, in words; each once."""
        found = [line for line in self._evaluation.strangers() if line not in self._strange] if self._evaluation else []
        self._strange.update(found)
        return found

    def look(self, now: float | None = None) -> list[Event]:
        """What is new. Of a run that was begun anew at the same place everything is."""
        now = time.monotonic() if now is None else now
        book = open_run(self._path)
        if (book.manifest.created, book.manifest.run) != self._made:
            self._begin(book)
        over = book.state != "open"
        if self._evaluation is None and book.manifest.state != "open":
            return self._whole()
        events: list[Event] = []
        more = True
        while more:
            more = self._tail.read(now)
            if over and not more:
                self._tail.read(now)  # what was set aside meanwhile
            events += self._judge(book, self._tail.finished(all_of_it=over and not more))
        if not over:
            events += self._silence(now)
        return events

    def _whole(self) -> list[Event]:
        """Of a run that has ended before it was looked at."""
        with Ledger(self._path) as ledger:
            return self._taken_in(ledger)

    def _judge(self, book: RunDirectory, last: int) -> list[Event]:
        lines = list(self._tail.take(last))
        if not lines:
            return []
        with tempfile.TemporaryDirectory(prefix="flowledger-watch-") as folder:
            _chapter(Path(folder), self._path, book, lines)
            with Ledger(Path(folder), only=TABLES) as ledger:
                return self._taken_in(ledger, live=True)

    def _taken_in(self, ledger: Ledger, *, live: bool = False) -> list[Event]:
        if self._evaluation is None:
            self._evaluation = Evaluation(self._rules, facts_of(ledger))
        numbers = numbers_of(ledger, self._evaluation.metrics | {"step_time_s"}, self._evaluation.of_ranks)
        recorded = ledger.rows("FROM findings WHERE source <> 'plan' AND verdict IN ('warn', 'fail')")
        if live:
            numbers.job.pop(NOW, None)
            numbers.ranks.pop(NOW, None)
            numbers.resumed |= self._tail.resumed
        changes = self._evaluation.advance(numbers)
        self._steps_s = [*self._steps_s, *numbers.job.get("step_time_s", {}).values()][-50:]
        self.last_step = max([self.last_step or 0, *numbers.steps]) if numbers.steps else self.last_step
        return [*(self._event(change) for change in changes), *self._found(recorded)]

    def _event(self, change: Change) -> Event:
        course = change.course
        row = fired(course, course.firings[-1], 0, self._lang)
        return Event("fired" if change.fired else "over", row, change.step)

    def _found(self, rows: Iterable[dict[str, object]]) -> list[Event]:
        """What the run's own recorder said, each once; its alarms are those that were told already."""
        names, events = set(FindingRow.__struct_fields__), []
        for row in rows:
            key = str(row["id"]), str(row["message"])
            if row["order"] == ORDER or key in self._told:
                continue
            self._told.add(key)
            known = {name: value for name, value in row.items() if name in names and value is not None}
            found = msgspec.convert(known, FindingRow)
            events.append(Event("found", found, found.step))
        return events

    def _silence(self, now: float) -> list[Event]:
        """Ranks that write nothing while others do, and a run in which nobody does."""
        silent = self._tail.silent(now)
        if not silent:
            return []
        least, step = min(silent.values()), self._tail.reached
        events = self._all_silent(least, step)
        if len(silent) > 1:
            behind = {rank: seconds - least for rank, seconds in silent.items()}
            numbers = Numbers(job={NOW: {step: max(behind.values())}}, ranks={NOW: {step: behind}})
            events += [self._event(change) for change in self._at_once().advance(numbers)]
        return events

    def _at_once(self) -> Evaluation:
        if self._now is None:
            with Ledger(self._path, only=()) as ledger:
                facts = facts_of(ledger)
            self._now = Evaluation([rule for rule in self._rules if NOW in rule.when], facts)
        return self._now

    def _all_silent(self, seconds: float, step: int) -> list[Event]:
        limit = max(STILL_S, STILL_STEPS * median(self._steps_s) if self._steps_s else 0.0)
        was, self._still = self._still, seconds > limit
        if was == self._still:
            return []
        row = FindingRow(
            id="nothing_recorded", order=ORDER, verdict="fail", severity="critical", step=step,
            message=f"no rank has recorded anything for {seconds:.0f} s, in step {step}" if self._still else "rows come again",
            next_step="see whether the job lives and what it does: py-spy dump --pid PID",
        )  # fmt: skip
        return [Event("still" if self._still else "over", row, step)]


def _chapter(folder: Path, run: Path, book: RunDirectory, lines: Sequence[tuple[str, str, list[bytes]]]) -> None:
    """A ledger of these lines alone, with everything else that the run says of itself."""
    (folder / MANIFEST).write_bytes(book.manifest.encode())
    if (planned := run / "plan").is_dir():
        (folder / "plan").symlink_to(planned.resolve())
    for part, table, rows in lines:
        here = folder / "parts" / part
        if not here.exists():
            here.mkdir(parents=True)
            for place in (run / "parts" / part, run / "compacted" / part):
                if (place / "process.json").is_file():
                    (here / "process.json").write_bytes((place / "process.json").read_bytes())
        with (here / f"{table}-0.jsonl").open("ab") as file:
            file.write(b"\n".join(rows) + b"\n")
