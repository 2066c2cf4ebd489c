"""What an alarm lacked that could not be judged: metrics that no step has, ranks, steps, settings."""

from collections.abc import Collection
from dataclasses import dataclass

from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.numbers import numbers
from flowledger.diagnose.alarms.program import Program
from flowledger.diagnose.alarms.rules import Compiled
from flowledger.flow.errors import nearest
from flowledger.tables.metrics import find, metrics


def inputs(program: Program, alarm: Compiled) -> list[str]:
    """The metrics and numbers that an alarm reads, in the order in which it names them."""
    parts = [program.parts[node] for node in program.below(alarm.when)]
    names = [part.name if part.kind == "metric" else part.key for part in parts if part.kind in ("metric", "ranks")]
    return list(dict.fromkeys(names))


def strangers(program: Program, alarm: Compiled, names: Collection[str]) -> list[str]:
    """In words, the metrics of a condition that are neither canonical nor among the names of a run: slips of the pen, mostly."""
    return [
        f"alarm {alarm.rule.id}: this run has no metric {name!r} so far{nearest(name, [*sorted(names), *metrics()])}"
        for name in inputs(program, alarm)
        if name not in names and name not in numbers() and name != "step" and find(name) is None
    ]


def lacking(
    program: Program, alarm: Compiled, *, seen: Collection[str], ranked: Collection[str], steps: int, facts: Facts
) -> list[str]:
    """In words, the missing metrics first; where none is missing, the steps that a history needs."""
    known = _Known(set(seen), set(ranked), facts)
    missing = _missing(program, alarm.when, known)
    if not missing:
        parts = [program.parts[node] for node in program.below(alarm.when)]
        what = "a history" if any(part.kind == "back" for part in parts) else "steps with all of its numbers"
        missing = [f"{what}: {steps} step{'s were' if steps != 1 else ' was'} seen"]
    return list(dict.fromkeys([*missing, *alarm.rule.needs]))


@dataclass(frozen=True, slots=True)
class _Known:
    seen: set[str]
    ranked: set[str]
    facts: Facts


def _missing(program: Program, node: int, known: _Known) -> list[str]:
    """What a node lacks, in words. Of alternatives nothing is missing where one is there."""
    part = program.parts[node]
    if part.kind == "metric":
        return [] if part.name in known.seen else [_needed(part.name)]
    if part.kind == "ranks":
        return (
            []
            if part.key in known.ranked
            else [_needed(part.key) if part.key not in known.seen else f"{part.key} of at least two ranks"]
        )
    if part.name == "size":
        return [] if part.key in known.facts.sizes else [f"the size of {part.key}"]
    if part.name == "planned":
        return [] if part.key in known.facts.planned else [f"a plan with {part.key}"]
    if part.name == "config":
        return [] if part.children or known.facts.setting(part.key) is not None else [f"the setting {part.key}"]
    below = [_missing(program, child, known) for child in part.children]
    if part.name in ("first", "count") and not all(below):
        return []
    return [one for found in below for one in found]


def _needed(name: str) -> str:
    return f"{name}: {numbers()[name].needs}" if name in numbers() else f"metric {name}"
