"""How like a report is to what each cause says, by the words they share: rare words count more than common ones.

A last resort where no condition holds: it knows neither numbers nor `not`. A cause's portrait is its own row (its sentences, its next
step, and `alike`, other ways in which people tell it).
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from flowledger.diagnose.reports.report import Report
from flowledger.diagnose.reports.table import Cause, causes

WORD = re.compile(r"[a-z]+|\d+")
FEWEST, OF_FEW = 4, 0.3  # words that must be shared, and the most that fewer can come to
SETTING = 0.4  # what a word of a setting's key counts, beside 1 for a word of the symptom
HOLE = re.compile(r"\{[^{}]*\}")


def stems(text: str) -> list[str]:
    """The words of a text without endings, synonyms joined, numbers and plain words left out."""
    plain, endings, same = _words()
    found = []
    for word in WORD.findall(HOLE.sub(" ", text.casefold())):
        if len(word) < 3 or word.isdigit() or word in plain:
            continue
        stem = next(
            (word[: -len(end)] for end in endings if word.endswith(end) and len(word) - len(end) >= 3), word
        ).rstrip("e")
        if stem not in plain:
            found.append(same.get(stem, same.get(word, stem)))
    return found


def alike(report: Report) -> list[tuple[Cause, float]]:
    """Causes by likeness, the most alike first. The figure: shared weight ÷ √(weight of the report), in units of a rare word."""
    weights = _weights()
    asked = dict.fromkeys(stems(" ".join(map(str, report.config))), SETTING) | dict.fromkeys(stems(report.symptom), 1.0)
    whole = math.sqrt(sum((share * weights.get(stem, 0.0)) ** 2 for stem, share in asked.items())) or 1.0
    scores = []
    for cause, portrait in _portraits():
        common = asked.keys() & portrait.keys()
        shared = sum(asked[stem] * weights[stem] ** 2 for stem in common)
        size = math.sqrt(sum(weights[stem] ** 2 for stem in portrait))
        figure = shared / (whole * size)
        scores.append((cause, figure if len(common) >= FEWEST else min(figure, OF_FEW)))
    return sorted(scores, key=lambda one: -one[1])


@cache
def _words() -> tuple[frozenset[str], tuple[str, ...], Mapping[str, str]]:
    """Words left out, endings taken off, and the one word that several are taken for."""
    text = files("flowledger.diagnose.reports").joinpath("likeness.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    same = {word: one for one, several in rows["same"].items() for word in several}
    return frozenset(rows["plain"]), tuple(rows["endings"]), same


@cache
def _portraits() -> Sequence[tuple[Cause, Counter[str]]]:
    return [(cause, Counter(stems(" ".join((*cause.says, cause.next_step, cause.alike))))) for cause in causes()]


@cache
def _weights() -> Mapping[str, float]:
    """log(causes ÷ causes that use the word)."""
    used = Counter(stem for _, portrait in _portraits() for stem in portrait)
    return {stem: math.log((1 + len(_portraits())) / count) for stem, count in used.items()}
