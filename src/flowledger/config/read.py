"""Reads a RunConfig from a YAML file and `key=value` overrides, and remembers where each value came from.

`read("examples/tiny.yaml", ["steps=5", "ref=null"])`. A value on the command line is parsed as YAML; keys are dotted,
and a number picks from a list (`reward.components.0.weight=2`). Everything wrong is said in one BadInput, a line for
each fault.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from flowledger.config.complaints import complaints
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput, nearest

COMMAND_LINE = "command line"

# What is a path, or `file.py:name`, when it stands in a file; relative ones are looked for beside that file first.
PATH_KEYS = re.compile(r"model\.path|data\.path|rollout\.abort_function|reward\.components\.\d+\.path")
TAG = "tag:yaml.org,2002:"  # of the types that YAML itself knows
LARGEST = 2**63 - 1
MOST_KEYS = 100_000  # a file of a few anchors can stand for more keys than memory holds
MODEL_NAMES = ("tiny", "smollm2-135m")  # these name a model and are no paths

Marks = dict[str, str]  # dotted key -> `file.yaml:LINE` or `command line`, for leaves and sections alike


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `off` and `2024-01-01` are words, `1e-5` is a number. Only what a setting can be."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (*(f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")), None)
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML does it, but a value that its tag cannot be is a YAMLError with a line, like every other fault."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            raise _refused("half a surrogate pair is no character", node) from None
        except (ValueError, LookupError, AttributeError, ArithmeticError, TypeError):
            kind = str(node.tag).removeprefix(TAG)
            raise _refused(f"{str(node.value)[:40]!r} is no {kind} that can be read", node) from None
        if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            raise _refused(f"{str(node.value)[:40]!r} is an integer of more than 63 bits", node)
        return value


_Loader.yaml_implicit_resolvers = {}


def _refused(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for kind, pattern, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"{TAG}{kind}", re.compile(f"(?:{pattern})$"), first)


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
    data, marks, line = _document(_text_of(path), str(path))
    if line is None:
        raise BadInput(f"{path} is empty; a run needs at least `data:` with a task or a path")
    if not isinstance(data, dict):
        raise BadInput(f"{path}:{line}: expected `key: value` lines, found a {type(data).__name__}")
    return data, marks


def _document(text: str, where: str) -> tuple[Any, Marks, int | None]:
    """(value, marks, line on which it begins) of one YAML document; (None, {}, None) of an empty one. Raises BadInput."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}, None
            marks = dict(islice(_marks(node, where, "", ()), MOST_KEYS + 1))
            if len(marks) > MOST_KEYS:
                raise BadInput(f"{where}: more than {MOST_KEYS} keys; a run has a few dozen")
            return loader.construct_document(node), marks, node.start_mark.line + 1
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise BadInput(_malformed(error, where)) from None
    except RecursionError:
        raise BadInput(f"{where}: malformed YAML: nested too deeply; a run has a few levels") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # PyYAML lets some through
        raise BadInput(f"{where}: malformed YAML: {error}") from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise BadInput(f"{path}: no such file{nearest(path.name, there)}") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; give a .yaml file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


def _marks(node: yaml.Node, path: str, prefix: str, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, str]]:
    """Dotted key -> `file:line` for every key under a node. Raises BadInput for a key given twice or a circle."""
    if node in above:
        raise BadInput(
            f"{path}:{node.start_mark.line + 1}: {prefix.rstrip('.')} contains itself (a YAML anchor in a circle)"
        )
    inside = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for number, child in enumerate(node.value):
            yield f"{prefix}{number}", f"{path}:{child.start_mark.line + 1}"
            yield from _marks(child, path, f"{prefix}{number}.", inside)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, child in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise BadInput(f"{path}:{line}: {prefix}{name} is given twice (first in line {lines[name]}); keep one")
            lines[name] = line
            yield f"{prefix}{name}", f"{path}:{line}"
            yield from _marks(child, path, f"{prefix}{name}.", inside)


def _malformed(error: yaml.YAMLError, where: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    context = getattr(error, "context", None)
    place = f"{where}:{mark.line + 1}" if mark is not None and where != COMMAND_LINE else where
    return f"{place}: malformed YAML: {problem}" + (f" ({context})" if context else "")


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
        raise BadInput(f"{COMMAND_LINE}: {override!r} is no setting; write key=value, such as steps=5 or optim.lr=1e-5")
    try:
        value, _, _ = _document(text, COMMAND_LINE)
    except BadInput as error:
        raise BadInput(f"{error} in {_short(override)}") from None
    _place(data, key.split("."), value, override)
    for old in [known for known in marks if known == key or known.startswith(f"{key}.")]:
        del marks[old]
    marks[key] = COMMAND_LINE


def _short(override: str) -> str:
    return repr(override if len(override) <= 80 else f"{override[:77]}...")


def _place(data: dict[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Set a nested key, making the sections above it; a section that is null counts as not there."""
    at: Any = data
    for number, part in enumerate(parts):
        key: Any = part
        if isinstance(at, list):
            if not _is_place(part, at):
                above = ".".join(parts[:number])
                raise BadInput(f"{COMMAND_LINE}: {override!r}: {above} is a list of {len(at)}; name an item from 0")
            key = int(part)
        elif not isinstance(at, dict):
            raise BadInput(
                f"{COMMAND_LINE}: {override!r}: {'.'.join(parts[:number])} is the value {at!r}, not a section"
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
