"""Tables drawn for a terminal: readable at 100 columns, grouped, with what matters beneath."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.flow.rank_classes import count_of
from flowledger.show import metric_lines
from flowledger.show.columns import Column, Table
from flowledger.show.fitting import ROOMY, WRAPPED, fitted, is_cramped, print_whole, widths_of
from flowledger.show.memory_lines import is_shown, peak_and_estimates, place
from flowledger.show.words import ABSENT, NUMERIC, harmless, human_shape, written

PIPED_WIDTH = 160  # columns where nobody looks: a file, a pipe
MOST_ROWS = 400
MOST_STEPS = 3  # sections of a step, unless a step is asked for
ABBREVIATED = 999.5  # bytes from which a size is written with a letter
MOST_RANKS = 8  # that a sentence names one by one

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
        metric_lines.draw(table, screen)
        return
    rows = latest = _latest_steps(table)
    if table.name == "memory" and not wide:
        rows = [row for row in rows if is_shown(table, row)] or rows
    columns = _columns(table, rows, screen, wide)
    if title := TITLES.get(table.name):
        title(table, screen)
    grid = _filled(table, columns, rows[:MOST_ROWS], screen, wide=wide)
    if wide:
        print_whole(grid, screen)
    else:
        screen.print(grid)
    if {row.get("step") for row in latest} != {row.get("step") for row in table.rows}:
        screen.print(f"earlier steps are left out; --step N shows one, --json all {len(table.rows)} rows", style="dim")
    if len(rows) > MOST_ROWS:
        screen.print(
            f"{len(rows) - MOST_ROWS} more rows; --step N or --stage NAME narrows, --csv gives all", style="dim"
        )
    if beneath := BENEATH.get(table.name):
        beneath(table, screen, columns)
    if _abbreviated(columns, rows):
        screen.print("sizes in bytes: K, M, G, T are KiB, MiB, GiB, TiB (powers of 1024)", style="dim")


def draw_result(names: Sequence[str], rows: Sequence[Sequence[Any]], screen: Console) -> None:
    """Print what a query gave; text from a run is printed as it is, never read as markup."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    if not rows:
        screen.print(Text(f"no rows; the columns are {', '.join(map(harmless, names))}"))
        return
    for name in names:
        grid.add_column(Text(name))
    for row in rows[:MOST_ROWS]:
        grid.add_row(*(Text(ABSENT if value is None else harmless(str(value))) for value in row))
    if is_cramped(grid, screen):
        print_whole(grid, screen)
    else:
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
    return [c for c in shown if not (c.wide or c.sparse) or any(row.get(c.name) is not None for row in rows)]


def _abbreviated(columns: list[Column], rows: list[Any]) -> bool:
    """Whether a size stands in the table that is not written out."""
    sizes = [column.name for column in columns if column.form == "bytes"]
    return any(abs(row.get(name) or 0) >= ABBREVIATED for row in rows for name in sizes)


def _filled(table: Table, columns: list[Column], rows: list[Any], screen: Console, *, wide: bool) -> Grid:
    """Numbers are never cut, sentences wrap, names are cut last; `wide`: nothing is squeezed."""
    roomy = _roomy(screen, columns)
    narrow = not roomy and not wide
    cells = [[_cell(table, column, row, roomy=roomy) for column in columns] for row in rows]
    if table.section and table.section != "step":
        for line, row in zip(cells, rows, strict=True):
            line[0] = Text(str(row[table.section] or "(outside a stage)"), style="bold cyan")
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 0 if narrow else 1, 0, 0), header_style="bold", pad_edge=False)
    widths = widths_of(table, columns, cells, screen) if narrow else [None] * len(columns)
    for column, width in zip(columns, widths, strict=True):
        _add_column(grid, table, column, rows, width, folded=narrow and screen.width < ROOMY)
    _fill(grid, table, rows, [list(map(fitted, line, widths)) for line in cells])
    return grid


def _add_column(grid: Grid, table: Table, column: Column, rows: list[Any], width: int | None, *, folded: bool) -> None:
    long, number = (table.name, column.name) in WRAPPED, column.form in NUMERIC
    whole = number or (table.name == "log" and column.form == "shape")
    grid.add_column(
        _heading(column, folded=folded, lines=3 if width else 2),
        justify="right" if number else "left",
        no_wrap=not (long or width),
        overflow="fold" if long or width else "ellipsis",
        width=width,
        min_width=width or min(18, _longest(column, rows)) if long else _longest(column, rows) if whole else None,
    )


def _longest(column: Column, rows: list[Any]) -> int:
    return max((len(written(row.get(column.name), column.form)) for row in rows), default=0)


def _heading(column: Column, *, folded: bool, lines: int) -> str:
    """A word a line in a narrow column; in one that is as wide as what it holds, two lines, as equal as they can be."""
    text = column.heading
    if not folded or " / " in text or lines > 2:
        return text.replace(" / ", "/\n").replace(" ", "\n") if folded else text
    words = text.split()
    ways = ([" ".join(words[:at]), " ".join(words[at:])] for at in range(1, len(words)))
    return "\n".join(min(ways, key=lambda way: max(map(len, way)), default=words))


