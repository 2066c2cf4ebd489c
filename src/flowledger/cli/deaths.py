"""A rank that died without a word: where it was, which the others find in what it had recorded."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowledger.ledger.rows import FindingRow


def last_seen(path: Path | None, rank: int | None) -> str:
    """` in update_actor, step 3`: where a rank was when it wrote for the last time, a second before its end at most."""
    from flowledger.ledger.reader import Ledger

    if path is None or rank is None:
        return ""
    with Ledger(path, only=("spans",)) as ledger:
        last = ledger.rows(
            "SELECT stage, step FROM spans WHERE rank = ? AND stage IS NOT NULL ORDER BY t_ns DESC LIMIT 1", [rank]
        )
    return f" in {last[0]['stage']}, step {last[0]['step']}" if last else ""


def finding(text: str) -> "FindingRow":
    """For the ledger, beside what the others say of themselves."""
    from flowledger.ledger.rows import FindingRow

    return FindingRow(id="rank_died", verdict="fail", severity="error", message=text)
