"""Changing a configuration tree by dotted keys, under Hydra's struct mode: no key appears that was not asked for with `+`."""

from collections.abc import Mapping
from typing import Any

from flowledger.config.verl.interpolation import MISSING, InterpolationError, Resolver, is_interpolation

Tree = dict[str, Any]
_KINDS = {dict: "dictionary", list: "list"}


class UnknownKeyError(Exception):
    """A key that the tree does not have, met without `+`."""


class OtherKindError(Exception):
    """A list where a dictionary is, or the reverse, or a key inside what holds none; the text says which."""


def copied(value: Any) -> Any:
    """A deep copy of dictionaries and lists (copy.deepcopy is ten times slower)."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def selected(tree: Tree, key: str, environment: Mapping[str, str]) -> Any:
    """What `key` resolves to; None where it is absent, null or `???`."""
    resolver = Resolver(tree, environment)
    parts = key.split(".")
    at: Any = tree
    for depth, part in enumerate(parts):
        at = _inner(at, part)
        if is_interpolation(at):
            try:
                at = resolver.select(tuple(parts[: depth + 1]))
            except InterpolationError:
                return None
    return None if at == MISSING else at


def update(tree: Tree, key: str, value: Any, *, adds: bool) -> None:
    """Set `key`, merging dictionaries. `adds`: missing keys are made. Raises UnknownKeyError, OtherKindError."""
    *above, last = key.split(".")
    at: Any = tree
    for part in above:
        inner = _inner(at, part)
        if not isinstance(inner, (dict, list)):
            _put(at, part, inner := {}, adds)
        at = inner
    old = _inner(at, last)
    if isinstance(value, dict) and isinstance(old, dict):
        _merge(old, value, adds)
    elif isinstance(value, (dict, list)) and isinstance(old, (dict, list)) and type(value) is not type(old):
        raise OtherKindError(f"it is a {_KINDS[type(old)]}, not a {_KINDS[type(value)]}")
    else:
        _put(at, last, copied(value), adds)


def delete(tree: Tree, key: str) -> None:
    """Remove a key that is there. Raises OtherKindError where it is no key of a dictionary that is written out."""
    *above, last = key.split(".")
    at: Any = tree
    for part in above:
        at = _inner(at, part)
    if not isinstance(at, dict):
        raise OtherKindError(f"{last} is not a key of a dictionary")
    del at[last]


def _inner(at: Any, part: str) -> Any:
    return at.get(part) if isinstance(at, dict) else _item(at, part) if isinstance(at, list) else None


def _item(at: list[Any], part: str) -> Any:
    return at[int(part)] if part.isdigit() and int(part) < len(at) else None


def _put(at: Any, part: str, value: Any, adds: bool) -> None:
    if isinstance(at, list):
        if not part.isdigit() or int(part) >= len(at):
            raise UnknownKeyError(part)
        at[int(part)] = value
    elif part in at or adds:
        at[part] = value
    else:
        raise UnknownKeyError(part)


def _merge(old: Tree, new: Tree, adds: bool) -> None:
    for key, value in new.items():
        if key not in old and not adds:
            raise UnknownKeyError(str(key))
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value, adds)
        else:
            old[key] = copied(value)
