"""What an alarm says when it fires: its message with values in it, and the values and thresholds that it fired on."""

import math
import re
from collections.abc import Callable, Sequence

from flowledger.diagnose.alarms.moments import Value
from flowledger.diagnose.alarms.numbers import Numbers
from flowledger.diagnose.alarms.program import Program
from flowledger.diagnose.alarms.rules import Compiled

FROM = {
    "plan": "from the plan", "config": "from the configuration", "history": "from the run's own history",
    "default": "default",
}  # fmt: skip

LONGEST_NOTE = 160  # characters; the evidence has all
IN_BRACKETS = re.compile(r"""m\[(['"])(.*?)\1\]""")
# What a function is called where its value is told; {x} what it is of, {k} its steps.
PLAIN = {
    "usual": "usual {x}", "spread": "usual spread of {x}", "early": "{x} at the start of the run", "prev": "{x} {k} before",
    "mean": "mean of {x} over {k}", "median": "median of {x} over {k}", "mad": "median deviation of {x} over {k}",
    "low": "least {x} of {k}", "high": "most {x} of {k}", "slope": "change of {x} a step over {k}",
    "rising": "{x} rose in each of {k}", "falling": "{x} fell in each of {k}", "steady": "{x} was the same for {k}",
    "ranks_max": "{x} of the rank that has most", "ranks_min": "{x} of the rank that has least", "ranks_mean": "mean {x} of the ranks",
    "ranks_median": "median {x} of the ranks", "ranks_others": "median {x} of all ranks but the largest",
    "ranks_spread": "difference between the largest and the smallest {x} of the ranks", "worst": "the rank that has most {x}",
    "fraction": "share of {k} in which {x}", "config": "{x} of the configuration", "size": "size of {x}", "planned": "planned {x}",
    "noise_floor": "noise floor",
}  # fmt: skip


def filled(parts: Sequence[tuple[str, int | None, str]], values: Sequence[Value], note: Callable[[int], str]) -> str:
    """A message with its values; `note` says what else is known of the number of a node."""
    return "".join(
        before + ("" if node is None else note(node) if form == "note" else shown(values[node], form))
        for before, node, form in parts
    )


def noted(program: Program, node: int, values: Sequence[Value], step: int, numbers: Numbers) -> str:
    """What else is known of a number at a step, as far as a sentence holds it; the number itself where nothing is."""
    note = numbers.notes.get((program.parts[node].name, step), shown(values[node]))
    return note if len(note) <= LONGEST_NOTE else f"{note[:LONGEST_NOTE].rpartition(', ')[0] or note[:LONGEST_NOTE]}, …"


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


def told(program: Program, alarm: Compiled, values: Sequence[Value], step: int, numbers: Numbers) -> tuple[str, ...]:
    """Sentences of evidence: the numbers, each threshold with its origin, and what rows say besides."""
    parts = {node: program.parts[node] for node in program.below(alarm.when)}
    found = [
        f"step {step}: {plain(program, node, values)} = {shown(values[node])}"
        for node, part in parts.items()
        if values[node] is not None and part.kind in ("metric", "back", "ranks", "facts")
    ]
    found += _bounds(program, alarm, values)
    found += [note for part in parts.values() if (note := numbers.notes.get((part.name or part.key, step)))]
    return tuple(dict.fromkeys(found))


def bare(text: str) -> str:
    """An expression with the names of metrics as they are: `reward/std` for m["reward/std"]."""
    return IN_BRACKETS.sub(r"\2", text)


def plain(program: Program, node: int, values: Sequence[Value]) -> str:
    """What a value is called: `usual ref_kl` for usual(first(ref_kl, policy_kl)) where ref_kl is the one that is known."""
    part = program.parts[node]
    if part.kind == "metric":
        return part.name
    if part.name == "first":
        return plain(program, next((one for one in part.children if values[one] is not None), part.children[0]), values)
    if part.name not in PLAIN:
        return bare(part.text)
    steps = re.search(r", (\d+)\)$", part.text)
    count = int(steps[1]) if steps else 1
    x = part.key or (plain(program, part.children[0], values) if part.children else "")
    return PLAIN[part.name].format(x=x, k=f"{count} steps" if count != 1 else "a step")


def _bounds(program: Program, alarm: Compiled, values: Sequence[Value]) -> list[str]:
    """What was held against what, where it fired: named thresholds with their origin, and bounds that stand in the condition itself."""
    fired = program.deciding(alarm.when, values)
    under = {node for one in fired for node in program.below(one)}
    named = {name: {node for _, node in nodes} for name, nodes in alarm.thresholds.items()}
    found = [
        line
        for name, nodes in named.items()
        if (not fired or nodes & under) and (line := _threshold(program, alarm, name, values))
    ]
    for one in fired:
        sides = program.parts[one].children
        made = [side for side in sides if program.parts[side].kind == "operation"]
        if len(sides) == 2 and made and not any(set(program.below(one)) & nodes for nodes in named.values()):
            found.append(
                f"fired on {bare(program.parts[one].text)}: {' against '.join(shown(values[side]) for side in sides)}"
            )
    return found


def _threshold(program: Program, alarm: Compiled, name: str, values: Sequence[Value]) -> str:
    """`bound = 3.2, from the run's own history: max(usual(x) + 8 * spread(x), 3 * usual(x))`."""
    for origin, node in alarm.thresholds[name]:
        if values[node] is None:
            continue
        source = alarm.rule.thresholds[name].source if origin == "default" else ""
        text = "" if origin == "default" else f": {bare(program.parts[node].text)}"
        return f"{name} = {shown(values[node])}, {FROM[origin]}{text}{f' ({source})' if source else ''}"
    return ""


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"
