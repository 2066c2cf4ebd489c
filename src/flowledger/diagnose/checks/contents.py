"""What one stage hands on is what the next one reads: content by checksum, from stage to stage and down to micro-batches."""

from collections.abc import Iterator
from typing import Any

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.sequences import Told, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SENTENCE = "a tensor that is read has the content with which it was written"
# What stands in other places under the same name: layers, decode steps, and sums that an estimator makes of rewards.
NOT_HANDED_ON = ("hidden_states", "logits", "kv_cache", "activations", "comm_buffer")

BETWEEN_STAGES = f"""
WITH met AS (
    SELECT process, step, stage, tensor_name, local_shape, access, checksum, seq, row_number() OVER (
        PARTITION BY process, step, stage, tensor_name, local_shape, access ORDER BY seq) AS nth
    FROM tensors WHERE checksum IS NOT NULL AND micro_batch IS NULL AND source <> 'plan'
        AND NOT list_contains(?, tensor_name) AND NOT (tensor_name = 'reward' AND stage = 'advantage') AND {WHOLE}),
handed AS (
    SELECT *, lag(checksum) OVER before AS was, lag(stage) OVER before AS was_stage, lag(access) OVER before AS was_access
    FROM met WHERE access = 'write' OR nth = 1
    WINDOW before AS (PARTITION BY process, step, tensor_name, local_shape ORDER BY seq))
SELECT step, stage, tensor_name, was_stage, was_access, process FROM handed
WHERE access = 'read' AND was <> checksum AND was_stage IS DISTINCT FROM stage ORDER BY step, seq LIMIT 20"""

# Of the same samples every micro-batch, in whatever stage, epoch or phase, reads the same rows.
WITHIN_STAGES = f"""
WITH met AS (
    SELECT process, step, stage, phase, epoch, mini_batch, micro_batch, tensor_name, local_shape, access, checksum, seq
    FROM tensors WHERE checksum IS NOT NULL AND micro_batch IS NOT NULL AND source <> 'plan' AND {WHOLE}),
samples AS (
    SELECT process, step, stage, epoch, mini_batch, micro_batch, any_value(checksum) AS whose
    FROM met WHERE tensor_name = 'sample_id' AND access = 'read' AND phase IS NULL GROUP BY ALL),
rows_of AS (
    SELECT met.*, whose FROM met JOIN samples ON met.process = samples.process AND met.step = samples.step AND met.stage = samples.stage
        AND met.epoch IS NOT DISTINCT FROM samples.epoch AND met.mini_batch IS NOT DISTINCT FROM samples.mini_batch
        AND met.micro_batch = samples.micro_batch
    WHERE access = 'read' AND list_contains(?, tensor_name)),
firsts AS (
    SELECT *, first_value(checksum) OVER same AS was, first_value(stage) OVER same AS was_stage FROM rows_of
    WINDOW same AS (PARTITION BY process, step, whose, tensor_name, local_shape ORDER BY seq ROWS UNBOUNDED PRECEDING))
SELECT step, stage, phase, epoch, mini_batch, micro_batch, tensor_name, was_stage, process FROM firsts
WHERE was <> checksum ORDER BY step, seq LIMIT 20"""
OF_SAMPLES = (
    "full_sequence", "attention_mask", "position_ids", "response_mask", "loss_mask", "old_log_prob", "ref_log_prob",
    "advantages", "rollout_is_weights", "values", "returns",
)  # fmt: skip

# Token by token, from where it is made to where the loss reads it; rows of a micro-batch have no checksum of their own before.
TO_THE_LOSS = ("old_log_prob", "ref_log_prob", "advantage")

STALE = f"""
SELECT now.step, now.stage, now.tensor_name, now.process, earlier.step AS of
FROM (SELECT * FROM tensors WHERE access = 'write' AND micro_batch IS NULL AND checksum IS NOT NULL AND source <> 'plan' AND {WHOLE}) AS now
JOIN (SELECT * FROM tensors WHERE access = 'write' AND micro_batch IS NULL AND checksum IS NOT NULL AND source <> 'plan') AS earlier
ON now.process = earlier.process AND now.tensor_name = earlier.tensor_name AND now.stage = earlier.stage
    AND now.step = earlier.step + 1 AND now.checksum = earlier.checksum AND now.local_shape = earlier.local_shape
WHERE list_contains(?, now.tensor_name) ORDER BY now.step, now.seq LIMIT 20"""
# Sums of thousands of roundings: two steps do not make the same by chance. -> the column of a token that has it
NEVER_TWICE = {
    "rollout_log_prob": "rollout_log_prob",
    "old_log_prob": "old_log_prob",
    "entropy": "entropy",
    "values": "value",
}
# Steps that sampled the very sequences of the step before, from weights that it had not moved: they must make the same.
SAME_AGAIN = f"""
WITH sequences AS (
    SELECT process, step, checksum FROM tensors WHERE tensor_name = 'full_sequence' AND access = 'write' AND micro_batch IS NULL
        AND checksum IS NOT NULL AND source <> 'plan' AND {WHOLE}),
still AS (SELECT step FROM metrics_by_step WHERE name = 'update_ratio' AND value = 0)
SELECT DISTINCT now.step FROM sequences AS now JOIN sequences AS earlier
ON now.process = earlier.process AND now.step = earlier.step + 1 AND now.checksum = earlier.checksum
WHERE earlier.step IN (SELECT step FROM still)"""


