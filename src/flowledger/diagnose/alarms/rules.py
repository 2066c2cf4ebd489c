"""Rows of alarms: read from YAML, checked when they are loaded, and made into one program.

An error names the row, its field, what is wrong and the nearest that would be right.
"""

import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowledger.diagnose.alarms.expressions import Scope
from flowledger.diagnose.alarms.expressions import read as node_of
from flowledger.diagnose.alarms.numbers import numbers
from flowledger.diagnose.alarms.program import Program
from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.stages import stages
from flowledger.tables.metrics import find, metrics

Goal = Literal["correctness", "stability", "performance", "memory", "balance", "data"]
Severity = Literal["warning", "error", "critical"]
ORIGINS = ("plan", "config", "history", "default")  # of a threshold: the first that is known counts
LARGEST = 1 << 20  # bytes of a file of rows
FORMAT = re.compile(r"(,?\.?\d{0,2}[defg%]?|B|note|)")


class Threshold(BaseModel):
    """What a number is held against: the plan's, else the configuration's, else from the run's own history, else a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str | None = None
    config: str | None = None
    history: str | None = None
    default: float | str | None = None
    source: str = ""  # where the default is from

    @property
    def origins(self) -> dict[str, str]:
        """Origin -> expression, those that are given, in their order."""
        return {origin: str(text) for origin in ORIGINS if (text := getattr(self, origin)) is not None}


class Rule(BaseModel):
    """One alarm."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    id: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)
    goal: Goal
    when: str
    hold: int = Field(1, alias="for", ge=1, le=1000)  # steps in a row
    warm_up: int = Field(0, ge=0, le=1000)  # steps at the start, and after a resume, that are not judged
    severity: Severity
    message: str
    zh: str = ""
    next_step: str
    next_step_zh: str = ""
    thresholds: dict[str, Threshold] = {}
    rank: str | None = None  # an expression: which rank is meant
    stage: str | None = None
    each: list[str] = []  # stages: one alarm for each, with its name in place of <stage>
    needs: list[str] = []  # said where the alarm could not be judged, besides what is missing
    confidence: float = Field(0.8, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A rule as nodes of a program."""

    rule: Rule
    stage: str | None
    when: int
    conjuncts: tuple[int, ...]  # parts of `when` that all must be known for it to be judged
    rank: int | None
    thresholds: Mapping[str, tuple[tuple[str, int], ...]]  # name -> (origin, node), in their order
    words: Mapping[str, tuple[tuple[str, int | None, str], ...]]  # language -> (text before, node, format)


@cache
def built_in() -> tuple[Rule, ...]:
    """The alarms of flowledger."""
    text = files("flowledger.diagnose.alarms").joinpath("alarms.yaml").read_text(encoding="utf-8")
    return parsed(text, "alarms.yaml")


def read(path: Path) -> tuple[Rule, ...]:
    """The rows of a user's file. Raises BadInput for anything that cannot be one."""
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is no regular file; alarms are rows of a YAML file")
        if path.stat().st_size > LARGEST:
            raise BadInput(f"{path}: {path.stat().st_size:,} bytes; a file of alarms has at most {LARGEST:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no text in UTF-8; alarms are written in YAML") from None
    return parsed(text, str(path))


def parsed(text: str, where: str) -> tuple[Rule, ...]:
    """Rows from YAML: a list, or a mapping with the one key `alarms`."""
    try:
        document = yaml.load(
            text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )  # safe either way, and in C fast
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{where} is no YAML: {' '.join(str(error).split())[:300]}") from None
    rows = document.get("alarms") if isinstance(document, dict) and set(document) == {"alarms"} else document
    if not isinstance(rows, list):
        raise BadInput(
            f"{where}: a list of alarms is expected, each with id, goal, when, severity, message and next_step"
        )
    made = tuple(_row(row, f"{where}, alarm {number}") for number, row in enumerate(rows, 1))
    ids = [rule.id for rule in made]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise BadInput(f"{where}: the id {twice!r} stands twice")
    return made


def joined(own: Sequence[Rule], added: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rows of two lists; a later one with the same id stands in place of the earlier."""
    rows = {rule.id: rule for rule in own}
    rows.update({rule.id: rule for rule in added})
    return tuple(rows.values())


def compiled(rules: Iterable[Rule]) -> tuple[Program, list[Compiled]]:
    """All rules in one program. Raises BadInput for an expression that cannot be taken."""
    program, known = Program(), _Known([*metrics(), *numbers()])
    return program, [
        _compiled(program, rule, stage, known) for rule in rules for stage in rule.each or [rule.stage or ""]
    ]


class _Known(frozenset[str]):
    """Names of metrics: the canonical ones, the instances of their patterns, and the numbers of alarms."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and find(name) is not None)


def _row(raw: Any, where: str) -> Rule:
    if isinstance(raw, dict) and isinstance(raw.get("id"), str):
        where = f"{where} ({raw['id'][:60]})"
    try:
        rule = Rule.model_validate(raw)
    except ValidationError as error:
        raise BadInput(f"{where}: {_first(error)}") from None
    if unknown := [stage for stage in [*rule.each, *([rule.stage] if rule.stage else [])] if stage not in stages()]:
        raise BadInput(f"{where}: no stage is called {unknown[0]!r}{nearest(unknown[0], stages())}")
    return rule


def _first(error: ValidationError) -> str:
    found = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    key = ".".join(map(str, found["loc"])) or "a row"
    fields = [field.alias or name for name, field in Rule.model_fields.items()]
    if found["type"] == "extra_forbidden":
        return f"{key} is no field of an alarm{nearest(str(found['loc'][-1]), [*fields, *Threshold.model_fields])}"
    given = "" if found["type"] == "missing" else f", not {str(found['input'])[:60]!r}"
    return f"{key}: {found['msg'][:1].lower()}{found['msg'][1:]}{given}"


def _compiled(program: Program, rule: Rule, stage: str, known: Collection[str]) -> Compiled:
    def scope(field: str, names: Mapping[str, int]) -> Scope:
        return Scope(f"alarm {rule.id}, {field}", known, names)

    def expression(text: str) -> str:
        return text.replace("<stage>", stage)

    thresholds: dict[str, tuple[tuple[str, int], ...]] = {}
    names: dict[str, int] = {}
    for name, threshold in rule.thresholds.items():
        if not name.isidentifier() or not threshold.origins:
            raise BadInput(f"alarm {rule.id}, thresholds: {name!r} needs a name and one of {', '.join(ORIGINS)}")
        thresholds[name] = tuple(
            (origin, node_of(program, expression(text), scope(f"thresholds.{name}.{origin}", names)))
            for origin, text in threshold.origins.items()
        )
        nodes = tuple(node for _, node in thresholds[name])
        names[name] = nodes[0] if len(nodes) == 1 else program.first_of(nodes, name)
    words = {
        language: _words(program, expression(text), scope(f"message ({language})", names))
        for language, text in (("en", rule.message), ("zh", rule.zh or rule.message))
    }
    when = node_of(program, expression(rule.when), scope("when", names))
    return Compiled(
        rule, stage or None, when, program.conjuncts(when),
        None if rule.rank is None else node_of(program, expression(rule.rank), scope("rank", names)), thresholds, words,
    )  # fmt: skip


def _words(program: Program, text: str, scope: Scope) -> tuple[tuple[str, int | None, str], ...]:
    """A message in parts: text, and what is put after it; `{an expression:format}`."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise BadInput(f"{scope.where}: {error}") from None
    found: list[tuple[str, int | None, str]] = []
    for before, inner, form, conversion in parts:
        if conversion or (form and not FORMAT.fullmatch(form)):
            raise BadInput(
                f"{scope.where}: {{{inner}}} is written as {{expression}} or {{expression:.3g}}, B for bytes, note for what else is known of a number"
            )
        found.append((before, None if inner is None else node_of(program, inner, scope), form or ""))
    return tuple(found)