def _fill(grid: Grid, table: Table, rows: list[Any], lines: list[list[Text]]) -> None:
    """A step stands on a line above its rows; any other section in the first column, once."""
    section: Any = object()
    for row, cells in zip(rows, lines, strict=True):
        if table.section:
            begins, section = row[table.section] != section, row[table.section]
            if begins and rows[0] is not row:
                grid.add_section()
            if begins and table.section == "step":
                title = "outside of the steps" if section is None else f"step {section}"
                grid.add_row(Text(title, style="bold cyan"), *[""] * (len(cells) - 1))
            if table.section != "step" and not begins:
                cells[0] = Text("")
        grid.add_row(*cells)


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


def _owners(row: Row) -> Text:
    """Whose parts make up one copy, and how many ranks hold the tensor where that is more."""
    owners, holders = row["owner_rank"], row["held_by"] or 0
    counted = count_of(owners) if owners else None
    return Text((owners or ABSENT) + (f"\nheld by {holders}" if counted and counted < holders else ""))


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


OUTCOMES = {
    "equal": "green",
    "explained": "cyan",
    "unequal": "bold red",
    "came true": "green",
    "did not come true": "red",
}


def _outcome(row: Row) -> Text:
    return Text(row["outcome"], style=OUTCOMES.get(row["outcome"], "dim"))


CELLS: dict[tuple[str, str], Callable[[Row], Text]] = {
    ("shapes", "logical_shape"): _logical,
    ("shapes", "local_shape"): _local,
    ("shapes", "mask"): _mask,
    ("shapes", "owner_rank"): _owners,
    ("memory", "stage"): place,
    ("lifetimes", "freed_at"): _freed,
    ("lifetimes", "tensor_name"): _tensor,
    ("findings", "verdict"): _verdict,
    ("diff_findings", "verdict"): _verdict,
    ("diff_shapes", "outcome"): _outcome,
    ("diff_checks", "outcome"): _outcome,
}


OWNER_RANK = (
    "owner rank: ranks whose parts make up one copy of the whole (`held by` so many, where others have copies); "
    "0-12:4 is every fourth rank from 0 to 12"
)


def _common_bugs(table: Table, screen: Console, columns: list[Column]) -> None:
    """Whose copy `owner rank` is, and the bugs by their numbers; a wide terminal has them in the table, in short."""
    if any((row["held_by"] or 0) > 1 for row in table.rows):
        screen.print(Text(OWNER_RANK, style="dim"))
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


SHARE = "share: of all ranks' time in the step, the part that the stage had for itself, without stages inside of it"
SLOWEST = (
    "time: the longest of any rank; slowest rank: who worked longest, its time less what it waited for later ranks"
)
WAITED = "waited: the slowest rank alone; of all ranks' time the part is the metric bubble/<stage>"


def _shares(table: Table, screen: Console, columns: list[Column]) -> None:
    screen.print(Text(SHARE, style="dim"))
    if any(row.get("slowest_rank") is not None for row in table.rows):
        screen.print(Text(SLOWEST, style="dim"))
    if any(row.get("waited_seconds") for row in table.rows):
        screen.print(Text(WAITED, style="dim"))


def _waits(table: Table, screen: Console, columns: list[Column]) -> None:
    """`step 0: rank 0 waited 20.1 s for rank 1 in filter (all_reduce over world); rank 1 was in reward`."""
    for row in table.summary.get("waits", ()):
        ranks, last, group = row["ranks"], row["last_rank"], row["group"]
        if len(ranks) == 1:
            who = f"rank {ranks[0]} waited"
        else:
            named = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= MOST_RANKS else f"{len(ranks)} ranks"
            who = f"{named} waited up to"
        over = "" if group is None else f" of ranks {group}" if group[0].isdigit() else f" over {group}"
        where = f"; rank {last} was in {row['last_stage']}" if row["last_stage"] else ""
        screen.print(
            f"step {row['step']}: {who} {written(row['seconds'], 'seconds')} for rank {last} in "
            f"{row['stage'] or 'no stage'} ({row['comm_type']}{over}){where}",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _asked(table: Table, screen: Console) -> None:
    """What was asked for, and the step whose samples are meant: `who holds sample 3 of step 0`."""
    asked, step = table.summary.get("asked", {}), table.summary.get("step")
    if asked:
        named = ", ".join(f"{word} {number}" for word, number in asked.items())
        screen.print(f"who holds {named}" + ("" if step is None else f" (trained on in step {step})"), style="bold")


TITLES: dict[str, Callable[[Table, Console], None]] = {"mesh": _asked}


def _notes(table: Table, screen: Console, columns: list[Column]) -> None:
    for note in table.summary.get("notes", ()):
        screen.print(note, style="dim", markup=False)


BENEATH: dict[str, Callable[[Table, Console, list[Column]], None]] = {
    "shapes": _common_bugs,
    "memory": peak_and_estimates,
    "stages": _shares,
    "balance": _waits,
    "mesh": _notes,
}
