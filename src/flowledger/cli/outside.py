"""One line on the metrics whose last number is outside its healthy range: no alarm by itself, but the page marks them too."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger

NAMED = 5  # metrics of which the number stands in the line


def outside(ledger: "Ledger") -> str:
    """`2 metrics outside their healthy range: a 1 (0 … 0.3), b 0 (from 0.65)`; empty where all are inside."""
    from flowledger.cli.page import metrics
    from flowledger.show.page.signals import is_outside
    from flowledger.show.words import human_number

    out = [metric for metric in metrics(ledger) if is_outside(metric)]
    found = [
        f"{one.name} {human_number(one.values[max(one.values)])} ({spread(*one.healthy)})" for one in out if one.healthy
    ]
    if not found:
        return ""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    what = "1 metric outside its" if len(found) == 1 else f"{len(found)} metrics outside their"
    return f"{what} healthy range: {', '.join(found[:NAMED])}{more}"


def spread(low: float | None, high: float | None) -> str:
    """A range in words: `0 … 0.3`, `from 0.65`, `up to 3`. None and infinity bound nothing."""
    from flowledger.show.words import human_number

    if low is None or math.isinf(low):
        return f"up to {human_number(math.inf if high is None else high)}"
    if high is None or math.isinf(high):
        return f"from {human_number(low)}"
    return f"{human_number(low)} … {human_number(high)}"
