"""What an alarm lacked that could not be judged: metrics that no step has, ranks, steps, settings."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.numbers import numbers
from flowledger.diagnose.alarms.program import Program
from flowledger.diagnose.alarms.rules import Compiled, built_in
from flowledger.flow.dims import SYMBOLS
from flowledger.flow.errors import nearest
from flowledger.tables.metrics import find, metrics

PLANNED = ("memory_allocated", "memory_reserved")  # what `planned` knows, where a plan lies in the run


def inputs(program: Program, alarm: Compiled) -> list[str]:
    """The metrics and numbers that an alarm reads, in the order in which it names them."""
    parts = [program.parts[node] for node in program.below(alarm.when)]
    names = [part.name if part.kind == "metric" else part.key for part in parts if part.kind in ("metric", "ranks")]
    return list(dict.fromkeys(names))


def strangers(program: Program, alarm: Compiled, names: Collection[str], facts: Facts) -> list[str]:
    """In words, the metrics and settings of an alarm that are neither known nor among those of a run: slips of the pen, mostly."""
    return [*_metrics(program, alarm, names), *_settings(program, alarm, facts)]


def _settings(program: Program, alarm: Compiled, facts: Facts) -> Iterator[str]:
    """Of an alarm of the user's own: ours ask for settings that not every framework has."""
    if alarm.rule in built_in():
        return
    nodes = {alarm.when, *(node for origins in alarm.thresholds.values() for _, node in origins)}
    parts = {one: program.parts[one] for node in nodes for one in program.below(node)}
    known: Mapping[str, Collection[str]] = {"config": facts.keys, "size": SYMBOLS, "planned": PLANNED}
    what = {"config": "setting", "size": "symbol", "planned": "planned number"}
    for part in parts.values():
        if (
            part.name in known and part.key not in known[part.name] and not part.children
        ):  # one with a default may be absent
            some = (
                f": settings are {', '.join(sorted(facts.keys)[:4])}, …" if part.name == "config" and facts.keys else ""
            )
            close = nearest(part.key, sorted(known[part.name])) or some
            yield f"alarm {alarm.rule.id}: this run has no {what[part.name]} {part.key!r}{close}"


def _metrics(program: Program, alarm: Compiled, names: Collection[str]) -> list[str]:
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
