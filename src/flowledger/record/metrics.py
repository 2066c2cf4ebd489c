"""Numbers as rows; what JSON cannot hold goes to `special`."""

import math
from collections.abc import Iterable
from typing import Any

from flowledger.ledger.rows import MetricRow


def metric_rows(name: str, value: Any, weight: float | None = None, raw: str | None = None) -> Iterable[MetricRow]:
    """One row for a number, one for each element of a tensor or a sequence; text and the like give none.

    `raw`: what the job that is recorded calls it, where that is another name.
    """
    if type(value) is float:  # as most are
        return (_row(name, raw or name, value, weight),)
    if hasattr(value, "tolist"):
        value = value.tolist()
    numbers = value if isinstance(value, (list, tuple)) else (value,)
    return [
        _row(name, raw or name, float(number), weight) for number in numbers if isinstance(number, (bool, int, float))
    ]


def _row(name: str, raw: str, number: float, weight: float | None) -> MetricRow:
    if math.isfinite(number):
        return MetricRow(name=name, raw_name=raw, value=number, weight=weight)
    special = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return MetricRow(name=name, raw_name=raw, special=special, weight=weight)
