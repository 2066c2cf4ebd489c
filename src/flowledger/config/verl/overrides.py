"""One Hydra override: `key=value`, `+key=value`, `++key=value`, `~key`, `group=option`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from flowledger.config.verl.values import ValueSyntaxError, parse_value
from flowledger.flow.errors import BadInput

_ID = r"[A-Za-z_][A-Za-z0-9_-]*"
_PART = r"[A-Za-z_$][A-Za-z0-9_$-]*"
_PACKAGE = rf"(?:(?:{_PART}|[0-9]+)(?:\.(?:{_PART}|[0-9]+))+|{_PART}|)"
_OVERRIDE = re.compile(
    rf"(?P<sign>\+\+?|~|)(?P<key>{_ID}(?:/{_ID})+|{_PACKAGE})(?:@(?P<package>{_PACKAGE}))?(?:=[ \t]*(?P<value>.*))?",
    re.DOTALL,
)
Kind = Literal["change", "add", "force", "delete"]
_KINDS: dict[str, Kind] = {"": "change", "+": "add", "++": "force", "~": "delete"}


@dataclass(frozen=True, slots=True)
class Override:
    """What one override asks for. `place` says where it stands (`file:line`), or is empty."""

    kind: Kind
    key: str  # dotted, or a group `a/b`
    value: Any
    text: str
    place: str = ""
    package: str | None = None  # of `group@package=option`


def refuse(place: str, reason: str) -> BadInput:
    return BadInput(f"{place}: {reason}" if place else reason)


def parse(text: str, place: str = "") -> Override:
    """One override of a command line, as Hydra 1.3 reads it. Raises BadInput."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise refuse(place, f"{text!r} is no override; write key=value, +key=value, ++key=value or ~key")
    kind = _KINDS[match["sign"]]
    given = match["value"]
    try:
        value = None if given is None else parse_value(given)
    except ValueSyntaxError as error:
        raise refuse(place, f"{match['key']} = {given}: {error}") from None
    return Override(kind, match["key"], value, text, place, match["package"])
