"""Resolves `${…}` in a configuration tree as OmegaConf does: references, `oc.select`, `oc.env`, `oc.decode`, `oc.create`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowledger.config.verl.values import ValueSyntaxError, parse_value
from flowledger.flow.errors import nearest

MISSING = "???"
Path = tuple[str | int, ...]
_RESOLVER = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.]*)\s*:(.*)", re.DOTALL)
_ABSENT = object()


class InterpolationError(Exception):
    """A reference that leads nowhere, a circle, or a resolver that is not known here."""


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def keys_of(path: str) -> Path:
    """`a.b[0].c` as (a, b, 0, c)."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", path) if part)


class Resolver:
    """Looks values up in a tree whose leaves may be interpolations. `environment` answers `oc.env`."""

    def __init__(self, tree: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._tree = tree
        self._environment = environment
        self._open: list[Path] = []

    def whole(self) -> dict[str, Any]:
        """The tree with every interpolation resolved. Raises InterpolationError."""
        return {key: self._value(value, (key,)) for key, value in self._tree.items()}

    def select(self, path: Path) -> Any:
        """The resolved value at a path; None where it is absent or missing (`???`)."""
        found = self._find(path)
        return None if found is _ABSENT or found == MISSING else found

    def _find(self, path: Path) -> Any:
        at: Any = self._tree
        for depth, part in enumerate(path):
            if is_interpolation(at):
                at = self._value(at, path[:depth])
            at = _child(at, part)
            if at is _ABSENT:
                return _ABSENT
        return self._value(at, path)

    def _value(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: self._value(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, (*path, index)) for index, item in enumerate(value)]
        if not is_interpolation(value):
            return value
        if path in self._open:
            raise InterpolationError(f"{_spell(path)} = {value} refers to itself")
        self._open.append(path)
        try:
            return self._text(value, path)
        finally:
            self._open.pop()

    def _text(self, text: str, path: Path) -> Any:
        parts = list(_parts(text))
        if len(parts) == 1 and parts[0][0]:
            return self._one(parts[0][1], path)
        return "".join(_written(self._one(part, path)) if dynamic else part for dynamic, part in parts)

    def _one(self, inner: str, path: Path) -> Any:
        match = _RESOLVER.fullmatch(inner)
        if match is None:
            found = self._find(self._absolute(self._plain(inner, path), path))
            if found is _ABSENT or found == MISSING:
                raise InterpolationError(f"{_spell(path)} = ${{{inner}}} refers to a key that has no value")
            return found
        arguments = [self._argument(part, path) for part in _split(match[2])]
        resolver = _RESOLVERS.get(match[1])
        if resolver is None:
            raise InterpolationError(
                f"{_spell(path)} = ${{{inner}}} uses a resolver that is not known here{nearest(match[1], _RESOLVERS)}"
            )
        return resolver(self, arguments, path)

    def _plain(self, text: str, path: Path) -> str:
        return str(self._text(text, path)) if "${" in text else text.strip()

    def _argument(self, text: str, path: Path) -> Any:
        if "${" in text:
            return self._text(text, path)
        try:
            return parse_value(text)
        except ValueSyntaxError as error:
            raise InterpolationError(f"{_spell(path)}: {error}") from None

    def _absolute(self, key: str, path: Path) -> Path:
        dots = len(key) - len(key.lstrip("."))
        around = path[: len(path) - dots] if dots else ()
        return (*around, *keys_of(key[dots:]))

    def oc_select(self, arguments: Sequence[Any], path: Path) -> Any:
        found = self._find(self._absolute(str(arguments[0]), path))
        if found is _ABSENT or found == MISSING:
            return arguments[1] if len(arguments) > 1 else None
        return found

    def oc_env(self, arguments: Sequence[Any], path: Path) -> Any:
        name = str(arguments[0])
        if name in self._environment:
            return self._environment[name]
        if len(arguments) > 1:
            return None if arguments[1] is None else _written(arguments[1])
        raise InterpolationError(f"{_spell(path)} needs the environment variable {name}; give --assume {name}=value")


def _decode(_: Resolver, arguments: Sequence[Any], path: Path) -> Any:
    try:
        return arguments[0] if arguments[0] is None else parse_value(str(arguments[0]))
    except ValueSyntaxError as error:
        raise InterpolationError(f"{_spell(path)}: {error}") from None


_RESOLVERS: Mapping[str, Callable[[Resolver, Sequence[Any], Path], Any]] = {
    "oc.select": Resolver.oc_select,
    "oc.env": Resolver.oc_env,
    "oc.decode": _decode,
    "oc.create": lambda _, arguments, __: arguments[0],
}


def _child(at: Any, part: str | int) -> Any:
    if isinstance(at, Mapping):
        return at.get(part, at.get(str(part), _ABSENT))
    if isinstance(at, list) and isinstance(part, int) and part < len(at):
        return at[part]
    return _ABSENT


def _parts(text: str) -> list[tuple[bool, str]]:
    """Literal pieces and the insides of `${…}`, in order."""
    found: list[tuple[bool, str]] = []
    literal, at = "", 0
    while at < len(text):
        if text.startswith("\\${", at):
            literal, at = literal + "${", at + 3
        elif text.startswith("${", at):
            end = _closing(text, at + 2)
            found += [(False, literal)] if literal else []
            found.append((True, text[at + 2 : end]))
            literal, at = "", end + 1
        else:
            literal, at = literal + text[at], at + 1
    return [*found, (False, literal)] if literal or not found else found


def _closing(text: str, at: int) -> int:
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise InterpolationError(f"{text}: ${{ without its }}")


def _split(text: str) -> list[str]:
    """Arguments at the commas that stand in no bracket and no quotes."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0 and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def _written(value: Any) -> str:
    return str(value)


def _spell(path: Path) -> str:
    return ".".join(map(str, path))
