"""Of which steps and ranks memory is shown: those whose peaks are worth a look, and what is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.show.page.book import Book, Rows, kept
from flowledger.show.page.choice import Choice

Row = Mapping[str, Any]

STEPS, RANKS = 4, 8  # that a file holds
# Of a very large run the peaks of single ranks are not there: the step in which a rank is fullest, by its readings.
FULLEST = """
SELECT source, step FROM memory_readings WHERE step IS NOT NULL AND (?::BIGINT IS NULL OR rank = ?) AND coalesce(allocated, known) IS NOT NULL
ORDER BY instant = 'peak' DESC, coalesce(allocated, known) DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Among:
    """What there is to choose from: the peak of each step and process, and of these the steps and ranks (-> why) that a file holds."""

    peaks: Rows
    steps: list[int | None]
    ranks: dict[int | None, str]


def among(book: Book) -> Among:
    """The choices of a run; of a plan where nothing was recorded."""
    return kept(book, "memory's choices", lambda: _among(book))


def _among(book: Book) -> Among:
    known = book.shown("FROM peaks") or book.shown("SELECT *, NULL AS peak FROM memory_readings")
    return Among(known, steps(known), ranks(book, known)) if known else Among([], [], {})


def tops(book: Book) -> Rows:
    """The peaks of the steps and ranks that a file holds."""
    found = among(book)
    return [row for row in found.peaks if row["step"] in found.steps and row["rank"] in found.ranks]


def size(row: Row) -> int:
    return int(row["peak"] or row["device_used"] or 0)


def is_watched(known: Rows, step: int | None) -> bool:
    return any(row["instant"] == "peak" and row["step"] == step for row in known)


def steps(known: Rows) -> list[int | None]:
    """The first, the last and the fullest of the watched steps, then of all; what lies outside of the steps only where there is nothing else."""
    placed = [row for row in known if row["step"] is not None] or known
    watched = [row for row in placed if row["instant"] == "peak"]
    ends = [
        row
        for rows in (watched, placed)
        if rows
        for row in (max(rows, key=size), rows[0], rows[-1])
    ]  # fmt: skip
    return list(dict.fromkeys(row["step"] for row in ends))[:STEPS]


def ranks(book: Book, known: Rows) -> dict[int | None, str]:
    """Rank -> why it is among the choices."""
    first = steps(known)[0]
    here = [row for row in known if row["step"] == first]
    found: dict[int | None, str] = {max(here, key=size)["rank"]: "highest"}
    found.setdefault(min(here, key=size)["rank"], "lowest")
    there = {row["rank"] for row in here}
    for members in book.ledger.directory.manifest.rank_classes.values():
        first_there = next((one for one in members if one in there), None)
        if first_there is not None:
            found.setdefault(first_there, "")
    for rank in sorted(there, key=lambda one: -1 if one is None else one):
        found.setdefault(rank, "")
    return dict([*found.items()][:RANKS])


def alike(book: Book, rank: int | None) -> int | None:
    """Of a plan: how many ranks this one stands for."""
    counts = book.ledger.rows("SELECT DISTINCT rank, rank_count FROM memory WHERE source = 'plan'")
    return next((row["rank_count"] for row in counts if row["rank"] == rank), None)


def asked(book: Book, known: Rows, at: Choice) -> tuple[int | None, int | None]:
    """Step and rank that are asked for, or the fullest there is where one is left open."""
    fitting = [
        row
        for row in known
        if (at.step is None or row["step"] == at.step) and (at.rank is None or row["rank"] == at.rank)
    ]
    if not fitting:
        found = [] if at.step is not None else book.shown(FULLEST, [at.rank, at.rank])
        return (found[0]["step"] if found else at.step), at.rank
    best = max(fitting, key=lambda row: (row["instant"] == "peak", size(row)))
    return best["step"], best["rank"]
