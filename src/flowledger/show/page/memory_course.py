"""The memory of one process through one step: reading after reading, in the order in which they were taken."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flowledger.flow.kinds import KINDS

Row = dict[str, Any]

TELLING = tuple(kind for kind in KINDS if kind != "residue")  # what tensors explain
PLACE = ("stage", "phase", "epoch", "mini_batch", "micro_batch", "instant")
ALLOCATOR = ("known", "allocated", "reserved", "peak_since_stage", "reserved_peak_since_stage", "device_used", "host_used", "limit", "fragmentation")  # fmt: skip
# Of the chart: where it stands, which band of its stage, whether the table below has it, the step's peak, what was planned for the stage.
DRAWN = ("at", "band", "listed", "untold", "peak", "planned")
NAMES = (*PLACE, *KINDS, *ALLOCATOR, *DRAWN)
MOST = 240  # bars that can be told apart


def course(readings: Sequence[Mapping[str, Any]], listed: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The readings of a process in a step, as they are drawn. `listed`: those of the memory ledger, in its order.

    `at`: position; `band`: the stretch of one stage it belongs to; `untold`: what is allocated where nothing tells the kinds.
    Where there are more than can be told apart, those of the memory ledger alone.
    """
    order = {_key(row): place for place, row in enumerate(listed)}
    chosen = [row for row in readings if _key(row) in order] if len(readings) > MOST else readings
    ordered = sorted(chosen, key=lambda row: row["t_ns"])
    drawn: list[Row] = []
    for band, (_, rows) in enumerate(groupby(ordered, key=lambda row: row["stage"])):
        for row in rows:
            untold = row["allocated"] if row["known"] is None else None
            drawn.append({**row, "at": len(drawn), "band": band, "listed": order.get(_key(row)), "untold": untold})
    return drawn


def with_peak(rows: Sequence[Row], peak: Mapping[str, Any] | None) -> list[Row]:
    """The same, with the step's peak marked at its reading."""
    mark = peak and _key(peak)
    return [{**row, "peak": peak["peak"]} if peak and _key(row) == mark else row for row in rows]


def with_plan(rows: Sequence[Row], planned: Mapping[str, int]) -> list[Row]:
    """The same, with the planned peak of each reading's stage (stage -> bytes)."""
    return [{**row, "planned": planned.get(row["stage"])} for row in rows]


def drawn(rows: Sequence[Row], name: str, *, hides: bool) -> list[Row]:
    """The readings that a chart shows: where residue would hide the kinds, there is one of those that know the kinds, and one of
    those at which the allocator was asked."""
    if not hides:
        return [*rows]
    asked = "allocated" if name == "residue" else "known"
    shown = [{**row, "at": at} for at, row in enumerate(row for row in rows if row[asked] is not None)]
    if name == "residue":
        return shown
    return [
        {**row, "peak": None} if (row.get("peak") or 0) > row["known"] else row for row in shown
    ]  # of the whole process


def told(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The kinds that have bytes anywhere, in their order; `untold` last."""
    return tuple(kind for kind in (*KINDS, "untold") if any((row.get(kind) or 0) > 0 for row in rows))


def is_hidden_by_residue(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what no tensor explains is so much more than the rest that a chart with it would show nothing else."""
    most = max((row["known"] or 0 for row in rows), default=0)
    return max((row["residue"] or 0 for row in rows), default=0) > 3 * most > 0


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)
