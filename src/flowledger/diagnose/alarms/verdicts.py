"""The alarms of a run that is on disk, as findings."""

from collections.abc import Sequence

from flowledger.diagnose.alarms import rules as rows
from flowledger.diagnose.alarms.evaluation import Course, Evaluation, Firing
from flowledger.diagnose.alarms.numbers import facts_of, numbers_of
from flowledger.diagnose.alarms.rules import Rule
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

ORDER = "alarms"


def check(ledger: Ledger, rules: Sequence[Rule] | None = None, lang: str = "en") -> list[FindingRow]:
    """One finding for each alarm that fired, at the first step at which it did. Raises BadInput for rules that cannot be."""
    return [found for found in check_all(ledger, rules, lang) if found.verdict in ("warn", "fail")]


def check_all(ledger: Ledger, rules: Sequence[Rule] | None = None, lang: str = "en") -> list[FindingRow]:
    """One finding for each alarm: warn or fail where it fired, pass, or skipped with what it lacked."""
    evaluation = evaluated(ledger, rules)
    return [finding(evaluation, course, position, lang) for position, course in enumerate(evaluation.courses, 1)]


def evaluated(ledger: Ledger, rules: Sequence[Rule] | None = None) -> Evaluation:
    """All alarms, with all steps of a run taken in."""
    chosen = rows.built_in() if rules is None else rules
    evaluation = Evaluation(chosen, facts_of(ledger))
    evaluation.advance(numbers_of(ledger, evaluation.metrics, evaluation.of_ranks))
    return evaluation


def finding(evaluation: Evaluation, course: Course, position: int, lang: str = "en") -> FindingRow:
    """What one alarm came to."""
    rule, stage = course.rule, course.alarm.stage
    if course.firings:
        return fired(course, course.firings[0], position, lang)
    of_stage = f" in {stage}" if stage else ""
    if not course.known:
        return FindingRow(
            id=rule.id, order=ORDER, position=position, verdict="skipped", stage=stage, needs=evaluation.lacks(course),
            message=f"{rule.id}{of_stage}: not judged",
        )  # fmt: skip
    held = f", true in {course.held} of them but never {rule.hold} in a row" if course.held else ""
    return FindingRow(
        id=rule.id, order=ORDER, position=position, verdict="pass", stage=stage,
        message=f"{rule.id}{of_stage}: quiet in {course.judged} step{'s' if course.judged != 1 else ''}{held}",
    )  # fmt: skip


def fired(course: Course, firing: Firing, position: int, lang: str = "en") -> FindingRow:
    """An alarm at the step at which it fired."""
    rule = course.rule
    again = [one.step for one in course.firings if one.step > firing.step]
    since = f"since step {firing.since}, {rule.hold} steps in a row" if rule.hold > 1 else f"at step {firing.step}"
    course_of_it = f"true {since}; in {course.held} of the {course.judged} steps judged" + (
        f"; fired again at step {again[0]}" if again else ""
    )
    next_step = rule.next_step_zh if lang == "zh" and rule.next_step_zh else rule.next_step
    return FindingRow(
        id=rule.id, order=ORDER, position=position, verdict="warn" if rule.severity == "warning" else "fail",
        severity=rule.severity, step=firing.step, stage=course.alarm.stage, rank=firing.rank,
        message=firing.message[lang], evidence=[*firing.evidence, course_of_it], next_step=next_step,
        confidence=rule.confidence,
    )  # fmt: skip
