"""Metrics of samples: how long, how they ended, what they earned, which were dropped."""

from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger

SAMPLES = f"SELECT * FROM samples_merged WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE}"
KEPT = "(dropped_reason IS NULL OR dropped_reason = 'rejected')"  # a rejected sample had its reward

LENGTHS = tuple(
    (f"{part}_length/{name}", formula.format(f"{part}_length"))
    for part in ("prompt", "response")
    for name, formula in (
        ("mean", "avg({})"), ("min", "min({})"), ("max", "max({})"), ("p50", "quantile_cont({}, 0.5)"),
        ("p99", "quantile_cont({}, 0.99)"),
    )
)  # fmt: skip
REWARDS = tuple(
    (f"reward/{name}", f"{formula} FILTER ({KEPT})")
    for name, formula in (
        ("mean", "avg(reward)"), ("std", "stddev_pop(reward)"), ("min", "min(reward)"), ("max", "max(reward)"),
    )
)  # fmt: skip
ADVANTAGES = tuple(
    (f"advantage/{name}", f"{formula}(advantage) FILTER (dropped_reason IS NULL)")
    for name, formula in (("mean", "avg"), ("std", "stddev_pop"), ("min", "min"), ("max", "max"))
)
ENDS = (
    ("eos_ratio", "avg((finish_reason = 'stop')::INT)"),
    ("abort_ratio", "avg((finish_reason IN ('abort', 'timeout'))::INT)"),
)
DROPPED = (
    (
        "dropped_ratio",
        "CASE WHEN count(trained) + count(dropped_reason) > 0 THEN avg((dropped_reason IS NOT NULL)::INT) END",
    ),
)
TOTAL = (("total_tokens", "sum(prompt_length + response_length)"),)

# A response that fills its limit and does not end with a token that has ended a shorter one was cut off, whatever is said of it.
TRUNCATED = f"""
WITH samples_here AS ({SAMPLES}),
tails AS (
    SELECT sample_id, arg_max(token_id, position) AS tail FROM tokens WHERE token_id IS NOT NULL AND source <> 'plan' GROUP BY sample_id),
ends AS (
    SELECT DISTINCT tail FROM tails JOIN samples_here USING (sample_id)
    WHERE finish_reason = 'stop' AND response_length < ?
    UNION SELECT unnest(?::BIGINT[])),
judged AS (
    SELECT step, finish_reason, response_length >= ? AS filled, CASE WHEN tail IS NULL OR NOT EXISTS (FROM ends) THEN NULL
        ELSE tail IN (FROM ends) END AS ended
    FROM samples_here LEFT JOIN tails USING (sample_id))
SELECT step, avg((CASE WHEN filled THEN NOT coalesce(ended, coalesce(finish_reason IN ('stop', 'abort', 'timeout'), false))
    ELSE coalesce(finish_reason = 'length', CASE WHEN filled IS NOT NULL THEN false END) END)::INT)::DOUBLE AS truncation_ratio
FROM judged GROUP BY step
"""

COMPONENTS = f"""
SELECT step, part.key AS component, avg(part.value) AS mean, stddev_pop(part.value) AS std
FROM (SELECT step, unnest(map_entries(rewards)) AS part FROM ({SAMPLES}) WHERE {KEPT})
WHERE part.value IS NOT NULL AND NOT isnan(part.value) GROUP BY step, component
"""

GROUPS = f"""
SELECT step, avg((least = most)::INT)::DOUBLE AS zero_variance_groups
FROM (SELECT step, group_id, min(reward) AS least, max(reward) AS most FROM ({SAMPLES})
    WHERE group_id IS NOT NULL AND reward IS NOT NULL AND {KEPT} GROUP BY step, group_id)
GROUP BY step
"""

