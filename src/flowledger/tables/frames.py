"""What frames of a traceback say of the memory that was asked for in them: its kind, and the stage. The rows of `frames.toml`."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A frame whose file and function contain these words says this."""

    file: str
    function: str
    says: str


@cache
def rules(about: str) -> tuple[Rule, ...]:
    """The rows of `kind` or of `stage`, in their order."""
    table = tomllib.loads(files("flowledger.tables").joinpath("frames.toml").read_text(encoding="utf-8"))
    return tuple(Rule(row.get("file", ""), row.get("function", ""), row[about]) for row in table[about])


def kind_of(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """The kind of memory that the innermost frame which says one names. Frames: filename, name; the innermost first."""
    for frame in frames:
        for file, function, kind in rules("kind"):
            if file in frame["filename"] and function in frame["name"]:
                return kind
    return None


def stage_of(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """The stage that the first row with a frame of its own names."""
    held = [(frame["filename"], frame["name"]) for frame in frames]
    for file, function, stage in rules("stage"):
        if any(file in filename and function in name for filename, name in held):
            return stage
    return None
