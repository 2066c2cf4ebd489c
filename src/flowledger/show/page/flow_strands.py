"""A strand of the flow: the life of one tensor over the columns, in one piece or several."""

from collections.abc import Mapping
from typing import Any

from flowledger.flow.tensors import tensors
from flowledger.show.page.book import Rows
from flowledger.show.page.flow_columns import Columns, place

Row = Mapping[str, Any]


def strand(name: str, uses: Rows, fates: Rows, grid: Columns, *, first: bool = False) -> dict[str, Any]:
    """`pieces` from birth to release, `reads` and `writes` as columns, and the row of the tensor.

    A piece has `born` (null: it was there before), `until` (the last column that needs it), `freed`, and `ends`, how that is known: freed,
    after (the step), held, stays, declared by the flow, or unseen. `made`: [column, index of the use] each time it is made. `first`: nothing
    is known to have been there before this step.
    """
    known = tensors().get(name)
    main = next((row for row in uses if "write" in (row["access"] or "")), uses[0])
    kind = main["kind"] or next((row["kind"] for row in fates), None)
    persistent = main["lifetime"] == "persistent"
    pieces = [_whole(uses, grid, first=first)] if persistent else _pieces(name, uses, fates, grid)
    return {
        "tensor_name": name,
        "known": known is not None,
        **{key: main[key] for key in ("dtype", "mask", "lifetime", "owner", "owner_rank")},
        "kind": kind,
        "bytes": max((row["bytes"] for row in uses if row["bytes"] is not None), default=None),
        "reads": sorted(_largest(uses, "read", grid)),
        "writes": sorted(_largest(uses, "write", grid)),
        "pieces": pieces,
    }


def _whole(uses: Rows, grid: Columns, *, first: bool) -> dict[str, Any]:
    """What stays: from before the step to behind it; in the first step from where it is made, unless somebody has read it before."""
    made = [[at, use] for at, use in sorted(_largest(uses, "write", grid).items())]
    read = min(_largest(uses, "read", grid), default=grid.after)
    return {
        "born": made[0][0] if first and made and made[0][0] <= read else None, "until": grid.after, "freed": grid.after, "ends": "stays", "made": made,
        "outlives": False, "holder": None, "bytes": max((row["bytes"] or 0 for row in uses), default=0),
    }  # fmt: skip


def _pieces(name: str, uses: Rows, fates: Rows, grid: Columns) -> list[dict[str, Any]]:
    """Each making begins a piece, or goes on with one that is not yet freed; so does a reading of what nobody saw made."""
    reads = _largest(uses, "read", grid)
    makings = _makings(uses, fates, grid)
    found: list[dict[str, Any]] = []
    for at in sorted({*reads, *makings}):
        gone = not found or at > found[-1]["freed"]
        if not gone and at not in makings:
            continue
        use = makings.get(at, reads.get(at))
        fate = _fate(name, at, [*reads], fates, grid)
        fate["bytes"] = _bytes(uses, use, fates, at, grid)
        if gone:
            found.append({"born": at, **fate, "made": [[at, use]]})
        else:
            _go_on(found[-1], at, use, fate)
    for one in found:  # what was read is needed, whatever was declared
        last = max((at for at in reads if one["born"] <= at <= one["freed"]), default=one["born"])
        one["until"] = min(max(one["until"], last), one["freed"])
    return found


def _makings(uses: Rows, fates: Rows, grid: Columns) -> dict[int, int | None]:
    """Column -> use: where a stage writes the tensor, or where a storage of it is born that another stage reads."""
    written: dict[int, int | None] = {**_largest(uses, "write", grid)}
    for row in fates:
        at = grid.begin(row["born_at"])
        stage = (row["born_at"] or "").partition("/")[0]
        if at is not None and any(reader != stage for reader in row["readers"]):
            written.setdefault(at, None)
    return written


def _largest(uses: Rows, access: str, grid: Columns) -> dict[int, int]:
    found: dict[int, int] = {}
    for use, row in enumerate(uses):
        at = _at(row, grid)
        if at is None or access not in (row["access"] or ""):
            continue
        if at not in found or (row["bytes"] or 0) > (uses[found[at]]["bytes"] or 0):
            found[at] = use
    return found


def _fate(name: str, at: int, reads: list[int], fates: Rows, grid: Columns) -> dict[str, Any]:
    """When a tensor that is made in a column is needed last and freed; the longest of its storages counts."""
    mine = [row for row in fates if grid.begin(row["born_at"]) == at]
    due = max((end for row in mine if (end := grid.end(_due(row))) is not None), default=None)
    if due is None:
        due = grid.end(_declared(name, at, grid))
    last = max((one for one in reads if one >= at), default=at)
    freed, how, row = max(
        (_end(row, at, grid) for row in mine),
        key=lambda one: (one[1] == "held", one[0], one[1] != "unseen"),
        default=(due, "declared", None) if due is not None else (last, "unseen", None),
    )
    freed = max(freed, at)
    return {
        "until": max(at, min(due if due is not None else last, freed)),
        "freed": freed,
        "ends": how,
        "outlives": _said(mine, "outlives"),
        "holder": _said(mine, "holder"),
        "storages": row["storages"] if row else None,
    }


def _end(row: Row, at: int, grid: Columns) -> tuple[int, str, Row | None]:
    """The column in which storages end that were watched, and how that is known."""
    freed = grid.end(row["freed_at"])
    if freed is None:
        return grid.after, "held" if row["holder"] else "unseen", row
    return max(freed, at), "after" if freed == grid.after else "freed", row


def _due(row: Row) -> str | None:
    due = row["declared_freed_by"]
    return None if due == "never" else due


def _declared(name: str, at: int, grid: Columns) -> str | None:
    """Where the flow says that a tensor made in this column is freed."""
    known = tensors().get(name)
    if known is None or known.freed_by == "never":
        return None
    stage = grid.places[at][0]
    return next((one for one in known.also_freed_by if one.partition("/")[0] == stage), known.freed_by)


def _go_on(piece: dict[str, Any], at: int, use: int | None, fate: Row) -> None:
    piece["made"].append([at, use])
    if fate["freed"] > piece["freed"]:
        piece.update({key: fate[key] for key in ("freed", "ends", "storages")})
    piece["until"] = max(piece["until"], fate["until"])
    piece["bytes"] = max(piece["bytes"], fate["bytes"])
    piece["outlives"] = piece["outlives"] or fate["outlives"]
    piece["holder"] = piece["holder"] or fate["holder"]


def _bytes(uses: Rows, use: int | None, fates: Rows, at: int, grid: Columns) -> int:
    if use is not None and uses[use]["bytes"] is not None:
        return int(uses[use]["bytes"])
    born = [row["bytes"] for row in fates if grid.begin(row["born_at"]) == at and row["bytes"] is not None]
    return int(max(born, default=max((row["bytes"] or 0 for row in uses), default=0)))


def _said(rows: Rows, column: str) -> Any:
    return next((row[column] for row in rows if row[column]), rows[0][column] if rows else None)


def _at(row: Row, grid: Columns) -> int | None:
    return grid.begin(place(row))
