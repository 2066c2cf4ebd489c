"""Metrics of speed: time of a step, tokens a second, the part of it that stages have, and of the device's peak what is used."""

from dataclasses import dataclass
from functools import partial

from flowledger.diagnose.measures.measure import Measure, Rows, named
from flowledger.diagnose.missing import WHOLE
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.tables import models
from flowledger.tables.gpus import gpu

HERE = f"source <> 'plan' AND step IS NOT NULL AND {WHOLE}"
STEPS = f"steps AS (SELECT step, max(seconds) AS seconds FROM step_seconds SEMI JOIN step_begins USING (step) WHERE {HERE} GROUP BY step)"
TOKENS = f"tokens_of AS (SELECT step, sum(prompt_length + response_length) AS n FROM samples_merged WHERE {HERE} GROUP BY step)"
RANKS = "(SELECT nullif(count(DISTINCT rank), 0) FROM processes WHERE source <> 'plan')"
SPEED = f"""
WITH {STEPS}, {TOKENS}
SELECT step, {named((("step_time_s", "seconds"), ("tokens_per_s", "n / seconds"), ("tokens_per_s_per_gpu", f"n / seconds / {RANKS}")))}
FROM steps LEFT JOIN tokens_of USING (step)
"""
GOODPUT = f"SELECT step, sum(share)::DOUBLE AS goodput FROM stage_shares SEMI JOIN step_begins USING (step) WHERE {HERE} GROUP BY step"

# What went through the update in a step, each pass of a sample once, whatever ranks share it; and how long the slowest rank had.
UPDATES = f"""
WITH passes AS (
    SELECT step, sample_id, max(len(list_distinct(list_transform(trained, lambda one: (one.epoch, one.mini_batch))))) AS n
    FROM samples WHERE {HERE} AND len(trained) > 0 GROUP BY step, sample_id),
lengths AS (
    SELECT sample_id, any_value(prompt_length + response_length) AS n FROM samples_merged WHERE {HERE} GROUP BY sample_id),
work AS (
    SELECT step, sum(passes.n * lengths.n) AS tokens, sum(passes.n * lengths.n ** 2) AS squares FROM passes JOIN lengths USING (sample_id) GROUP BY step)
SELECT step, tokens, squares, max(seconds) AS seconds FROM work JOIN stages USING (step)
WHERE stages.stage = 'update_actor' AND stages.source <> 'plan' GROUP BY ALL
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model tells its operations: parameters that a token meets, and layers times width of attention."""

    active: float  # matrix parameters a token is multiplied with: embeddings looked up are none of them, the head is
    attention: float  # L * A * D

    def flops(self, tokens: float, squares: float, *, again: bool) -> float:
        """Operations of training on samples with so many tokens in all, and so many squared lengths.

        6 a parameter and token: 2 forward, 4 backward; attention 12·L·A·D·n a token, of which a causal mask leaves half
        (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). again: activations are made a second time, one forward more.
        """
        once = 6 * self.active * tokens + 6 * self.attention * squares
        return once * 4 / 3 if again else once


def shape_of(ledger: Ledger) -> Shape | None:
    """Of the model of the run, by its published sizes or those that the run was bound to; None where they do not say."""
    path = ledger.setting("model.path")
    known = models.find(path) if isinstance(path, str) else None
    if known is not None and known.mla is None and known.linear is None:
        attention = known.heads * known.head_dim
        mixer = 2 * known.hidden * (attention + known.kv_heads * known.head_dim)
        feed_forward = sum(_feed_forward(known, layer) for layer in range(known.layers))
        return Shape(known.layers * mixer + feed_forward + known.hidden * known.vocab, known.layers * attention)
    b = ledger.directory.manifest.bindings
    if not b.keys() >= set("HLAKDFV"):
        return None
    width = b["F"]
    if b.get("E", 1) > 1:
        width = ledger.setting("model.tiny.experts_per_token") * b["F"] if path == "tiny" else 0
    if not width:
        return None
    layer = 2 * b["H"] * (b["A"] + b["K"]) * b["D"] + 3 * b["H"] * width
    return Shape(b["L"] * layer + b["H"] * b["V"], b["L"] * b["A"] * b["D"])


def _feed_forward(known: models.Architecture, layer: int) -> int:
    """Parameters of one layer's feed-forward that a token meets."""
    branches = known.branches + 1
    if known.moe is None or not known.is_moe(layer):
        return branches * known.hidden * known.ffn
    of_experts = known.moe.topk * known.moe.ffn + known.moe.shared_ffn
    return known.hidden * (branches * of_experts + known.moe.experts)


def peak_of(ledger: Ledger) -> tuple[float, str]:
    """Peak operations a second of all ranks together, or 0 and why it is not known.

    A device is what its process names; where it names none, what the configuration says (`hardware.gpu`).
    """
    devices = ledger.rows(
        "SELECT rank, any_value(device) AS device FROM processes WHERE rank IS NOT NULL GROUP BY rank"
    )
    (seen,) = ledger.rows("SELECT count(device_used) > 0 AS gpu FROM memory WHERE source <> 'plan'")
    dtype, stated = str(ledger.setting("model.dtype") or "bfloat16"), ledger.setting("hardware.gpu")
    total = 0.0
    for row in devices:
        if row["device"] == "cpu" and not seen["gpu"]:
            return 0.0, "a GPU: the run was on a CPU, whose peak nobody states"
        peak = _peak(row["device"], dtype) or _peak(stated, dtype)
        if not peak:
            return (
                0.0,
                f"the name of the GPU: hardware.gpu; the process says {row['device']!r}, which tables/gpus.toml has not",
            )
        total += peak
    return total, "" if devices else "processes with a rank"


def _peak(device: object, dtype: str) -> float:
    try:
        return gpu(str(device)).flops(dtype)
    except BadInput:
        return 0.0


def why_no_mfu(ledger: Ledger) -> str:
    """What the utilisation of the peak lacks."""
    if shape_of(ledger) is None:
        return "the sizes of the model (H, L, A, K, D, F, V)"
    return peak_of(ledger)[1] or "samples with lengths and their passes through update_actor: record.level = tensors"


def utilisation(ledger: Ledger) -> Rows:
    """Of the update, with what it recomputes and without."""
    shape, (peak, _) = shape_of(ledger), peak_of(ledger)
    if shape is None or not peak:
        return []
    again = bool(ledger.setting("actor.activation_checkpointing")) or (
        ledger.setting("actor.engine.recompute.granularity") == "full"
    )
    return [
        {
            "step": row["step"],
            "mfu": shape.flops(row["tokens"], row["squares"], again=False) / (row["seconds"] * peak),
            "mfu/with_recompute": shape.flops(row["tokens"], row["squares"], again=again) / (row["seconds"] * peak),
        }
        for row in ledger.rows(UPDATES)
        if row["seconds"]
    ]


def rows_of(sql: str, ledger: Ledger) -> Rows:
    """The rows of one question."""
    return ledger.rows(sql)


MEASURES = (
    Measure(names=("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu"), make=partial(rows_of, SPEED), needs="spans of steps, and lengths of samples"),
    Measure(names=("goodput",), make=partial(rows_of, GOODPUT), needs="spans of steps and stages"),
    Measure(names=("mfu", "mfu/with_recompute"), make=utilisation, needs=why_no_mfu),
    Measure(names=("sma",), make=lambda _: [], needs="SM activity of the GPUs as NVML GPM or DCGM say it, recorded or imported as sma"),
    Measure(names=("comm_overlap",), make=lambda _: [], needs="a trace of the devices (Kineto, Chrome): flowledger import"),
)  # fmt: skip
