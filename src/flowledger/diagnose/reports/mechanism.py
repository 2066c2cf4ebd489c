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

CLAUSE = re.compile(r"(?<=[.;!?])\s+|\n+|;\s*|:\s+(?=[a-zA-Z])")
SUPPOSED = re.compile(
    r"\b(?:suspect|maybe|perhaps|guess|believe[sd]?|think[s]?|hypothes|might|possibly|wonder|unclear|seems?)",
    re.IGNORECASE,
)
SHORTEST = 12
SETTING = "report_dead_setting"  # where a name of the code is enough of an object
CODE = 10  # how much farther a name of the code counts than an object that is known
LONGEST = 240  # characters of a clause that are shown
IDENTIFIER = re.compile(r"\b(?:[a-z]+\w*_\w+|[A-Z]\w*[a-z][A-Z]\w*)\b")
FARTHEST = 90  # characters between a failure and the object it is said of


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    id: str
    pattern: re.Pattern[str]
    context: re.Pattern[str]  # must stand somewhere in the symptom
    says: str
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What one clause says."""

    id: str
    message: str
    next_step: str
    clause: str
    weight: float  # how much of object, failure and stage stands together


def located(text: str, keys: Iterable[str] = ()) -> list[Located]:
    """What the clauses of a symptom locate, the fullest first. `keys`: settings, which are named where a clause names them."""
    tails = {tail for key in keys if len(tail := re.split(r"[./]|--", key)[-1].replace("-", "_")) > 5}
    found = [one for clause in _clauses(text) for one in _of_clause(clause, text, tails)]
    return sorted(found, key=lambda one: -one.weight)


def _clauses(text: str) -> Iterator[str]:
    for clause in CLAUSE.split(text[:20000]):
        if len(clause.strip()) >= SHORTEST and not SUPPOSED.search(clause):
            yield clause.strip()


def _of_clause(clause: str, text: str, tails: set[str]) -> Iterator[Located]:
    for rank, failure in enumerate(_table()[0]):
        match = failure.pattern.search(clause)
        if match is None or not failure.context.search(text):
            continue
        objects = [
            *sorted(tail for tail in tails if tail in clause.replace("-", "_")),
            *_near(clause, match, failure.id == SETTING),
        ]
        if not objects:
            continue
        stage = next((says for says, pattern in _table()[2] if pattern.search(clause)), "")
        message = f"{' / '.join(objects[:2])}{f', {stage}' if stage else ''}: {failure.says}"
        shown = clause if len(clause) <= LONGEST else clause[: LONGEST - 1] + "…"
        yield Located(
            id=failure.id, message=f"{message[0].upper()}{message[1:]}. The report says: “{shown.rstrip('.')}”",
            next_step=failure.next_step, clause=clause, weight=1.0 + 0.3 * bool(stage) - 0.01 * rank,
        )  # fmt: skip
        return


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
        )
        for row in rows["failure"]
    ]
    objects = [(row["name"], _any(row["patterns"])) for row in rows["object"]]
    return failures, objects, [(row["says"], _any(row["patterns"])) for row in rows["stage"]]


def _any(patterns: list[str]) -> re.Pattern[str]:
    """Each from the start of a word: `turns` must not stand in `returns`."""
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(patterns)})", re.IGNORECASE)
