"""Ranks that wait for each other for ever: one that waits finds it in the ledger, tells the others, and so ends the run."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowledger.cli.recorded import Recorded
    from flowledger.ledger.rows import FindingRow
    from flowledger.record.waiting import Alarm

SETTLE_S = 2.0  # what a rank begins is on disk after that
APART_S = 0.25  # between ranks that look, so that the first has spoken before many read the whole ledger
LATEST_S = 10.0


def alarm(recorded: "Recorded", *, after_s: float, rank: int) -> "Alarm | None":
    """For the recorder of this rank; None where nobody is to be told, or ranks may wait for ever (`after_s` 0)."""
    from flowledger.diagnose import waiting
    from flowledger.ledger.reader import Ledger
    from flowledger.record.waiting import Alarm

    book, ink, end_all = recorded.book, recorded.ink, recorded.end_all
    if end_all is None or book is None or ink is None or not after_s:
        return None

    def look() -> "FindingRow | None":
        with Ledger(book.path, only=("spans", "findings")) as ledger:
            return next(iter(waiting.check(ledger, after_s)), None)

    def tell(finding: "FindingRow") -> None:
        if end_all(finding.message):
            ink.put(finding)

    return Alarm(after_s + SETTLE_S + min(rank * APART_S, LATEST_S), look, tell)


def seen_in(path: Path) -> str:
    """What is to be found now that the ranks of a run have ended, of which one gave no sign of life; "" where nothing is."""
    from flowledger.diagnose import waiting
    from flowledger.ledger.reader import Ledger

    with Ledger(path, only=("spans", "findings")) as ledger:
        found = waiting.check(ledger)
    return recorded_in(path) or (found[0].message if found else "")


def recorded_in(path: Path) -> str:
    """What was found while the ranks of a run hung; "" where they did not."""
    from flowledger.ledger.reader import Ledger

    with Ledger(path, only=("findings",)) as ledger:
        found = ledger.rows("SELECT message FROM findings WHERE id = 'hang'")
    return str(found[0]["message"]) if found else ""
