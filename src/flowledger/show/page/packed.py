"""Rows as a page holds many of them, every name once; and rows that several parts of a page ask for, read once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flowledger.show.page.book import Book

T = TypeVar("T")


def packed(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """`names` and `rows`, a list of values each. Names that have no value anywhere are left out."""
    listed = list(rows)
    kept = [name for name in names if any(row.get(name) is not None for row in listed)]
    return {"names": kept, "rows": [[row.get(name) for name in kept] for row in listed]}


def unpacked(held: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows again, one dict each."""
    return [dict(zip(held["names"], row, strict=True)) for row in held["rows"]]


def kept(book: Book, what: str, read: Callable[[], T]) -> T:
    """What `read` gives, read once for a ledger; anew each time where rows made elsewhere stand in for some of its views: they change."""
    if book.ledger.changes:
        return read()
    held = book.ledger.worked_out
    if (key := f"page, {what}") not in held:
        held[key] = read()
    found: T = held[key]
    return found
