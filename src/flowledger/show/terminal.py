"""Tables drawn for a terminal: readable at 100 columns, grouped, with what matters beneath."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.columns import Column, Table
from flowledger.show.words import ABSENT, NUMERIC, harmless, human_bytes, human_number, human_shape, written

PIPED_WIDTH = 160  # columns where nobody looks: a file, a pipe
ROOMY = 150  # from this width on, long sentences stand in the table itself
MOST_ROWS = 400
MOST_STEPS = 3  # sections of a step, unless a step is asked for
WRAPPED = frozenset({
    ("shapes", "logical_shape"), ("shapes", "common_bug"), ("lifetimes", "readers"), ("findings", "message"),
    ("findings", "next_step"), ("plan_chain", "quantity"), ("plan_chain", "key"), ("plan_chain", "arithmetic"),
    ("plan_checks", "message"), ("plan_checks", "needs"), ("plan_lifetimes", "readers"), ("plan_advice", "key"), ("plan_advice", "costs"),
    ("plan_largest", "what"), ("plan_largest", "key"),
})  # fmt: skip
# Widths where a terminal is narrower than ROOMY: what does not fit goes on in the next line, so that nothing is lost.
NARROW: dict[tuple[str, str], int] = {
    ("shapes", "stage"): 12, ("shapes", "tensor_name"): 19, ("shapes", "logical_shape"): 14, ("shapes", "local_shape"): 9,
    ("shapes", "mask"): 14, ("shapes", "owner_rank"): 5, ("shapes", "lifetime"): 11, ("shapes", "common_bug"): 6,
    ("memory", "stage"): 13, ("memory", "instant"): 5,
    ("lifetimes", "born_at"): 13, ("lifetimes", "tensor_name"): 19, ("lifetimes", "readers"): 14, ("lifetimes", "freed_at"): 14, ("lifetimes", "declared_freed_by"): 12,
    ("lifetimes", "lifetime"): 11, ("plan_chain", "key"): 18,
    ("plan_lifetimes", "born_at"): 12, ("plan_lifetimes", "tensor_name"): 17, ("plan_lifetimes", "readers"): 13,
    ("plan_lifetimes", "freed_at"): 12, ("plan_lifetimes", "lifetime"): 11,
    ("plan_advice", "key"): 18, ("plan_advice", "before"): 8, ("plan_advice", "after"): 8, ("plan_advice", "peak_stage"): 8,
    ("plan_largest", "key"): 22,
}  # fmt: skip
SPACIOUS = 125  # from this width on, these columns get more
SPACIOUS_WIDTHS = {
    ("shapes", "logical_shape"): 32, ("shapes", "local_shape"): 16, ("plan_chain", "key"): 34,
    ("plan_lifetimes", "born_at"): 21, ("plan_lifetimes", "tensor_name"): 19, ("plan_lifetimes", "readers"): 32,
    ("plan_lifetimes", "freed_at"): 21, ("plan_advice", "key"): 36, ("plan_advice", "peak_stage"): 12,
    ("plan_largest", "key"): 58,
}  # fmt: skip
BARS = "▁▂▃▄▅▆▇█"

Row = Mapping[str, Any]


def console() -> Console:
    """Standard output; a pipe is given a width at which tables do not wrap."""
    screen = Console(highlight=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen = Console(highlight=False, width=PIPED_WIDTH)
    return screen


def draw(table: Table, screen: Console, *, wide: bool = False) -> None:
    """Print one table."""
    if not table.rows:
        screen.print(f"{table.name}: nothing recorded", style="dim")
        return
    if table.name == "metrics":
        _draw_metrics(table, screen)
        return
    rows = _latest_steps(table)
    if table.name == "memory" and not wide:  # a stage begins as the one before it ended
        rows = [row for row in rows if row["instant"] != "begin"]
    columns = _columns(table, rows, screen, wide)
    grid = _grid(table, columns, rows[:MOST_ROWS], screen)
    _fill(grid, table, columns, rows[:MOST_ROWS], screen)
    screen.print(grid)
    if {row.get("step") for row in rows} != {row.get("step") for row in table.rows}:
        screen.print(f"earlier steps are left out; --step N shows one, --json all {len(table.rows)} rows", style="dim")
    if len(rows) > MOST_ROWS:
        screen.print(
            f"{len(rows) - MOST_ROWS} more rows; --step N or --stage NAME narrows, --csv gives all", style="dim"
        )
    if beneath := BENEATH.get(table.name):
        beneath(table, screen, columns)


def draw_result(names: Sequence[str], rows: Sequence[Sequence[Any]], screen: Console) -> None:
    """Print what a query gave; text from a run is printed as it is, never read as markup."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for name in names:
        grid.add_column(Text(name))
    for row in rows[:MOST_ROWS]:
        grid.add_row(*(Text(ABSENT if value is None else harmless(str(value))) for value in row))
    screen.print(grid)
    if len(rows) > MOST_ROWS:
        screen.print(f"{len(rows) - MOST_ROWS} more rows; --csv or --json has all", style="dim")


