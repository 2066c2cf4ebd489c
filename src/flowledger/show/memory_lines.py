"""What stands beneath the memory table: the peak and what it is made of, the allocator, and the rough estimates."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.columns import Column, Table
from flowledger.show.words import ABSENT, human_bytes, written

Row = Mapping[str, Any]


def place(row: Row) -> Text:
    return Text(f"{row['stage']}/{row['phase']}" if row["phase"] else row["stage"] or "whole step")


def _where(row: Row, rank: int | None) -> str:
    """`update_actor/backward, step 0, mini-batch 1, micro-batch 1, rank 2 (at peak)`."""
    at = "".join(
        f", {name.replace('_', '-')} {row[name]}" for name in ("mini_batch", "micro_batch") if row[name] is not None
    )
    on = "" if rank is None else f", rank {rank}"
    step = "outside of the steps" if row["step"] is None else f"step {row['step']}"
    return f"{place(row).plain}, {step}{at}{on} (at {row['instant']})"


def peak_and_estimates(table: Table, screen: Console, _columns: Sequence[Column]) -> None:
    peak = table.summary.get("peak")
    if not peak:
        return
    watched, several = peak["instant"] == "peak", len({row["rank"] for row in table.rows}) > 1
    of = "of live tensors" if watched and peak["allocated"] is None else "allocated"
    screen.print(
        f"[bold]peak[/bold] {human_bytes(peak['peak'])} {of} in {_where(peak, peak['rank'] if several else None)}"
    )
    kinds = ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue")
    made = sorted(((peak[kind], kind) for kind in kinds if peak[kind]), reverse=True)
    if made:
        screen.print(
            "made of " + ", ".join(f"{kind} {human_bytes(size)} ({size / peak['peak']:.0%})" for size, kind in made)
        )
    if not watched:
        screen.print("not taken apart further: no operator was watched in this step (record.ops_every)", style="dim")
    counted = table.summary.get("counted")
    if counted:
        on = f" of rank {counted['rank']}" if several else ""
        screen.print(
            f"counted by the device{on}: at most {human_bytes(counted['peak_since_stage'])} allocated and "
            f"{human_bytes(counted['reserved_peak_since_stage'])} reserved, in {place(counted).plain} of step {counted['step']}"
        )
    reading = table.summary.get("allocator")
    if reading and reading["reserved"] is not None:
        spare = human_bytes(reading["reserved"] - reading["allocated"])
        screen.print(
            f"allocator: at most {human_bytes(reading['allocated'])} when asked, in "
            f"{_where(reading, reading['rank'] if several else None)}; reserved "
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
            "not measured" if row["estimate"] and not row["measured"] else written(row["measured"], "bytes"),
            deviation,
        )
    screen.print(grid)
