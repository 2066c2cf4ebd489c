"""What two places say of the same thing, in the run of a framework: weights sent and received, its numbers and ours."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flowledger.diagnose.measures import micro_batches
from flowledger.diagnose.measures.series import series_of
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow
from flowledger.tables.metrics import find

OWN = "flowledger"
FRAMEWORKS = ("verl", "trl", OWN)  # whose metrics mean what the table says; another loop may call something else so
TOLERANCE = 1e-4  # relative: metrics are made in float32, and some of them are means over means
WHOLE_CHECKSUM = 1 << 32
# Metrics of the samples, and of the tokens, that are the same whoever makes them.
OF_SAMPLES = (
    "reward/mean", "reward/std", "reward/max", "reward/min", "reward/<component>/mean", "response_length/mean",
    "response_length/max", "response_length/min", "prompt_length/mean", "prompt_length/max", "prompt_length/min",
    "truncation_ratio", "abort_ratio", "dropped_ratio", "zero_variance_groups", "advantage/mean", "advantage/std",
    "total_tokens",
)  # fmt: skip
OF_TOKENS = ("rollout_gap/mean", "rollout_gap/max", "ratio/max")
# Means over tokens for us; most frameworks take the mean of means of parts, which lies between the extremes of these.
OF_PARTS = tuple(micro_batches.PARTS)
# What is not compared: times, as two clocks around two calls are not one number.


class Pair(NamedTuple):
    """A metric as it was told and as the rows give it, in one step; it may lie between `low` and `high`."""

    step: int
    name: str
    told: float
    low: float
    high: float

    @property
    def agrees(self) -> bool:
        margin = TOLERANCE * max(1.0, abs(self.low), abs(self.high))
        inside = self.low - margin <= self.told <= self.high + margin
        return inside or (self.told != self.told and self.low != self.low)  # nan is nan


def check(ledger: Ledger) -> list[FindingRow]:
    """A finding for each of the two, none where the run has nothing to compare."""
    return [one for one in (weights_arrived(ledger), metrics_agree(ledger)) if one is not None]


def metrics_agree(ledger: Ledger) -> FindingRow | None:
    """The framework's own metrics beside those made of the recorded samples and tokens, step by step."""
    if ledger.directory.manifest.framework not in FRAMEWORKS:
        return None
    pairs = list(compared(ledger))
    if not pairs:
        return None
    rows = ledger.rows("SELECT DISTINCT name, raw_name FROM metrics WHERE NOT recomputed AND source <> 'plan'")
    raw = {row["name"]: row["raw_name"] for row in rows}
    apart = [
        f"step {pair.step}: {raw.get(pair.name) or pair.name} = {pair.told:.6g}, but the recorded samples give {_given(pair)}"
        for pair in pairs
        if not pair.agrees
    ]
    message = f"{len(pairs)} numbers of the framework, recomputed from the recorded samples"
    return _finding("metrics_agree", message, apart, "look at which samples each of them counts")


def compared(ledger: Ledger) -> Iterator[Pair]:
    """Every number that was told and can be recomputed from everything that there was in its step."""
    series = series_of(ledger)
    own = ledger.directory.manifest.framework == OWN
    each_step = {row["step"] for row in ledger.rows("SELECT DISTINCT step FROM samples_merged WHERE step IS NOT NULL")}
    ahead = _steps_with_samples_of_others(ledger)
    for name in series.told:
        row = find(name)
        if row is None or row.name not in (*OF_SAMPLES, *OF_TOKENS, *OF_PARTS):
            continue
        told, made = series.recorded(name), series.made.by_step(name)
        if not each_step.intersection(made) <= told.keys():  # who tells more rarely tells means over several steps
            continue
        between = micro_batches.bounds(ledger, name) if row.name in OF_PARTS and not own else {}
        for step in sorted(series.made.whole(name) & told.keys() - ahead):
            yield Pair(step, name, told[step], *between.get(step, (made[step], made[step])))


def _steps_with_samples_of_others(ledger: Ledger) -> set[int]:
    """Steps that learn of samples of an earlier one, or leave theirs to a later one: a framework counts those that it trains on."""
    rows = ledger.rows("SELECT DISTINCT unnest([step, trained_in]) AS step FROM samples_merged WHERE trained_in > step")
    return {row["step"] for row in rows}


def differing(ledger: Ledger) -> set[tuple[int, str]]:
    """(step, metric) of each number that was told otherwise than the rows give it; of a loop with words of its own, none."""
    known = ledger.directory.manifest.framework in FRAMEWORKS
    return {(pair.step, pair.name) for pair in compared(ledger) if not pair.agrees} if known else set()


def _given(pair: Pair) -> str:
    return f"{pair.low:.6g}" if pair.low == pair.high else f"{pair.low:.6g} to {pair.high:.6g}"


def weights_arrived(ledger: Ledger) -> FindingRow | None:
    """The n-th weights that a worker of the engine received, beside the n-th that the trainer sent."""
    sent, received = (_synchronisations(ledger, way) for way in ("sent", "received"))
    if not sent or not received:
        return None
    (first, *_) = sent.values()
    compared, apart = 0, []
    for process, theirs in received.items():
        for number, (got, gave) in enumerate(zip(theirs, first, strict=False)):
            compared += 1
            apart += [
                f"synchronisation {number}, {process}: {what} {got[what]} received, {gave[what]} sent"
                for what in ("tensors", "bytes", "checksum")
                if what in got and what in gave and got[what] != gave[what]
            ]
    message = f"{compared} synchronisations of weights, as sent and as received"
    return _finding(
        "weights_arrived", message, apart, "sample with the weights that were trained: look at the transfer"
    )


def _synchronisations(ledger: Ledger, way: str) -> dict[str, list[Mapping[str, Any]]]:
    """By process what each of its weight synchronisations came to: buckets added up."""
    rows = ledger.rows(
        "WITH syncs AS (SELECT process, start_ns, end_ns, row_number() OVER (PARTITION BY process ORDER BY start_ns) AS n "
        "FROM spans WHERE stage = 'weight_sync' AND span_kind = 'stage' AND event = 'end') "
        "SELECT syncs.process, n, split_part(name, '_', -1) AS what, sum(value)::HUGEINT AS total FROM syncs JOIN metrics "
        "ON metrics.process = syncs.process AND metrics.t_ns BETWEEN syncs.start_ns AND syncs.end_ns "
        "WHERE name LIKE ? GROUP BY ALL ORDER BY syncs.process, n",
        [f"weight_sync/{way}_%"],
    )
    found: dict[str, dict[int, dict[str, int]]] = {}
    for row in rows:
        total = int(row["total"])
        one = found.setdefault(row["process"], {}).setdefault(row["n"], {})
        one[row["what"]] = total % WHOLE_CHECKSUM if row["what"] == "checksum" else total
    return {process: [syncs[n] for n in sorted(syncs)] for process, syncs in found.items()}


def _finding(name: str, message: str, apart: list[str], next_step: str) -> FindingRow:
    if not apart:
        return FindingRow(id=name, verdict="pass", message=f"{message}: equal")
    return FindingRow(
        id=name, verdict="warn", severity="warning", message=f"{message}: {len(apart)} differ; {apart[0]}",
        evidence=apart, next_step=next_step,
    )  # fmt: skip