def _latest_steps(table: Table) -> list[Any]:
    if table.section != "step":
        return table.rows
    kept = sorted({row["step"] for row in table.rows if row["step"] is not None})[-MOST_STEPS:]
    return [row for row in table.rows if row["step"] in kept or row["step"] is None]


def _columns(table: Table, rows: list[Any], screen: Console, wide: bool) -> list[Column]:
    """The columns that a terminal of this width gets: `step` stands above its rows, empty wide columns take no room."""
    hidden = {"step"} if table.section == "step" else set()
    hidden |= {
        "phase",
        "dims",
        "broadcast",
        "common_bug_zh",
        "holder",
        "outlives",
        "ranks",
        "layers",
        "role",
        "mask_fits",
        "accesses",
    } | {column.name for column in table.columns if column.name.endswith("_min")}
    if table.name == "mesh":  # it has such columns of its own, and they are what it is about
        hidden = set()
    if table.name == "findings" and screen.width < ROOMY:  # JSON and CSV have them; here the message needs the room
        hidden |= {"severity", "order", "position", "scope", "evidence", "fix", "confidence"}
    shown = [column for column in table.columns if column.name not in hidden and (wide or not column.wide)]
    return [c for c in shown if not c.wide or any(row.get(c.name) is not None for row in rows)]


def _grid(table: Table, columns: list[Column], rows: list[Any], screen: Console) -> Grid:
    """Numbers are never cut, sentences wrap, names are cut last."""
    narrow = not _roomy(screen, columns)
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 0 if narrow else 1, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        long = (table.name, column.name) in WRAPPED
        number = column.form in NUMERIC
        width = _width(table, column, screen) if narrow else None
        whole = number or (table.name == "log" and column.form == "shape")
        grid.add_column(
            _heading(column, folded=narrow and screen.width < ROOMY),
            justify="right" if number else "left",
            no_wrap=not (long or width),
            overflow="fold" if long or width else "ellipsis",
            width=width,
            min_width=width or 18 if long else _longest(column, rows) if whole else None,
        )
    return grid


def _width(table: Table, column: Column, screen: Console) -> int | None:
    widths = NARROW | SPACIOUS_WIDTHS if screen.width >= SPACIOUS else NARROW
    return widths.get((table.name, column.name))


