"""Everything that can be found out about a run from its ledger: one table of detectors, asked one after the other."""

from collections.abc import Callable

from flowledger.diagnose import agreement, balance, laws, shapes, waiting
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

Detector = Callable[[Ledger], list[FindingRow]]

DETECTORS: tuple[Detector, ...] = (laws.check, shapes.check, balance.check, waiting.check, agreement.check)


def findings(ledger: Ledger) -> list[FindingRow]:
    """What every detector has to say, in the order of the table."""
    return [finding for detector in DETECTORS for finding in detector(ledger)]
