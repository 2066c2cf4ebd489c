"""What is not measured in a run, and what it would take."""

from flowledger.diagnose.measures.recompute import Recomputed
from flowledger.diagnose.measures.series import series_of
from flowledger.ledger.reader import Ledger
from flowledger.tables.metrics import find, metrics

TOLD = "a number that is recorded or imported under this name"


def missing(ledger: Ledger) -> list[tuple[str, str]]:
    """Every metric of the table that a run has no number of, and what it needs; patterns count as one."""
    series = series_of(ledger)
    there = {row.name for name in series.names if (row := find(name)) is not None}
    return [(name, needs(ledger, series.made, name)) for name in metrics() if name not in there]


def needs(ledger: Ledger, made: Recomputed, name: str) -> str:
    """What a ledger must hold for a metric."""
    words = [measure.needs for measure in made.giving(name)]
    return "; or ".join(word if isinstance(word, str) else word(ledger) for word in words) or TOLD
