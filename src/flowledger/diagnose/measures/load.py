"""Metrics of ranks: what each had to do in each stage, how long it took, how long it waited, and how unequal that is."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    "samples": ("load/{}/samples", "mean"), "tokens": ("load/{}/tokens", "mean"),
    "length_squares": ("load/{}/length_squares", "mean"), "longest": ("load/{}/longest", "max"),
    "micro_batches": ("load/{}/micro_batches", "max"), "seconds": ("stage_time_s/{}", "max"),
}  # fmt: skip
TOGETHER = {"comm_seconds": ("comm_time_s/{}", "max"), "waited_seconds": ("wait_time_s/{}", "max")}
UNEQUAL = {
    "samples": "imbalance/{}/samples", "tokens": "imbalance/{}/tokens", "length_squares": "imbalance/{}/length_squares",
    "longest": "imbalance/{}/longest", "busy": "imbalance/{}/time",
}  # fmt: skip

Row = Mapping[str, Any]
Ways = Mapping[str, tuple[str, str]]

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


def balance(ledger: Ledger) -> Rows:
    """The balance, row by row; it is asked for once."""
    if "balance" not in ledger.worked_out:
        ledger.worked_out["balance"] = ledger.rows(BALANCE)
    rows: Rows = ledger.worked_out["balance"]
    return rows


def places(ledger: Ledger) -> dict[tuple[int, str], list[Row]]:
    """(step, stage) -> the rows of its processes; worked out once."""
    if "places" not in ledger.worked_out:
        placed: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in balance(ledger):
            placed[row["step"], row["stage"]].append(row)
        ledger.worked_out["places"] = placed
    found: dict[tuple[int, str], list[Row]] = ledger.worked_out["places"]
    return found


def loads(ledger: Ledger) -> Rows:
    """Load and times of every rank in every stage, and of the job."""
    of_job = (_of_job(place, rows, LOADS) for place, rows in places(ledger).items())
    return [*_of_ranks(balance(ledger), LOADS), *of_job]


def together(ledger: Ledger) -> Rows:
    """What ranks have to do with each other: how unequal they are, how long they exchange and wait."""
    rows = balance(ledger)
    ways = (
        TOGETHER if any(row["comm_seconds"] for row in rows) else {}
    )  # else nobody looked at collectives, or there are none
    unequal = [_unequal(place, rows) for place, rows in places(ledger).items()]
    of_job = [_of_job(place, rows, ways) for place, rows in places(ledger).items()]
    return [*(_of_ranks(rows, ways) if ways else ()), *of_job, *unequal, *bubbles(places(ledger))]


def bubbles(places: Mapping[tuple[int, str], list[Row]]) -> Rows:
    """Of all ranks' time in a stage, and in all stages, the part in which they waited in a collective for a later rank."""
    steps: dict[int, list[Row]] = defaultdict(list)
    found: Rows = []
    for (step, stage), rows in places.items():
        steps[step] += rows
        found.append({"step": step, f"bubble/{stage}": waiting_share(rows)})
    return [*found, *({"step": step, "bubble": waiting_share(rows)} for step, rows in steps.items())]


def waiting_share(rows: Iterable[Row]) -> float | None:
    """`bubble`: the part of the time of these ranks in these stages that they waited; None where no wait is known."""
    known = [row for row in rows if row["waited_seconds"] is not None and row["seconds"]]
    spent = sum(row["seconds"] for row in known)
    return sum(row["waited_seconds"] for row in known) / spent if spent else None


def _of_ranks(rows: Rows, ways: Ways) -> Rows:
    """The columns as metrics, of every row that is a rank's."""
    names = {
        stage: [(name.format(stage), column) for column, (name, _) in ways.items()]
        for stage in {row["stage"] for row in rows}
    }
    return [
        {"step": row["step"], "rank": row["rank"], **{name: row[column] for name, column in names[row["stage"]]}}
        for row in rows
        if row["rank"] is not None
    ]


def _of_job(place: tuple[int, str], rows: Iterable[Row], ways: Ways) -> dict[str, Any]:
    found: dict[str, Any] = {"step": place[0]}
    for column, (name, way) in ways.items():
        numbers = [row[column] for row in rows if row[column] is not None]
        found[name.format(place[1])] = _joined(numbers, way) if numbers else None
    return found


def _joined(numbers: list[float], way: str) -> float:
    return float(max(numbers)) if way == "max" else sum(numbers) / len(numbers)


def _unequal(place: tuple[int, str], rows: Iterable[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"step": place[0]}
    for column, name in UNEQUAL.items():
        numbers = [row[column] for row in rows if row[column] is not None and row["rank"] is not None]
        found[name.format(place[1])] = imbalance(numbers)
    return found


def imbalance(numbers: list[float]) -> float | None:
    """Largest divided by mean: 1 where all are equal. None for one rank, and where nobody has anything."""
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if len(numbers) > 1 and total > 0 else None


def kv_used(ledger: Ledger) -> Rows:
    """Of the blocks of the KV caches."""
    return ledger.rows(KV_USED)


def _names(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.format("<stage>") for name in patterns)


MEASURES = (
    Measure(
        names=_names(name for name, _ in LOADS.values()), make=loads,
        needs="spans of stages, and samples with lengths that a rank sampled or trained on: record.level = tensors",
    ),
    Measure(
        names=(*_names(UNEQUAL.values()), *_names(name for name, _ in TOGETHER.values()), "bubble/<stage>", "bubble"),
        make=together, needs="several ranks, their stages, samples and collectives: record.level = tensors",
    ),
    Measure(names=("rollout/kv_used",), make=kv_used, needs="readings of the engine that samples: its KV cache"),
)  # fmt: skip
