"""Memory of one step stage by stage: planned beside measured, over the ranks, and over the tokens of its micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.show.page.book import Book, Rows
from flowledger.show.page.memory_course import TELLING

Row = Mapping[str, Any]
Planned = dict[str, Any]  # a stage's fullest planned instant: bytes, by kind, and `bytes` altogether

VARIES = 1.1  # the largest micro-batch beside the smallest
POINTS = 64  # ranks that are shown one by one

PLANNED = "FROM memory_by_stage WHERE instant = 'peak' AND stage IS NOT NULL"
# The fullest instant of each stage on each rank, by what the allocator says and by the tensors that live.
OF_RANKS = """
SELECT source, stage, rank, max(rank_count) AS rank_count, max(greatest(peak_since_stage, allocated)) AS allocated, max(known) AS known
FROM memory_readings LEFT JOIN (SELECT process, max(rank_count) AS rank_count FROM memory WHERE source = 'plan' GROUP BY process) USING (process)
WHERE step IS NOT DISTINCT FROM ? AND stage IS NOT NULL AND rank IS NOT NULL GROUP BY source, stage, rank ORDER BY rank, stage, source
"""


def planned(book: Book, step: int | None, rank: int | None) -> dict[str, Planned]:
    """Stage -> its fullest planned instant, of the plan's rank that stands for this one. A plan has the first step, and one of all later."""
    rows = book.expected(PLANNED)
    if not rows:
        return {}
    stands_for = max({row["rank"] for row in rows if (row["rank"] or 0) <= (rank or 0)}, default=rows[0]["rank"])
    its_steps = {row["step"] for row in rows}
    like = step if step in its_steps else max(its_steps)
    here = [row for row in rows if row["rank"] == stands_for and row["step"] == like]
    found: dict[str, Planned] = {}
    for row in here:
        size = row["allocated"] if row["allocated"] is not None else row["known"]
        if size is not None and size > found.get(row["stage"], {}).get("bytes", -1):
            found[row["stage"]] = {**{kind: row[kind] for kind in KINDS}, "bytes": size}
    return found


def beside(rows: Rows, planned: Mapping[str, Planned]) -> Rows:
    """One row a stage and source: its fullest instant by kind. What no tensor explains is left out of both: it is asked for
    at other instants than the fullest."""
    found = [
        {"stage": stage, "source": "plan", **{kind: one[kind] for kind in TELLING}, "whole": sum(one[kind] or 0 for kind in TELLING)}
        for stage, one in planned.items()
    ]  # fmt: skip
    fullest: dict[str, Row] = {}
    for row in rows:
        if (
            row["stage"] is not None
            and row["known"] is not None
            and row["known"] > fullest.get(row["stage"], {"known": -1})["known"]
        ):
            fullest[row["stage"]] = row
    found += [
        {"stage": stage, "source": "run", **{kind: row[kind] for kind in TELLING}, "whole": row["known"]}
        for stage, row in fullest.items()
    ]  # fmt: skip
    return found


def spread(book: Book, step: int | None) -> Rows:
    """One row a stage and rank: its peak, by what more of them know, the allocator or the tensors that live."""
    rows = book.shown(OF_RANKS, [step])
    by = max(("allocated", "known"), key=lambda name: sum(row[name] is not None for row in rows))
    told = [row for row in rows if row[by] is not None]
    return [
        {"stage": row["stage"], "rank": row["rank"], "rank_count": row["rank_count"], "bytes": row[by], "by": by}
        for row in _few(told)
    ]  # fmt: skip


def _few(rows: Rows) -> Rows:
    """All ranks, or, of very many, each stage's smallest, its median and its largest besides every so-manieth."""
    ranks = sorted({row["rank"] for row in rows})
    if len(ranks) <= POINTS:
        return rows
    kept = set(ranks[:: len(ranks) // POINTS + 1])
    for stage in {row["stage"] for row in rows}:
        here = sorted(
            (row for row in rows if row["stage"] == stage), key=lambda row: (row["allocated"] or 0, row["known"] or 0)
        )
        kept |= {here[at]["rank"] for at in (0, len(here) // 2, -1)}
    return [row for row in rows if row["rank"] in kept]


TOKENS = """
SELECT process, step, any_value(stage) AS stage, any_value(epoch) AS epoch, any_value(mini_batch) AS mini_batch, any_value(micro_batch) AS micro_batch,
    max(tokens_computed) AS tokens
FROM spans WHERE list_contains(?::BIGINT[], step) AND source <> 'plan' AND micro_batch IS NOT NULL AND span_kind <> 'comm'
GROUP BY process, step, id HAVING tokens IS NOT NULL ORDER BY process, step, id
"""


def micro_batches(book: Book, steps: Sequence[int | None]) -> Rows:
    """One row a micro-batch of the steps and process: where it stands, and its tokens."""
    return book.ledger.rows(TOKENS, [[step for step in steps if step is not None]])


def by_tokens(batches: Rows, rows: Rows) -> Rows:
    """One row a micro-batch: its tokens and its fullest instant. None where all have much the same: there is nothing to see."""
    known = {_batch(row): row["tokens"] for row in batches}
    if not known or max(known.values()) < VARIES * min(known.values()):
        return []
    fullest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        size = row["known"] if row["known"] is not None else row["allocated"]
        if (at := _batch(row)) in known and size is not None and size > fullest.get(at, {"bytes": -1})["bytes"]:
            fullest[at] = {
                **{name: row[name] for name in ("stage", "phase", "mini_batch", "micro_batch")},
                "tokens": known[at],
                "bytes": size,
            }
    return [dict(row) for row in fullest.values()]


def _batch(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("stage", "epoch", "mini_batch", "micro_batch"))