# Same tokens in the same group. Only groups of which tokens were recorded are looked at.
DUPLICATES = f"""
WITH said AS (
    SELECT step, sample_id, list(token_id ORDER BY position) AS response
    FROM (SELECT step, sample_id, position, max(token_id) AS token_id FROM tokens
        WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY step, sample_id, position HAVING max(response_mask) = 1)
    WHERE token_id IS NOT NULL GROUP BY step, sample_id),
counted AS (
    SELECT said.step, count(*) OVER (PARTITION BY said.step, group_id, response) AS alike
    FROM said JOIN (SELECT DISTINCT sample_id, group_id FROM samples_merged WHERE group_id IS NOT NULL) USING (sample_id))
SELECT step, avg((alike > 1)::INT)::DOUBLE AS duplicate_ratio FROM counted GROUP BY step
"""

STALENESS = f"""
WITH of_sample AS (
    SELECT max(step) FILTER (len(trained) > 0) AS step, sample_id, max(policy_version) FILTER (len(trained) > 0) AS trained_at,
        min(list_min(versions)) AS sampled_at
    FROM samples WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY sample_id, attempt)
SELECT step, {named((("staleness/mean", "avg(trained_at - sampled_at)"), ("staleness/max", "max(trained_at - sampled_at)")))}
FROM of_sample WHERE step IS NOT NULL GROUP BY step
"""


def plain(ledger: Ledger) -> Rows:
    """What one look at each sample gives."""
    columns = named((*LENGTHS, *REWARDS, *ADVANTAGES, *ENDS, *DROPPED, *TOTAL))
    return ledger.rows(f"SELECT step, {columns} FROM ({SAMPLES}) GROUP BY step")


def truncated(ledger: Ledger) -> Rows:
    """Cut-off responses, by the real limit. Of responses of several turns a last token does not tell: it may have ended a turn."""
    limit = ledger.setting("rollout.max_response_tokens")
    of_turns = (ledger.setting("rollout.max_turns") or 1) > 1
    stops = [] if of_turns else list(ledger.setting("rollout.stop_token_ids") or ())
    return ledger.rows(TRUNCATED, [0 if of_turns else limit, stops, limit])


def prompts_cut(ledger: Ledger) -> Rows:
    """Prompts that fill their limit."""
    limit = ledger.setting("data.max_prompt_tokens")
    column = named((("prompt_truncation_ratio", "avg((prompt_length >= ?)::INT)"),))
    return ledger.rows(f"SELECT step, {column} FROM ({SAMPLES}) GROUP BY step", [limit])


def components(ledger: Ledger) -> Rows:
    """Each reward component by its name."""
    return [
        {"step": row["step"], f"reward/{row['component']}/mean": row["mean"], f"reward/{row['component']}/std": row["std"]}
        for row in ledger.rows(COMPONENTS)
    ]  # fmt: skip


def _names(columns: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in columns)


LEVEL = "record.level = tensors"
MEASURES = (
    Measure(
        names=_names((*LENGTHS, *REWARDS, *ADVANTAGES, *ENDS, *DROPPED, *TOTAL)), make=plain,
        needs=f"rows of `samples` with lengths, rewards, finish_reason: {LEVEL}",
    ),
    Measure(
        names=("truncation_ratio",), make=truncated,
        needs="finish_reason of each sample, or its length and rollout.max_response_tokens",
    ),
    Measure(
        names=("prompt_truncation_ratio",), make=prompts_cut,
        needs="prompt_length of each sample and data.max_prompt_tokens",
    ),
    Measure(names=("reward/<component>/mean", "reward/<component>/std"), make=components, needs="rewards of each sample by component"),
    Measure(names=("zero_variance_groups",), make=lambda ledger: ledger.rows(GROUPS), needs="group_id and reward of each sample"),
    Measure(
        names=("duplicate_ratio",), make=lambda ledger: ledger.rows(DUPLICATES), of_tokens="token_id",
        needs="rows of `tokens` with token_id: record.level = tokens",
    ),
    Measure(
        names=("staleness/mean", "staleness/max"), make=lambda ledger: ledger.rows(STALENESS),
        needs="versions of each sample and policy_version of its update",
    ),
)  # fmt: skip
