"""Rows as a page holds many of them, every name once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def packed(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """`names` and `rows`, a list of values each. Names that have no value anywhere are left out."""
    listed = list(rows)
    kept = [name for name in names if any(row.get(name) is not None for row in listed)]
    return {"names": kept, "rows": [[row.get(name) for name in kept] for row in listed]}


def unpacked(held: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows again, one dict each."""
    return [dict(zip(held["names"], row, strict=True)) for row in held["rows"]]
