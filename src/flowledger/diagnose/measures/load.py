"""Metrics of ranks: what each had to do in each stage, how long it took, how long it waited, and how unequal that is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger

BALANCE = f"""
SELECT step, stage, rank, samples, tokens, length_squares, longest, micro_batches, seconds, comm_seconds, waited_seconds,
    seconds - coalesce(waited_seconds, 0) AS busy
FROM balance_at(NULL) WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE}
"""

# Column of the balance -> metric of a stage, and how the whole job's number is made of the ranks'.
LOADS = {
    "samples": ("load/{}/samples", "avg"), "tokens": ("load/{}/tokens", "avg"),
    "length_squares": ("load/{}/length_squares", "avg"), "longest": ("load/{}/longest", "max"),
    "micro_batches": ("load/{}/micro_batches", "max"), "seconds": ("stage_time_s/{}", "max"),
}  # fmt: skip
TOGETHER = {"comm_seconds": ("comm_time_s/{}", "max"), "waited_seconds": ("wait_time_s/{}", "max")}
UNEQUAL = {
    "samples": "imbalance/{}/samples", "tokens": "imbalance/{}/tokens", "length_squares": "imbalance/{}/length_squares",
    "longest": "imbalance/{}/longest", "busy": "imbalance/{}/time",
}  # fmt: skip
# Largest divided by mean: 1 where all are equal. Null for one rank, and where nobody has anything.
IMBALANCE = (
    "CASE WHEN count({0}) FILTER ({1}) > 1 AND sum({0}) FILTER ({1}) > 0 "
    "THEN max({0}) FILTER ({1})::DOUBLE * count({0}) FILTER ({1}) / sum({0}) FILTER ({1}) END"
)
RANK = "rank IS NOT NULL"
# Of the ranks whose waits are known: their time, and what of it they waited.
KNOWN = "(waited_seconds IS NOT NULL AND seconds <> 0)"
BUBBLE = f"sum(waited_seconds) FILTER ({KNOWN}) / nullif(sum(seconds) FILTER ({KNOWN}), 0)"

Row = Mapping[str, Any]
Ways = Mapping[str, tuple[str, str]]
OF_STAGES = """
WITH here AS ({balance}) SELECT step, stage, {columns} FROM here GROUP BY GROUPING SETS ((step, stage), (step)) ORDER BY step, stage
"""

# Of the KV cache of the engines, the part that requests hold.
KV_USED = f"""
SELECT step, {
    named(
        (
            (
                "rollout/kv_used",
                "sum(value * coalesce(weight, 1)) FILTER (name = 'rollout/kv_blocks_used') "
                "/ nullif(sum(value * coalesce(weight, 1)) FILTER (name = 'rollout/kv_blocks'), 0)",
            ),
        )
    )
}
FROM metrics_placed WHERE source <> 'plan' AND step IS NOT NULL AND {
    WHOLE
} AND name IN ('rollout/kv_blocks_used', 'rollout/kv_blocks')
GROUP BY step
"""


def loads(ledger: Ledger) -> Rows:
    """Load and times of the job in every stage."""
    return _named(_of_stages(ledger), [name for name, _ in LOADS.values()])


def loads_of_ranks(ledger: Ledger) -> Rows:
    """The same of every rank."""
    return _of_ranks(ledger, LOADS)


def together(ledger: Ledger) -> Rows:
    """What ranks have to do with each other: how unequal they are, how long they exchange and wait.

    `bubble`: of all ranks' time in a stage, and in all stages, the part in which they waited in a collective for a later rank.
    """
    rows = _of_stages(ledger)
    exchanged = [name for name, _ in TOGETHER.values()] if _exchange(rows) else []
    whole: Rows = [{"step": row["step"], "bubble": row["bubble/{}"]} for row in rows if row["stage"] is None]
    return [*_named(rows, [*exchanged, *UNEQUAL.values(), "bubble/{}"]), *whole]


def together_of_ranks(ledger: Ledger) -> Rows:
    """How long each rank exchanges and waits."""
    return _of_ranks(ledger, TOGETHER) if _exchange(_of_stages(ledger)) else []


def _exchange(rows: Iterable[Row]) -> bool:
    """Without one second in a collective nobody looked at them, or there are none."""
    return any(row["comm_time_s/{}"] for row in rows)


def _of_stages(ledger: Ledger) -> Rows:
    """Every formula over the ranks of a stage in a step, and of all its stages together (`stage` null); worked out once."""
    if "of stages" not in ledger.worked_out:
        ways = [(name, f"{way}({column})") for column, (name, way) in (LOADS | TOGETHER).items()]
        unequal = [(name, IMBALANCE.format(column, RANK)) for column, name in UNEQUAL.items()]
        columns = named([*ways, *unequal, ("bubble/{}", BUBBLE)])
        ledger.worked_out["of stages"] = ledger.rows(OF_STAGES.format(balance=BALANCE, columns=columns))
    rows: Rows = ledger.worked_out["of stages"]
    return rows


def _named(rows: Rows, patterns: Sequence[str]) -> Rows:
    return [
        {"step": row["step"], **{pattern.format(row["stage"]): row[pattern] for pattern in patterns}}
        for row in rows
        if row["stage"] is not None
    ]


def _of_ranks(ledger: Ledger, ways: Ways) -> Rows:
    """The columns as metrics, of every row that is a rank's."""
    rows = ledger.rows(f"WITH here AS ({BALANCE}) FROM here WHERE rank IS NOT NULL")
    return [
        {"step": row["step"], "rank": row["rank"], **{name.format(row["stage"]): row[column] for column, (name, _) in ways.items()}}
        for row in rows
    ]  # fmt: skip


def waiting_share(rows: Iterable[Row]) -> float | None:
    """`bubble`: the part of the time of these ranks in these stages that they waited; None where no wait is known."""
    known = [row for row in rows if row["waited_seconds"] is not None and row["seconds"]]
    spent = sum(row["seconds"] for row in known)
    return sum(row["waited_seconds"] for row in known) / spent if spent else None


def kv_used(ledger: Ledger) -> Rows:
    """Of the blocks of the KV caches."""
    return ledger.rows(KV_USED)


def _names(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.format("<stage>") for name in patterns)


MEASURES = (
    Measure(
        names=_names(name for name, _ in LOADS.values()), make=loads, of_ranks=loads_of_ranks,
        needs="spans of stages, and samples with lengths that a rank sampled or trained on: record.level = tensors",
    ),
    Measure(
        names=(*_names(UNEQUAL.values()), *_names(name for name, _ in TOGETHER.values()), "bubble/<stage>", "bubble"),
        make=together, of_ranks=together_of_ranks, needs="several ranks, their stages, samples and collectives: record.level = tensors",
    ),
    Measure(names=("rollout/kv_used",), make=kv_used, needs="readings of the engine that samples: its KV cache"),
)  # fmt: skip
