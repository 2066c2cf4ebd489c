"""What a measure is: rows of numbers by metric, made of a ledger by one function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.ledger.reader import Ledger

Rows = list[dict[str, Any]]
Why = Callable[[Ledger], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Some metrics that are made together.

    `make` gives rows of the whole job: `step`, and numbers by metric name; None where there is no number. `of_ranks` gives the same of
    each `rank`: many more, of which most readers ask nothing.
    """

    names: tuple[str, ...]  # rows of the metrics table
    needs: str | Why  # what the ledger must hold, in words, where it gives none
    make: Callable[[Ledger], Rows]
    of_ranks: Callable[[Ledger], Rows] | None = None
    of_tokens: str = ""  # the column of `tokens` that it is made of: of a few groups only, where no more are recorded


def named(columns: Sequence[tuple[str, str]]) -> str:
    """Formulas as columns named by their metrics."""
    return ", ".join(f'({formula})::DOUBLE AS "{name}"' for name, formula in columns)
