"""The flags of a command line, read by a table as argparse would: values, types, choices, abbreviations, places.

A row of the table has `key`, `type` (int, float, str), `words` (0 a switch, a number, `*`, `+`), `choices`, `default`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowledger.config.near_key import near
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import Gap, Word, gap_of, vanished
from flowledger.config.shown import shown, shown_setting
from flowledger.flow.errors import BadInput, nearest

Row = Mapping[str, Any]
COMMAND_LINE = "command line"
TYPES: Mapping[str, type] = {"int": int, "float": float, "str": str}


@dataclass(slots=True)
class Given:
    """Values by key with their places, and the flags that no row knows: name -> (values, place)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    gaps: dict[str, Gap] = field(default_factory=dict)  # keys whose value the script leaves open

    def say(self, key: str, value: Any, place: str, gap: Gap | None = None) -> None:
        """A later word counts above an earlier one, also above one that leaves its value open."""
        self.values[key], self.places[key] = value, place
        self.gaps.pop(key, None)
        if gap is not None:
            self.gaps[key] = gap

    def say_unknown(self, name: str, values: list[str], place: str, gone: Gap | None) -> None:
        """A flag that no row knows; what its values lack is kept under the name that an attribute would have."""
        self.unknown[name] = (values, place)
        gap = next(filter(None, map(gap_of, values)), None) or (None if values else gone)
        if gap is not None:
            self.gaps[name.replace("-", "_")] = gap


def program_words(launched: Launched, program: Sequence[str]) -> list[tuple[str, str]]:
    """(word, place) after the program: a module or script that ends in one of `program`, else the last `.py` or `-m x`."""
    words = list(zip(launched.argv, launched.places, strict=True))
    for at, (word, _) in enumerate(words):
        if word.removesuffix(".py").endswith(tuple(program)) and not word.startswith("--"):
            return words[at + 1 :]
    for at in range(len(words) - 1, -1, -1):
        if words[at][0].endswith(".py") or (at and words[at - 1][0] == "-m"):
            return words[at + 1 :]
    raise BadInput(
        f"{launched.file}:{launched.line}: no program among {' '.join(launched.argv[:6])}; name a script or module"
    )


def given(
    words: Sequence[tuple[str, str]],
    rows: Mapping[str, Row],
    release: str,
    *,
    abbreviations: bool = True,
    unset: Sequence[tuple[str, str]] = (),
) -> Given:
    """What the words say. `rows`: flag without dashes -> row. Later words count above earlier ones. `unset`: (name, place)
    of variables that are not set. Raises BadInput for a value that its flag refuses, and for a word of no flag."""
    found = Given()
    at = 0
    while at < len(words):
        word, place = words[at]
        if not word.startswith("--"):
            raise BadInput(f"{place}: {word!r} stands alone; {release} takes --flag value")
        name, equals, inline = word[2:].partition("=")
        end = _end(words, at + 1)
        values = [_rest(word, inline)] if equals else [text for text, _ in words[at + 1 : end]]
        flag = match(name, rows, place) if abbreviations or name in rows else None
        gone = vanished(unset, place)
        if flag is None:
            found.say_unknown(name, values, place, gone)
            at = end
            continue
        row = rows[flag]
        if (gap := _gap(row, values, gone)) is not None:
            found.say(row["key"], str(values[0]) if values else "", place, gap)
            at = at + 1 if equals else at + 1 + min(1, len(values))
            continue
        if equals and row.get("words", 1) == 0:
            raise BadInput(f"{place}: --{name} takes no value; write --{name} alone")
        taken, value = taken_by(row, f"--{name}", values, place, release)
        if taken < len(values) and not equals:
            raise _alone(words[at + 1 + taken], name)
        found.say(row["key"], value, place)
        at = at + 1 if equals else at + 1 + taken
    return found


