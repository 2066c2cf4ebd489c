"""From a report to findings, the surest first. What its inputs do not decide comes out as skipped, and says what would."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flowledger.diagnose.reports.expression import Unknown, evaluate, names_in
from flowledger.diagnose.reports.facts import facts_of
from flowledger.diagnose.reports.keys import asked
from flowledger.diagnose.reports.likeness import alike
from flowledger.diagnose.reports.mechanism import Located, located
from flowledger.diagnose.reports.report import Report
from flowledger.diagnose.reports.table import HOLE, Cause, causes, filled, words
from flowledger.ledger.rows import FindingRow

ORDER = "report"
LEAST = 0.6  # confidence below which nothing is told as the cause
# Likeness from which a cause is told without its condition, from which it goes before what is located only, and how far the
# next must be behind. Set on labelled reports.
LIKE, VERY_LIKE, APART = 0.34, 0.45, 0.07
HINT = 0.31  # likeness from which a cause is named as suspected
# Places by likeness from which words alone are not told surely, and not told at all: of labelled reports that no row was written
# for, nine of ten are right nearer than the first, half between the two, one in four beyond.
DISTANT, FAR = 12, 40
UNSURE, DOUBT = 0.65, 0.7
MOST_SHOWN = 6
LONGEST = 20_000  # characters in which signs are looked for
# What is asked for where no cause is even suspected, by the kind of failure that the words name.
ASKED_BY_KIND: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oom", ("the stage in which it died (traceback)", "how much it tried to allocate, and what was allocated and reserved")),
    ("nan", ("the first step and the first tensor that is not finite", "batch, mini- and micro-batch sizes and the number of GPUs")),
    ("hang", ("stacks of all ranks at the stall", "the last stage that each rank finished")),
    ("slow", ("seconds of each stage by rank", "tokens and longest response by rank")),
    ("error", ("the last line of the exception and the sizes in it", "the batch keys and the number of GPUs")),
)  # fmt: skip
ASKED_ELSE = (
    "the symptom in numbers: metrics by step, the exception's last line, or memory by stage",
    "the configuration",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A cause that a report fits: told, located only (`undecided`), or suspected with inputs missing."""

    cause: Cause
    confidence: float
    missing: frozenset[str]
    suspected: bool


def answer(report: Report, planned: Sequence[FindingRow] = ()) -> list[FindingRow]:
    """Findings for a report. The first is the cause, or says that it cannot be told and what is needed.

    `planned`: what the checks of the configuration found; those that fail or warn follow.
    """
    names = names_of(report)
    likeness = alike(report)
    by_cause = {cause.id: figure for cause, figure in likeness}
    places = {cause.id: place for place, (cause, _) in enumerate(likeness)}
    found = (_doubted(match, names, places[match.cause.id]) for match in _matches(names, report.said()))
    matches = sorted(found, key=lambda match: -match.confidence - 0.2 * by_cause[match.cause.id])
    rows = [_row(match, names) for match in matches if not match.suspected and match.confidence >= LEAST]
    rows += [_composed(one) for one in located(report.symptom, report.config)[:2]]
    rows.sort(key=lambda row: -(row.confidence or 0))  # stable: of equals the one that the report is more like
    rows = _with_alike(rows, likeness, names) or [_cannot_tell(matches, names, likeness)]
    shown = [*rows[:MOST_SHOWN], *(row for row in planned if row.verdict in ("fail", "warn"))]
    for position, row in enumerate(shown):
        row.position = position
    return shown


def _with_alike(
    rows: list[FindingRow], likeness: Sequence[tuple[Cause, float]], names: Mapping[str, Any]
) -> list[FindingRow]:
    """The rows, before them the cause that the report is most like, where no condition tells one and it is like no other."""
    (cause, figure), (_, second) = likeness[:2]
    told = any(row.verdict == "fail" for row in rows)
    enough = figure >= (VERY_LIKE if rows else LIKE) and figure - second >= APART
    facts = {name: value for name, value in names.items() if name not in _all_words()}
    contradicted = evaluate(cause.when, facts) is False  # by numbers and settings: words are left open
    sayable = any(filled(says, names) for says in cause.says) and not contradicted
    if told or not enough or not sayable or any(row.id == cause.id for row in rows):
        return rows
    match = Match(cause=cause, confidence=min(0.55 + 0.2 * figure, 0.65), missing=frozenset(), suspected=False)
    return [_row(match, names), *rows]


