"""A run of our own loop whose rows are written by hand, and what the questions of one module say of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flowledger.ledger import directory, manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, Row
from flowledger.ledger.writer import Writer

Check = Callable[[Ledger], list[FindingRow]]


def told(
    check: Check, path: Path, rows: Iterable[Row], config: dict[str, Any] | None = None, *, framework: str = "flowledger",
    ranks: int = 1,
) -> dict[str, FindingRow]:  # fmt: skip
    """id -> finding. Rows are numbered and timed in their order where they are not; `rank` says whose part they stand in."""
    made = directory.create(
        path,
        manifest.Manifest(run="hand", level="tokens", config=config or {}, framework=framework, mesh={"dp": ranks}),
    )
    inks = [Writer(made.part("actor", rank, coordinates={"dp": rank})) for rank in range(ranks)]
    for at, row in enumerate(rows):
        row.t_ns = at + 1 if row.t_ns == -1 else row.t_ns
        row.rank = row.rank or 0
        inks[row.rank].put(row)
    for ink in inks:
        ink.close()
    made.close()
    with Ledger(path) as ledger:
        return {finding.id: finding for finding in check(ledger)}
