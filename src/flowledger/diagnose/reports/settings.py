"""What a report says of its own settings, as findings: one it works with or without, one that its symptom names, one that stands alone."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.diagnose.reports.clauses import Contrast, Switch, contrasts, kinds, sentences, switch
from flowledger.diagnose.reports.expression import evaluate
from flowledger.diagnose.reports.keys import number
from flowledger.diagnose.reports.report import Report, leaves
from flowledger.ledger.rows import FindingRow

ORDER = "report"
DECIDED, WEAKLY = 0.65, 0.56  # confidence of what a report says it works with
# Confidence of a setting that makes such symptoms: where the symptom names it, and where few are given.
NAMED, LIKELIEST = 0.58, 0.46
CLASH, SHORTEST = 0.62, 8  # of two settings that a refusal names, and characters of such a name
REFUSED = re.compile(
    r"ValueError|Assert|not (?:supported|allowed|compatible)|incompatib|cannot be|must (?:be|not)|requires?|conflict",
    re.IGNORECASE,
)
FEW = 3  # settings of a report that names few
UNSET = ("false", "none", "null", "", "off", "0", "1.0")
# Symptoms of many causes: a setting that the symptom does not name says nothing of them.
VAGUE = ("oom", "nan", "hang", "timeout", "slow", "collapse", "no_learning")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{2,}")  # a word of a setting or of its value


def kind_of(names: Mapping[str, Any]) -> str:
    """The kind of a symptom, by the first condition that holds."""
    return next((kind for kind, when in kinds().items() if evaluate(when, names) is True), "")


def decided(report: Report, names: Mapping[str, Any]) -> list[FindingRow]:
    """What the report says it works with, or without, as the cause."""
    kind = kind_of(names)
    found: dict[str, FindingRow] = {}
    for one in contrasts(report.symptom):
        factor = _named(one.factor, report)
        known = switch(factor)
        if known:
            says = f"{known.name} decides ({factor}): {known.seen.get(kind, known.says)}"
            sure = WEAKLY if known.weak and kind not in known.seen else DECIDED
            found[known.name] = _row(says, one, sure)
        elif key := _configured_word(factor, report):
            says = f"the setting {key} decides ({factor}): what its path does otherwise (tokens, weights, masks, batches) is the cause"
            found.setdefault(key, _row(says, one, WEAKLY))
    return [*found.values(), *([] if found else _clashing(report, names))]


def _clashing(report: Report, names: Mapping[str, Any]) -> Iterator[FindingRow]:
    """Two settings that a refusal names in one sentence: as they are set they do not go together."""
    keys = {re.split(r"[./]", key)[-1].lstrip("-").replace("-", "_"): value for key, value in leaves(report.config)}
    tails = {f"{key} = {value}": (key, str(value)) for key, value in keys.items() if len(key) >= SHORTEST}
    for sentence in sentences(report.symptom):
        if not names["error"] or not REFUSED.search(sentence):
            continue
        said = [
            shown
            for shown, (key, value) in tails.items()
            if key in sentence or (len(value) >= SHORTEST and value in sentence)
        ]
        if len(said) == 2:
            message = f"the settings {said[0]} and {said[1]} do not go together (not allowed in combination): the one needs another value of the other"
            yield told(
                "report_clash",
                message,
                [f"“{sentence}”"],
                "change one of the two; the check's own sentence says which value it asks for",
                CLASH,
            )
            return


def configured(report: Report, names: Mapping[str, Any]) -> list[FindingRow]:
    """The setting that makes symptoms of this kind, as a suspicion: one that the symptom names, else the first of a few."""
    kind = kind_of(names)
    given = [(key, value) for key, value in leaves(report.config) if str(value).casefold() not in UNSET]
    known = list(_known(given, kind))
    named = [one for one in known if kind != "hang" and not one[2].weak and one[2].pattern.search(report.symptom)]
    alone = known if kind not in VAGUE and len(given) <= FEW else []
    for candidates, confidence in ((named, NAMED), (alone, LIKELIEST)):
        if candidates:
            key, value, one = candidates[0]
            message = f"{one.name} ({key} = {value}) is the likeliest: {one.seen[kind]}"
            return [told("report_setting", message, None, "run the same without it, all else equal", confidence)]
    return []


def told(identity: str, message: str, evidence: list[str] | None, next_step: str, confidence: float) -> FindingRow:
    """What a report itself says, as a finding."""
    return FindingRow(
        id=identity, scope="run", order=ORDER, verdict="fail", severity="error", message=message[0].upper() + message[1:],
        evidence=evidence, next_step=next_step, confidence=confidence,
    )  # fmt: skip


def _row(says: str, one: Contrast, confidence: float) -> FindingRow:
    step = "change nothing else, and compare the stage's inputs and outputs with and without it"
    return told("report_contrast", says, [f"“{one.clause}”"], step, confidence)


def _known(given: list[tuple[str, Any]], kind: str) -> Iterator[tuple[str, Any, Switch]]:
    for key, value in given:
        one = switch(f"{key}={value}")
        if one and kind in one.seen:
            yield key, value, one


def _named(factor: str, report: Report) -> str:
    """A factor that is a bare number, with the one setting that has a number of its size."""
    value = number(factor.split()[0])
    if value is None:
        return factor
    sizes = [(key, number(given)) for key, given in leaves(report.config)]
    near = [key for key, size in sizes if size and value and 0.2 < size / value < 5 and size != value]
    return f"{near[0]} {factor}" if len(near) == 1 else factor


def _configured_word(factor: str, report: Report) -> str:
    """The setting whose key or value a factor names, as `key = value`."""
    words = {word.casefold() for word in NAME.findall(factor)}
    for key, value in leaves(report.config):
        own = {word.casefold() for word in NAME.findall(f"{re.split(r'[./]', key)[-1]} {value}")}
        if words & own:
            return f"{key} = {value}"
    return ""