def check(ledger: Ledger) -> list[FindingRow]:
    """`content_changed` and `content_repeated`."""
    if ledger.directory.manifest.framework != "flowledger":
        needs = ("a loop that hands on the rows of a step in one order: framework = flowledger",)
        return [answer("content_changed", SENTENCE, seen=0, needs=needs)]
    (found,) = ledger.rows("SELECT count(checksum) AS n FROM tensors WHERE source <> 'plan'")
    if not found["n"]:
        return [answer("content_changed", SENTENCE, seen=0, needs=("checksums: record.level = tokens",))]
    breaches = [
        Breach(
            step=row["step"], stage=row["stage"],
            text=f"{row['stage']} reads a {row['tensor_name']} that differs from what {row['was_stage']} "
            f"{'wrote' if row['was_access'] == 'write' else 'read'}",
        )
        for row in ledger.rows(BETWEEN_STAGES, [list(NOT_HANDED_ON)])
    ] + [
        Breach(
            step=row["step"], stage=row["stage"],
            text=f"micro-batch {row['micro_batch']} of {row['stage']}{' ' + row['phase'] if row['phase'] else ''} reads a "
            f"{row['tensor_name']} of its samples that differs from the first that was read of them, in {row['was_stage']}",
        )
        for row in ledger.rows(WITHIN_STAGES, [list(OF_SAMPLES)])
    ] + list(_in_loss(told(ledger)))  # fmt: skip
    repeated = [
        Breach(step=row["step"], stage=row["stage"], text=f"{row['tensor_name']} of {row['stage']} is that of step {row['of']}, bit for bit")
        for row in _stale(ledger)
    ]  # fmt: skip
    return [
        answer(
            "content_changed", SENTENCE, seen=found["n"], breaches=breaches,
            cause="rows were permuted, replaced or kept from elsewhere on the way",
            next_step="look at what stands between the two stages, and print the sample ids on both sides",
        ),
        answer(
            "content_repeated", "what a step computes is its own", seen=found["n"], breaches=repeated,
            cause="a result of an earlier step is used again, or the weights and the samples are those of that step",
        ),
    ]  # fmt: skip


def _stale(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Results that are those of the step before, without those that two steps make alike by right: a policy that has collapsed
    onto one text is certain of each token, so that all of its log-probs are 0 in every step.
    """
    rows = ledger.rows(STALE, [list(NEVER_TWICE)])
    if not rows:
        return
    again = {row["step"] for row in ledger.rows(SAME_AGAIN)}
    said: dict[tuple[int, str], set[Any]] = {}
    for one in told(ledger).sequences:
        for name, column in NEVER_TWICE.items():
            own = (
                value for value, on in zip(one[column], one["response_mask"], strict=True) if on and value is not None
            )
            said.setdefault((one.step, name), set()).update(own)
    certain = {place for place, values in said.items() if len(values) == 1}
    yield from (row for row in rows if row["step"] not in again and (row["step"], row["tensor_name"]) not in certain)


def _in_loss(data: Told) -> Iterator[Breach]:
    """Where the loss was handed other numbers for a recorded token than the step had made of it."""
    made = {(one.step, one.sample_id): one for one in data.sequences}
    columns = [
        name for name in TO_THE_LOSS if name != "old_log_prob" or data.setting("algorithm.policy_loss") != "bypass_mode"
    ]
    for one in data.passes:
        before = made.get((one.step, one.sample_id))
        if before is None:
            continue
        places = {position: at for at, position in enumerate(before.positions)}
        for name in columns:
            pairs = (
                (position, before[name][places[position]], value)
                for position, value, on in zip(one.positions, one[name], one["loss_mask"], strict=True)
                if on and position in places
            )
            odd = next((pair for pair in pairs if None not in pair and pair[1] != pair[2]), None)
            if odd is not None:
                yield Breach(
                    step=one.step, stage="update_actor",
                    text=f"the loss reads {name} {odd[2]:.5g} of sample {one.sample_id} position {odd[0]}, and {odd[1]:.5g} was made of it",
                )  # fmt: skip
                break
