"""Reads a RunConfig from a YAML file and `key=value` overrides, and remembers where each value came from.

`read("examples/tiny.yaml", ["steps=5", "ref=null"])`. A value on the command line is parsed as YAML; keys are dotted,
and a number picks from a list (`reward.components.0.weight=2`). Everything wrong is said in one BadInput, a line for
each fault.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowledger.config.complaints import complaints
from flowledger.config.schema import RunConfig
from flowledger.config.shown import shown_setting
from flowledger.config.yaml_text import COMMAND_LINE, Marks, document, text_of
from flowledger.flow.errors import BadInput

# What is a path, or `file.py:name`, when it stands in a file; relative ones are looked for beside that file first.
PATH_KEYS = re.compile(r"model\.path|data\.path|rollout\.(abort_function|environment)|reward\.components\.\d+\.path")
MODEL_NAMES = ("tiny", "smollm2-135m")  # these name a model and are no paths


def read(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a file (or of the overrides alone). Raises BadInput with a line for each thing wrong."""
    data, marks = ({}, {}) if path is None else _read_file(Path(path))
    if path is not None:
        data = _beside(data, Path(path).parent)
    for override in overrides:
        _override(data, marks, override)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join(complaints(error, marks, None if path is None else str(path)))) from None
    _refuse_flags(data, config, marks)
    config._sources.update({key: mark for key, mark in marks.items() if _is_leaf(data, key)})
    return config


def _read_file(path: Path) -> tuple[dict[str, Any], Marks]:
    data, marks, line = document(text_of(path), str(path))
    if line is None:
        raise BadInput(f"{path} is empty; a run needs at least `data:` with a task or a path")
    if not isinstance(data, dict):
        raise BadInput(f"{path}:{line}: expected `key: value` lines, found a {type(data).__name__}")
    return data, marks


def _beside(value: Any, directory: Path, key: str = "") -> Any:
    """The same data with relative paths that exist beside the file made to point there; others stay relative to cwd."""
    if isinstance(value, dict):
        return {name: _beside(inner, directory, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list):
        return [_beside(inner, directory, f"{key}.{number}") for number, inner in enumerate(value)]
    if isinstance(value, str) and value and PATH_KEYS.fullmatch(key) and value not in MODEL_NAMES:
        stem, function, name = value.partition(".py:")
        file = directory / (f"{stem}.py" if function else value)
        return str(file) + (f":{name}" if function else "") if _exists(file) else value
    return value


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # a name that is too long for any file; the schema says so
        return False


def _override(data: dict[str, Any], marks: Marks, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise BadInput(
            f"{COMMAND_LINE}: {shown_setting(override)!r} is no setting; write key=value, such as steps=5 or optim.lr=1e-5"
        )
    try:
        value, _, _ = document(text, COMMAND_LINE)
    except BadInput as error:
        raise BadInput(f"{error} in {_short(override)}") from None
    _place(data, key.split("."), value, override)
    for old in [known for known in marks if known == key or known.startswith(f"{key}.")]:
        del marks[old]
    marks[key] = COMMAND_LINE


def _short(override: str) -> str:
    return repr(shown_setting(override if len(override) <= 80 else f"{override[:77]}..."))


def _place(data: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Set a nested key, making the sections above it; a section that is null counts as not there."""
    at: Any = data
    for number, part in enumerate(parts):
        key: Any = part
        if isinstance(at, list):
            if not _is_place(part, at):
                above = ".".join(parts[:number])
                raise BadInput(
                    f"{COMMAND_LINE}: {shown_setting(override)!r}: {above} is a list of {len(at)}; name an item from 0"
                )
            key = int(part)
        elif not isinstance(at, dict):
            raise BadInput(
                f"{COMMAND_LINE}: {shown_setting(override)!r}: {'.'.join(parts[:number])} is the value {at!r}, not a section"
            )
        if number == len(parts) - 1:
            at[key] = value
        elif isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
        at = at[key]


def _refuse_flags(data: dict[str, Any], config: RunConfig, marks: Marks) -> None:
    """`steps: yes` would pass as 1, since Python counts True as a number. Raises BadInput with a line for each."""
    taken = config.model_dump(by_alias=True)
    flags = [key for key in marks if isinstance(_at(data, key), bool) and not isinstance(_at(taken, key), bool)]
    if flags:
        lines = [f"{marks[key]}: {key} = {str(_at(data, key)).lower()} should be a number" for key in flags]
        raise BadInput("\n".join(lines))


def _is_leaf(data: dict[str, Any], key: str) -> bool:
    """Whether a key holds a value of its own. A section's line says nothing of the defaults inside it."""
    value = _at(data, key)
    return not (isinstance(value, dict) and value)


def _at(data: Any, key: str) -> Any:
    """The value at a dotted key; None where the dots do not lead to one (a foreign key with a dot in its name)."""
    for part in key.split("."):
        match data:
            case list() | tuple() if _is_place(part, data):
                data = data[int(part)]
            case dict():
                data = data.get(part)
            case _:
                return None
    return data


def _is_place(part: str, items: Sequence[Any]) -> bool:
    return part.isdecimal() and len(part) < 10 and int(part) < len(items)
