"""Rows of lifetimes for the steps that a page shows: where each tensor lives, and when. Read once, for two views are made of them."""

from collections.abc import Sequence
from typing import Any

from flowledger.show.page.book import Book, Rows, kept
from flowledger.show.page.flow_columns import steps

FATE = (
    "role", "tensor_name", "kind", "born_at", "readers", "last_read_at", "freed_at", "declared_freed_by", "lifetime", "holder",
    "outlives",
)  # fmt: skip

# What `lifetimes_at` says of each of several steps, in one look at all storages instead of one for each; beside it the times by the
# clock of each process, from where its step began: of several storages the first birth, the first readings, the last release.
QUERY = """
WITH begun AS (
    SELECT process, step, min(start_ns) AS zero_ns FROM spans
    WHERE list_contains($steps, step) AND stage IS NULL AND name IN ('step', 'rl_step') AND source <> 'plan' GROUP BY process, step),
mine AS (SELECT * FROM storages WHERE source <> 'plan' AND event IN ('born', 'freed')),
events AS (
    SELECT process, storage, min(t_ns) FILTER (event = 'born') AS born_ns, max(t_ns) FILTER (event = 'freed') AS freed_ns
    FROM mine SEMI JOIN (FROM mine WHERE list_contains($steps, step)) AS near USING (process, storage) GROUP BY process, storage),
reads AS (
    SELECT process, storage, tensor_name, step, map_from_entries(list((stage, read_ns))) AS read_ns FROM (
        SELECT process, storage, tensor_name, step, stage, min(t_ns) AS read_ns FROM tensors
        WHERE source <> 'plan' AND access = 'read' AND list_contains($steps, step) AND storage IS NOT NULL AND stage IS NOT NULL GROUP BY ALL)
    GROUP BY process, storage, tensor_name, step)
SELECT run, lifetimes.source, lifetimes.step, COLUMNS, count(*) AS storages, max(bytes) AS bytes, sum(bytes)::BIGINT AS total_bytes,
    avg(alive_ms) AS alive_ms, lifetimes.step AS first_step, lifetimes.step AS last_step,
    min(born_ns - zero_ns) / 1e6 AS born_ms, max(freed_ns - zero_ns) / 1e6 AS freed_ms,
    list(list_transform(lifetimes.readers, lambda one: (read_ns[one] - zero_ns) / 1e6)) AS reads_ms
FROM lifetimes LEFT JOIN begun USING (process, step) LEFT JOIN events USING (process, storage)
LEFT JOIN reads USING (process, storage, tensor_name, step)
LEFT JOIN flow_tensors ON flow_tensors.tensor_name = lifetimes.tensor_name
LEFT JOIN flow_stages ON flow_stages.stage = split_part(born_at, '/', 1)
WHERE list_contains($steps, lifetimes.step) AND lifetimes.source <> 'plan'
GROUP BY ALL
ORDER BY any_value(flow_stages.position) NULLS FIRST, born_at, any_value(flow_tensors.position) NULLS LAST, max(bytes) DESC
""".replace("COLUMNS", ", ".join(f"lifetimes.{name}" for name in FATE))


def recorded_lifetimes(book: Book, step: int | None) -> Rows:
    """The rows of `lifetimes_at(step)`, with `born_ms`, `reads_ms` and `freed_ms` where a step is asked for."""
    if step is None:
        return kept(book, "lifetimes", lambda: book.seen("FROM lifetimes_at(NULL)"))
    wanted = sorted({*steps(book), step})
    rows = kept(book, f"lifetimes of {wanted}", lambda: [_row(row) for row in book.seen(QUERY, {"steps": wanted})])
    return [row for row in rows if row["step"] == step]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "reads_ms": _earliest(row["reads_ms"])}


def _earliest(times: Sequence[Sequence[float | None] | None]) -> list[float | None]:
    """Of lists of equal length the smallest, place by place."""
    places = zip(*(one for one in times if one is not None), strict=True)
    return [min((time for time in place if time is not None), default=None) for place in places]
