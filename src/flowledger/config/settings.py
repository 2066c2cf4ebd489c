"""The keys of a foreign framework while they are read: value, place, and whether any plan took it.

`Settings` answers by dotted key and remembers what was asked; `Draft` collects the RunConfig that comes out, each value
with the key that it was taken from.
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from flowledger.config.dotted import ABSENT, Tree, at, flat, place
from flowledger.config.foreign import Reading, build
from flowledger.config.near_key import near
from flowledger.config.shell.word import Gap, gap_of
from flowledger.config.shown import shown
from flowledger.flow.errors import BadInput

ASSUMED = "--assume"
UNKNOWN_MODEL = "unknown"  # model.path where the launch leaves it open
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@cache
def table(framework: str) -> Mapping[str, Any]:
    """`tables/<framework>.toml`: the keys and the defaults of one framework, with their source and version."""
    text = (files("flowledger.tables") / f"{framework}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


class Settings:
    """Effective values of a framework's keys. `places`: dotted key -> where the user said it."""

    def __init__(
        self,
        release: str,
        tree: Tree,
        places: Mapping[str, str],
        assume: Mapping[str, str],
        gaps: Mapping[str, Gap] | None = None,
    ) -> None:
        """`gaps`: keys whose value the script leaves open, or makes of variables that are not set."""
        self.gaps = dict(gaps or {})
        self.spelt: Mapping[str, str] = {}  # key -> as the user writes it, where that is another word
        self.release = release  # `trl 1.16`
        self.tree = tree
        self.places = {key: place for key, place in places.items() if at(tree, key) is not ABSENT}
        self.gaps |= {key: gap for key, place in self.places.items() if (gap := gap_of(place)) is not None}
        self.notes: list[str] = []
        self._assume, self._used, self._read = dict(assume), set[str](), set[str]()
        for key, value in assume.items():
            if at(tree, key) is not ABSENT and (key not in self.places or key in self.gaps):
                self.gaps.pop(key, None)
                place(tree, key, value)
                self.places[key] = ASSUMED
                self._used.add(key)

    def get(self, key: str) -> Any:
        """The value or section at a key, None where there is none; from now on the key counts as read."""
        self._read.add(key)
        found = at(self.tree, key)
        if isinstance(found, str) and "${" in found:
            raise self.bad(key, "cannot be resolved here; give the value, or --assume NAME=value for its variable")
        return None if found is ABSENT else found

    def has(self, key: str) -> bool:
        """Whether a key holds anything. It does not count as read."""
        return at(self.tree, key) not in (ABSENT, None)

    def integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        number = self.number(key)
        if number is None:
            return None
        if not number.is_integer():
            raise self.bad(key, "should be a whole number")
        return int(number)

    def count(self, key: str) -> int:
        """A whole number that must be there and be positive."""
        value = self.integer(key)
        if value is None:
            raise self.bad(key, "is not given; it should be a whole number of at least 1")
        if value < 1:
            raise self.bad(key, "should be a whole number of at least 1; use 1")
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            if key in self.gaps:
                raise self.bad(key, "is empty")
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise self.bad(key, "should be a number") from None

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        if str(value).lower() not in WORDS:
            raise self.bad(key, "should be true or false")
        return WORDS[str(value).lower()]

    def text(self, key: str) -> str | None:
        value = self.get(key)
        return None if value is None else str(value)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of words; one word counts as a list of one."""
        value = self.get(key)
        return tuple(map(str, value)) if isinstance(value, list | tuple) else () if value is None else (str(value),)

    def said(self, key: str) -> bool:
        """Whether the user gave the key, or one inside it."""
        return key in self.places or any(name.startswith(f"{key}.") for name in self.places)

    def assumed(self, name: str) -> str | None:
        """What `--assume name=…` gives for something that no key of the framework says."""
        if name in self._assume:
            self._used.add(name)
        return self._assume.get(name)

    def assumed_count(self, name: str) -> int | None:
        text = self.assumed(name)
        if text is not None and (not text.isdecimal() or int(text) < 1):
            raise BadInput(f"--assume {name}={text}: should be a whole number of at least 1; use 1")
        return None if text is None else int(text)

    def origin(self, key: str) -> str:
        """`key@file:line`, or `key default@trl 1.16`."""
        found = self.places.get(key) or next(
            (self.places[above] for above in _above(key) if above in self.places and key not in self.places), None
        )
        name = self.spelt.get(key, key)
        return f"{name}@{found}" if found else f"{name} default@{self.release}"

    def bad(self, key: str, rule: str) -> BadInput:
        value, name = at(self.tree, key), self.spelt.get(key, key)
        where = self.places.get(key, self.release)
        if key in self.gaps:
            value = "" if value in (ABSENT, None) else value
            return BadInput(self.gaps[key].reason(where, name, value, spelt=key))
        spelt = "" if value is ABSENT else f" = {shown(key, value)}"
        return BadInput(f"{where}: {name}{spelt}: {rule}")

    def model(self, key: str) -> tuple[str, str | None]:
        """The model's path, and why it is not known: then the path is UNKNOWN_MODEL, so that a plan may be given another."""
        path, gap = self.text(key), self.gaps.get(key)
        if path and not (gap and gap.unknown):
            return path, None
        if gap is None and (path is None or not self.said(key)):
            return "", None
        why = str(self.bad(key, "is empty; name a model, or give --model NAME"))
        self.notes[:] = [note for note in self.notes if not why.startswith(note.partition(";")[0])]
        self.notes.append(why)
        return UNKNOWN_MODEL, why

    def refuse_unknown(self, unknown: Iterable[str], known: Iterable[str]) -> None:
        """One line for each key that the framework has no place for. A key named by --assume goes through."""
        names = list(known)
        moved = table(self.release.partition(" ")[0]).get("moved", {})
        lines = [
            f"{self.places.get(key, self.release)}: unknown key {key}: {self.release} "
            + (f"has it no more: {moved[key]}" if key in moved else f"refuses it{near(key, names)}")
            for key in unknown
            if self.assumed(key) is None
        ]
        if lines:
            raise BadInput("\n".join(lines))

    def ignored(self) -> tuple[str, ...]:
        """`key@place` of what the user gave and nobody asked for."""
        read = self._read
        inside = {above for key in read for above in _above(key)}
        return tuple(
            f"{key}@{place}"
            for key, place in self.places.items()
            if key not in read and key not in inside and not any(above in read for above in _above(key))
        )

    def used(self) -> tuple[str, ...]:
        return tuple(f"{key}={self._assume[key]}" for key in self._assume if key in self._used)