def _alone(word: tuple[str, str], name: str) -> BadInput:
    return BadInput(f"{word[1]}: {word[0]!r} stands alone after --{name}; quote it or name its flag")


def _end(words: Sequence[tuple[str, str]], at: int) -> int:
    """Where the next flag stands."""
    return next((n for n in range(at, len(words)) if words[n][0].startswith("--") and len(words[n][0]) > 2), len(words))


def _rest(word: str, inline: str) -> str:
    gap = gap_of(word)
    return inline if gap is None else Word(inline, gap)


def _gap(row: Row, values: Sequence[str], gone: Gap | None) -> Gap | None:
    """What the value of a flag lacks, where it cannot be read as it stands: unknown, or empty for a variable's sake."""
    words = row.get("words", 1)
    if words != 1:
        return None
    if not values:
        return gone
    gap = gap_of(values[0])
    return gap if gap is not None and (gap.unknown or not values[0]) else None


def match(name: str, rows: Mapping[str, Row], place: str) -> str | None:
    """The flag itself, else the only one that begins so (argparse takes abbreviations)."""
    if name in rows:
        return name
    begin = [flag for flag in rows if flag.startswith(name)] if name else []
    if len(begin) > 1:
        raise BadInput(f"{place}: --{name} could be --{', --'.join(sorted(begin)[:4])}; write it out")
    return begin[0] if begin else None


def taken_by(row: Row, flag: str, values: list[str], place: str, release: str) -> tuple[int, Any]:
    """How many of the words a flag takes, and their value. Raises BadInput as argparse refuses."""
    words = row.get("words", 1)
    if words == 0:
        return 0, not row.get("negates", False)
    if words == 1:
        if not values:
            raise BadInput(f"{place}: {flag} needs a value ({row['meaning']})")
        return 1, converted(row, flag, values[0], place)
    many = [converted(row, flag, value, place) for value in (values if isinstance(words, str) else values[:words])]
    if (words == "+" and not many) or (isinstance(words, int) and len(many) < words):
        raise BadInput(
            f"{place}: {flag} needs {words if isinstance(words, int) else 'at least one'} values; {release} gives none"
        )
    return len(many), many


def converted(row: Row, flag: str, text: str, place: str) -> Any:
    kind = TYPES[row.get("type", "str")]
    try:
        value = kind(text)
    except ValueError:
        rule = "a whole number" if kind is int else "a number"
        raise BadInput(f"{place}: {flag} = {shown(flag, text)}: should be {rule}; {_default(row)}") from None
    choices = row.get("choices")
    if choices and value not in choices:
        raise BadInput(
            f"{place}: {flag} = {shown(flag, text)}: should be one of {', '.join(map(str, choices))}{nearest(text, choices)}"
        )
    return value


def overridden(found: Given, overrides: Sequence[str], rows: Mapping[str, Row]) -> None:
    """`key=value` given beside the script, by the flag's name or its key. Raises BadInput for what no row knows."""
    by_key = {str(row["key"]): row for row in rows.values()}
    for text in overrides:
        name, equals, value = text.lstrip("-").partition("=")
        row = by_key.get(name) or by_key.get(name.replace("-", "_")) or rows.get(name)
        if row is None or not equals:
            hint = near(name, [*by_key, *rows])
            raise BadInput(
                f"{COMMAND_LINE}: {shown_setting(text)!r} is no setting that is known; write key=value{hint}"
            )
        key = row["key"]
        if row.get("words", 1) == 0:
            if value.lower() not in ("true", "false"):
                raise BadInput(f"{COMMAND_LINE}: {name} = {value}: should be true or false")
            found.say(key, value.lower() == "true", COMMAND_LINE)
        else:
            values = value.split(",") if row.get("words", 1) != 1 else [value]
            found.say(key, taken_by(row, name, values, COMMAND_LINE, "it")[1], COMMAND_LINE)


def _default(row: Row) -> str:
    return f"use {row['default']}" if row.get("default") is not None else "there is no default"
