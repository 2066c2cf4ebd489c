"""One Hydra override: `key=value`, `+key=value`, `++key=value`, `~key`, `group=option`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from flowledger.config.shell.word import Gap, gap_of
from flowledger.config.shown import shown, shown_setting
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
    gap: Gap | None = None  # what a script leaves open of the value


def refuse(place: str, reason: str) -> BadInput:
    return BadInput(f"{place}: {reason}" if place else reason)


def parse(text: str, place: str = "") -> Override:
    """One override of a command line, as Hydra 1.3 reads it. Raises BadInput."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise refuse(place, f"{shown_setting(text)!r} is no override; write key=value, +key=value, ++key=value or ~key")
    kind, gap = _KINDS[match["sign"]], gap_of(text)
    given, key = match["value"], match["key"]
    if gap is not None and gap.unknown and given is not None:  # `$(…)`: no value yet, and a text for what asks no more
        value = given.replace("${", "$ {")
        quoted = value.replace("'", "\\'")
        return Override(kind, key, value, f"{match['sign']}{key}='{quoted}'", place, match["package"], gap)
    try:
        value = None if given is None else parse_value(given)
    except ValueSyntaxError as error:
        if gap is not None:
            raise BadInput(gap.reason(place, key, given)) from None
        raise refuse(place, f"{key} = {shown(key, given)}: {error}") from None
    return Override(kind, key, value, str(text), place, match["package"], gap)
