"""Metrics over time: one number a step of the whole job, and one a rank.

A recomputed number stands before a recorded or imported one. Ranks are joined by the weights of their rows where they have
some, else by what the metrics table says of the metric (`over_ranks`). What is not finite stays so: nan, inf.
"""

from functools import cached_property

from flowledger.diagnose.measures.recompute import MEASURES, Recomputed
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.tables.metrics import over_ranks

# Rows of a process are means of parts, by weight; `count`: counts of parts; `sum`: each process has a part for itself.
TOTAL = "sum(value * coalesce(weight, 1))"
WEIGHT = "sum(coalesce(weight, 1)) FILTER (value IS NOT NULL)"
ROWS = f"SELECT * FROM metrics_placed WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE}"
WAYS = {
    "mean": f"{TOTAL} / nullif({WEIGHT}, 0)",
    "count": "sum(value)",
    "max": "max(value)",
    "min": "min(value)",
}
# Where one process has fewer parts than another (decode steps), it has nothing in the rest.
OF_PROCESS = f"SELECT name, step, process, {TOTAL} AS total, {WEIGHT} AS weight, max(special) AS special FROM ({ROWS}) GROUP BY ALL"
# One row a metric: its steps and numbers as lists. What is not finite is kept as a word: nan before inf.
OF_JOB = """
WITH one AS (
    SELECT name, step, coalesce(max(special)::DOUBLE, {value}) AS value FROM ({rows}) WHERE name IN (SELECT unnest(?::VARCHAR[]))
    GROUP BY name, step)
SELECT name, list(step ORDER BY step) AS steps, list(value ORDER BY step) AS numbers FROM one WHERE value IS NOT NULL GROUP BY name
"""
OF_JOB_BY_WAY = {
    **{way: OF_JOB.format(value=value, rows=ROWS) for way, value in WAYS.items()},
    "sum": OF_JOB.format(value="sum(total) / nullif(max(weight), 0)", rows=OF_PROCESS),
}

OF_RANK = """
WITH one AS (
    SELECT step, rank, coalesce(max(special)::DOUBLE, {value}) AS value FROM ({rows}) WHERE name = ? AND rank IS NOT NULL GROUP BY step, rank)
SELECT step, list(rank ORDER BY rank) AS ranks, list(value ORDER BY rank) AS numbers FROM one WHERE value IS NOT NULL
GROUP BY step ORDER BY step
"""


class Series:
    """All metrics of a run, step by step. To be read while its ledger is open: a metric is made when it is asked for."""

    def __init__(self, ledger: Ledger, made: Recomputed) -> None:
        self.ledger, self.made = ledger, made
        self._of_rank: dict[str, dict[int, dict[int, float]]] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every metric that has a number, recorded or recomputed."""
        return tuple(sorted(self._recorded.keys() | self.made.names()))

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Those that are made of other rows of the ledger."""
        return tuple(sorted(self.made.names()))

    @property
    def told(self) -> tuple[str, ...]:
        """Those that were recorded or imported as numbers."""
        return tuple(sorted(self._recorded))

    def by_step(self, name: str) -> dict[int, float]:
        """The whole job's number in each step that has one; empty for an unknown name.

        A recomputed one stands before a recorded one, unless it is made of the tokens of a few groups only.
        """
        made, told = self.made.by_step(name), self._recorded.get(name, {})
        found = {**made, **told, **{step: made[step] for step in self.made.whole(name)}}
        return {step: found[step] for step in sorted(found)}

    def is_recomputed(self, name: str) -> bool:
        """Whether all that `by_step` gives is made of other rows, and none of it told."""
        told, made = self._recorded.get(name, {}), self.made.by_step(name)
        return bool(made) and told.keys() <= self.made.whole(name)

    def recorded(self, name: str) -> dict[int, float]:
        """The same as it was recorded or imported, whatever is recomputed."""
        return dict(self._recorded.get(name, {}))

    def by_rank(self, name: str) -> dict[int, dict[int, float]]:
        """step -> rank -> number. Empty for what no rank says of itself."""
        if name not in self._of_rank:
            value = WAYS.get(over_ranks(name), WAYS["mean"])
            rows = self.ledger.rows(OF_RANK.format(value=value, rows=ROWS), [name])
            self._of_rank[name] = {row["step"]: dict(zip(row["ranks"], row["numbers"], strict=True)) for row in rows}
        told, made = self._of_rank[name], self.made.by_rank(name)
        return {step: {**told.get(step, {}), **made.get(step, {})} for step in sorted(told.keys() | made.keys())}

    @cached_property
    def _recorded(self) -> dict[str, dict[int, float]]:
        by_way: dict[str, list[str]] = {}
        for row in self.ledger.rows("SELECT DISTINCT name FROM metrics WHERE source <> 'plan'"):
            by_way.setdefault(over_ranks(row["name"]), []).append(row["name"])
        return {
            row["name"]: dict(zip(row["steps"], row["numbers"], strict=True))
            for way, names in by_way.items()
            for row in self.ledger.rows(OF_JOB_BY_WAY[way], [names])
        }


def series_of(ledger: Ledger, *, recompute: bool = True) -> Series:
    """The metrics of a run; with `recompute`, those too that its rows give by themselves. Made once for each ledger."""
    key = f"series, recompute={recompute}"
    if key not in ledger.worked_out:
        ledger.worked_out[key] = Series(ledger, Recomputed(ledger, MEASURES if recompute else ()))
    found: Series = ledger.worked_out[key]
    return found
