"""The rows that exports are made of: intervals and readings of chosen steps on one clock, a page at a time.

Times are ns of the wall's clock. What an importer read stands on the wall's clock already, as its source had it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger, Params
from flowledger.show.words import SAID_TOO_LARGE, TOO_LARGE

Row = dict[str, Any]
PAGE = 10_000  # rows that are held at once
WRITTEN = re.compile(r"(\d{0,15})(\.\.)?(\d{0,15})")
APART = "CASE WHEN rows.source = 'import' THEN 0 ELSE coalesce(clocks.apart, 0) END"
SPANS = f"""
SELECT rows.*, start_ns + {APART} AS began_ns,
    coalesce(end_ns, CASE WHEN latency_ms IS NOT NULL THEN start_ns + (latency_ms * 1e6)::BIGINT END) + {APART} AS ended_ns
FROM spans_view AS rows LEFT JOIN clocks USING (process) WHERE rows.source <> 'plan'
"""
READINGS = f"""
SELECT rows.*, t_ns + {APART} AS at_ns FROM memory_readings AS rows LEFT JOIN clocks USING (process)
WHERE rows.source <> 'plan' AND t_ns > 0
"""
# When a step began, and when its last number was told; what an importer read without a time has none.
TIMES = f"""
SELECT step, min(began_ns) AS began_ns, max(told_ns) AS told_ns FROM (
    SELECT step, began_ns, NULL AS told_ns FROM step_begins WHERE source <> 'plan'
    UNION ALL SELECT step, NULL, t_ns + {APART} FROM metrics AS rows LEFT JOIN clocks USING (process)
        WHERE rows.source <> 'plan' AND step IS NOT NULL AND t_ns > 0)
GROUP BY step
"""
METRICS = "FROM metrics_by_step WHERE source <> 'plan' AND step BETWEEN ? AND ? ORDER BY step, name"
Numbers = Mapping[str, Mapping[int, float]]  # metric -> step -> number
_numbers = count()


@dataclass(frozen=True, slots=True)
class Steps:
    """From which step to which, both with it; None: open on that side."""

    first: int | None = None
    last: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The same for SQL's BETWEEN."""
        return 0 if self.first is None else self.first, (1 << 62) if self.last is None else self.last

    @property
    def all(self) -> bool:
        return self.first is None and self.last is None


def steps_of(text: str | None) -> Steps:
    """`7`, `3..9`, `3..` or `..9`. Raises BadInput for anything else."""
    if text is None:
        return Steps()
    found = WRITTEN.fullmatch(text.strip())
    if found is None or not (found[1] or found[3]):
        raise BadInput(f"--step {text!r}: give one step (7) or a range of them (3..9, 3.. or ..9)")
    first, last = (int(number) if number else None for number in (found[1], found[3]))
    if not found[2]:
        last = first
    if first is not None and last is not None and first > last:
        raise BadInput(f"--step {text}: the range ends before it begins; {last}..{first} has those steps")
    return Steps(first, last)


def check_steps(ledger: Ledger, steps: Steps) -> None:
    """Raises BadInput, with the steps that there are, where a run has none of those asked for."""
    if steps.all:
        return
    tables = " UNION ".join(
        f"SELECT step FROM {name} WHERE source <> 'plan'" for name in ("spans", "memory", "metrics", "samples")
    )
    (row,) = ledger.rows(
        f"SELECT min(step) AS low, max(step) AS high, count(*) FILTER (step BETWEEN ? AND ?) AS chosen FROM ({tables})",
        steps.bounds,
    )
    if row["low"] is None:
        raise BadInput(f"run {ledger.run} has no steps to choose from: leave --step out")
    if not row["chosen"]:
        low, high = row["low"], row["high"]
        nearest = min(max(steps.first if steps.first is not None else low, low), high)
        raise BadInput(f"run {ledger.run} has no such steps; it has {low} to {high}, the nearest is --step {nearest}")


def paged(ledger: Ledger, sql: str, params: Params = ()) -> Iterator[dict[str, Any]]:
    """The rows of a query in its order, held by DuckDB and fetched a page at a time."""
    name = f"export_{next(_numbers)}"
    ledger.rows(f"CREATE TEMP TABLE {name} AS SELECT *, row_number() OVER () AS row_of_export FROM ({sql})", params)
    try:
        for at in count(0, PAGE):
            page = ledger.rows(
                f"SELECT * EXCLUDE row_of_export FROM {name} WHERE row_of_export > ? AND row_of_export <= ? ORDER BY row_of_export",
                [at, at + PAGE],
            )
            yield from page
            if len(page) < PAGE:
                return
    finally:
        ledger.rows(f"DROP TABLE {name}")


