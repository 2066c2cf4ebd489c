"""AReaL's configuration classes as a table: the defaults of a whole tree, and which keys a structured config refuses."""

from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.config.dotted import Tree
from flowledger.config.settings import table


def defaults(name: str, given: Any) -> Tree:
    """Every key of a class with its default; a nested class that is absent by default only where it is given."""
    found: Tree = {}
    for one in lineage(name):
        found |= dict.fromkeys(one.get("unset", ()))
        found |= one.get("defaults", {})
        for key, inner in one.get("nested", {}).items():
            value = given.get(key) if isinstance(given, dict) else None
            absent = inner.endswith("?") and not isinstance(value, dict)
            found[key] = None if absent else defaults(inner.rstrip("?"), value)
    return found


def unknown(name: str, given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that a class and the classes inside it have no place for."""
    classes = lineage(name)
    nested = {key: inner for one in classes for key, inner in one.get("nested", {}).items()}
    free = {key for one in classes for key in one.get("free", ())}
    plain = {key for one in classes for key in (*one.get("unset", ()), *one.get("defaults", {}))}
    for key, value in given.items():
        if key in nested and isinstance(value, dict):
            yield from unknown(nested[key].rstrip("?"), value, f"{prefix}{key}.")
        elif key not in nested and key not in free and key not in plain:
            yield f"{prefix}{key}"


def known(name: str, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Every dotted key of a class, for hints."""
    for one in lineage(name):
        yield from (f"{prefix}{key}" for key in (*one.get("unset", ()), *one.get("defaults", {}), *one.get("free", ())))
        for key, inner in one.get("nested", {}).items():
            yield f"{prefix}{key}"
            if depth < 4:
                yield from known(inner.rstrip("?"), f"{prefix}{key}.", depth + 1)


def lineage(name: str) -> list[Mapping[str, Any]]:
    """The rows of a class and its bases, bases first, so that a later default counts."""
    row = table("areal")["class"][name]
    return [found for base in row.get("bases", ()) for found in lineage(base)] + [row]
