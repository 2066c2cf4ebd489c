"""How one value is written for people: bytes, shapes, times, flags. Absent is a dim dot."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ABSENT = "·"
COUNTED = 1e15  # from here on nobody reads the digits of a number one by one
# What the database says of numbers that it cannot add up, and the same in words, English and Chinese.
TOO_LARGE = re.compile(r"^(\w+: )?(Out of Range|Conversion) Error")
SAID_TOO_LARGE = ("a number in its rows is too large", "其数据行中有过大的数值")


def human_bytes(value: float) -> str:
    """At most five characters: 523, 4.0K, 118M, 1.2G (powers of 1024)."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit in ("", "K", "M", "G", "T"):
        if size < 999.5 or unit == "T":
            break
        size /= 1024
    return f"{sign}{size:.0f}{unit}" if not unit or size >= 9.95 else f"{sign}{size:.1f}{unit}"


def human_count(value: float) -> str:
    return f"{value:,.0f}"


def human_number(value: float) -> str:
    """Four significant digits, thousands apart: 0.3142, 1,986, 68,612,102,554; with an exponent what is tiny or beyond counting."""
    if not math.isfinite(value):
        return str(value)
    value += 0.0  # of -0 makes 0
    if abs(value) >= COUNTED or 0 < abs(value) < 1e-4:
        return short_exponent(f"{value:.3e}")
    return human_count(value) if value == int(value) or abs(value) >= 9999.5 else f"{value:,.4g}"


def short_exponent(text: str) -> str:
    """`6.860e+10` as `6.86e10`."""
    digits, sign, exponent = text.partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" if sign else text


def human_seconds(value: float) -> str:
    size = abs(value)
    return f"{value:.1f} s" if size >= 9.995 else f"{value:.2f} s" if size >= 0.9995 else f"{value * 1e3:.3g} ms"


def human_shape(shape: Sequence[int], smallest: Sequence[int] | None = None) -> str:
    """`[4, 3]`, or `[4, 2..3]` where a dim varied."""
    low = smallest if smallest and len(smallest) == len(shape) else shape
    dims = (f"{a}..{b}" if a != b else str(b) for a, b in zip(low, shape, strict=True))
    return f"[{', '.join(dims)}]"


def human_trained(slices: Sequence[Mapping[str, int]]) -> str:
    """`e0 m1 µ2`: epoch, mini-batch, micro-batch; of several the first, and how many."""
    if not slices:
        return "no"
    first = slices[0]
    more = f" +{len(slices) - 1}" if len(slices) > 1 else ""
    return f"e{first['epoch']} m{first['mini_batch']} µ{first['micro_batch']}{more}"


def human_map(pairs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {human_number(value) if isinstance(value, float) else value}" for key, value in pairs.items()
    )


def harmless(text: str) -> str:
    """Text that came from a run, with its control characters shown: none of them reaches a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)


def visible(text: str) -> str:
    """A token's text on one line: blanks and control characters shown, not obeyed."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(char if char.isprintable() else "�" for char in shown)


FORMS: dict[str, Callable[[Any], str]] = {
    "bytes": human_bytes,
    "count": human_count,
    "number": human_number,
    "setting": lambda value: f"{value:.10g}",
    "percent": lambda value: f"{value + 0.0:.0%}" if abs(value) >= 0.0995 or value == 0 else f"{value:.1%}",
    "seconds": human_seconds,
    "milliseconds": lambda value: human_seconds(value / 1e3),
    "shape": human_shape,
    "flag": lambda value: "yes" if value else "no",
    "trained": human_trained,
    "map": human_map,
}
NUMERIC = frozenset({"bytes", "count", "number", "setting", "percent", "seconds", "milliseconds"})


def written(value: Any, form: str) -> str:
    """One cell."""
    if value is None:
        return ABSENT
    if form in FORMS:
        return FORMS[form](value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
