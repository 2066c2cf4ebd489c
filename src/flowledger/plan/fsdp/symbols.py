"""The symbols and flags that the rows of tables/activations_hf.toml are evaluated with: one job, one layer, local sizes."""

from flowledger.config.engine import Engine
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.tables.models import Mla

GATED = ("swiglu", "geglu")


def computes_in(engine: Engine) -> int:
    """Bytes of one number in the matrix products."""
    return ITEMSIZE.get(engine.compute_dtype or engine.param_dtype, 2)


def stream_in(engine: Engine) -> int:
    """Bytes of one number of the residual stream: that of the embedding's weights as the forward pass sees them."""
    if engine.autocast and engine.strategy in ("single", "ddp", "zero1", "zero2"):
        return ITEMSIZE.get(engine.param_dtype, 4)
    return computes_in(engine)


def is_autocast(engine: Engine) -> bool:
    """Whether torch.autocast narrows products while the stream stays wide; over cast units it changes nothing."""
    return engine.autocast and stream_in(engine) > computes_in(engine)


def symbols(job: Job) -> dict[str, object]:
    """Local sizes of one rank. Ulysses sp cuts tokens outside attention and heads inside: T*Q is the same product."""
    arch, engine, tp = job.architecture, job.engine, job.mesh.tp
    heads = -(-arch.heads // tp)
    keys = max(1, -(-arch.kv_heads // tp))
    tokens = job.local_tokens
    found: dict[str, object] = {
        "T": tokens,
        "H": arch.hidden,
        "A": heads,
        "K": keys,
        "D": arch.head_dim,
        "Q": heads * arch.head_dim,
        "P": keys * arch.head_dim,
        "F": -(-arch.ffn // tp),
        "e": computes_in(engine),
        "r": stream_in(engine),
        "B": job.beside_tokens,
        "N": tokens,
        "W": arch.hidden,
        "I": 1,
        "C": job.mesh.cp,
        "J": heads + keys if arch.qk_norm == "head" else 2,
        "M": heads * _squares(job),
    }
    return found | _expert_symbols(job, tokens) | (_latent_symbols(arch.mla, heads) if arch.mla else {})


def _expert_symbols(job: Job, tokens: int) -> dict[str, object]:
    moe, tp = job.architecture.moe, job.mesh.tp
    etp = job.mesh.etp or tp
    if moe is None:
        return {}
    return {
        "X": moe.experts,
        "O": moe.topk,
        "R": tokens * moe.topk,
        "G": -(-moe.ffn // etp),
        "U": -(-moe.shared_ffn // tp),
        "x": max(1, moe.experts // job.mesh.ep),
    }


def _latent_symbols(mla: Mla, heads: int) -> dict[str, object]:
    """Keys are as wide as queries, values as `v`: P is what a key and a value of all heads have on average."""
    queries, values = heads * (mla.qk_nope + mla.qk_rope), heads * mla.v
    return {
        "Q": queries,
        "P": (queries + values) // 2,
        "q": mla.q_lora or 0,
        "c": mla.kv_lora,
        "d": mla.qk_rope,
        "v": values,
    }


def flags(job: Job) -> set[str]:
    """What holds in this job; see the head of tables/activations_hf.toml."""
    engine = job.engine
    attention = engine.attention if engine.attention in ("flash", "sdpa", "eager") else "sdpa"
    held = {
        attention: True,
        "low": computes_in(engine) < 4,
        "autocast": is_autocast(engine),
        "grad": job.gradients,
        "no_grad": not job.gradients,
        "gpu": job.device is not None,
        "lora": engine.lora is not None,
        "int4": engine.param_dtype == "int4",
        "trained": engine.lora is None,
        "norm_trained": engine.lora is None,
        "ulysses": job.mesh.sp > 1,
        "tp": job.mesh.tp > 1,
        "cp": job.mesh.cp > 1,
        "segments": is_packed_loop(engine),
        "grouped": is_loop(engine),
        "travelling": is_loop(engine) and job.mesh.ep > 1,
    }
    return {name for name, holds in held.items() if holds} | _shapes(job)


def _shapes(job: Job) -> set[str]:
    """What follows from the architecture. Modules differ where a model family wrote its own.

    wide_norm: Gemma and OLMo 2 weigh in float32; fused_qkv: GPT-NeoX; gelu_new: GPT-2 and Phi (transformers 5.24).
    """
    arch = job.architecture
    grouped = arch.kv_heads < arch.heads and arch.mla is None
    shared = arch.parallel_residual and arch.norms_per_layer == 1
    held = {
        "gqa": grouped,
        "repeat_kv": repeats_keys(job) and grouped,
        "rope": arch.positions == "rope",
        "shared_norm": arch.norms_per_layer == 1,
        "wide_norm": arch.mlp == "geglu" or arch.qk_norm == "full",
        "fused_qkv": arch.parallel_residual and not shared,
        "gelu_new": arch.mlp == "gelu" and (shared or arch.positions == "learned"),
    }
    return {name for name, holds in held.items() if holds}


def is_loop(engine: Engine) -> bool:
    """flowledger's own loop; Hugging Face computes its experts all at once there."""
    logits = engine.logits
    own = engine.attention == "sdpa" and logits.dtype == "float32" and logits.temperature_copy
    return own and not logits.upcast


def is_packed_loop(engine: Engine) -> bool:
    """The same with packed rows: it attends to one segment after another and joins them."""
    return is_loop(engine) and engine.packed


def repeats_keys(job: Job) -> bool:
    """Whether keys and values are copied for each head: eager attention does; SDPA does with a mask (padded batches).

    transformers 5.24 integrations/sdpa_attention.py use_gqa_in_sdpa: grouped kernels only without a mask.
    """
    if job.engine.attention == "eager":
        return True
    return job.engine.attention == "sdpa" and not job.engine.packed and job.sequences > 1


def kernels(job: Job) -> str:
    """The rows to read first; `hf` has the rest."""
    return job.engine.kernels if job.engine.kernels in ("hf", "liger") else "hf"


def keeps_stream(job: Job, module: str) -> bool:
    """Whether a norm saves the residual stream itself rather than a copy of it."""
    if module == "layernorm" or kernels(job) != "hf" or job.engine.compile:
        return True
    return computes_in(job.engine) == 4 or is_autocast(job.engine)


def _squares(job: Job) -> int:
    """Sum over sequences of the squared length, as many full ones as fit."""
    full, rest = divmod(job.tokens, max(1, job.longest))
    return full * job.longest**2 + rest**2
