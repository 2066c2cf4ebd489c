"""Numbers as Python prints them: plain, of numpy, of torch, with or without quotes."""

import re
from collections.abc import Iterator

WRAPPED = re.compile(
    r"(?:np\.|numpy\.|torch\.)?(?:tensor|array|u?int\d+|float\d+|bool_?)\(\s*\[?(?P<inner>[^,\])]+)\]?[^)]*\)?"
)
MOST_STEPS = 10**12
TOO_LARGE = "a whole number larger than a float can hold"
LONGEST_NUMBER = 64  # characters of a text that may be one
WORDS = {"True": 1.0, "False": 0.0}
# 'key': value of a flat dict, where the value begins like a number; other values are passed over.
PAIR = re.compile(
    r"""(?P<quote>['"])(?P<key>[^'"\n]{1,200})(?P=quote):\s*"""
    r"""(?:(?:np|numpy|torch)\.)?(?:(?:tensor|array|u?int\d+|float\d+|bool_?)\(\[?)?['"]?"""
    r"""(?P<value>[-+]?(?:nan|NaN|inf|Infinity|True|False|\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?))"""
    r"""(?![\w./:-])"""
)


def number(text: str) -> float:
    """The number that a printed scalar is. Raises ValueError where it is none."""
    try:
        return float(text)
    except ValueError:
        text = text.strip().strip("'\"")
    if (found := WRAPPED.fullmatch(text)) is not None:
        text = found["inner"].strip()
    return WORDS[text] if text in WORDS else float(text)


def pairs(text: str) -> Iterator[tuple[str, float]]:
    """The numbers of a printed dict, by key; what is no number is passed over."""
    for found in PAIR.finditer(text):
        value = found["value"]
        yield found["key"], WORDS[value] if value in WORDS else float(value)


def step(value: object) -> int | None:
    """A value as the number of a step; None where it can be none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_STEPS:
        return None
    return int(value)


def of_text(value: object) -> float | None:
    """The number that a text is, as some loggers write them; None for other text, and for anything that is no text."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NUMBER:
        return None
    try:
        return number(value)
    except ValueError:
        return None


def too_large(value: object) -> bool:
    """Whether it is a whole number that no float holds."""
    return isinstance(value, int) and finite(value) is None


def finite(value: object) -> float | None:
    """A number of JSON as a float, with those that a float cannot hold left out; None for anything else."""
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
