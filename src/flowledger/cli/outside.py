"""One line on the metrics whose last number is outside its healthy range: no alarm by itself, but the page marks them too."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger

NAMED = 5  # metrics of which the number stands in the line


def outside(ledger: "Ledger") -> str:
    """`2 metrics outside their healthy range: a 1 (0 … 0.3), b 0 (from 0.65)`; empty where all are inside."""
    from flowledger.diagnose.measures import series_of
    from flowledger.show.words import human_number
    from flowledger.tables.metrics import find

    series, found = series_of(ledger), []
    for name in series.names:
        known, values = find(name), series.by_step(name)
        if known and known.healthy and values and not known.is_healthy(last := values[max(values)]):
            found.append(f"{name} {human_number(last)} ({spread(*known.healthy)})")
    if not found:
        return ""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    what = "1 metric outside its" if len(found) == 1 else f"{len(found)} metrics outside their"
    return f"{what} healthy range: {', '.join(found[:NAMED])}{more}"


def spread(low: float, high: float) -> str:
    """A range in words: `0 … 0.3`, `from 0.65`, `up to 3`."""
    from flowledger.show.words import human_number

    if math.isinf(low) or math.isinf(high):
        return f"up to {human_number(high)}" if math.isinf(low) else f"from {human_number(low)}"
    return f"{human_number(low)} … {human_number(high)}"
