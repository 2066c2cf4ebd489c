"""Metrics of rollout against trainer: log-probs of the same tokens by the engine that sampled them and by the model that learns.

The noise floor stands beside them: what two computations of the same policy in the dtype of the run are apart anyway.
"""

from flowledger.diagnose.laws import noise_floor
from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.measures.policy import HERE, ratio
from flowledger.ledger.reader import Ledger

# r: by the engine. o: by the trainer before it learns from the token: its own pass, else what the update saw first.
TOKENS = f"""
said AS (
    SELECT step, sample_id, position, arg_max(rollout_log_prob, t_ns) AS r, coalesce(
            arg_max(old_log_prob, t_ns) FILTER (stage = 'old_log_prob'), arg_min(new_log_prob, t_ns) FILTER (stage = 'update_actor'),
            arg_max(old_log_prob, t_ns)) AS o, arg_max(loss_mask, t_ns) AS loss_mask
    FROM tokens WHERE {HERE} GROUP BY step, sample_id, position),
pairs AS (
    SELECT *, {ratio("o - r")} AS w FROM said
    WHERE loss_mask = 1 AND r IS NOT NULL AND o IS NOT NULL),
whole AS (
    SELECT step, exp(avg(r) - avg(o)) AS perplexities, {ratio("sum(o - r)")} AS v
    FROM pairs GROUP BY step, sample_id),
responses AS (
    SELECT step, avg(perplexities) AS perplexities, sum(v) ** 2 / (count(v) * sum(v * v)) AS worth FROM whole GROUP BY step)"""

COLUMNS = (
    ("rollout_gap/mean", "avg(abs(r - o))"),
    ("rollout_gap/max", "max(abs(r - o))"),
    ("rollout_gap/k1", "avg(r - o)"),
    ("rollout_gap/k3", "avg(w - (o - r) - 1)"),
    ("rollout_gap/prob_mean", "avg(abs(exp(r) - exp(o)))"),
    ("rollout_gap/ppl_ratio", "any_value(perplexities)"),
    (
        "rollout_gap/pearson",
        "CASE WHEN stddev_pop(exp(r)) > 0 AND stddev_pop(exp(o)) > 0 THEN corr(exp(r), exp(o)) END",
    ),
    ("rollout_gap/effective_sample_size", "sum(w) ** 2 / (count(w) * sum(w * w))"),
    ("rollout_gap/effective_responses", "any_value(worth)"),
)


def gap(ledger: Ledger) -> Rows:
    """All of them in one look at the tokens, and the floor for each step that has them."""
    rows = ledger.rows(
        f"WITH {TOKENS} SELECT pairs.step, {named(COLUMNS)} FROM pairs JOIN responses USING (step) GROUP BY pairs.step"
    )
    floor = noise_floor(ledger)
    return [{**row, "rollout_gap/noise_floor": floor} for row in rows]


MEASURES = (
    Measure(
        names=(*(name for name, _ in COLUMNS), "rollout_gap/noise_floor"), make=gap, of_tokens="coalesce(old_log_prob, new_log_prob)",
        needs="rows of `tokens` with rollout_log_prob, old_log_prob and loss_mask: record.level = tokens and log-probs of the engine",
    ),
)  # fmt: skip
