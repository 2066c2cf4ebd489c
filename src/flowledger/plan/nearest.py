"""The nearest values of a key with which a rule holds: found by trying, not by knowing the rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowledger.plan.arithmetic import evaluate, names_in
from flowledger.plan.facts import Facts, derive
from flowledger.tables.rules import Rule

LINEAR = 2048  # values tried one by one on either side; beyond that the search doubles its stride
FARTHEST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One key that can be turned, and the values that satisfy the rule: the nearest below, the nearest above."""

    knob: str
    key: str
    current: Any
    values: tuple[Any, ...]
    shown: tuple[Any, ...]  # what the message tells of each: the rule's `shown` name at that value


def ways(rule: Rule, facts: Facts) -> list[Way]:
    """For each knob of the rule that can satisfy it alone, in the rule's order."""
    found = (_way(rule, knob, facts) for knob in rule.knobs if knob in facts.values)
    return [way for way in found if way is not None]


def holds(rule: Rule, names: dict[str, Any]) -> bool:
    """Whether the rule has nothing to say: it does not apply, or its condition is met. Null inputs do not satisfy it."""
    if rule.trainers and names.get("trainer", rule.trainers[0]) not in rule.trainers:
        return True
    try:
        if not evaluate(rule.when, names):
            return True
        return bool(evaluate(rule.given, names)) and bool(evaluate(rule.condition, names))
    except (LookupError, TypeError, ZeroDivisionError):
        return False


def _way(rule: Rule, knob: str, facts: Facts) -> Way | None:
    current, shown = facts.values[knob], rule.shown or knob
    used = {*names_in(rule.when), *names_in(rule.given), *names_in(rule.condition), shown, "trainer"}
    derived = facts.following(knob, used)
    if knob not in used and not derived:
        return None
    inputs = used | {name for fact in derived for name in names_in(fact.expression or "")}
    known = {name: facts.values[name] for name in inputs if name in facts.values}

    def with_(value: Any) -> dict[str, Any]:
        return derive({**known, knob: value}, derived)

    def satisfied(value: Any) -> bool:
        return holds(rule, with_(value))

    if isinstance(current, bool):
        values: list[int] = [not current] if satisfied(not current) else []
    elif current is None or isinstance(current, int):
        values = nearest_integers(satisfied, current or 0)
    else:
        return None
    if not values:
        return None
    return Way(
        knob=knob,
        key=facts.keys.get(knob, knob),
        current=current,
        values=tuple(values),
        shown=tuple(with_(value).get(shown, value) for value in values),
    )


def nearest_integers(satisfied: Callable[[int], bool], current: int) -> list[int]:
    """The nearest integer below `current` (at least 1) and the nearest above that satisfy, lowest first.

    Exact within LINEAR of `current`; beyond, exact for a condition that stays true once it is (a limit).
    """
    below = _search(satisfied, current, -1)
    above = _search(satisfied, current, 1)
    return [value for value in (below, above) if value is not None]


def _search(satisfied: Callable[[int], bool], current: int, sign: int) -> int | None:
    end = current - 1 if sign < 0 else FARTHEST
    for distance in range(1, min(LINEAR, end) + 1):
        if satisfied(current + sign * distance):
            return current + sign * distance
    missed, distance = LINEAR, 2 * LINEAR
    while missed < end:
        distance = min(distance, end)
        if satisfied(current + sign * distance):
            return current + sign * _first_true(satisfied, current, sign, missed, distance)
        missed, distance = distance, 2 * distance
    return None


def _first_true(satisfied: Callable[[int], bool], current: int, sign: int, missed: int, hit: int) -> int:
    while hit - missed > 1:
        middle = (hit + missed) // 2
        if satisfied(current + sign * middle):
            hit = middle
        else:
            missed = middle
    return hit
