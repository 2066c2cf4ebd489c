"""Alarms over the steps of a run, one step after the other: which fire, since when, and which are over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowledger.diagnose.alarms.moments import Facts, Moment, Value
from flowledger.diagnose.alarms.needs import lacking, strangers
from flowledger.diagnose.alarms.numbers import Numbers
from flowledger.diagnose.alarms.rules import Compiled, Rule, compiled
from flowledger.diagnose.alarms.words import filled, noted, told

Known = list[Value]


@dataclass(frozen=True, slots=True)
class Firing:
    """An alarm at the step at which it fired."""

    step: int
    since: int  # the first of the steps in a row
    message: dict[str, str]  # language -> sentence
    evidence: tuple[str, ...]
    rank: int | None


@dataclass(slots=True)
class Course:
    """How one alarm goes: what it has seen, and each time that it fired."""

    alarm: Compiled
    judged: int = 0  # steps at which it could be said
    known: bool = False  # at one of them all that it joins with `and` was known
    held: int = 0  # steps at which it was true
    row: int = 0  # steps in a row at which it was
    calm: int = 0  # steps in a row at which it was not
    since: int | None = None
    on: bool = False
    firings: list[Firing] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the step at which each firing was over

    @property
    def rule(self) -> Rule:
        return self.alarm.rule


@dataclass(frozen=True, slots=True)
class Change:
    """What a step changed: an alarm fired, or is over."""

    course: Course
    fired: bool
    step: int


class Evaluation:
    """All alarms of a run. Give it the steps in their order, all at once or as they come."""

    def __init__(self, rules: Sequence[Rule], facts: Facts) -> None:
        """Raises BadInput for a rule that cannot be taken."""
        self._facts = facts
        self._program, made = compiled(rules)
        self._program.settle([alarm.when for alarm in made], facts)
        self.courses = [Course(alarm) for alarm in made]
        self._seen: set[str] = set()  # names that had a number
        self._names: set[str] = set()  # of all metrics that the run has
        self._ranks: set[str] = set()  # of those, of which two ranks had one
        self._steps = 0
        self._warm = 0  # steps since the start or the last resume

    @property
    def metrics(self) -> set[str]:
        """Names whose numbers are needed."""
        return self._program.metrics

    @property
    def of_ranks(self) -> set[str]:
        """Names whose numbers of the ranks are needed."""
        return self._program.of_ranks

    def advance(self, numbers: Numbers) -> list[Change]:
        """Take steps in, and say what changed."""
        changes: list[Change] = []
        self._names |= numbers.names
        for moment in numbers.moments(self._facts):
            self._warm = 0 if moment.step in numbers.resumed else self._warm
            self._seen.update(moment.job)
            self._ranks.update(name for name, ranks in moment.ranks.items() if len(ranks) > 1)
            values = self._program.advance(moment)
            for course in self.courses:
                change = self._judge(course, values, moment, numbers)
                if change is not None:
                    changes.append(change)
            self._steps += 1
            self._warm += 1
        return changes

    def _judge(self, course: Course, values: Known, moment: Moment, numbers: Numbers) -> Change | None:
        value, step = values[course.alarm.when], moment.step
        if value is None or self._warm < course.rule.warm_up:
            return None
        course.judged += 1
        course.known = course.known or all(values[part] is not None for part in course.alarm.conjuncts)
        if value:
            course.held += 1
            course.calm = 0
            course.since = step if course.row == 0 else course.since
            course.row += 1
            if course.row >= course.rule.hold and not course.on:
                course.on = True
                self._program.complete(values, moment)
                course.firings.append(self._firing(course, values, step, numbers))
                return Change(course, True, step)
            return None
        course.row, course.calm = 0, course.calm + 1
        if course.on and course.calm >= course.rule.hold:
            course.on = False
            course.ends.append(step)
            return Change(course, False, step)
        return None

    def _firing(self, course: Course, values: Known, step: int, numbers: Numbers) -> Firing:
        alarm = course.alarm
        since = step if course.since is None else course.since
        rank = None if alarm.rank is None else values[alarm.rank]
        evidence = told(self._program, alarm, values, step, numbers)
        message = {
            language: filled(parts, values, lambda node: noted(self._program, node, values, step, numbers))
            for language, parts in alarm.words.items()
        }
        return Firing(step, since, message, evidence, int(rank) if isinstance(rank, float | int) else None)

    def strangers(self) -> list[str]:
        """What alarms of a user ask for, metrics or settings, by a name that neither this run nor any other has, in words."""
        found = (
            line for course in self.courses for line in strangers(self._program, course.alarm, self._names, self._facts)
        )
        return list(dict.fromkeys(found)) if self._steps else []

    def lacks(self, course: Course) -> list[str]:
        """What an alarm that could not be judged at any step had needed."""
        return lacking(
            self._program, course.alarm, seen=self._seen, ranked=self._ranks, steps=self._steps, facts=self._facts
        )
