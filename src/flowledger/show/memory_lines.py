"""What stands beneath the memory table: the peak and what it is made of, what was asked for in vain, the allocator, the rough estimates."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.flow.kinds import KINDS
from flowledger.show.allocator import held_back
from flowledger.show.columns import Column, Table
from flowledger.show.words import ABSENT, human_bytes, written

Row = Mapping[str, Any]

MOST_SHORTAGES = 3  # that are told one by one
IN_BETWEEN = "between stages"
SIZES = (*KINDS, "known", "allocated", "reserved")
PLACE = ("process", "step", "stage", "phase", "instant")
NAMED = ("peak", "allocator")  # readings of the summary that a line beneath the table speaks of
ABSENT_PARTS = {
    "import": "not taken apart further: an imported log has totals only; a memory snapshot of torch has every block (flowledger import SNAPSHOT)",
    "record": "not taken apart further: no operator was watched in this step (record.ops_every)",
}
RESIDUE = "resid: what no tensor explains (the process itself); live: the sum of the kinds"


def place(row: Row) -> Text:
    """Stage and phase; without a stage the step from end to end, or at its peak what lies between its stages."""
    if row["stage"]:
        return Text(f"{row['stage']}/{row['phase']}" if row["phase"] else row["stage"])
    instant = row.get("instant")
    if row["step"] is None or instant not in ("begin", "peak", "end"):
        return Text(ABSENT)
    return Text(IN_BETWEEN if instant == "peak" else "whole step")


def is_shown(table: Table, row: Row) -> bool:
    """Whether a reading has a row without --wide: not where no size is known (but the host's), and not at the begin of a stage,
    which is as the one before it ended, unless a line beneath speaks of it."""
    if all(row[name] is None for name in SIZES):
        return False
    if row["instant"] != "begin":
        return True
    named = (table.summary.get(name) for name in NAMED)
    return any(one and all(one[name] == row[name] for name in PLACE) for one in named)


def _where(row: Row, rank: int | None) -> str:
    """`in update_actor/backward, step 0, mini-batch 1, micro-batch 1, rank 2`, or `outside of the steps`."""
    at = "".join(
        f", {name.replace('_', '-')} {row[name]}" for name in ("mini_batch", "micro_batch") if row[name] is not None
    )
    on = "" if rank is None else f", rank {rank}"
    step = "outside of the steps" if row["step"] is None else f"step {row['step']}"
    where = ", ".join(one for one in (place(row).plain, f"{step}{at}{on}") if one != ABSENT)
    return where if where.startswith("outside") else f"in {where}"


def peak_and_estimates(table: Table, screen: Console, _columns: Sequence[Column]) -> None:
    peak = table.summary.get("peak")
    if not peak:
        return
    several = len({row["rank"] for row in table.rows}) > 1
    _peak(peak, screen, several=several)
    _ran_out(table.summary.get("shortages") or [], screen, several=several)
    _allocator(table.summary, screen, several=several)
    if any(row["known"] is not None or row["residue"] is not None for row in table.rows):
        screen.print(RESIDUE, style="dim")
    _estimates(table.summary["estimates"], screen, imported=peak["source"] == "import")


def _peak(peak: Row, screen: Console, *, several: bool) -> None:
    watched = peak["instant"] == "peak"
    of = "of live tensors" if watched and peak["allocated"] is None else "allocated"
    where = _where(peak, peak["rank"] if several else None)
    screen.print(f"[bold]peak[/bold] {human_bytes(peak['peak'])} {of} {where} (at {peak['instant']})")
    made = sorted(((peak[kind], kind) for kind in KINDS if peak[kind]), reverse=True)
    if made:
        screen.print(
            "made of " + ", ".join(f"{kind} {human_bytes(size)} ({size / peak['peak']:.0%})" for size, kind in made)
        )
    if not watched and (lacks := ABSENT_PARTS.get(peak["source"])):
        screen.print(lacks, style="dim")


def _ran_out(shortages: Sequence[Row], screen: Console, *, several: bool) -> None:
    """`ran out in update_actor/forward, step 4: 10G more were asked for, 7.6G were free`."""
    for one in shortages[:MOST_SHORTAGES]:
        free = "" if one["free"] is None else f", {human_bytes(one['free'])} were free"
        asked = f"{human_bytes(one['asked'])} more were asked for{free}"
        where = _where(one, one["rank"] if several or one["rank"] else None)
        screen.print(f"[bold red]ran out[/bold red] {where}: {asked}")
    if len(shortages) > MOST_SHORTAGES:
        screen.print(f"and {len(shortages) - MOST_SHORTAGES} more times; show findings has each", style="dim")


def _allocator(summary: Mapping[str, Any], screen: Console, *, several: bool) -> None:
    counted, reading = summary.get("counted"), summary.get("allocator")
    if counted:
        on = f" of rank {counted['rank']}" if several else ""
        screen.print(
            f"counted by the device{on}: at most {human_bytes(counted['peak_since_stage'])} allocated and "
            f"{human_bytes(counted['reserved_peak_since_stage'])} reserved, in {place(counted).plain} of step {counted['step']}"
        )
    if reading:
        where = _where(reading, reading["rank"] if several else None)
        spare = (
            ""
            if reading["allocated"] is None
            else f"; {human_bytes(held_back(reading))} of that were not allocated then"
        )
        screen.print(
            f"allocator: at most {human_bytes(reading['reserved'])} reserved when asked, {where} (at {reading['instant']}){spare}"
        )


def _estimates(rows: Sequence[Row], screen: Console, *, imported: bool) -> None:
    """The rough estimates; where none could be made what they lack, in a line, and of an import nothing: nobody can add it."""
    if not any(row["estimate"] is not None for row in rows):
        lacks = ", ".join(dict.fromkeys(need for row in rows for need in row["needs"]))
        if lacks and not imported:
            screen.print(f"rough estimates are left out: they need {lacks}", style="dim")
        return
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("rough estimate", "estimate", "measured", "deviation"):
        grid.add_column(heading, justify="left" if heading == "rough estimate" else "right")
    for row in rows:
        lacks = f"  [dim]skipped: needs {', '.join(row['needs'])}[/dim]" if row["needs"] else ""
        deviation = ABSENT if row["deviation"] is None else f"{row['deviation']:+.0%}"
        grid.add_row(
            f"{row['name']} ≈ {row['formula']}{lacks}",
            written(row["estimate"], "bytes"),
            "not measured" if row["estimate"] and not row["measured"] else written(row["measured"], "bytes"),
            deviation,
        )
    screen.print(grid)
