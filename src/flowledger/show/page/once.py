"""A book whose ledger is asked each question once: the parts of a view share most of what they ask."""

from dataclasses import replace

from flowledger.ledger.reader import Ledger, Params
from flowledger.show.page.book import Book, Rows


def asking_once(book: Book) -> Book:
    """The same book. What was answered stays with its ledger, but where rows made elsewhere stand in for some of its views: they change."""
    return book if book.ledger.changes else replace(book, ledger=_Once(book.ledger))


class _Once(Ledger):
    def __init__(self, opened: Ledger) -> None:
        vars(self).update(vars(opened))
        self._answers: dict[str, Rows] = opened.worked_out.setdefault("page, asked", {})

    def rows(self, sql: str, params: Params = ()) -> Rows:
        key = f"{params} {sql}"
        if key not in self._answers:
            self._answers[key] = super().rows(sql, params)
        return self._answers[key]