class Draft:
    """A RunConfig in the making: nested values, and for each the key of the framework that it was taken from."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.data: Tree = {}
        self.sources: dict[str, str] = {}
        self._open: dict[str, str] = {}  # targets whose key has a gap

    def put(self, target: str, value: Any, *keys: str) -> None:
        """Set a dotted key of RunConfig; None leaves it at its default. The source is the first key that the user
        gave, else the first key; without keys it is the framework itself, whose code decides it."""
        if value is None:
            return
        place(self.data, target, value)
        origin = next((key for key in keys if self.settings.said(key)), keys[0] if keys else None)
        if origin in self.settings.gaps:
            self._open[target] = str(origin)
        self.sources[target] = self.settings.origin(origin) if origin else self.settings.release

    def put_model(self, key: str, path: str | None = None) -> None:
        """`model.path`, whose source says why where it is not known."""
        known, why = self.settings.model(key)
        self.put("model.path", known or path or None, key)
        if why is not None:
            self.sources["model.path"] = why

    def copy(self, source: str, target: str) -> None:
        """What was put at one dotted key, or under it, at another one too, with its sources."""
        for key in [key for key in self.sources if key == source or key.startswith(f"{source}.")]:
            place(self.data, target + key[len(source) :], at(self.data, key))
            self.sources[target + key[len(source) :]] = self.sources[key]

    def reading(self, where: str | Path, raw: Mapping[str, Any]) -> Reading:
        """The finished reading. `raw`: what the framework derives itself, beside its effective keys."""
        framework, _, version = self.settings.release.partition(" ")
        data = {
            "framework": framework,
            "framework_version": version,
            "raw": {**flat(self.settings.tree), **raw},
            **self.data,
        }
        try:
            config = build(data, self.sources, str(where))
        except BadInput as error:
            raise BadInput("\n".join(dict.fromkeys(map(self._why, str(error).split("\n"))))) from None
        return Reading(
            config=config,
            ignored=self.settings.ignored(),
            assumed=self.settings.used(),
            notes=tuple(self.settings.notes),
        )

    def _why(self, line: str) -> str:
        """A fault's line; where the value is not known, why."""
        key = next((key for target, key in self._open.items() if f"{target} = " in line), None)
        return line if key is None else str(self.settings.bad(key, ""))


def _above(key: str) -> Iterable[str]:
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
