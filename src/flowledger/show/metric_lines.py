"""The table of metrics in a terminal: of many steps one line a metric, how it went and where it left its healthy range; of one
step its numbers, with what they are held against.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.columns import Table
from flowledger.show.words import ABSENT, harmless, human_number, short_exponent, written
from flowledger.tables.metrics import find

Row = Mapping[str, Any]

BARS = "▁▂▃▄▅▆▇█"
LEAST_BARS, MOST_BARS = 8, 24
LONGEST_NAME = 36  # signs of a metric's name on one line; a longer one goes on in the next
ROOM = 140  # columns from which on the number of steps and what was recomputed have columns of their own
SHORT = 9  # signs of a number in a table of many steps
LEAST_ROOM = 90  # columns below which the extremes are left out
NAMED = 5  # metrics that are named beneath the table


def draw(table: Table, screen: Console) -> None:
    """Print it."""
    series: dict[str, list[Row]] = {}
    for row in table.rows:
        series.setdefault(row["name"], []).append(row)
    steps = {row.get("step") for row in table.rows}
    if len(steps) > 1:
        _course(series, len(steps), screen)
    else:
        _step(series, screen)


# ------------------------------------------------------------------------------------------------------------ one step


def _step(series: Mapping[str, Sequence[Row]], screen: Console) -> None:
    grid = _grid(("metric", "value", "recomputed", "unit", "healthy", ""), left=("metric", "unit", "healthy", ""))
    for name, (row, *_) in sorted(series.items()):
        known = find(name)
        healthy = "" if known is None or known.healthy is None else " … ".join(map(human_number, known.healthy))
        grid.add_row(
            Text(harmless(name), overflow="fold"), row["special"] or _written(name, _number(row)), _again([row]),
            known.unit if known else "", healthy, Text("!" if _is_out(row) else "", style="yellow"),
        )  # fmt: skip
    screen.print(grid)


# ---------------------------------------------------------------------------------------------------------- many steps


def _course(series: Mapping[str, Sequence[Row]], steps: int, screen: Console) -> None:
    wide, space = screen.width >= ROOM, 2 if screen.width >= ROOM else 1
    usual = Counter(map(len, series.values())).most_common(1)[0][0]  # a step that broke off has few metrics
    lines = {name: _line(rows, usual, wide=wide) for name, rows in sorted(series.items())}
    more = ("steps", "recomputed") if wide else ()
    headings = ("metric", *more, "first", "last", "min", "max", "trend", "unhealthy")
    if screen.width < LEAST_ROOM:
        headings = tuple(heading for heading in headings if heading not in ("min", "max"))
        lines = {name: [*cells[:2], *cells[4:]] for name, cells in lines.items()}
    widths = [
        max(len(heading), *(len(cells[at]) for cells in lines.values())) for at, heading in enumerate(headings[1:])
    ]
    taken = min(LONGEST_NAME, max(map(len, lines))) + sum(widths) - widths[-2] + (space + 1) * len(headings)
    bars = min(MOST_BARS, max(LEAST_BARS, screen.width - taken))
    grid = _grid(headings, left=("metric", "trend", "unhealthy"), space=space)
    for name, cells in lines.items():
        *numbers, _, left = cells
        course = spark([_number(row) for row in series[name]], bars)
        grid.add_row(Text(harmless(name), overflow="fold"), *numbers, course, Text(left, style="yellow"))
    screen.print(grid)
    out = [name for name in lines if _left(series[name])]
    if out:
        named = f"{', '.join(out[:NAMED])}{f' and {len(out) - NAMED} more' if len(out) > NAMED else ''}"
        screen.print(Text(harmless(f"left their healthy range: {named}"), style="yellow"))
    broken = f", {steps - usual} more of which little is known" if steps > usual else ""
    screen.print(f"{usual} steps{broken}; --step N shows the numbers of one, with unit and healthy range", style="dim")


def _line(rows: Sequence[Row], usual: int, *, wide: bool) -> list[str]:
    """The cells of a metric behind its name; that of the trend is filled in when its width is known. `usual`: steps that most metrics have."""
    write = partial(_written if wide else _short, rows[0]["name"])
    values = [value for row in rows if (value := _number(row)) is not None]
    ends = [
        row["special"] or (ABSENT if (value := _number(row)) is None else write(value)) for row in (rows[0], rows[-1])
    ]
    extremes = [write(min(values)), write(max(values))] if values else [ABSENT, ABSENT]
    again = _again(rows)
    notes = [_left(rows)]
    if not wide:
        notes += [again] if again.startswith("≠") else []
        notes += [f"(in {len(rows)} step{'s' * (len(rows) != 1)})"] if len(rows) != usual else []
    return [*([str(len(rows)), again] if wide else []), *ends, *extremes, "", "; ".join(filter(None, notes))]


def _written(name: str, value: float | None) -> str:
    """As its unit is written: bytes with their prefix."""
    known = find(name)
    return written(value, "bytes" if known is not None and known.unit == "bytes" else "number")


def _short(name: str, value: float) -> str:
    """In nine signs at most: bytes with their prefix, other numbers with three digits."""
    text = _written(name, float(f"{value:.3g}"))
    return text if len(text) <= SHORT else short_exponent(f"{value:.2e}")


def _left(rows: Sequence[Row]) -> str:
    """`at 3 (57x)`: the first step in which a metric is not healthy, and how many there are."""
    out = [row for row in rows if _is_out(row)]
    if not out:
        return ""
    step = out[0].get("step")
    return ("of all steps" if step is None else f"at {step}") + (f" ({len(out)}x)" if len(out) > 1 else "")


def _is_out(row: Row) -> bool:
    """Whether a number is outside of what the metrics' table calls healthy, or none at all."""
    if row["special"]:
        return True
    known, value = find(row["name"]), _number(row)
    return known is not None and value is not None and known.is_healthy(value) is False


