"""The reporter's own keys and numbers under one set of names: `keys.toml` for settings, `spoken.toml` for sentences."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.diagnose.reports.report import Report, leaves

TRUE, FALSE = ("true", "on", "yes", "1", "enabled"), ("false", "off", "no", "0", "disabled")
GIB = 2**30
UNITS = {
    "gib": 1.0,
    "gb": 1.0,
    "mib": 2**-10,
    "mb": 2**-10,
    "bytes": 1 / GIB,
}  # what people call GB in these messages is GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row of `keys.toml`."""

    name: str
    ending: str
    kind: str
    only: str


def asked(name: str) -> str:
    """How a missing fact is asked for."""
    return _asks().get(name, name.replace("_", " "))


def facts_by_key(report: Report) -> dict[str, Any]:
    """What stands under a known key; measured numbers come after the configuration and do not replace it."""
    found: dict[str, Any] = {}
    for raw, value in (*leaves(report.config), *leaves(report.measured)):
        for key in _matches(raw, report.framework):
            read = parsed(value, key.kind)
            if read is not None:
                found.setdefault(key.name, read)
                break
    return found


def facts_in_words(text: str) -> dict[str, float]:
    """Numbers of known sentences and error messages; the first of a kind counts."""
    found: dict[str, float] = {}
    for pattern, names in _spoken():
        match = pattern.search(text)
        if match:
            for name, words in zip(names, match.groups(), strict=True):
                value = number(words)
                if value is not None:
                    found.setdefault(name, value)
    return found


def number(words: object) -> float | int | None:
    """A number with an optional unit: `58.15 GiB`, `1e-6`, `32k`, `8,192`; None for anything else, comparisons too."""
    if isinstance(words, bool) or words is None:
        return None
    if isinstance(words, int | float):
        return words
    match = re.fullmatch(
        r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(gib|gb|mib|mb|bytes|k|%)?", str(words).strip(), re.IGNORECASE
    )
    if match is None:
        return None
    value = float(match[1].replace(",", ""))
    unit = (match[2] or "").lower()
    value = value * (1024 if unit == "k" else 0.01 if unit == "%" else UNITS.get(unit, 1.0))
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def switch(words: object) -> bool | None:
    """A switch as people write it."""
    text = str(words).strip().casefold()
    return True if text.startswith(TRUE) else False if text.startswith(FALSE) else None


def parsed(value: object, kind: str) -> Any:
    """A value of a kind (number, switch, word, list); None for what is none."""
    if kind == "switch":
        return switch(value)
    if kind == "word":
        return str(value).casefold() if value is not None else None
    if kind == "list":
        return tuple(value) if isinstance(value, list) else None
    return number(value)


def _matches(raw: str, framework: str) -> Iterator[Key]:
    """The rows whose ending a key has, the longest first."""
    plain = _plain(raw)
    for key in _endings():
        if (plain == key.ending or plain.endswith(f".{key.ending}")) and key.only in framework.casefold():
            yield key


def _plain(key: str) -> str:
    return re.sub(r"[/ ]+", ".", key.strip().lstrip("-+").casefold()).replace("-", "_")


@cache
def rows() -> list[Mapping[str, Any]]:
    """The rows of `keys.toml`."""
    text = files("flowledger.diagnose.reports").joinpath("keys.toml").read_text(encoding="utf-8")
    found: list[Mapping[str, Any]] = tomllib.loads(text)["fact"]
    return found


@cache
def _endings() -> tuple[Key, ...]:
    found = [
        Key(name=row["name"], ending=_plain(ending), kind=row.get("kind", "number"), only=row.get("only", ""))
        for row in rows()
        for ending in row["keys"]
    ]
    return tuple(sorted(found, key=lambda key: (-len(key.ending), not key.only)))


@cache
def _asks() -> Mapping[str, str]:
    return {row["name"]: row["ask"] for row in reversed(rows()) if "ask" in row}


@cache
def _spoken() -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    text = files("flowledger.diagnose.reports").joinpath("spoken.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["spoken"]
    return tuple((re.compile(row["pattern"], re.IGNORECASE), tuple(row["names"])) for row in rows)