def names_of(report: Report) -> dict[str, Any]:
    """Everything a condition may use: words that stand in the report, and facts."""
    text = {"said": report.said(), "settings": report.settings(), "anywhere": report.whole()}
    seen = {
        word: bool(pattern.search(text[place])) for place, rows in words().items() for word, pattern in rows.items()
    }
    return {**seen, **facts_of(report), "true": True}


@cache
def _all_words() -> frozenset[str]:
    return frozenset(word for rows in words().values() for word in rows)


def _matches(names: Mapping[str, Any], said: str) -> Iterator[Match]:
    for cause in causes():
        if not all(sign.search(said, 0, LONGEST) for sign in cause.signs):
            continue
        value = evaluate(cause.when, names)
        confidence = cause.confidence
        if value is True:
            for condition in cause.surer:
                confidence = 1 - (1 - confidence) * (2 / 3 if evaluate(condition, names) is True else 1)
            yield Match(cause=cause, confidence=confidence, missing=frozenset(), suspected=False)
        elif evaluate(cause.suspect, names) is True:
            missing = value.missing if isinstance(value, Unknown) else frozenset()
            yield Match(cause=cause, confidence=confidence / 2, missing=missing, suspected=True)


def _doubted(match: Match, names: Mapping[str, Any], place: int) -> Match:
    """Less sure where only words speak for a cause, and the report as a whole is more like many others."""
    facts = names_in(match.cause.when) - _all_words()
    if place < DISTANT or match.suspected or match.cause.undecided or any(name in names for name in facts):
        return match
    return replace(match, confidence=match.confidence * DOUBT if place >= FAR else min(match.confidence, UNSURE))


def _row(match: Match, names: Mapping[str, Any]) -> FindingRow:
    cause = match.cause
    message = next((text for says in cause.says if (text := filled(says, names))), HOLE.sub("?", cause.says[-1]))
    evidence = [text for one in cause.evidence if (text := filled(one, names))]
    fix = {key: filled(value, names) for key, value in cause.fix.items()}
    needs = list(cause.needs) or [asked(name) for name in sorted(match.missing)]
    if cause.undecided:
        message = f"cannot tell, needs {'; '.join(needs)}: {message}"
    return FindingRow(
        id=cause.id, scope="run", order=ORDER, verdict="skipped" if cause.undecided else "fail",
        severity="info" if cause.undecided else "error", message=message, evidence=evidence or None,
        needs=needs if cause.undecided else None,
        fix={key: value for key, value in fix.items() if value is not None} if fix and None not in fix.values() else None,
        next_step=cause.next_step, confidence=round(match.confidence, 2),
    )  # fmt: skip


def _composed(one: Located) -> FindingRow:
    return FindingRow(
        id=one.id, scope="run", order=ORDER, verdict="fail", severity="error", message=one.message,
        evidence=[f"“{one.clause}”"], next_step=one.next_step, confidence=round(min(0.55 + 0.07 * one.weight, 0.65), 2),
    )  # fmt: skip


def _cannot_tell(
    matches: Sequence[Match], names: Mapping[str, Any], likeness: Sequence[tuple[Cause, float]]
) -> FindingRow:
    """The one row that says what is missing, with the causes that would then be asked."""
    needs = list(dict.fromkeys(need for match in matches[:3] for need in _needs_of(match)))
    if not needs:
        needs = list(next((asks for word, asks in ASKED_BY_KIND if names[word]), ASKED_ELSE))
    guesses = [text for match in matches[:2] if (text := _guess(match, names))]
    guesses += [
        cause.says[-1] for cause, figure in likeness[:1] if not guesses and figure >= HINT and "{" not in cause.says[-1]
    ]
    message = f"cannot tell, needs {'; '.join(needs[:4])}" + (f"; suspected: {guesses[0]}" if guesses else "")
    return FindingRow(
        id="cannot_tell", scope="run", order=ORDER, verdict="skipped", severity="info", message=message,
        evidence=guesses or None, needs=needs, next_step=f"find out {needs[0]}", confidence=0.0,
    )  # fmt: skip


def _needs_of(match: Match) -> list[str]:
    return list(match.cause.needs) or [asked(name) for name in sorted(match.missing)]


def _guess(match: Match, names: Mapping[str, Any]) -> str | None:
    if match.cause.guess:
        return filled(match.cause.guess, names)
    return next((text for says in match.cause.says if (text := filled(says, names))), None)
