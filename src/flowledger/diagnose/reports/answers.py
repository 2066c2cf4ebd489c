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
from flowledger.diagnose.reports.settings import ORDER, VAGUE, configured, decided, told
from flowledger.diagnose.reports.table import HOLE, Cause, causes, filled, words
from flowledger.ledger.rows import FindingRow

LEAST, DOUBTED = 0.6, 0.4  # confidence from which a cause is told for sure, and from which it is told at all
# How well a report must fit a cause whose condition is not known to hold: likeness, more where the condition holds as far as it is known, more
# or less by the share of its signs. From LIKE it is told where nothing else is, from VERY_LIKE beside what is only located, from MOST_LIKE where the symptom is
# of many causes. Set on labelled reports.
LIKE, VERY_LIKE, MOST_LIKE, LEAST_LIKE, HOLDS, SIGNED = 0.36, 0.4, 0.5, 0.1, 0.15, 0.2
HINT = 0.31  # likeness from which a cause is named as suspected
# Places by likeness from which words alone are not told surely, and not told at all: of labelled reports that no row was written
# for, nine of ten are right nearer than the first, half between the two, one in four beyond.
DISTANT, FAR = 14, 46
UNSURE = 0.65
# The most that words alone are worth, and numbers that do not settle it (a row of less than `SURE`): of reports that are new to
# the tables one in three is told wrongly by words.
BY_WORDS = 0.69
SURE = 0.8
LIKELY = 0.49  # the most that a cause is worth whose condition is not known to hold
LOCATED = 0.45  # confidence of what is only located: an object of which something is said to be wrong
MOST_SHOWN = 6
# A stage -> the word of conditions that tells it.
STAGE_WORDS = {
    "old_log_prob": "log_prob_pass", "ref_log_prob": "log_prob_pass", "update_actor": "update", "update_critic": "critic_update", "rollout": "rollout",
    "weight_sync": "weight_sync", "checkpoint": "save", "reward": "reward_stage", "validate": "validation",
}  # fmt: skip
LONGEST = 20_000  # characters in which signs are looked for
# What is asked for where no cause is even suspected, by the kind of failure that the words name.
ASKED_BY_KIND: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oom", ("the stage in which it died (traceback)", "how much it tried to allocate, and what was allocated and reserved")),
    ("nan", ("the first step and the first tensor that is not finite", "batch, mini- and micro-batch sizes and the number of GPUs")),
    ("hang", ("stacks of all ranks at the stall", "the last stage that each rank finished")),
    ("slow", ("seconds of each stage by rank", "tokens and longest response by rank")),
    ("error", ("the last line of the exception and the sizes in it", "the batch keys and the number of GPUs")),
)  # fmt: skip
# What is asked for -> the facts and words of which one is enough to leave it out: who has told it is not asked again.
TOLD = {
    "the stage in which it died": (*STAGE_WORDS.values(), "wake", "backward", "engine_start"), "how much it tried to allocate": ("alloc_gib",),
    "the last line of the exception": ("size_high", "dividend", "missing_name"), "how many GPUs": ("world",), "gpu_memory_utilization": ("util",),
    "the engine's memory share": ("util",), "the first step": ("step",), "the learning rate": ("lr",), "the model's size": ("params_b",),
}  # fmt: skip
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
    found = (_doubted(match, names, places[match.cause.id]) for match in _matches(names, report))
    matches = sorted(found, key=lambda match: -match.confidence - 0.2 * by_cause[match.cause.id])
    rows = [_row(match, names) for match in matches if not match.suspected and match.confidence >= DOUBTED]
    rows += decided(report, names)
    vague = any(names[word] for word in VAGUE)
    rows += [_composed(one) for one in located(report.symptom, report.config)[:2] if not (vague and one.weak)]
    rows = _with_likeliest(rows, _likeliest(report, likeness, names), names, vague)
    rows += [] if any((row.confidence or 0) >= LEAST for row in rows) else configured(report, names)
    rows = rows or [_cannot_tell(matches, names, likeness)]
    # What it works with is more than what is only located. Of equals the one that the report is more like goes first (a stable sort).
    apart = any(row.id == "report_contrast" for row in rows) and not (names["oom"] or names["hang"])
    rows.sort(key=lambda row: (apart and row.verdict == "skipped", -(row.confidence or 0)))
    shown = [*rows[:MOST_SHOWN], *(row for row in planned if row.verdict in ("fail", "warn"))]
    unsure = {match.cause.id for match in matches if match.confidence < SURE or _words_alone(match.cause, names)}
    for position, row in enumerate(shown):
        row.position = position
        if row.id in unsure:  # the order stands: only how sure it is
            row.confidence = min(row.confidence or 0.0, BY_WORDS)
    return shown


