"""A run of several ranks whose rows are written by hand."""

from collections.abc import Sequence
from pathlib import Path

from flowledger.ledger import directory, manifest
from flowledger.ledger.rows import Row
from flowledger.ledger.writer import Writer


def book(path: Path, ranks: Sequence[Sequence[Row]], *, state: str = "crashed", dropped: int = 0) -> Path:
    """The rows of each rank in its own part."""
    made = directory.create(path, manifest.Manifest(run="hand", level="tokens", mesh={"dp": len(ranks)}))
    for rank, rows in enumerate(ranks):
        ink = Writer(made.part("actor", rank))
        for row in rows:
            row.rank = rank
            ink.put(row)
        ink.close()
    made.close(state, {"dropped": dropped})
    return path
