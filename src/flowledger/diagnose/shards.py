"""What all ranks hold of a tensor, put together: it must be the logical tensor, nothing missing and nothing twice."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from flowledger.flow.dims import parse_shape
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Mesh, logical_shape, mesh
from flowledger.flow.stages import mesh_of
from flowledger.ledger.assemble import SAME

Rows = list[dict[str, Any]]

# Symbols whose size each rank has for itself: micro-batches differ, and so do decode steps.
RAGGED = {"B_micro", "B_run", "B_admit", "B_slot", "N_decode", "S_cache", "T", "T_logit", "P"}

# Frameworks in which each rank pads its samples to its own longest (verl: does not pad them), and the widths that differ by it.
PAD_ALONE = {"trl", "verl", "own"}
WIDTHS = {"S_prompt", "S_resp", "S"}


def breaches(rows: Rows, meshes: Mapping[str, Mesh], group_size: int, *, pad_alone: bool) -> list[str]:
    """Where the rows of all ranks do not give the logical tensor, in words; `pad_alone`: each rank pads to its own longest."""
    found: list[str] = []
    ranked = [row for row in rows if row["rank"] is not None]  # a process beside the ranks has no part of anything
    for _, access in groupby(sorted(ranked, key=_access_key), key=_access_key):
        each = list(access)
        found += _put_together(_levelled(each) if pad_alone else each, meshes, group_size)
    return found


def _put_together(rows: Rows, meshes: Mapping[str, Mesh], group_size: int) -> list[str]:
    """The shards of one access on all ranks against the logical shape that each rank stated.

    Ranks that sample share prompts: where they hold samples, `group_size` of them stay together.
    A rank may access a tensor several times at one place (decode steps, chunks of logits): the n-th access of one rank
    belongs to the n-th of every other.
    """
    lies_on = mesh_of(rows[0]["tensor_name"], rows[0]["stage"], rows[0]["access"])
    by_rank: dict[int, Rows] = {}
    for row in sorted(rows, key=lambda row: int(row["seq"])):
        by_rank.setdefault(row["rank"], []).append(row)
    breaches = []
    for nth in zip(*by_rank.values(), strict=False):
        breaches += _whole(list(nth), meshes[lies_on], group_size if lies_on == "rollout" else 1)
    return breaches


def _levelled(rows: Rows) -> Rows:
    """The same rows, each as wide as the widest rank's: what they differ in there is padding."""
    wide = [bool(WIDTHS & dim.symbols) for dim in parse_shape(rows[0]["dims"] or "[]")]
    if not any(wide) or any(len(row["local_shape"]) != len(wide) for row in rows):
        return rows
    most = [max(sizes) for sizes in zip(*(row["local_shape"] for row in rows), strict=True)]
    return [
        row
        | {
            "local_shape": [
                top if level else size for top, size, level in zip(most, row["local_shape"], wide, strict=True)
            ]
        }
        for row in rows
    ]


def _whole(rows: Rows, on: Mesh, group_size: int) -> list[str]:
    """One access of one tensor on the ranks that have it, cut as its placement says, chunk by chunk."""
    dims = parse_shape(rows[0]["dims"] or "[]")
    if not dims or RAGGED & {symbol for dim in dims for symbol in dim.symbols}:
        return []  # every rank has what it happens to have: there is only the sum
    stated = {tuple(row["logical_shape"]) for row in rows if row["logical_shape"]}
    if len(stated) > 1:
        return [f"{where(rows[0])}: ranks disagree on the logical shape: {sorted(stated)}"]
    placements = dict(pair.split(": ", 1) for pair in rows[0]["placement"] or () if ": " in pair)
    locals_ = _on_one_stage({row["rank"]: row["local_shape"] for row in rows}, on)
    if locals_ is None or not stated:
        return []
    shapes, within = locals_
    units = [group_size if {"B_prompt", "G"} <= dim.symbols else 1 for dim in dims]
    try:
        counted = {rank: _in_units(shape, units) for rank, shape in shapes.items()}
        whole = tuple(size * unit for size, unit in zip(logical_shape(counted, placements, within), units, strict=True))
    except BadInput as error:
        return [f"{where(rows[0])}: {error}"]
    return [] if whole in stated else [f"{where(rows[0])}: shards give {list(whole)}, stated is {list(*stated)}"]


def _in_units(shape: list[int], units: list[int]) -> list[int]:
    """A local shape in groups of samples where these stay together. Raises BadInput for a part of a group."""
    for size, unit in zip(shape, units, strict=True):
        if size % unit:
            raise BadInput(f"{size} samples are no whole groups of {unit}")
    return [size // unit for size, unit in zip(shape, units, strict=True)]


def _on_one_stage(locals_: dict[int, Any], on: Mesh) -> tuple[dict[int, Any], Mesh] | None:
    """The local shapes, with the mesh of the ranks that have one: all, or those of one pipeline stage; else None."""
    if len(locals_) == on.size:
        return locals_, on
    stages_ = {on.coordinates(rank)["pp"] for rank in locals_}
    within = mesh(**{axis: degree for axis, degree in on.degrees if axis != "pp"})
    if len(stages_) != 1 or len(locals_) != within.size:
        return None
    return {at: locals_[rank] for at, rank in enumerate(sorted(locals_))}, within


def where(row: Mapping[str, Any]) -> str:
    return f"{row['tensor_name']} at {row['stage']}{'/' + row['phase'] if row['phase'] else ''} (step {row['step']})"


def _access_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SAME)
