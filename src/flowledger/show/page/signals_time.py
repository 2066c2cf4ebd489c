"""Where the time of a step went, rank by rank: stages, the collectives in them, and how long each rank waited for the others."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from flowledger.show.page.book import Book, Rows, text
from flowledger.show.page.packed import packed

MOST = 16  # rows of a timeline; of more ranks those of each class, and the extremes
FINEST = 800  # pieces of a step that can be told apart
NAMES = ("row", "what", "stage", "begin", "end", "open")

NOTHING = text(
    "No stage was timed rank by rank: there is no timeline. A recording has one; a log tells at best how long a stage took, which is among the metrics.",
    "没有逐 rank 的阶段计时：没有时间线。记录（record）会有；日志至多给出各阶段耗时，见指标。",
)

STAGES = """
SELECT process, role, rank, step, stage, begin_ns, coalesce(end_ns, heard_ns) AS end_ns, end_ns IS NULL AS open FROM (
    SELECT spans.process, id, any_value(coalesce(spans.role, processes.role)) AS role, any_value(coalesce(spans.rank, processes.rank)) AS rank, spans.step, any_value(stage) AS stage,
        min(start_ns) + any_value(apart) AS begin_ns, max(end_ns) + any_value(apart) AS end_ns, any_value(heard) + any_value(apart) AS heard_ns
    FROM spans JOIN clocks USING (process) LEFT JOIN processes USING (process)
        JOIN (SELECT process, max(coalesce(end_ns, start_ns)) AS heard FROM spans GROUP BY process) USING (process)
    WHERE span_kind = 'stage' AND stage IS NOT NULL AND list_contains(?::BIGINT[], spans.step) AND {source} GROUP BY spans.process, id, spans.step)
