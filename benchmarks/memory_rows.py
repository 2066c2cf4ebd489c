"""Published measurements of fine-tuning outside Megatron, as jobs of the planner: one reader a framework.

A reader says what the framework does that its row leaves unsaid (defaults read in its source), never what one row measured.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.config.engine import Engine, Logits, Lora, Mesh, Offload, Optimizer, Recompute
from flowledger.plan.fsdp.adapters import adapters
from flowledger.plan.fsdp.state import units
from flowledger.plan.job import Job
from flowledger.plan.weights import count, weights
from flowledger.tables.constants import constant
from flowledger.tables.models import Architecture, Mla, Moe

Row = Mapping[str, Any]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEVICES = {
    "a100": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB", "h200": "H200-SXM5-141GB", "b200": "B200-180GB", "gb200": "GB200-186GB",
    "a6000": "RTX A6000", "l40s": "L40S", "4090": "RTX 4090", "a10g": "A10G",
}  # fmt: skip


@dataclass(frozen=True)
class Skip:
    """A row that cannot be predicted, and the input that it lacks."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row as the planner sees it."""

    job: Job
    variant: str = ""  # rows of activations that come first
    beside: int = 0  # bytes that lie there from begin to end: workspaces, buffers that no job states
    steady: int | None = None  # bytes at the logging point, where that is not the end of the step


def run_of(row: Row) -> Run | Skip:
    """The job of a row. Skips name the input that is missing."""
    name = (row.get("framework") or "").lower()
    for start, reader in READERS.items():
        if start in name:
            return reader(row)
    return Skip(f"no reader for {row.get('framework') or 'a row without framework'}")


def architecture_of(row: Row) -> Architecture | Skip:
    """The sizes that the row prints."""
    model = row.get("model") or {}
    needed = ("layers", "hidden", "heads", "ffn", "vocab")
    missing = [key for key in needed if not model.get(key)]
    if missing:
        return Skip(f"model sizes: {', '.join(missing)}")
    moe, mla = model.get("moe"), model.get("mla")
    heads = model["heads"]
    return Architecture(
        name=model["name"], layers=model["layers"], hidden=model["hidden"], heads=heads,
        kv_heads=model.get("kv_heads") or heads, head_dim=model.get("head_dim") or model["hidden"] // heads,
        ffn=model["ffn"], vocab=model["vocab"], tied=bool(model.get("tied_embeddings")),
        mlp=model.get("mlp") or "swiglu", norm=model.get("norm") or "rmsnorm",
        qk_norm="head" if model.get("qk_norm") else "none", qkv_bias=bool(model.get("bias") or model.get("qkv_bias")),
        o_bias=bool(model.get("bias")), mlp_bias=bool(model.get("bias")), head_bias=bool(model.get("lm_head_bias")),
        parallel_residual=bool(model.get("parallel_residual")),
        norms_per_layer=_norms(model), moe=_moe(moe, model) if moe else None, mla=Mla(**_mla(mla)) if mla else None,
    )  # fmt: skip


def _norms(model: Mapping[str, Any]) -> int:
    """Phi shares one norm between its parallel branches; GPT-NeoX has two."""
    return 1 if model.get("parallel_residual") and "phi" in model["name"].lower() else 2


def _moe(moe: Mapping[str, Any], model: Mapping[str, Any]) -> Moe:
    wide = moe["moe_ffn"]
    first = moe.get("first_dense") or 0
    return Moe(
        experts=moe["experts"], topk=moe["topk"], ffn=wide, shared_ffn=(moe.get("shared") or 0) * wide,
        dense=tuple(range(first)), router_bias=bool(first),
    )  # fmt: skip


