"""A finding composed of a report's own words: what fails (an object), how (a failure), and where (a stage).

Rows of `causes/` know cases. A report that tells its mechanism in a clause is located without one: "the optimizer is not offloaded again after
checkpointing" names the tensor, the stage and the failure. Clauses that only tell a symptom (memory, NaN, a hang) have no failure in them.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.diagnose.reports.clauses import sentences

SUPPOSED = re.compile(
    r"\b(?:suspect|maybe|perhaps|guess|believe[sd]?|think[s]?|hypothes|might|possibly|wonder|unclear|seems?)",
    re.IGNORECASE,
)
SHORTEST = 12
SETTING = "report_dead_setting"  # where a name of the code is enough of an object
CODE = 10  # how much farther a name of the code counts than an object that is known
LONGEST = 240  # characters of a clause that are shown
IDENTIFIER = re.compile(r"\b(?:[a-z]+\w*_\w+|[A-Z]\w*[a-z][A-Z]\w*)\b")
MOST = 4  # objects that are named
FARTHEST = 110  # characters between a failure and the object it is said of


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    id: str
    pattern: re.Pattern[str]
    context: re.Pattern[str]  # must stand somewhere in the symptom
    says: str
    next_step: str
    weak: bool  # it says that something is wrong with an object, not how


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What one sentence says."""

    id: str
    message: str
    next_step: str
    clause: str
    weight: float  # how much of object, failure and stage stands together
    weak: bool


def located(text: str, keys: Iterable[str] = ()) -> list[Located]:
    """What the sentences of a symptom locate, the fullest first. `keys`: settings, which are named where a sentence names them."""
    tails = {tail for key in keys if len(tail := re.split(r"[./]|--", key)[-1].replace("-", "_")) > 5}
    found = [one for clause in _clauses(text) if (one := _of_clause(clause, text, tails))]
    return sorted(found, key=lambda one: -one.weight)


def _clauses(text: str) -> Iterator[str]:
    for clause in sentences(text):
        if len(clause) >= SHORTEST and not SUPPOSED.search(clause):
            yield clause


def _of_clause(clause: str, text: str, tails: set[str]) -> Located | None:
    """The failures of a sentence, strong ones first, said of the objects near the first of them."""
    hits = [(one, match) for one in _table()[0] if (match := one.pattern.search(clause)) and one.context.search(text)]
    for failure, match in hits:
        named = sorted(tail for tail in tails if tail in clause.replace("-", "_"))
        objects = [*named, *_near(clause, match, failure.id == SETTING)][:MOST]
        stage = next((says for says, pattern in _table()[2] if pattern.search(clause)), "")
        if not objects or (failure.weak and len(objects) < 2):
            continue
        also = next(
            (one.says for one, _ in hits if one is not failure and one.weak == failure.weak and not one.weak), ""
        )
        message = f"{' / '.join(objects)}{f', {stage}' if stage else ''}: {failure.says}{f'; {also}' if also else ''}"
        shown = clause if len(clause) <= LONGEST else clause[: LONGEST - 1] + "…"
        return Located(
            id=failure.id, message=f"{message[0].upper()}{message[1:]}. The report says: “{shown.rstrip('.')}”",
            next_step=failure.next_step, clause=clause, weak=failure.weak,
            weight=1.0 - failure.weak + 0.2 * bool(stage) + 0.1 * len(objects) + 0.1 * bool(also),
        )  # fmt: skip
    return None


def _near(clause: str, match: re.Match[str], alone: bool) -> list[str]:
    """Objects of a clause by their distance to the failure, nearest first; one before it counts as nearer."""
    distances: dict[str, float] = {}
    for name, pattern in _table()[1]:
        for one in pattern.finditer(clause):
            gap = match.start() - one.end() if one.end() <= match.start() else 1.5 * max(0, one.start() - match.end())
            if gap <= FARTHEST:
                distances[name] = min(gap, distances.get(name, gap))
    for one in IDENTIFIER.finditer(clause):
        gap = match.start() - one.end() if one.end() <= match.start() else 1.5 * max(0, one.start() - match.end())
        if gap <= FARTHEST and (distances or alone) and not _known(one[0], distances):
            distances.setdefault(one[0], gap + CODE)
    return sorted(distances, key=lambda name: distances[name])


def _known(name: str, found: Iterable[str]) -> bool:
    """Whether a name of the code says nothing beyond the objects that were found."""
    objects = dict(_table()[1])
    return any(name in one or (one in objects and objects[one].search(name) is not None) for one in found)


@cache
def _table() -> tuple[list[Failure], list[tuple[str, re.Pattern[str]]], list[tuple[str, re.Pattern[str]]]]:
    rows: dict[str, list[dict[str, Any]]] = tomllib.loads(
        files("flowledger.diagnose.reports").joinpath("mechanisms.toml").read_text(encoding="utf-8")
    )
    failures = [
        Failure(
            id=row["id"],
            pattern=_any(row["patterns"]),
            context=_any([row.get("with", "")]),
            says=row["says"],
            next_step=row["next"],
            weak=row.get("weak", False),
        )
        for row in rows["failure"]
    ]
    objects = [(row["name"], _any(row["patterns"])) for row in rows["object"]]
    return failures, objects, [(row["says"], _any(row["patterns"])) for row in rows["stage"]]


def _any(patterns: list[str]) -> re.Pattern[str]:
    """Each from the start of a word: `turns` must not stand in `returns`."""
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(patterns)})", re.IGNORECASE)
