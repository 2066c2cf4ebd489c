"""What one wants to know first: is it healthy, how fast is it, where do time and memory go."""

from collections.abc import Sequence
from typing import Any

from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice


def choices(book: Book) -> Sequence[Choice]:
    """There is one overview."""
    return [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """`findings`: worst first."""
    return {"findings": list(book.findings)}
