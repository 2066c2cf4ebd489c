"""The flow of a step: its stages as columns, its tensors as strands, born where made, ending where freed.

What a strand says are rows of `show RUN shapes`; where it begins and ends is what `show RUN lifetimes` says, and what the flow
declares where nobody watched storages.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flowledger.flow.tensors import tensors
from flowledger.show.page.book import Book, Rows, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.flow_columns import Columns, columns, planned, recorded_shapes, steps
from flowledger.show.page.flow_strands import strand
from flowledger.show.page.lifetimes_rows import recorded_lifetimes

USE = (
    "stage", "phase", "role", "access", "dims", "logical_shape", "logical_shape_min", "local_shape", "local_shape_min",
    "dtype", "bytes", "mask", "broadcast", "padding", "kind", "lifetime", "owner", "owner_rank",
)  # fmt: skip
MOST_RANKS = 8  # that a file holds shapes of

NO_STEP = text(
    "No tensor was recorded: the level of this run is {level}, and tensors are told from record.level = tensors on.",
    "没有记录任何张量：本次运行的记录级别是 {level}，record.level = tensors 及以上才记录张量。",
)
IMPORTED = text(
    "What was imported names no tensors, so there is no flow to draw: logs and metrics have numbers only. "
    "`flowledger plan` draws the flow of a configuration, `flowledger record` that of a run.",
    "导入的内容不含任何张量，因此没有数据流可画：日志和指标里只有数值。`flowledger plan` 可画出配置的数据流，`flowledger record` 可画出一次运行的数据流。",
)
NOTHING = text("No tensor was recorded or planned.", "没有记录或计划任何张量。")
AS_PLANNED = text(
    "This run recorded no tensors; what is drawn is its plan.", "本次运行没有记录张量；此处画出的是它的计划。"
)
AS_DECLARED = text(
    "Nobody watched the storages of these tensors: strands end where the flow declares that they are freed.",
    "没有监视这些张量的存储：流线止于数据流声明的释放处。",
)

OUTSIDE = text("Seen outside of every stage, so not drawn: {tensors}.", "在任何阶段之外见到，因此未画出：{tensors}。")


def choices(book: Book) -> Sequence[Choice]:
    """A few steps; a plan has one."""
    return [Choice(step=step) for step in steps(book)] or [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """`columns`: stages and phases; `strands`: one a tensor; `texts`: what each is for; `ranks`: whose local shapes there are."""
    uses = recorded_shapes(book, at.step)
    fates = recorded_lifetimes(book, at.step) if uses else []
    step, as_planned = at.step, not uses
    if as_planned:
        uses, fates, step = planned(book, "shapes_at"), planned(book, "lifetimes_at"), None
    if not any(row["freed_at"] for row in fates):  # nobody watched
        fates = []
    if not uses:
        return {"absent": True, "missing": [why_nothing(book)]}
    local = _local_shapes(book, step, at.rank, as_planned=as_planned)
    placed = [row for row in uses if row["stage"] is not None]
    missing = [AS_PLANNED] if as_planned and not book.is_plan else [] if fates else [AS_DECLARED]
    if outside := sorted({row["tensor_name"] for row in uses} - {row["tensor_name"] for row in placed}):
        missing.append({lang: said.replace("{tensors}", ", ".join(outside)) for lang, said in OUTSIDE.items()})
    if not placed:
        return {"absent": True, "missing": missing}
    grid = columns(book, step, placed, fates)
    return {
        "step": step,
        "planned": as_planned,
        "columns": grid.rows(),
        "strands": _strands(placed, fates, grid, local, first=step is not None and step == first_step(book)),
        "texts": _texts({row["tensor_name"] for row in placed}),
        "ranks": local.ranks,
        "missing": missing,
    }


def _strands(uses: Rows, fates: Rows, grid: Columns, local: "_Local", *, first: bool) -> list[dict[str, Any]]:
    """One a tensor, in the order of the flow, those that are not of the flow behind."""
    order = {name: at for at, name in enumerate(tensors())}
    named = sorted(uses, key=lambda row: (order.get(row["tensor_name"], len(order)), row["tensor_name"]))
    found = []
    for name, rows in groupby(named, key=lambda row: row["tensor_name"]):
        mine = list(rows)
        made = strand(name, mine, [row for row in fates if row["tensor_name"] == name], grid, first=first)
        found.append({**made, "uses": [_use(row, local) for row in mine]})
    return found


def first_step(book: Book) -> int | None:
    """The first step of the run."""
    (row,) = book.ledger.rows("SELECT min(step) AS step FROM tensors WHERE source <> 'plan'")
    return None if row["step"] is None else int(row["step"])


def why_nothing(book: Book) -> dict[str, str]:
    """Why there are no tensors."""
    sources = book.sources()
    if "record" in sources:
        level = str(book.ledger.directory.manifest.level)
        return {lang: said.replace("{level}", level) for lang, said in NO_STEP.items()}
    return IMPORTED if "import" in sources else NOTHING


class _Local:
    """Local shapes rank by rank, where ranks differ."""

    def __init__(self, rows: Rows, ranks: Rows):
        self.ranks = ranks
        self.of: dict[tuple[Any, ...], dict[int, Any]] = {}
        for row in rows:
            self.of.setdefault(_key(row), {})[row["rank"]] = [row["local_shape"], row["bytes"]]


def _local_shapes(book: Book, step: int | None, rank: int | None, *, as_planned: bool) -> _Local:
    ask = book.expected if as_planned else book.seen
    rows = ask(
        "SELECT source, role, stage, phase, tensor_name, dims, len(coalesce(logical_shape, local_shape)) AS ndim, rank, "
        "max(coalesce(rank_count, 1)) AS rank_count, shape_max(local_shape) AS local_shape, max(bytes) AS bytes FROM accesses "
        "WHERE rank IS NOT NULL AND (?::BIGINT IS NULL OR step = ?) GROUP BY ALL ORDER BY rank",
        [step, step],
    )
    same: dict[Any, Rows] = {}
    for one, mine in groupby(rows, key=lambda row: row["rank"]):
        shapes = list(mine)
        alike = frozenset((*_key(row), tuple(row["local_shape"] or ()), row["bytes"]) for row in shapes)
        counted = max(row["rank_count"] for row in shapes) if as_planned else 1
        same.setdefault(alike, []).append({"rank": one, "count": counted})
    classes = [
        {"rank": ranks[0]["rank"], "ranks": [row["rank"] for row in ranks], "count": sum(row["count"] for row in ranks)}
        for ranks in same.values()
    ]
    held = classes[:MOST_RANKS]
    held += [one for one in classes[MOST_RANKS:] if rank in one["ranks"]]
    kept = {one["rank"] for one in held}
    return _Local([row for row in rows if row["rank"] in kept], held)


def _use(row: Mapping[str, Any], local: _Local) -> dict[str, Any]:
    """A row of shapes; `by_rank`: local shape and bytes of each rank, left out where all are as the row has them."""
    found = {name: row[name] for name in USE}
    by_rank = local.of.get(_key(row), {})
    if any(shape != row["local_shape"] or size != row["bytes"] for shape, size in by_rank.values()) or len(
        by_rank
    ) < len(local.ranks):
        found["by_rank"] = {str(rank): told for rank, told in by_rank.items()}
    return found


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    ndim = row["ndim"] if "ndim" in row else len(row["logical_shape"] or row["local_shape"] or ())
    return (row["role"], row["stage"], row["phase"], row["tensor_name"], row["dims"], ndim)


def _texts(names: set[str]) -> dict[str, Any]:
    """What the flow says of each tensor, in both languages."""
    known = tensors()
    return {
        name: {
            "purpose": text(known[name].purpose, known[name].purpose_zh),
            "common_bug": text(known[name].common_bug, known[name].common_bug_zh),
            "producer": known[name].producer,
            "readers": list(known[name].readers),
            "freed_by": known[name].freed_by,
        }
        for name in known
        if name in names
    }