def _grid(headings: Sequence[str], left: Sequence[str], space: int = 2) -> Grid:
    grid = Grid(box=SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        grid.add_column(
            heading, justify="left" if heading in left else "right", no_wrap=heading not in ("metric", "unhealthy"),
            max_width=LONGEST_NAME if heading == "metric" else None,
        )  # fmt: skip
    return grid


def _again(rows: Sequence[Row]) -> str:
    """`=`: as it was told; `≠ 0.31`: not so, in some step; `only`: nobody told it; a number, where two clocks are not one."""
    row = next((row for row in rows if row.get("differs")), rows[-1])
    told, made = row["value"], row.get("recomputed_value")
    if made is None or (told is None and not row["special"]):
        return ABSENT if made is None else "only"
    if row.get("differs"):
        return f"≠ {_written(row['name'], made)}"
    near = told is None or abs(told - made) <= 1e-4 * max(1.0, abs(made))
    return "=" if near else _written(row["name"], made)


def _number(row: Row) -> float | None:
    """As it was told; of a metric that nobody told, what it comes to."""
    told: float | None = row["value"]
    return told if told is not None or row["special"] else row.get("recomputed_value")


def spark(values: Sequence[float | None], width: int = MOST_BARS) -> str:
    """A line of bars over the whole course, low to high; each the mean of its share of the steps, `×` where one is no number."""
    if not values:
        return ""
    count = min(width, len(values))
    shares = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    means = [None if None in share else sum((one or 0.0) / len(share) for one in share) for share in shares]
    seen = [value for value in means if value is not None]
    low, span = (
        (min(seen) / 2, max(seen) / 2 - min(seen) / 2) if seen else (0.0, 0.0)
    )  # halves, for the whole may be too large a number
    return "".join(
        "×" if v is None else BARS[int((v / 2 - low) / span * (len(BARS) - 1))] if span else BARS[0] for v in means
    )
