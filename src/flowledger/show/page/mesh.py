"""The ranks as a grid by axis: what each has, how much it does, which slice of a tensor it holds, where a sample travelled."""

from collections.abc import Sequence
from typing import Any

from flowledger.show import layout as ledger_layout
from flowledger.show.page import mesh_heat, mesh_ranks, mesh_samples, mesh_tensors
from flowledger.show.page.book import Book, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.once import asking_once

MOST_STEPS = 3  # that a file holds
NOTHING = text(
    "Neither ranks nor a mesh are known here: a log says nothing of them.",
    "此处既无 rank 也无设备网格的信息：日志中没有记录。",
)


def choices(book: Book) -> Sequence[Choice]:
    """The last step first; then the first, and those in which some rank waited or took longest."""
    book = asking_once(book)
    steps = _steps(book)
    if not steps:
        return [Choice()]
    named = [steps[-1], steps[0], *_worst(book), *reversed(steps)]
    return [Choice(step=step) for step in list(dict.fromkeys(named))[:MOST_STEPS]]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """`cells`: ranks, one by one or in classes; `heat`, `tensors` and `samples` of one step."""
    book, step = asking_once(book), at.step
    if step is None:
        step = mesh_samples.step_of(book, at.sample) if at.sample is not None else None
    if step is None:
        step = next(iter(_steps(book)[-1:]), None)
    ranks, members = mesh_ranks.ranks(book, step)
    if not ranks["known"]:
        return {"absent": True, "missing": [NOTHING]}
    together = [one.step for one in choices(book) if one.step is not None]
    warm, cold = mesh_heat.heat(book, step, ranks["size"], together)
    held, unheld = mesh_tensors.tensors_of(book, step, members)
    ways, astray, others = mesh_samples.ways(book, step)
    return {
        **ranks, "step": step, "heat": warm, "tensors": held, "samples": ways, "others": others,
        "missing": [*cold, *unheld, *astray], "dealing": _dealing(book),
    }  # fmt: skip


def _steps(book: Book) -> list[int]:
    rows = book.seen(
        "SELECT DISTINCT source, step FROM spans WHERE step IS NOT NULL AND stage IS NOT NULL ORDER BY step"
    )
    rows += book.seen("SELECT DISTINCT source, step FROM samples WHERE step IS NOT NULL")
    rows += book.seen("SELECT DISTINCT source, step FROM tensors WHERE step IS NOT NULL")
    return sorted({row["step"] for row in rows})


def _worst(book: Book) -> list[int]:
    """The step in which most was waited, and the longest."""
    waited = book.seen(
        "SELECT source, step, sum(waited_seconds) AS s FROM waited_by_stage WHERE step IS NOT NULL GROUP BY ALL"
    )
    whole = book.seen(
        "SELECT source, step, seconds AS s FROM step_seconds WHERE step IS NOT NULL AND seconds IS NOT NULL"
    )
    # Sums differ in their last digits from one time to the next: of steps that are alike the first.
    return [max(rows, key=lambda row: (round(row["s"], 9), -row["step"]))["step"] for rows in (waited, whole) if rows]


def _dealing(book: Book) -> str | None:
    """Of a plan, whose chunks are no promise: who may train on a sample after all."""
    return ledger_layout.dealing(book.ledger) if mesh_ranks.only_planned(book) else None
