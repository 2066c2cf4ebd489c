"""What an out-of-memory error says in its text: sizes in bytes, as exactly as they were printed."""

import re
from typing import NamedTuple

UNITS = {
    "bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30,
}  # fmt: skip
_SIZE = r"(\d[\d,.]*) ?(bytes|[KMGT]i?B)"
_SAID = {
    "asked": re.compile(rf"tried to allocate {_SIZE}", re.IGNORECASE),
    "total": re.compile(rf"total capac?i?ty of {_SIZE}|{_SIZE} total capacity", re.IGNORECASE),
    "free": re.compile(rf"of which {_SIZE} is free|{_SIZE} free", re.IGNORECASE),
    "process": re.compile(rf"this process has {_SIZE} memory in use", re.IGNORECASE),
    "allocated": re.compile(rf"{_SIZE} (?:is )?(?:already )?allocated(?: by PyTorch)?|allocated memory {_SIZE} is", re.IGNORECASE),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE),
    "more": re.compile(rf"{_SIZE} more were asked for", re.IGNORECASE),  # the recorder's own finding
}  # fmt: skip


class Size(NamedTuple):
    """A number of bytes as it was printed, and how far rounding may have moved it."""

    bytes: int
    within: int


class Said(NamedTuple):
    """The sizes of one error; None: not told."""

    asked: Size | None = None
    total: Size | None = None
    free: Size | None = None
    process: Size | None = None
    allocated: Size | None = None
    unused: Size | None = None  # reserved, and nothing lives in it


def said(text: str) -> Said | None:
    """The sizes in a text; None where it tells of no allocation that failed."""
    found = {name: _size(pattern.search(text)) for name, pattern in _SAID.items()}
    asked = found.pop("asked") or found.pop("more", None)
    found.pop("more", None)
    return Said(asked=asked, **found) if asked else None


def _size(match: re.Match[str] | None) -> Size | None:
    if match is None:
        return None
    number, unit = (one for one in match.groups() if one is not None)
    written = number.replace(",", "").rstrip(".")
    decimals = len(written.partition(".")[2])
    scale = UNITS[unit.lower()]
    return Size(round(float(written) * scale), int(scale * 0.5 * 10**-decimals) + 1)