ORDER BY rank, process, begin_ns
"""
COMM = """
SELECT process, step, any_value(stage) AS stage, 'comm' AS what, min(start_ns) + any_value(apart) AS begin_ns, max(end_ns) + any_value(apart) AS end_ns
FROM spans JOIN clocks USING (process) WHERE span_kind = 'comm' AND list_contains(?::BIGINT[], step) AND list_contains(?::VARCHAR[], process)
GROUP BY process, id, step HAVING end_ns IS NOT NULL
"""
WAITS = """
SELECT process, step, stage, 'wait' AS what, until_ns - (seconds * 1e9)::BIGINT AS begin_ns, until_ns AS end_ns, seconds, last_rank
FROM waits WHERE list_contains(?::BIGINT[], step) AND list_contains(?::VARCHAR[], process)
"""


def steps(book: Book) -> list[int]:
    """The steps in which a stage was timed."""
    found = book.ledger.rows(
        "SELECT DISTINCT step FROM spans WHERE span_kind = 'stage' AND stage IS NOT NULL AND step IS NOT NULL ORDER BY step"
    )
    return [row["step"] for row in found]


def timelines(book: Book, wanted: Sequence[int]) -> list[dict[str, Any]]:
    """One a step: `rows` (the ranks), `pieces` (what each did when, in ms since the step began) and `sums` of every stage."""
    spans = book.ledger.rows(STAGES.format(source="spans.source <> 'plan'"), [wanted])
    planned = not spans
    if planned:
        spans = book.expected(
            STAGES.replace("SELECT process", "SELECT 'plan' AS source, process", 1).format(
                source="spans.source = 'plan'"
            ),
            [wanted],
        )
    made = [(step, [row for row in spans if row["step"] == step]) for step in wanted]
    kept = {step: _processes(book, mine) for step, mine in made if mine}
    processes = sorted({process for some in kept.values() for process in some})
    inner = [] if planned else [row for query in (COMM, WAITS) for row in book.ledger.rows(query, [wanted, processes])]
    return [
        _timeline(step, [row for row in mine if row["process"] in kept[step]], [row for row in inner if row["step"] == step and row["process"] in kept[step]], kept[step])
        for step, mine in made
        if mine
    ]  # fmt: skip


def _processes(book: Book, spans: Rows) -> dict[str, str]:
    """Process -> what its row is called. Of very many ranks the slowest of each class."""
    called: dict[str, str] = {}
    firsts = {row["process"]: row for row in reversed(spans)}
    by_rank = sorted(firsts.values(), key=lambda row: (row["rank"] is None, row["rank"] or 0, row["process"]))
    many = {rank for rank, rows in groupby(by_rank, key=lambda row: row["rank"]) if len([*rows]) > 1}
    for row in by_rank:
        named = row["process"] if row["rank"] is None else f"rank {row['rank']}"
        called[row["process"]] = f"{named} {row['role']}" if row["rank"] in many and row["role"] else named
    if len(called) <= MOST:
        return called
    spent = (
        {name: sum(row["end_ns"] - row["begin_ns"] for row in spans if row["process"] == name) for name in called}
        if len(called) < 64
        else _spent(spans)
    )
    return {name: called[name] for name in called if name in _chosen(book, by_rank, spent)}


def _spent(spans: Rows) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in spans:
        found[row["process"]] = found.get(row["process"], 0) + row["end_ns"] - row["begin_ns"]
    return found


def _chosen(book: Book, by_rank: Rows, spent: Mapping[str, int]) -> list[str]:
    """The longest and the shortest at work, the slowest of each class, and then every so-manieth."""
    slowest_first = sorted(spent, key=lambda name: -spent[name])
    rank_of = {row["process"]: row["rank"] for row in by_rank}
    found = [slowest_first[0], slowest_first[-1]]
    for members in book.ledger.directory.manifest.rank_classes.values():
        alike = set(members)
        found += [name for name in slowest_first if rank_of[name] in alike][:1]
    found += [row["process"] for row in (*by_rank[:: len(by_rank) // MOST + 1], *by_rank)]
    return list(dict.fromkeys(found))[:MOST]


def _timeline(step: int, spans: Rows, inner: Rows, called: Mapping[str, str]) -> dict[str, Any]:
    began, ended = min(row["begin_ns"] for row in spans), max(row["end_ns"] for row in spans)
    finest = (ended - began) / FINEST
    by_kind = {kind: [*rows] for kind, rows in groupby(sorted(inner, key=_kind), key=_kind)}
    pieces = [{**row, "what": "stage"} for row in spans] + [
        {"process": process, "what": what, "stage": stage, "begin_ns": begin, "end_ns": end}
        for (process, what, stage), rows in by_kind.items()
        for begin, end in joined(
            ((row["begin_ns"], row["end_ns"]) for row in rows if row["end_ns"] > row["begin_ns"]), finest
        )
    ]
    names = [*called]
    placed = (
        {"row": names.index(one["process"]), "what": one["what"], "stage": one["stage"], "begin": _ms(one["begin_ns"] - began), "end": _ms(one["end_ns"] - began), "open": one.get("open") or None}
        for one in pieces
    )  # fmt: skip
    return {
        "step": step, "rows": [called[name] for name in names], "ms": (ended - began) / 1e6, "pieces": packed(placed, NAMES),
        "sums": [{"row": names.index(row["process"]), **row} for row in _sums(spans, by_kind)],
    }  # fmt: skip


def _sums(spans: Rows, by_kind: Mapping[tuple[str, str, str], Rows]) -> Rows:
    """One row a process and stage, as `show RUN balance` has them: seconds, those in collectives, those waited, and for whom most."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in spans:
        one = found.setdefault(
            (row["process"], row["stage"]),
            {**{name: row[name] for name in ("process", "rank", "stage")}, "seconds": None},
        )
        if not row["open"]:
            one["seconds"] = (one["seconds"] or 0) + (row["end_ns"] - row["begin_ns"]) / 1e9
    for (process, stage), one in found.items():
        collectives, waits = by_kind.get((process, "comm", stage), []), by_kind.get((process, "wait", stage), [])
        for_whom: dict[int, float] = {}
        for row in waits:
            for_whom[row["last_rank"]] = for_whom.get(row["last_rank"], 0) + row["seconds"]
        one["comm_seconds"] = (
            sum(end - begin for begin, end in joined((((row["begin_ns"], row["end_ns"]) for row in collectives)), 0))
            / 1e9
        )
        one["waited_seconds"] = sum(for_whom.values()) if waits else None
        one["waited_for"] = max(for_whom, key=lambda rank: for_whom[rank]) if any(for_whom.values()) else None
    return [*found.values()]


def joined(pieces: Iterable[tuple[int, int]], gap: float) -> list[tuple[int, int]]:
    """Intervals in order, those that overlap or lie closer than `gap` as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(pieces):
        if found and begin - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _kind(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["process"], row["what"], row["stage"] or ""


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
