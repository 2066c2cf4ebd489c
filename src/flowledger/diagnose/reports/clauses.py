"""A text in clauses, and the clauses that compare: “with A it works” says that A decides."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

CLAUSE = re.compile(r"(?<=[.;!?])\s+|\n+|;\s*|(?<!Error)(?<!Exception):\s+(?=[a-zA-Z])")
SENTENCE = re.compile(r"(?<=[.;!?])\s+|\n+|;\s*")
PART = re.compile(
    r",\s+(?:and |but |while |whereas )?|\s+(?:but|while|whereas|although|though)\s+|\s+and\s+(?=(?:with|without|in|on)\b)"
)
PRONOUN = re.compile(
    r"(?:and |but )?with(?:out)? (?:it|that|this|them|the (?:flag|switch|option|setting|feature))\b", re.IGNORECASE
)
LONGEST = 20_000  # characters that are read
SHORTEST, WORDS = 3, 5  # characters and words of a factor
SETTING = re.compile(r"[\w./-]+ ?= ?[\w.+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One thing that, changed alone, made it work."""

    factor: str  # in the reporter's words
    clause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What hangs on a setting: a row of `contrasts.toml`."""

    name: str
    pattern: re.Pattern[str]
    says: str
    seen: Mapping[str, str]  # kind of symptom -> what it then most likely is
    weak: bool  # many causes hang on it


def clauses(text: str) -> Iterator[str]:
    """Sentences, and the parts of them that stand behind a colon or semicolon."""
    for clause in CLAUSE.split(text[:LONGEST]):
        if clause.strip():
            yield clause.strip()


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text."""
    for sentence in SENTENCE.split(text[:LONGEST]):
        if sentence.strip():
            yield sentence.strip()


def contrasts(text: str) -> list[Contrast]:
    """What the report says it works with, or without."""
    found, before = [], ""
    for clause in clauses(text):
        # "with A it fails; without it it works": the factor stands in the clause before
        named = [_factor(before)] if PRONOUN.match(clause) and _works(clause) else list(_factors(clause))
        found += [Contrast(factor=factor, clause=clause) for factor in named if factor]
        before = clause
    return found


def switch(factor: str) -> Switch | None:
    """The row that a factor is of."""
    return next((one for one in _switches() if one.pattern.search(factor)), None)


def kinds() -> Mapping[str, str]:
    """Kind of symptom -> the condition that tells it."""
    found: dict[str, str] = _table()["kinds"]
    return found


def without_contrasts(text: str) -> str:
    """The text less what holds where it works: its settings are not those of the failure."""
    sentences = SENTENCE.split(text[:LONGEST])
    return "\n".join(part for one in sentences for part in PART.split(one) if not _works(part))


def _factors(clause: str) -> Iterator[str]:
    """What a clause says it works with, part by part; else what it compares with its absence."""
    found = list(_factors_of_parts(clause))
    compared = (match for one in _patterns()["compared"] if (match := one.search(clause)))
    yield from found or [match["factor"].strip() for match in compared][:1]


def _factors_of_parts(clause: str) -> Iterator[str]:
    parts = PART.split(clause)
    for place, part in enumerate(parts):
        if not _works(part):
            continue
        # "with A, it works" has its factor in the part before
        for candidate in (part, parts[place - 1] if place and len(part.split()) < 10 else ""):
            found = _factor(candidate)
            if found:
                yield found
                break


def _works(part: str) -> bool:
    good, bad = _patterns()["works"], _patterns()["fails"]
    return any(one.search(part) for one in good) and not any(one.search(part) for one in bad)


def _factor(part: str) -> str:
    match = next((found for one in _patterns()["factor"] if (found := one.search(part))), None)
    if match is None:
        return ""
    cut = next((found.start() for one in _patterns()["works"] if (found := one.search(match["factor"]))), None)
    words = match["factor"][:cut].strip(" .,:")
    setting = SETTING.search(words)
    words = setting[0] if setting else " ".join(words.split()[:WORDS])
    return words if len(words) >= SHORTEST else ""


@cache
def _patterns() -> dict[str, list[re.Pattern[str]]]:
    return {name: [re.compile(one, re.IGNORECASE) for one in rows] for name, rows in _table()["words"].items()}


@cache
def _switches() -> list[Switch]:
    return [
        Switch(
            name=row["name"],
            pattern=re.compile("|".join(row["patterns"]), re.IGNORECASE),
            says=row["says"],
            seen=row.get("seen", {}),
            weak=row.get("weak", False),
        )
        for row in _table()["switch"]
    ]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.diagnose.reports").joinpath("contrasts.toml").read_text(encoding="utf-8"))