def folded(name: str, width: int) -> str:
    """A long name over several lines, broken behind `.`, `/` or `_` rather than in the middle of a word."""
    lines = [""]
    for piece in re.split(r"(?<=[./_=])", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _longest(column: Column, rows: list[Any]) -> int:
    return max((len(written(row.get(column.name), column.form)) for row in rows), default=0)


def _heading(column: Column, *, folded: bool) -> str:
    text = column.heading
    return text.replace(" / ", "/\n").replace(" ", "\n") if folded else text


def _fill(grid: Grid, table: Table, columns: list[Column], rows: list[Any], screen: Console) -> None:
    """A step stands on a line above its rows; any other section in the first column, once."""
    section: Any = object()
    roomy = _roomy(screen, columns)
    widths = [None if roomy else _width(table, column, screen) for column in columns]
    for row in rows:
        cells = [_cell(table, column, row, roomy=roomy) for column in columns]
        if table.section:
            begins, section = row[table.section] != section, row[table.section]
            if begins and rows[0] is not row:
                grid.add_section()
            if begins and table.section == "step":
                grid.add_row(Text(f"step {section}", style="bold cyan"), *[""] * (len(columns) - 1))
            if table.section != "step":
                cells[0] = Text(str(section or "(outside a stage)") if begins else "", style="bold cyan")
        grid.add_row(*(_fitted(cell, width) for cell, width in zip(cells, widths, strict=True)))


def _fitted(cell: Text, width: int | None) -> Text:
    """A name that is too long for its column, folded; sentences and shapes wrap by themselves."""
    if width is None or len(cell.plain) <= width or " " in cell.plain or "\n" in cell.plain:
        return cell
    return Text(folded(cell.plain, width), style=cell.style, spans=cell.spans if not cell.spans else [])


def _roomy(screen: Console, columns: list[Column]) -> bool:
    """Whether sentences find room in the table: a wide terminal, and no columns beyond the usual ones."""
    return screen.width >= ROOMY and not any(column.wide for column in columns)


def _cell(table: Table, column: Column, row: Row, *, roomy: bool) -> Text:
    if column.name == "common_bug":
        return _bug(table, row, roomy=roomy)
    special = CELLS.get((table.name, column.name))
    text = special(row) if special else Text(harmless(written(row.get(column.name), column.form)))
    if text.plain == ABSENT:
        text.stylize("dim")
    return text


def _place(row: Row) -> Text:
    return Text(f"{row['stage']}/{row['phase']}" if row["phase"] else row["stage"] or "whole step")


def _bug(table: Table, row: Row, *, roomy: bool) -> Text:
    """What the bug is in a few words where there is room; else the number under which it stands beneath the table."""
    bug = row["common_bug"]
    if bug is None:
        return Text(ABSENT, style="dim")
    return (
        Text(bug.partition(":")[0].partition(";")[0]) if roomy else Text(f"[{_numbered(table)[row['tensor_name']][0]}]")
    )


def _numbered(table: Table) -> dict[str, tuple[int, str]]:
    """Tensor -> (number, common bug), in the order in which they first stand in the table."""
    bugs = {row["tensor_name"]: row["common_bug"] for row in table.rows if row["common_bug"]}
    return {name: (number, bug) for number, (name, bug) in enumerate(bugs.items(), 1)}


def _logical(row: Row) -> Text:
    """Symbols, then numbers."""
    shape = row["logical_shape"]
    numbers = human_shape(shape, row["logical_shape_min"]) if shape is not None else ABSENT
    return Text.assemble(f"[{row['dims']}]\n", (numbers, "green")) if row["dims"] is not None else Text(numbers)


def _local(row: Row) -> Text:
    return Text(ABSENT if row["local_shape"] is None else human_shape(row["local_shape"], row["local_shape_min"]))


def _mask(row: Row) -> Text:
    parts = [row["mask"] or "", f"→ {row['broadcast']}" if row["broadcast"] else ""]
    text = Text(" ".join(part for part in parts if part) or ABSENT)
    if row["mask_fits"] is False:
        text.append(" does not fit", style="bold red")
    return text


def _freed(row: Row) -> Text:
    """Where it was freed; where that was later than declared, or never, by whom it is held."""
    text = Text(row["freed_at"] or ("stays" if row["lifetime"] == "persistent" else ABSENT))
    if row["outlives"]:
        text.append(f" held by {row['holder']}" if row["holder"] else "", style="red")
        text.append(f" (due {row['declared_freed_by']})", style="red")
    return text


def _tensor(row: Row) -> Text:
    return Text(row["tensor_name"]) if row["tensor_name"] else Text(f"({row['kind'] or 'unnamed'})", style="dim")


def _verdict(row: Row) -> Text:
    colour = {"fail": "bold red", "warn": "yellow", "pass": "green"}.get(row["verdict"], "dim")
    return Text(row["verdict"], style=colour)


CELLS: dict[tuple[str, str], Callable[[Row], Text]] = {
    ("shapes", "logical_shape"): _logical,
    ("shapes", "local_shape"): _local,
    ("shapes", "mask"): _mask,
    ("memory", "stage"): _place,
    ("lifetimes", "freed_at"): _freed,
    ("lifetimes", "tensor_name"): _tensor,
    ("findings", "verdict"): _verdict,
}


def _common_bugs(table: Table, screen: Console, columns: list[Column]) -> None:
    """The bugs by their numbers; a wide terminal has them in the table, in short."""
    if _roomy(screen, columns):
        screen.print("common bugs in short; flowledger explain TENSOR tells each in full", style="dim")
        return
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("", justify="right", no_wrap=True)
    grid.add_column("tensor", no_wrap=True)
    grid.add_column("common bug")
    for name, (number, bug) in _numbered(table).items():
        grid.add_row(f"[{number}]", name, bug)
    screen.print(grid)


def _where(row: Row) -> str:
    """`update_actor/backward, step 0, mini-batch 1, micro-batch 1 (at peak)`."""
    at = "".join(
        f", {name.replace('_', '-')} {row[name]}" for name in ("mini_batch", "micro_batch") if row[name] is not None
    )
    return f"{_place(row).plain}, step {row['step']}{at} (at {row['instant']})"


def _peak_and_estimates(table: Table, screen: Console, columns: list[Column]) -> None:
    peak = table.summary.get("peak")
    if not peak:
        return
    watched = peak["instant"] == "peak"
    of = "of live tensors" if watched and peak["allocated"] is None else "allocated"
    screen.print(f"[bold]peak[/bold] {human_bytes(peak['peak'])} {of} in {_where(peak)}")
    kinds = ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue")
    made = sorted(((peak[kind], kind) for kind in kinds if peak[kind]), reverse=True)
    if made:
        screen.print(
            "made of " + ", ".join(f"{kind} {human_bytes(size)} ({size / peak['peak']:.0%})" for size, kind in made)
        )
    if not watched:
        screen.print("not taken apart further: no operator was watched in this step (record.ops_every)", style="dim")
    reading = table.summary.get("allocator")
    if reading and reading["reserved"] is not None:
        spare = human_bytes(reading["reserved"] - reading["allocated"])
        screen.print(
            f"allocator: at most {human_bytes(reading['allocated'])} when asked, in {_where(reading)}; reserved "
            f"{human_bytes(reading['reserved'])}, of which {spare} were not allocated then"
        )
    screen.print("resid: what no tensor explains (the process itself); live: the sum of the kinds", style="dim")
    if not table.summary["estimates"]:
        return
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("rough estimate", "estimate", "measured", "deviation"):
        grid.add_column(heading, justify="left" if heading == "rough estimate" else "right")
    for row in table.summary["estimates"]:
        lacks = f"  [dim]skipped: needs {', '.join(row['needs'])}[/dim]" if row["needs"] else ""
        deviation = ABSENT if row["deviation"] is None else f"{row['deviation']:+.0%}"
        grid.add_row(
            f"{row['name']} ≈ {row['formula']}{lacks}",
            written(row["estimate"], "bytes"),
            written(row["measured"], "bytes"),
            deviation,
        )
    screen.print(grid)


BENEATH: dict[str, Callable[[Table, Console, list[Column]], None]] = {
    "shapes": _common_bugs,
    "memory": _peak_and_estimates,
}


def _draw_metrics(table: Table, screen: Console) -> None:
    """One line a metric: how it went over the steps."""
    series: dict[str, list[Row]] = {}
    for row in table.rows:
        series.setdefault(row["name"], []).append(row)
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("metric", "steps", "first", "last", "min", "max", "course"):
        grid.add_column(heading, justify="left" if heading in ("metric", "course") else "right", no_wrap=True)
    for name, rows in sorted(series.items()):
        values = [row["value"] for row in rows if row["value"] is not None]
        ends = [row["special"] or written(row["value"], "number") for row in (rows[0], rows[-1])]
        extremes = [human_number(min(values)), human_number(max(values))] if values else [ABSENT, ABSENT]
        grid.add_row(Text(harmless(name)), str(len(rows)), *ends, *extremes, spark([row["value"] for row in rows]))
    screen.print(grid)


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
