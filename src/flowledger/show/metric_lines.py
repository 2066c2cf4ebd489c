"""The table of metrics in a terminal: one line a metric, how it went over the steps and what it comes to when it is recomputed."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.columns import Table
from flowledger.show.words import ABSENT, harmless, human_number, written

Row = Mapping[str, Any]

BARS = "▁▂▃▄▅▆▇█"


def draw(table: Table, screen: Console) -> None:
    """Print it."""
    series: dict[str, list[Row]] = {}
    for row in table.rows:
        series.setdefault(row["name"], []).append(row)
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("metric", "steps", "first", "last", "recomputed", "min", "max", "course"):
        grid.add_column(heading, justify="left" if heading in ("metric", "course") else "right", no_wrap=True)
    for name, rows in sorted(series.items()):
        course = [_number(row) for row in rows]
        values = [value for value in course if value is not None]
        ends = [row["special"] or written(_number(row), "number") for row in (rows[0], rows[-1])]
        extremes = [human_number(min(values)), human_number(max(values))] if values else [ABSENT, ABSENT]
        grid.add_row(Text(harmless(name)), str(len(rows)), *ends, _again(rows), *extremes, spark(course))
    screen.print(grid)


def _again(rows: list[Row]) -> str:
    """`=`: as it was told; `≠ 0.31`: not so, in some step; `only`: nobody told it; a number, where two clocks are not one."""
    row = next((row for row in rows if row.get("differs")), rows[-1])
    told, made = row["value"], row.get("recomputed_value")
    if made is None or (told is None and not row["special"]):
        return ABSENT if made is None else "only"
    if row.get("differs"):
        return f"≠ {written(made, 'number')}"
    near = told is None or abs(told - made) <= 1e-4 * max(1.0, abs(made))
    return "=" if near else written(made, "number")


def _number(row: Row) -> float | None:
    """As it was told; of a metric that nobody told, what it comes to."""
    told: float | None = row["value"]
    return told if told is not None or row["special"] else row.get("recomputed_value")


def spark(values: list[float | None], width: int = 24) -> str:
    """A line of bars, low to high; `×` where there was no finite number. Long series show their last values."""
    values = values[-width:]
    seen = [value for value in values if value is not None]
    if not seen:
        return "×" * len(values)
    low, span = min(seen), max(seen) - min(seen)
    return "".join(
        "×" if v is None else BARS[int((v - low) / span * (len(BARS) - 1))] if span else BARS[0] for v in values
    )
