"""Which part of a view is looked at: a step, a rank, a sample. What is left open is None."""

from dataclasses import dataclass, fields
from urllib.parse import urlencode

from flowledger.flow.errors import BadInput


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
    if (told := asked.get(name)) is None:
        return None
    if not told.isdecimal():
        raise BadInput(f"{name} = {told!r} is no number")
    return int(told)