def _mla(mla: Mapping[str, Any]) -> dict[str, Any]:
    return {key: mla.get(key) for key in ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v")}


def device_of(row: Row) -> str:
    """A name for the device; its memory does not matter here, that it is a GPU does."""
    hardware = (row.get("hardware") or "gpu").lower()
    return next((DEVICES[key] for key in DEVICES if key in hardware), "GPU")


def _whole(row: Row, key: str) -> int | None:
    value = row.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _mesh(row: Row) -> Mesh:
    parallel = row.get("parallel") or {}
    return Mesh(**{axis: parallel.get(axis) or 1 for axis in ("tp", "pp", "cp", "ep")}, vpp=parallel.get("vpp") or 1)


def _job(row: Row, engine: Engine, *, tokens: int, longest: int, sequences: int, micro_batches: int) -> Job | Skip:
    architecture = architecture_of(row)
    if isinstance(architecture, Skip):
        return architecture
    return Job(
        architecture=architecture, engine=engine, world=row["world_size"], device=device_of(row), sequences=sequences,
        tokens=tokens, longest=longest, micro_batches=micro_batches, pp_rank=engine.mesh.pp - 1 if engine.mesh else 0,
    )  # fmt: skip


# ---- prime-rl: FSDP2 over float32 weights, compiled layers, checkpoints or checkpoints on the host


def _prime_rl(row: Row) -> Run | Skip:
    tokens = _whole(row, "seq_len")
    if tokens is None:
        return Skip("seq_len")
    lora = row.get("lora")
    sft = "sft" in row["framework"]
    engine = Engine(
        strategy="fsdp2", mesh=_mesh(row), param_dtype="float32", compute_dtype="bfloat16", reduce_dtype="float32",
        recompute=Recompute(granularity="full"), offload=Offload(activation=row.get("offload") == "activations"),
        lora=Lora(rank=lora["rank"] * lora["max_concurrent_runs"], target_modules=ALL_LINEAR) if lora else None,
        optimizer=Optimizer(implementation="foreach"), attention="flash", compile=False,
        logits=Logits(upcast=True, dtype=None) if sft else Logits(implementation="fused"),
    )  # fmt: skip
    job = _job(row, engine, tokens=tokens, longest=tokens, sequences=1, micro_batches=row.get("num_microbatches") or 2)
    if isinstance(job, Skip):
        return job
    variant = "grouped" if job.architecture.moe else ""
    return Run(job=job, variant=variant, beside=-_idle_slots(job, lora["max_concurrent_runs"]) if lora else 0)


def _idle_slots(job: Job, slots: int) -> int:
    """What adapter slots without a run do not have: all are stored and gathered as one of their common rank; moments
    exist for the running one only, and so do gradients of experts' adapters, which no stack ties together.
    """
    idle, ranks = (slots - 1) / slots, job.shard
    added = sum(unit.added for unit in units(job)) / ranks
    experts = sum(
        pair.numel for layer in range(job.architecture.layers) for pair in adapters(job, tuple(w for w in weights(job.architecture) if w.layer == layer)) if pair.expert
    ) / ranks  # fmt: skip
    return int(idle * (8 * added + 4 * experts))


# ---- torchtitan: FSDP2 over float32 weights, operator-wise checkpoints


def _torchtitan(row: Row) -> Run | Skip:
    tokens, batch = _whole(row, "seq_len"), _whole(row, "micro_batch")
    if tokens is None or batch is None:
        return Skip("seq_len or micro_batch")
    mesh = _mesh(row)
    told = str(row.get("recompute") or "none").lower()
    granularity = "full" if told.startswith("full") else "selective" if "selective" in told else "none"
    pieces = min(batch, mesh.pp * mesh.vpp) if mesh.pp > 1 else 1  # pipeline_parallel_microbatches: as many as stages
    engine = Engine(
        strategy="fsdp1" if "fsdp1" in row["framework"].lower() else "fsdp2", mesh=mesh, param_dtype="float32",
        compute_dtype="bfloat16", reduce_dtype="float32", recompute=Recompute(granularity=granularity),
        optimizer=Optimizer(implementation="fused" if "fused" in str(row.get("optimizer")) else "foreach"),
        attention="sdpa", compile=bool(row.get("compile")), packed=False, sequence_parallel=mesh.tp > 1,
        reshard_after_forward=mesh.pp == 1, accumulates_unsharded=mesh.pp > 1, logits=Logits(dtype="float32"),
        expandable_segments="expandable" in row["framework"],
        layers_in_stages=_titan_stages(row["model"]["layers"], mesh) if mesh.pp > 1 else (),
    )  # fmt: skip
    job = _job(
        row, engine, tokens=tokens * (batch // pieces), longest=tokens, sequences=batch // pieces, micro_batches=pieces
    )
    return job if isinstance(job, Skip) else Run(job=job)


def _titan_stages(layers: int, mesh: Mesh) -> tuple[int, ...]:
    """torchtitan deals layers as if embedding and head were one each (distributed/pipeline_parallel.py)."""
    stages = mesh.pp * mesh.vpp
    each, more = divmod(layers + 2, stages)
    sizes = [each + (1 if index < more else 0) for index in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)


# ---- torchtune, one device


def _torchtune(row: Row) -> Run | Skip:
    tokens, batch = _whole(row, "seq_len"), _whole(row, "micro_batch")
    if tokens is None or batch is None:
        return Skip("seq_len or micro_batch")
    compiled, chunked = bool(row.get("compile")), "chunk" in str(row.get("loss_impl")).lower()
    granularity = "full" if str(row.get("recompute")).startswith("full") else "none"
    lora = row.get("lora")
    engine = Engine(
        strategy="single" if row["world_size"] == 1 else "fsdp2", mesh=_mesh(row), param_dtype="bfloat16",
        recompute=Recompute(granularity=granularity), offload=Offload(activation=row.get("offload") == "activations"),
        lora=Lora(rank=lora["rank"], target_modules=("q_proj", "v_proj")) if lora else None,
        optimizer=Optimizer(implementation="fused"), attention="sdpa", compile=compiled, packed=False,
        logits=Logits(chunk_tokens=tokens * batch // 8, kept=False) if chunked else Logits(dtype="float32", kept=False),
    )  # fmt: skip
    job = _job(row, engine, tokens=tokens * batch, longest=tokens, sequences=batch, micro_batches=1)
    return job if isinstance(job, Skip) else Run(job=job)


# ---- litgpt: one process in bfloat16, adapters on q and v


def _litgpt(row: Row) -> Run | Skip:
    tokens, batch, lora = _whole(row, "seq_len"), _whole(row, "micro_batch"), row.get("lora")
    if tokens is None or batch is None:
        return Skip("seq_len or micro_batch")
    if lora and lora.get("targets") != "q,v":
        return Skip("lora targets")
    base = (lora or {}).get("base") or "bf16"
    engine = Engine(
        strategy="single" if row["world_size"] == 1 else "fsdp1", mesh=_mesh(row),
        param_dtype="int4" if base.startswith("nf4") else "bfloat16", compute_dtype="bfloat16",
        recompute=Recompute(granularity="full" if str(row.get("recompute")).startswith("full") else "none"),
        lora=Lora(rank=lora["rank"], target_modules=("q_proj", "v_proj"), dtype="bfloat16") if lora else None,
        attention="flash", packed=True, logits=Logits(dtype="float32", chunk_tokens=128),
    )  # fmt: skip
    job = _job(row, engine, tokens=tokens * batch, longest=tokens, sequences=batch, micro_batches=2)
    if isinstance(job, Skip):
        return job
    more = constant("nf4_double_quantized_bytes_per_weight") - constant("nf4_bytes_per_weight")
    narrowed = sum(unit.linear for unit in units(job)) if base == "nf4-dq" else 0
    return Run(job=job, variant="litgpt", beside=int(more * narrowed))


# ---- PEFT's MetaMathQA comparison: a plain loop over padded batches, logits of the last batch still referenced


def _peft(row: Row) -> Run | Skip:
    lora = row.get("lora") or {}
    longest, batch = _whole(row, "seq_len"), _whole(row, "micro_batch")
    if longest is None or batch is None:
        return Skip("seq_len or micro_batch")
    whole = lora.get("method") == "full-finetuning"
    engine = Engine(
        strategy="single", mesh=Mesh(), param_dtype="bfloat16", lora=None if whole else _peft_lora(lora),
        optimizer=Optimizer(implementation="foreach"), attention="sdpa", packed=False, logits=Logits(upcast=True),
    )  # fmt: skip
    tokens = min(longest * batch, int(constant("metamath_longest_batch_tokens")))
    job = _job(row, engine, tokens=tokens, longest=tokens // batch, sequences=batch, micro_batches=1)
    if isinstance(job, Skip):
        return job
    parameters = count(job.architecture)
    trainable = lora.get("trainable") or row.get("num_trainable") or 0
    # weights, gradients and two moments in bfloat16, or frozen weights and all four of the adapters in float32
    states = 8 * parameters if whole else 2 * parameters + 16 * trainable
    workspace = int(constant("cublas_workspace_before_hopper"))
    logits = 2 * int(constant("metamath_mean_batch_tokens")) * job.architecture.vocab
    return Run(job=job, beside=workspace, steady=states + workspace + logits)


def _peft_lora(lora: Mapping[str, Any]) -> Lora:
    """Rank and targets by the name of the experiment; a method that is no LoRA as the smallest one."""
    tag = str(lora.get("tag"))
    rank = re.search(r"rank(\d+)", tag)
    if lora.get("method") != "lora" or rank is None:
        return Lora(rank=1, target_modules=(), dtype="float32")
    mlp = ("gate_proj", "up_proj", "down_proj")
    return Lora(rank=int(rank[1]), target_modules=mlp if "target-mlp" in tag else ("q_proj", "v_proj"), dtype="float32")


READERS: Mapping[str, Callable[[Row], Run | Skip]] = {
    "prime-rl": _prime_rl,
    "torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "litgpt finetune": _litgpt,
    "peft metamathqa": _peft,
}
