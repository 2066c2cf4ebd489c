"""The shape ledger: every tensor of every stage, planned and recorded side by side."""

from collections.abc import Sequence
from typing import Any

from flowledger.show.page.book import Book, text
from flowledger.show.page.choice import Choice

NOTHING = text("No tensor was recorded or planned.", "没有记录或计划任何张量。")


def choices(book: Book) -> Sequence[Choice]:
    """All steps together."""
    return [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """`rows`: one a stage, phase and tensor, as `show RUN shapes` has them."""
    rows = book.shown("FROM shapes")
    return {"rows": rows} if rows else {"absent": True, "missing": [NOTHING]}
