"""Which part of a view is looked at: a step, a rank, a sample. What is left open is None."""

import re
from dataclasses import dataclass, fields
from urllib.parse import urlencode

from flowledger.flow.errors import BadInput

DIGITS = 18  # of a number: with one more it may not fit into 64 bits
SHOWN = 24  # characters of what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Names one part of a view's data; the page asks for it by `key`."""

    step: int | None = None
    rank: int | None = None
    sample: str | None = None

    @property
    def key(self) -> str:
        """`rank=3&step=0`: names in alphabetical order, what is open left out."""
        named = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return urlencode(named)


NAMES = tuple(sorted(one.name for one in fields(Choice)))


def choice_of(asked: dict[str, str]) -> Choice:
    """A choice as a link names it; other words of the link are the page's own. Raises BadInput for what is no number."""
    return Choice(step=_number(asked, "step"), rank=_number(asked, "rank"), sample=asked.get("sample"))


def _number(asked: dict[str, str], name: str) -> int | None:
    return None if (told := asked.get(name)) is None else number(name, told)


def number(name: str, told: str) -> int:
    """A whole number of a link. Raises BadInput for what is none, and for one that is larger than any there can be."""
    short = told if len(told) <= SHOWN else f"{told[:SHOWN]}…"
    if not re.fullmatch(r"-?[0-9]+" if name == "step" else r"[0-9]+", told):
        raise BadInput(f"{name} = {short!r} is no number")
    if len(told.removeprefix("-")) > DIGITS:
        raise BadInput(f"there is no {name} {short}")
    return int(told)