def _likeliest(
    report: Report, likeness: Sequence[tuple[Cause, float]], names: Mapping[str, Any]
) -> tuple[Cause, float] | None:
    """The cause that a report fits best, its condition left open where words are missing: by likeness, signs and what holds of its condition."""
    said = report.said()
    stated = {name: value for name, value in names.items() if value is not False or name not in _all_words()}
    best: tuple[Cause, float] | None = None
    for cause, figure in likeness:
        if figure < LEAST_LIKE:
            break
        holds = evaluate(cause.when, stated)
        open_numbers = holds is not True and any(name in names for name in names_in(cause.when) - _all_words())
        if (
            holds is False
            or open_numbers
            or not cause.may_be_in(report.stage)
            or not any(filled(says, names) for says in cause.says)
        ):
            continue  # numbers that are there decide: where they do not, the sentence would state them all the same
        signs = (
            sum(bool(sign.search(said, 0, LONGEST)) for sign in cause.signs) / len(cause.signs) if cause.signs else 0.5
        )
        score = figure + HOLDS * (holds is True) + SIGNED * (signs - 0.5)
        if best is None or score > best[1]:
            best = cause, score
    return best


def _with_likeliest(
    rows: list[FindingRow], best: tuple[Cause, float] | None, names: Mapping[str, Any], vague: bool
) -> list[FindingRow]:
    """The rows and the cause that a report fits best, where none is told for sure."""
    sure = any(row.verdict == "fail" and (row.confidence or 0) >= LEAST for row in rows)
    if best is None or sure or best[0].undecided or best[1] < (MOST_LIKE if vague else VERY_LIKE if rows else LIKE):
        return rows
    confidence = min(0.25 + 0.5 * best[1], LIKELY)
    return [*rows, _row(Match(cause=best[0], confidence=confidence, missing=frozenset(), suspected=False), names)]


def names_of(report: Report) -> dict[str, Any]:
    """Everything a condition may use: words that stand in the report, and facts."""
    text = {"said": report.said(), "settings": report.settings(), "anywhere": report.whole()}
    seen = {
        word: bool(pattern.search(text[place])) for place, rows in words().items() for word, pattern in rows.items()
    }
    stage = {STAGE_WORDS[report.stage]: True} if report.stage in STAGE_WORDS else {}
    return {**seen, **stage, **facts_of(report), "true": True}


@cache
def _all_words() -> frozenset[str]:
    return frozenset(word for rows in words().values() for word in rows)


def _matches(names: Mapping[str, Any], report: Report) -> Iterator[Match]:
    said = report.said()
    for cause in causes():
        if not cause.may_be_in(report.stage) or not all(sign.search(said, 0, LONGEST) for sign in cause.signs):
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
    if place < DISTANT or match.suspected or match.cause.undecided or not _words_alone(match.cause, names):
        return match
    return replace(match, confidence=min(match.confidence, LOCATED if place >= FAR else UNSURE))


def _words_alone(cause: Cause, names: Mapping[str, Any]) -> bool:
    """Whether no setting or number of the report speaks for a cause."""
    return not any(name in names for name in names_in(cause.when) - _all_words())


def _row(match: Match, names: Mapping[str, Any]) -> FindingRow:
    cause = match.cause
    message = next((text for says in cause.says if (text := filled(says, names))), HOLE.sub("?", cause.says[-1]))
    evidence = [text for one in cause.evidence if (text := filled(one, names))]
    fix = {key: filled(value, names) for key, value in cause.fix.items()}
    needs = _still_asked(list(cause.needs) or [asked(name) for name in sorted(match.missing)], names)
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
    confidence = LOCATED if one.weak else round(min(0.55 + 0.07 * one.weight, 0.65), 2)
    return told(one.id, one.message, [f"“{one.clause}”"], one.next_step, confidence)


def _cannot_tell(
    matches: Sequence[Match], names: Mapping[str, Any], likeness: Sequence[tuple[Cause, float]]
) -> FindingRow:
    """The one row that says what is missing, with the causes that would then be asked."""
    needs = list(dict.fromkeys(need for match in matches[:3] for need in _needs_of(match)))
    needs = _still_asked(needs or next((asks for word, asks in ASKED_BY_KIND if names[word]), ASKED_ELSE), names)
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


def _still_asked(needs: Sequence[str], names: Mapping[str, Any]) -> list[str]:
    """The needs less what the report has told already; all of them where nothing would be left."""
    told = {need for need in needs for start, by in TOLD.items() if need.startswith(start) and any(map(names.get, by))}
    return [need for need in needs if need not in told] or list(needs)


def _guess(match: Match, names: Mapping[str, Any]) -> str | None:
    if match.cause.guess:
        return filled(match.cause.guess, names)
    return next((text for says in match.cause.says if (text := filled(says, names))), None)
