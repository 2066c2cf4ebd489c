"""The causes as rows of `causes/*.toml`. A row tells what to look for, what shows it, and what to change.

| column | what |
|---|---|
| `id` | its name, which is the finding's |
| `signs` | patterns that must all stand in the symptom, for words that only this row looks for |
| `stages` | where it can happen at all; empty: anywhere. A report that names its stage is not told of others |
| `when` | the condition under which it is told, beside its signs; unknown inputs make it unknown, never true |
| `suspect` | what makes one think of it while inputs of `when` are missing |
| `open` | true: what is known locates it, and does not decide it; it comes out as skipped, with `needs` |
| `confidence` | of what is told, 0 to 1; `surer`: conditions that each take a third of the doubt away |
| `says` | sentences; the first whose names are all known is taken. `evidence`: each where its names are known |
| `fix`, `next`, `needs`, `guess` | key, from and to; the next step; what would decide; the sentence while it is only suspected |
| `alike` | other ways in which people tell it, for `likeness` |
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.diagnose.reports.expression import Unknown, evaluate

HOLE = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
FLAGS = re.IGNORECASE | re.DOTALL
KINDS = (
    "shape", "sizes", "memory", "balance", "stability", "data", "hang", "weights", "objective", "engine", "waits", "layout", "terms", "agents", "versions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row."""

    id: str
    kind: str
    signs: tuple[re.Pattern[str], ...]
    stages: tuple[str, ...]
    when: str
    suspect: str
    undecided: bool
    confidence: float
    surer: tuple[str, ...]
    says: tuple[str, ...]
    evidence: tuple[str, ...]
    fix: Mapping[str, str]
    next_step: str
    needs: tuple[str, ...]
    guess: str
    alike: str

    def may_be_in(self, stage: str) -> bool:
        """Whether it can happen in a stage; empty: nobody has named one."""
        return not stage or not self.stages or stage in self.stages


@cache
def causes() -> tuple[Cause, ...]:
    """Every row, in the order of the files and of the rows in them."""
    return tuple(_cause(kind, row) for kind in KINDS for row in _rows(kind))


@cache
def words() -> Mapping[str, Mapping[str, re.Pattern[str]]]:
    """Where to look (said, settings, anywhere) -> word -> pattern."""
    text = files("flowledger.diagnose.reports").joinpath("words.toml").read_text(encoding="utf-8")
    return {
        place: {word: re.compile("|".join(patterns), FLAGS) for word, patterns in rows.items()}
        for place, rows in tomllib.loads(text).items()
    }


def filled(template: str, names: Mapping[str, Any]) -> str | None:
    """A sentence with `{expression:format}` worked out; None where one of them is unknown."""
    missing = False

    def put(match: re.Match[str]) -> str:
        nonlocal missing
        value = evaluate(match[1], names)
        wanted = match[2] or ("g" if isinstance(value, float) else "")
        if isinstance(value, Unknown) or (wanted and not isinstance(value, int | float)):
            missing = True
            return ""
        return format(value, wanted)

    text = HOLE.sub(put, template)
    return None if missing else text


def _rows(kind: str) -> list[dict[str, Any]]:
    text = files("flowledger.diagnose.reports").joinpath(f"causes/{kind}.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["cause"]
    return rows


def _cause(kind: str, row: Mapping[str, Any]) -> Cause:
    return Cause(
        id=row["id"], kind=kind, signs=tuple(re.compile(one, FLAGS) for one in row.get("signs", ())),
        stages=tuple(row.get("stages", ())), when=row.get("when", "True"), suspect=row.get("suspect", "False"), undecided=row.get("open", False),
        confidence=row["confidence"], surer=tuple(row.get("surer", ())), says=tuple(row["says"]),
        evidence=tuple(row.get("evidence", ())), fix=row.get("fix", {}), next_step=row["next"],
        needs=tuple(row.get("needs", ())), guess=row.get("guess", ""), alike=row.get("alike", ""),
    )  # fmt: skip