def spans(ledger: Ledger, steps: Steps, kinds: Sequence[str] = (), *, waits: bool = False) -> Iterator[dict[str, Any]]:
    """Intervals in order of their begin, those around others first; `ended_ns` is null of what has no end.

    What belongs to no step is there where it lies within the steps' time. kinds: these alone; waits: collectives say how long their
    rank waited in them and for whom (`waited_seconds`, `waited_for`).
    """
    told = "*"
    chosen = f"({_within(SPANS, steps)}) AS rows"
    if waits:
        told = "rows.*, waits.seconds AS waited_seconds, CASE WHEN waits.seconds > 0 THEN last_rank END AS waited_for"
        chosen += " LEFT JOIN waits ON (rows.run, rows.source, rows.process, rows.id) = (waits.run, waits.source, waits.process, waits.id)"
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    where = f"WHERE span_kind IN ({listed})" if kinds else ""
    yield from paged(
        ledger,
        f"SELECT {told} FROM {chosen} {where} ORDER BY rows.began_ns, coalesce(rows.ended_ns, {1 << 62}) DESC, rows.id",
    )


def readings(ledger: Ledger, steps: Steps) -> Iterator[dict[str, Any]]:
    """Readings of memory in order of time, `at_ns`."""
    chosen = "true" if steps.all else "step BETWEEN {} AND {}".format(*steps.bounds)
    yield from paged(ledger, f"FROM ({READINGS}) WHERE {chosen} ORDER BY at_ns, instant")


def metrics(ledger: Ledger, steps: Steps, more: Numbers) -> Iterator[dict[str, Any]]:
    """One number a step of the whole job, what was recorded first; with `began_ns` of the step and `told_ns`, null where not known.

    more: numbers that are no rows of the ledger.
    """
    unknown: dict[str, int | None] = {"began_ns": None, "told_ns": None}
    times = {row["step"]: {name: row[name] for name in unknown} for row in ledger.rows(TIMES)}
    for row in paged(ledger, METRICS, steps.bounds):
        yield row | times.get(row["step"], unknown)
    first, last = steps.bounds
    for name, by_step in more.items():
        for step, value in by_step.items():
            if first <= step <= last:
                finite = math.isfinite(value)
                number = {"value": value if finite else None, "special": None if finite else str(value)}
                yield {"name": name, "raw_name": name, "step": step, **number, **times.get(step, unknown)}


def has_numbers(ledger: Ledger) -> bool:
    """Whether a run has recorded numbers of steps; a plan has none."""
    return bool(ledger.rows("SELECT 1 FROM metrics_by_step WHERE source <> 'plan' AND step IS NOT NULL LIMIT 1"))


def begin_ns(ledger: Ledger, steps: Steps) -> int | None:
    """The first moment of which anything is known: an interval, a reading, a number."""
    first, last = steps.bounds
    (row,) = ledger.rows(
        f"SELECT min(known_ns) AS first_ns FROM (SELECT min(began_ns) AS known_ns FROM ({_within(SPANS, steps)}) "
        f"UNION ALL SELECT min(at_ns) FROM ({READINGS}) WHERE coalesce(step, {first}) BETWEEN {first} AND {last} "
        f"UNION ALL SELECT min(coalesce(began_ns, told_ns)) FROM ({TIMES}) WHERE step BETWEEN {first} AND {last})"
    )
    found: int | None = row["first_ns"]
    return found


def kept(what: str, rows: Iterator[Row], unmade: dict[str, str]) -> Iterator[Row]:
    """The rows, or none where the ledger cannot be read for them: then `unmade` says why."""
    try:
        yield from rows
    except BadInput as error:
        unmade[what] = reason(error)


def reason(error: BadInput) -> str:
    """Why rows cannot be made, in words: numbers of a run may be larger than the database adds up."""
    return SAID_TOO_LARGE[0] if TOO_LARGE.search(str(error)) else str(error)


def _within(sql: str, steps: Steps) -> str:
    """The rows of those steps, and of none that lie within their time."""
    if steps.all:
        return sql
    first, last = steps.bounds
    chosen = f"SELECT min(began_ns) AS low, max(ended_ns) AS high FROM ({sql}) WHERE step BETWEEN {first} AND {last}"
    return (
        f"SELECT every.* FROM ({sql}) AS every, ({chosen}) WHERE step BETWEEN {first} AND {last} "
        "OR (step IS NULL AND began_ns < high AND coalesce(ended_ns, began_ns) > low)"
    )


def told(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that say something."""
    return {name: row[name] for name in names if row[name] is not None}
