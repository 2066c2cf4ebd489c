"""A table as it is shown, whoever filled it: its columns, its rows, and what is said beneath them."""

from dataclasses import dataclass, field
from typing import Any

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name in the ledger, its title, and how a terminal writes its values."""

    name: str
    title: str = ""
    form: str = "text"  # a row of `words.FORMS`, or text
    wide: bool = False  # only with --wide (JSON and CSV always have it)
    sparse: bool = False  # takes no room in a terminal where no row has it

    @property
    def heading(self) -> str:
        return self.title or self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Table:
    """What one `show` prints: rows, their columns, and what is said beneath them."""

    name: str
    run: str
    columns: tuple[Column, ...]
    rows: Rows
    section: str | None = None  # the column whose changes part the rows in a terminal
    summary: dict[str, Any] = field(default_factory=dict)
