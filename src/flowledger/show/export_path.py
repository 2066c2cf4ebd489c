"""The way of one sample: in which interval of which rank each stage had it, in the order of time."""

from dataclasses import dataclass
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.ledger.reader import Ledger
from flowledger.show.export_rows import SPANS, Steps
from flowledger.show.report import telling_sample

# Where a sample was: the micro-batch that took it, else the stage; and spans that are of this sample alone.
STOPS = f"""
WITH every AS ({SPANS}),
seen AS (
    SELECT DISTINCT process, step, stage FROM samples WHERE sample_id = $sample AND source <> 'plan' AND stage IS NOT NULL
    UNION SELECT DISTINCT process, step, stage FROM tokens WHERE sample_id = $sample AND source <> 'plan' AND stage IS NOT NULL),
trained AS (
    SELECT DISTINCT process, step, stage, one.epoch AS epoch, one.mini_batch AS mini_batch, one.micro_batch AS micro_batch
    FROM (SELECT process, step, coalesce(stage, 'update_actor') AS stage, unnest(trained) AS one FROM samples
        WHERE sample_id = $sample AND source <> 'plan')),
micro AS (
    SELECT every.* FROM every SEMI JOIN trained ON every.process = trained.process AND every.step IS NOT DISTINCT FROM trained.step
        AND every.stage = trained.stage AND every.epoch IS NOT DISTINCT FROM trained.epoch
        AND every.mini_batch IS NOT DISTINCT FROM trained.mini_batch AND every.micro_batch = trained.micro_batch
    WHERE span_kind = 'compute'
    QUALIFY row_number() OVER (PARTITION BY process, step, stage, epoch, mini_batch, micro_batch ORDER BY began_ns, ended_ns DESC) = 1),
whole AS (
    SELECT every.* FROM every SEMI JOIN seen ON every.process = seen.process AND every.step IS NOT DISTINCT FROM seen.step
        AND every.stage = seen.stage
    WHERE span_kind = 'stage' AND (process, step, stage) NOT IN (SELECT (process, step, stage) FROM micro))
FROM micro UNION ALL FROM whole UNION ALL
FROM (SELECT * FROM every WHERE sample_id = $sample AND span_kind <> 'wait')
"""


@dataclass(frozen=True, slots=True)
class Path:
    """One sample and the intervals that it went through."""

    sample: str
    stops: tuple[dict[str, Any], ...]

    def order(self) -> dict[tuple[str, int], int]:
        """(process, span) -> its place on the way."""
        return {(stop["process"], stop["id"]): at for at, stop in enumerate(self.stops)}


def path_of(ledger: Ledger, sample: str | None, steps: Steps) -> Path | None:
    """The way of a sample, or of the most telling one of those steps; None where there is no sample with intervals.

    Raises BadInput for a sample that the run does not have.
    """
    if sample is None:
        sample = telling_sample(ledger, steps.bounds)
        if sample is None:
            return None
    elif not ledger.rows("SELECT 1 FROM samples WHERE sample_id = ? AND source <> 'plan' LIMIT 1", [sample]):
        known = [
            row["sample_id"] for row in ledger.rows("SELECT DISTINCT sample_id FROM samples ORDER BY ALL LIMIT 1000")
        ]
        there = nearest(sample, known) if known else "; no samples were recorded (record.level samples or tokens)"
        raise BadInput(f"run {ledger.run} has no sample {sample!r}{there}")
    first, last = steps.bounds
    stops = ledger.rows(
        f"FROM ({STOPS}) WHERE step IS NULL OR step BETWEEN {first} AND {last} ORDER BY began_ns, ended_ns, process, id",
        {"sample": sample},
    )
    return Path(sample, tuple(stops)) if stops else None
