"""What frameworks ask of a configuration: rows of `rules_<framework>.toml`, each with its source and the versions it holds for.

A file has two kinds of rows. A `fact` gives a name to a key of the framework (or to an expression over other names); a
`rule` says over those names what must hold, when it applies, when its breach shows, and which keys may be turned.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FRAMEWORKS = ("verl", "trl", "openrlhf", "slime", "areal", "nemo_rl", "flowledger")
ANY = "any"  # rules of models and meshes, which hold whatever the framework
SEVERITIES = ("error", "warning")  # error: the run stops (verdict fail); warning: it goes on, unlike what one expects

# Moments at which a breach shows, in the order of a run, with the words for them.
FIRES_AT: Mapping[str, Mapping[str, str]] = {
    "launch": {"en": "fires at launch", "zh": "启动时触发"},
    "worker_start": {"en": "fires when the workers start", "zh": "worker 启动时触发"},
    "first_rollout": {"en": "fires at the first rollout", "zh": "首次 rollout 时触发"},
    "first_update": {"en": "fires at the first update", "zh": "首次更新时触发"},
    "long_sample": {"en": "fires when a long sample comes", "zh": "出现长样本时触发"},
    "runtime": {"en": "shows while it runs", "zh": "运行中显现"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A name that rules use: of the first key that the framework's dictionary holds, or of an expression over names."""

    name: str
    keys: tuple[str, ...] = ()
    expression: str | None = None
    default: Any = None
    has_default: bool = False
    label: str | None = None  # what a user is asked for when it is missing; null: the first key


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `when`, `given` and `condition` are expressions; `message` and `zh` are templates with names in braces."""

    id: str
    framework: str
    versions: str  # all, head, 0.9.1, >=0.9.1, <0.10 (head is newer than every number)
    trainers: tuple[str, ...]  # of verl: v1, v0, one_step_off, fully_async; empty: all
    title: str  # what must hold
    when: str
    given: str  # what other rules ask for and this one stands on: without it there is no row, and no way out
    condition: str
    fires_at: str
    severity: str
    message: str
    zh: str
    knobs: tuple[str, ...]  # names of facts that may be turned, the first is proposed
    shown: str | None  # the name whose value at the nearest candidates is told; null: the knob's own
    source: str  # file::function of the framework
    confidence: float  # 1: read in the framework's source


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTable:
    """The facts and rules of one framework."""

    facts: tuple[Fact, ...]
    rules: tuple[Rule, ...]


@cache
def table(framework: str) -> RuleTable:
    """The rows for one framework, and those that hold for any (from flowledger's own file), whose facts come first."""
    own = _read("flowledger")
    shared = tuple(rule for rule in own.rules if rule.framework in (ANY, framework))
    if framework == "flowledger" or framework not in FRAMEWORKS:
        return RuleTable(facts=own.facts, rules=shared)
    theirs = _read(framework)
    named = {fact.name for fact in theirs.facts}
    facts = [*(fact for fact in own.facts if fact.name not in named and fact.expression is None), *theirs.facts]
    derived = (fact for fact in own.facts if fact.name not in named and fact.expression is not None)
    return RuleTable(facts=(*facts, *derived), rules=(*theirs.rules, *shared))


def holds_for(versions: str, version: str | None) -> bool:
    """Whether a rule's versions cover this one. An unknown version is covered; `head` is newer than every number."""
    if versions == "all" or version is None:
        return True
    return all(_within(part.strip(), version) for part in versions.split(","))


def _within(bound: str, version: str) -> bool:
    sign = next((s for s in (">=", "<=", ">", "<") if bound.startswith(s)), "==")
    left, right = _order(version), _order(bound.removeprefix(sign))
    return {">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right, "==": left == right}[sign]


def _order(version: str) -> tuple[int, ...]:
    if version == "head" or "dev" in version:
        return (10**6,)
    return tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in version.lstrip("v").split("."))


@cache
def _read(framework: str) -> RuleTable:
    name = f"rules_{framework}.toml"
    raw = tomllib.loads(files("flowledger.tables").joinpath(name).read_text(encoding="utf-8"))
    facts = tuple(_fact(row) for row in raw.get("fact", ()))
    rules = tuple(_rule(row, framework, name) for row in raw.get("rule", ()))
    for kind, names in (("fact", [fact.name for fact in facts]), ("rule", [rule.id for rule in rules])):
        twice = sorted({item for item in names if names.count(item) > 1})
        if twice:
            raise AssertionError(f"{name}: {kind} {twice[0]} stands twice")
    return RuleTable(facts=facts, rules=rules)


def _fact(row: Mapping[str, Any]) -> Fact:
    keys = row.get("key", ())
    return Fact(
        name=row["name"],
        keys=(keys,) if isinstance(keys, str) else tuple(keys),
        expression=row.get("is"),
        default=None if row.get("default") == "null" else row.get("default"),
        has_default="default" in row,
        label=row.get("label"),
    )


def _rule(row: Mapping[str, Any], framework: str, name: str) -> Rule:
    rule = Rule(
        id=row["id"],
        framework=row.get("framework", framework),
        versions=row.get("versions", "all"),
        trainers=tuple(row.get("trainers", ())),
        title=row["title"],
        when=row.get("when", "True"),
        given=row.get("given", "True"),
        condition=row["condition"],
        fires_at=row["fires_at"],
        severity=row.get("severity", "error"),
        message=row["message"],
        zh=row["zh"],
        knobs=tuple(row.get("knobs", ())),
        shown=row.get("shown"),
        source=row["source"],
        confidence=float(row.get("confidence", 1.0)),
    )
    if rule.fires_at not in FIRES_AT or rule.severity not in SEVERITIES:
        raise AssertionError(f"{name}: {rule.id} fires_at = {rule.fires_at}, severity = {rule.severity}")
    return rule
