"""Lifetimes: one bar a tensor from birth to release, the rows of `show RUN lifetimes`, with where and when each begins and ends."""

from collections.abc import Sequence
from typing import Any

from flowledger.show.page.book import Book, Rows, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.flow import AS_PLANNED, first_step, why_nothing
from flowledger.show.page.flow_columns import Columns, columns, place, planned, recorded_shapes, steps
from flowledger.show.page.lifetimes_rows import recorded_lifetimes
from flowledger.show.tables import TABLES

NO_STORAGES = text(
    "No storages were watched and none are planned, so nobody knows when a tensor was freed: record.level = tensors watches them.",
    "没有监视存储，也没有计划，因此不知道张量何时释放：record.level = tensors 会监视它们。",
)
COLUMNS = tuple(column.name for column in TABLES["lifetimes"].columns)
INTERVALS = """
WITH mine AS (SELECT * FROM spans WHERE step = $step AND source <> 'plan'),
begun AS (SELECT process, min(start_ns) AS zero_ns FROM mine WHERE stage IS NULL AND name IN ('step', 'rl_step') GROUP BY process)
SELECT source, stage, min(start_ns - zero_ns) / 1e6 AS begin_ms, max(end_ns - zero_ns) / 1e6 AS end_ms
FROM mine JOIN begun USING (process) WHERE span_kind = 'stage' AND stage IS NOT NULL GROUP BY source, stage
ORDER BY begin_ms, stage
"""


def choices(book: Book) -> Sequence[Choice]:
    """The steps of the flow."""
    return [Choice(step=step) for step in steps(book)] or [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """`columns`: stages and phases; `rows`: one a bar, as `show RUN lifetimes` has them; `persistent`: what stays, where no storage is known."""
    fates, uses, step = recorded_lifetimes(book, at.step), recorded_shapes(book, at.step), at.step
    expected = planned(book, "lifetimes_at")
    alone = not fates
    if alone:
        fates, uses, step = expected, planned(book, "shapes_at") or uses, None
    if not fates:
        return {"absent": True, "missing": [NO_STORAGES if uses else why_nothing(book)]}
    grid = columns(book, step, uses, fates)
    rows = [_row(row, grid) for row in fates]
    if not alone:
        _plan_beside(rows, expected, grid)
    return {
        "step": step,
        "planned": alone,
        "columns": grid.rows(),
        "rows": rows,
        "persistent": _persistent(
            uses, {row["tensor_name"] for row in fates}, grid, first=step is not None and step == first_step(book)
        ),
        "intervals": [] if step is None else book.seen(INTERVALS, {"step": step}),
        "missing": [AS_PLANNED] if alone and not book.is_plan else [],
    }


def _row(row: dict[str, Any], grid: Columns) -> dict[str, Any]:
    """The row with the columns in which it begins and ends; `freed` is null where nobody saw it."""
    born, freed, due = grid.begin(row["born_at"]), grid.end(row["freed_at"]), grid.end(row["declared_freed_by"])
    if born is not None and freed is not None:
        freed = max(born, freed)
    stage = (row["born_at"] or "").partition("/")[0]
    return {
        **{name: row[name] for name in COLUMNS},
        "born": born,
        "freed": freed,
        "due": due if due is None or born is None else max(due, born),
        "reads": [_read_at(one, stage, row, grid) for one in row["readers"]],
        "born_ms": row.get("born_ms"),
        "freed_ms": row.get("freed_ms"),
        "reads_ms": row.get("reads_ms"),
    }


def _read_at(reader: str, born_in: str, row: dict[str, Any], grid: Columns) -> int | None:
    """The column of a reading: of the last one its phase is known, of one in the stage that made it no more than that."""
    last = row["last_read_at"] or ""
    if last.partition("/")[0] == reader:
        return grid.begin(last)
    return grid.begin(row["born_at"]) if reader == born_in else grid.begin(reader)


def _plan_beside(rows: Rows, plan: Rows, grid: Columns) -> None:
    """`plan` of the fullest row of a tensor in the stage that makes it: where the plan has it born and freed."""
    for expected in plan:
        stage = (expected["born_at"] or "").partition("/")[0]
        same = [
            row for row in rows
            if row["tensor_name"] == expected["tensor_name"] and (row["born_at"] or "").partition("/")[0] == stage
        ]  # fmt: skip
        born, freed = grid.begin(expected["born_at"]), grid.end(expected["freed_at"])
        if same and born is not None:
            max(same, key=lambda row: row["bytes"] or 0)["plan"] = {
                "born": born, "freed": freed, "born_at": expected["born_at"], "freed_at": expected["freed_at"], "bytes": expected["bytes"],
            }  # fmt: skip


def _persistent(uses: Rows, named: set[str | None], grid: Columns, *, first: bool) -> list[dict[str, Any]]:
    """Tensors that stay from step to step and have no storage of their own in the rows. In the first step they begin where they are made,
    unless somebody has read them before: `born` is that column."""
    found: dict[str, dict[str, Any]] = {}
    for row in uses:
        if row["lifetime"] != "persistent" or row["tensor_name"] in named:
            continue
        one = found.setdefault(row["tensor_name"], {
            "tensor_name": row["tensor_name"], "kind": row["kind"], "lifetime": "persistent", "bytes": 0, "readers": [], "reads": [], "writes": [],
        })  # fmt: skip
        one["bytes"] = max(one["bytes"], row["bytes"] or 0)
        at = grid.begin(place(row))
        for access, where in (("read", "reads"), ("write", "writes")):
            if access in (row["access"] or "") and at is not None and at not in one[where]:
                one[where].append(at)
        if "read" in (row["access"] or "") and row["stage"] not in one["readers"]:
            one["readers"].append(row["stage"])
    for one in found.values():
        made = min(one["writes"], default=None)
        if first and made is not None and made <= min(one["reads"], default=made):
            stage, phase = grid.places[made][:2]
            one |= {"born": made, "born_at": stage if phase is None else f"{stage}/{phase}", "begins": True}
    return [*found.values()]
