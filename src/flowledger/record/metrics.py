"""Numbers as rows; what JSON cannot hold goes to `special`."""

import math
from collections.abc import Iterator
from typing import Any

from flowledger.ledger.rows import MetricRow


def metric_rows(name: str, value: Any, weight: float | None = None) -> Iterator[MetricRow]:
    """One row for a number, one for each element of a tensor or a sequence; text and the like give none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    for number in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(number, (bool, int, float)):
            yield _row(name, float(number), weight)


def _row(name: str, number: float, weight: float | None) -> MetricRow:
    if math.isfinite(number):
        return MetricRow(name=name, raw_name=name, value=number, weight=weight)
    special = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return MetricRow(name=name, raw_name=name, special=special, weight=weight)
