"""YAML text with line numbers: a value, and for every dotted key the place where it stands.

YAML 1.2's plain values, only what a setting can be; a malformed document is one BadInput with its line.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import yaml

from flowledger.flow.errors import BadInput, nearest

COMMAND_LINE = "command line"
TAG = "tag:yaml.org,2002:"  # of the types that YAML itself knows
LARGEST = 2**63 - 1
MOST_KEYS = 100_000  # a file of a few anchors can stand for more keys than memory holds

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


def document(text: str, where: str) -> tuple[Any, Marks, int | None]:
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


def text_of(path: Path) -> str:
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
