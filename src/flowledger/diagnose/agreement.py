"""What two places say of the same thing, in the run of a framework: weights sent and received, its numbers and ours."""

from collections.abc import Mapping
from typing import Any

from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

FRAMEWORKS = ("verl", "trl")  # whose metrics they make themselves
TOLERANCE = 1e-4  # relative: frameworks average in float32, and some of them over means
WHOLE_CHECKSUM = 1 << 32
# Metric -> the same from what was recorded of each sample.
RECOMPUTED = {
    "reward/mean": "avg(reward)", "reward/max": "max(reward)", "reward/min": "min(reward)",
    "response_length/mean": "avg(response_length)", "response_length/max": "max(response_length)",
    "response_length/min": "min(response_length)", "prompt_length/mean": "avg(prompt_length)",
    "prompt_length/max": "max(prompt_length)",
}  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """A finding for each of the two, none where the run has nothing to compare."""
    return [one for one in (weights_arrived(ledger), metrics_agree(ledger)) if one is not None]


def metrics_agree(ledger: Ledger) -> FindingRow | None:
    """The framework's own metrics beside those made of the recorded samples, step by step."""
    if ledger.directory.manifest.framework not in FRAMEWORKS:
        return None
    listed = ", ".join(f"{formula}::DOUBLE AS {_column(name)}" for name, formula in RECOMPUTED.items())
    ours = {row["step"]: row for row in ledger.rows(f"SELECT step, {listed} FROM samples_merged GROUP BY step")}
    told = ledger.rows(
        f"SELECT step, name, raw_name, value FROM metrics WHERE NOT recomputed AND value IS NOT NULL AND {WHOLE} "
        "ORDER BY step, name"
    )
    each_step = {  # who tells more rarely tells means over several steps
        name for name in RECOMPUTED if ours.keys() <= {row["step"] for row in told if row["name"] == name}
    }
    pairs = [
        (row, ours[row["step"]][_column(row["name"])])
        for row in told
        if row["name"] in each_step and row["step"] in ours
    ]
    pairs = [(row, value) for row, value in pairs if value is not None]
    if not pairs:
        return None
    apart = [
        f"step {row['step']}: {row['raw_name']} = {row['value']:.6g}, but the recorded samples give {value:.6g}"
        for row, value in pairs
        if abs(row["value"] - value) > TOLERANCE * max(1.0, abs(value))
    ]
    message = f"{len(pairs)} numbers of the framework, recomputed from the recorded samples"
    return _finding("metrics_agree", message, apart, "look at which samples each of them counts")


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


def _column(name: str) -> str:
    return name.replace("/", "_")
