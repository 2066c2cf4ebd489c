"""Between which bounds a mean of means over tokens must lie, as most frameworks make their metrics."""

from flowledger.diagnose.measures.measure import named
from flowledger.diagnose.measures.policy import COLUMNS, PASSES, SIDES, bounds_and_form
from flowledger.ledger.reader import Ledger

# What the smallest means are of: of each micro-batch of a rank; where it is aggregated as the loss is, of each response.
PARTS = {
    "clip_ratio": "rank, mini_batch, micro_batch",
    "policy_kl": "rank, mini_batch, micro_batch",
    "entropy": "sample_id",
    "ref_kl": "sample_id",
}


def bounds(ledger: Ledger, name: str) -> dict[int, tuple[float, float]]:
    """step -> the smallest and the largest mean of a part, of a metric that PARTS has."""
    clip, ref_kl = bounds_and_form(ledger)
    formula = dict((*COLUMNS, ref_kl))[name]
    rows = ledger.rows(
        f"WITH {PASSES}, {SIDES}, parts AS ("
        f"SELECT step, {named([('mean', formula)])} FROM sides GROUP BY step, epoch, {PARTS[name]}) "
        "SELECT step, min(mean) AS low, max(mean) AS high FROM parts WHERE mean IS NOT NULL GROUP BY step",
        clip,
    )
    return {row["step"]: (row["low"], row["high"]) for row in rows}
