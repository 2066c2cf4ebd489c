"""Metrics of memory and of tensors: peaks, what is reserved and not used, what is left, and whether shapes and masks fit."""

from collections.abc import Callable

from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger

HERE = f"source <> 'plan' AND step IS NOT NULL AND {WHOLE}"
ALLOCATED = "greatest(peak_since_stage, allocated)"
RESERVED = "greatest(reserved_peak_since_stage, reserved)"

# Of each process in each step. What is read at one time belongs together: the reading with the most has the fragmentation.
OF_PROCESS = f"""
SELECT step, process, any_value(rank) AS rank, max({ALLOCATED}) AS allocated, max({RESERVED}) AS reserved,
    max(device_used) AS device_used, max("limit") AS most, 1 - arg_max({ALLOCATED} / {RESERVED}, {ALLOCATED}) AS fragmentation,
    arg_max(residue / nullif(allocated, 0), allocated) FILTER (known IS NOT NULL) AS residue
FROM memory_readings WHERE {HERE} GROUP BY step, process
"""
ALLOCATOR = (
    ("memory/allocated_peak", "max(allocated)"),
    ("memory/reserved_peak", "max(reserved)"),
    ("memory/fragmentation", "max(fragmentation)"),
)
DEVICE = (
    ("memory/device_used", "max(device_used)"),
    ("memory/headroom", "min(1 - greatest(reserved, device_used, allocated) / most)"),
)
WATCHED = (("memory/residue_share", "max(residue)"),)

# What the named tensors of a step hold: each storage once, of tensors without one each name once.
BYTES = f"""
WITH held AS (
    SELECT step, process, rank, max(bytes) AS bytes FROM tensors WHERE {HERE}
    GROUP BY step, process, rank, coalesce(storage::VARCHAR, concat(tensor_name, layer, '/', micro_batch))),
of_process AS (SELECT step, process, rank, sum(bytes) AS bytes FROM held GROUP BY ALL)
"""

# Ranks of one role must have the same logical tensors; of what belongs to layers and experts those that hold the same ones.
MISMATCHES = f"""
WITH told AS (
    SELECT step, count(DISTINCT shape_checksum) AS shapes FROM tensors LEFT JOIN processes USING (process)
    WHERE {HERE.replace("source", "tensors.source")} AND shape_checksum IS NOT NULL AND micro_batch IS NULL
    GROUP BY step, tensors.role, stage, phase, tensor_name, layer, access,
        CASE WHEN kind IN ('param', 'grad', 'optimizer', 'activation') THEN (coordinates['pp'], coordinates['ep']) END
    HAVING count(DISTINCT tensors.rank) > 1)
SELECT step, sum((shapes > 1)::INT)::DOUBLE AS "tensor/shape_mismatches" FROM told GROUP BY step
"""
MISFITS = f"""
SELECT step, sum((NOT mask_fits(mask_shape, coalesce(local_shape, logical_shape)))::INT)::DOUBLE AS "tensor/mask_misfits"
FROM accesses WHERE {HERE} AND mask_shape IS NOT NULL AND coalesce(local_shape, logical_shape) IS NOT NULL
    AND coalesce(padding, 'none') <> 'packed' AND NOT (mask = 'attention_mask' AND tensor_name = 'response_mask')
GROUP BY step
"""
LIFETIMES = f"""
SELECT step, avg(alive_ms) AS "tensor/alive_ms", sum((outlives)::INT)::DOUBLE AS "tensor/outlives" FROM lifetimes WHERE {HERE} GROUP BY step
"""
# The same place of the same sample is the same token at every stage.
TOKENS = f"""
SELECT step, sum((ids > 1)::INT)::DOUBLE AS token_mismatches FROM (
    SELECT step, sample_id, position, count(DISTINCT token_id) AS ids FROM tokens WHERE {HERE} AND token_id IS NOT NULL GROUP BY ALL)
GROUP BY step
"""


def _of_job(rows: str, columns: str) -> Callable[[Ledger], Rows]:
    """Of the process that is worst off in each step."""
    return lambda ledger: ledger.rows(f"{rows} SELECT step, {columns} FROM of_process GROUP BY step")


def _of_ranks(rows: str, columns: str) -> Callable[[Ledger], Rows]:
    return lambda ledger: ledger.rows(
        f"{rows} SELECT step, rank, {columns} FROM of_process WHERE rank IS NOT NULL GROUP BY step, rank"
    )


MEMORY = (f"WITH of_process AS ({OF_PROCESS})", named((*ALLOCATOR, *DEVICE, *WATCHED)))
HELD = (BYTES, named((("tensor/bytes", "max(bytes)"),)))
TENSORS = "rows of `tensors`: record.level = tensors"
MEASURES = (
    Measure(
        names=tuple(name for name, _ in (*ALLOCATOR, *DEVICE, *WATCHED)), make=_of_job(*MEMORY), of_ranks=_of_ranks(*MEMORY),
        needs="readings of an allocator (of a GPU, for what is used of the device and what is left of its limit); for the residue "
        "a step that was watched operator by operator: record.ops_every",
    ),
    Measure(names=("tensor/bytes",), make=_of_job(*HELD), of_ranks=_of_ranks(*HELD), needs=TENSORS),
    Measure(
        names=("tensor/shape_mismatches",), make=lambda ledger: ledger.rows(MISMATCHES),
        needs=f"{TENSORS}, of several ranks",
    ),
    Measure(names=("tensor/mask_misfits",), make=lambda ledger: ledger.rows(MISFITS), needs=f"{TENSORS}, with mask_shape"),
    Measure(
        names=("tensor/alive_ms", "tensor/outlives"), make=lambda ledger: ledger.rows(LIFETIMES),
        needs="rows of `storages`: record.level = tensors",
    ),
    Measure(
        names=("token_mismatches",), make=lambda ledger: ledger.rows(TOKENS), of_tokens="token_id",
        needs="rows of `tokens` with token_id: record.level = tokens",
    ),
)  # fmt: skip
