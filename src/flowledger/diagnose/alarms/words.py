"""What an alarm says when it fires: its message with values in it, and the values and thresholds that it fired on."""

import math
from collections.abc import Sequence

from flowledger.diagnose.alarms.moments import Value
from flowledger.diagnose.alarms.numbers import Numbers
from flowledger.diagnose.alarms.program import Program
from flowledger.diagnose.alarms.rules import Compiled

FROM = {
    "plan": "from the plan", "config": "from the configuration", "history": "from the run's own history",
    "default": "default",
}  # fmt: skip


def filled(parts: Sequence[tuple[str, int | None, str]], values: Sequence[Value]) -> str:
    """A message with its values."""
    return "".join(before + ("" if node is None else shown(values[node], form)) for before, node, form in parts)


def shown(value: Value, form: str = "") -> str:
    """One value: four digits, unless a format is given; `B` is bytes."""
    if value is None:
        return "?"
    if isinstance(value, str | bool):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if form == "B":
        return _bytes(value)
    return f"{value:{form}}" if form and form[-1] != "d" else f"{value:,.0f}" if form else f"{value:.4g}"


def told(
    program: Program, alarm: Compiled, values: Sequence[Value], step: int, since: int, numbers: Numbers
) -> tuple[str, ...]:
    """Sentences of evidence: the numbers, each threshold with its origin, what rows say besides, and since when."""
    parts = {node: program.parts[node] for node in program.below(alarm.when)}
    found = [
        f"step {step}: {part.text} = {shown(values[node])}"
        for node, part in parts.items()
        if values[node] is not None and part.kind in ("metric", "back", "ranks", "facts")
    ]
    found += [line for name in alarm.thresholds if (line := _threshold(program, alarm, name, values))]
    found += [note for part in parts.values() if (note := numbers.notes.get((part.name or part.key, step)))]
    if since != step:
        found.append(f"true from step {since} to step {step}")
    return tuple(dict.fromkeys(found))


def _threshold(program: Program, alarm: Compiled, name: str, values: Sequence[Value]) -> str:
    """`bound = 3.2, from the run's own history: max(usual(x) + 8 * spread(x), 3 * usual(x))`."""
    for origin, node in alarm.thresholds[name]:
        if values[node] is None:
            continue
        source = alarm.rule.thresholds[name].source if origin == "default" else ""
        text = "" if origin == "default" else f": {program.parts[node].text}"
        return f"{name} = {shown(values[node])}, {FROM[origin]}{text}{f' ({source})' if source else ''}"
    return ""


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"
