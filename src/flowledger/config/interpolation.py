"""OmegaConf's `${…}`: references to other keys (`${actor.path}`, relative `${..x}`) and functions (`${mul:${a}, 2}`).

What cannot be resolved (an environment variable, a key that is not there) stays as it is written: only a reader that
needs the value complains.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowledger.config.dotted import ABSENT, Tree, at
from flowledger.config.yaml_text import COMMAND_LINE, document
from flowledger.flow.errors import BadInput

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
}
DEEPEST = 64
INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class _UnresolvedError(Exception):
    pass


def resolved(tree: Tree, environment: Mapping[str, str]) -> Tree:
    """The tree with every `${…}` that can be resolved. `environment`: what `${oc.env:NAME}` may see.

    Raises BadInput where a key refers to itself.
    """

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner, f"{key}.{number}") for number, inner in enumerate(value)]
        return _text(value, key, tree, environment, 0)

    found: Tree = walk(tree, "")
    return found


def _text(value: Any, key: str, tree: Tree, environment: Mapping[str, str], depth: int) -> Any:
    """A leaf resolved; the innermost `${…}` first, so that arguments of functions are values when they are called."""
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > DEEPEST:
        raise BadInput(f"{key} = {value!r}: the references lead back to themselves")
    text = value
    while (match := INNERMOST.search(text)) is not None:
        try:
            inner = _expression(match[1], key, tree, environment, depth)
        except _UnresolvedError:
            return value
        if match[0] == text:
            return inner
        text = text[: match.start()] + ("null" if inner is None else str(inner)) + text[match.end() :]
    return text


def _expression(text: str, key: str, tree: Tree, environment: Mapping[str, str], depth: int) -> Any:
    name, colon, rest = text.partition(":")
    if not colon:
        return _reference(text.strip(), key, tree, environment, depth)
    arguments = [argument.strip() for argument in rest.split(",")]
    match name.strip():
        case "oc.env":
            found = environment.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
            if found is None:
                raise _UnresolvedError
            return found
        case "oc.select":
            try:
                return _reference(arguments[0], key, tree, environment, depth)
            except _UnresolvedError:
                return _scalar(arguments[1]) if len(arguments) > 1 else None
        case known if known in FUNCTIONS:
            try:
                return FUNCTIONS[known](*map(_scalar, arguments))
            except (TypeError, ZeroDivisionError):
                raise _UnresolvedError from None
    raise _UnresolvedError


def _reference(text: str, key: str, tree: Tree, environment: Mapping[str, str], depth: int) -> Any:
    """`.x`: beside the key itself; `..x`: one section above; else from the root. A section is resolved whole."""
    dots = len(text) - len(text.lstrip("."))
    above = key.split(".")[:-dots] if dots else []
    target = ".".join([*above, text[dots:]])
    found = at(tree, target)
    if found is ABSENT:
        raise _UnresolvedError
    return _whole(found, target, tree, environment, depth + 1)


def _whole(value: Any, key: str, tree: Tree, environment: Mapping[str, str], depth: int) -> Any:
    if depth > DEEPEST:
        raise BadInput(f"{key}: the references lead back to themselves")
    if isinstance(value, dict):
        return {name: _whole(inner, f"{key}.{name}", tree, environment, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner, f"{key}.{number}", tree, environment, depth + 1) for number, inner in enumerate(value)]
    return _text(value, key, tree, environment, depth)


def _scalar(text: str) -> Any:
    try:
        return document(text, COMMAND_LINE)[0]
    except BadInput:
        return text
