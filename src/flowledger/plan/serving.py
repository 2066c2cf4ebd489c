"""One rank of an inference engine: weights, KV pool, and what stays of it while the trainer has the device.

vLLM takes a fraction of the whole device and must find that much free when it starts; SGLang takes a fraction of what is
free when it starts, for weights and pool together; TensorRT-LLM takes a fraction of what is left after its weights.
flowledger's own loop and Hugging Face's `generate` run in the trainer's process and keep nothing back.
"""

import math
from dataclasses import dataclass

from flowledger.config.engine import Dtype, Lora, Serving
from flowledger.plan import kv_cache
from flowledger.plan.engine_weights import weight_bytes
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.timeline import Live
from flowledger.tables.constants import constant
from flowledger.tables.models import Architecture

GIB = 2**30
IN_PROCESS = ("flowledger", "hf")
SAMPLING_CHUNK = 1 << 21  # logits that the own sampler handles at once, about 16 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one rank of an engine takes. Bytes of the device; `fits` is False with the reason where it cannot start."""

    weights: int
    kv_pool: int
    kv_blocks: int
    kv_tokens: int
    bytes_per_token: int
    profile_peak: int  # torch's peak above the weights in a forward pass of the largest batch
    graphs: int
    non_torch: int  # NCCL, cuBLAS, kernels: without the context of the process
    awake: tuple[Live, ...]
    asleep: tuple[Live, ...]
    prefill: int = 0  # of flowledger's own loop: a forward pass over the prompts, before anything is sampled
    fits: bool = True
    reason: str = ""


def engine(
    architecture: Architecture,
    serving: Serving,
    *,
    device_bytes: int,
    resident_bytes: int = 0,
    sleep_level: int = 2,
    samples: int | None = None,
    positions: int | None = None,
    policy_dtype: Dtype | None = None,
    shared: bool = False,
    light_sampler: bool = False,
    lora: Lora | None = None,
) -> Served:
    """One rank of a replica beside `resident_bytes` of others (the trainer's models) on a device of `device_bytes`.

    `sleep_level` 1 keeps the weights in host memory, 2 drops them. For engines inside the trainer's process: `samples`
    that run at once and `positions` of the longest on this rank (null: from `serving`), the dtype of the policy, and
    whether its own tensors are sampled from (with Hugging Face always), else the adapters that its copy has too.
    `light_sampler`: see `profile_peak`.
    """
    if serving.engine in IN_PROCESS:
        rows = next(one for one in (serving.max_running, samples, 1) if one is not None)
        return _in_process(
            architecture,
            serving,
            rows=min(rows, samples) if samples else rows,
            positions=positions or serving.max_model_tokens or 0,
            dtype=serving.dtype or policy_dtype or "bfloat16",
            shared=shared or serving.engine == "hf",
            lora=lora,
        )
    weights = weight_bytes(architecture, serving.mesh, serving.dtype or "bfloat16")
    peak = profile_peak(architecture, serving, device_bytes, light_sampler=light_sampler)
    non_torch = round(constant(_non_torch_name(serving)))
    graphs = round(constant("cuda_graphs")) if serving.cuda_graphs else 0
    free = device_bytes - resident_bytes - round(constant("cuda_context"))
    available = _available(serving, device_bytes, free, weights, peak, non_torch)
    pool = kv_cache.pool(architecture, serving, available)
    used = resident_bytes + sum(live.total for live in _awake(serving, weights, pool, peak))
    reason = _short(architecture, serving, device_bytes, free, weights, available, used)
    return Served(
        weights=weights,
        kv_pool=pool.bytes,
        kv_blocks=pool.blocks,
        kv_tokens=pool.tokens,
        bytes_per_token=pool.bytes_per_token,
        profile_peak=peak,
        graphs=graphs,
        non_torch=non_torch,
        awake=_awake(serving, weights, pool, peak),
        asleep=asleep(serving, weights, pool.bytes, sleep_level),
        fits=not reason,
        reason=reason,
    )


def profile_peak(
    architecture: Architecture, serving: Serving, device_bytes: int, *, light_sampler: bool = False
) -> int:
    """Torch's peak above the weights: the larger of one layer over max_batched_tokens, and of a dummy sampler run.

    The sampler goes over max_running rows of the whole vocabulary (vLLM gpu_model_runner._dummy_sampler_run).
    `light_sampler`: top-k and top-p without a sort, as from vLLM 0.17 on and in SGLang.
    """
    large = device_bytes >= constant("large_device_bytes")
    size = "large" if large else "small"
    running = serving.max_running or round(constant(f"vllm_max_running_{size}"))
    tokens = serving.max_batched_tokens or round(constant(f"vllm_batched_tokens_{size}"))
    hidden = 2 * tokens * architecture.hidden
    sorts = "" if serving.engine == "vllm" and not light_sampler else "_triton"
    sampler = round(constant(f"sampler_bytes_per_logit{sorts}") * min(running, tokens) * architecture.vocab)
    kept = round(constant("profile_hidden_copies") * hidden)
    return max(kept + sampler, 2 * hidden + tokens * _layer_width(architecture, serving.mesh.tp))


def _layer_width(architecture: Architecture, tp: int) -> int:
    """Bytes a token needs at the widest place of one layer, in 16 bits, nothing kept for backward."""
    attention = 2 * (2 * architecture.query_width + 2 * architecture.kv_heads * architecture.head_dim) // tp
    dense = 2 * (architecture.branches + 1) * architecture.ffn // tp
    if architecture.moe:
        moe = architecture.moe
        routed = moe.topk * ((architecture.branches + 1) * moe.ffn // tp + architecture.hidden)
        return max(attention, dense, 2 * routed)
    return max(attention, dense)


def _several(serving: Serving) -> bool:
    return serving.mesh.tp * serving.mesh.pp * serving.mesh.ep > 1


def _non_torch_name(serving: Serving) -> str:
    return "engine_non_torch_tp" if _several(serving) else "engine_non_torch_single"


def _available(serving: Serving, device: int, free: int, weights: int, peak: int, non_torch: int) -> int:
    """Bytes for the KV pool.

    vLLM (v1/worker/gpu_worker.py): total * share - weights - peak - non-torch. SGLang (model_runner): what is free after
    the weights, less (1 - share) of what was free before them. TensorRT-LLM: share of what is free after a dummy run.
    """
    share = serving.memory_fraction
    if serving.engine == "sglang":
        before = free - non_torch
        return round(share * before) - weights
    if serving.engine == "trtllm":
        return round(share * (free - non_torch - weights - peak))
    return round(share * device) - weights - peak - non_torch


def _short(
    architecture: Architecture, serving: Serving, device: int, free: int, weights: int, available: int, used: int
) -> str:
    """Why the engine cannot start, with numbers; empty where it can."""
    share, key = (
        serving.memory_fraction,
        "mem_fraction_static" if serving.engine == "sglang" else "gpu_memory_utilization",
    )
    if serving.engine == "vllm" and free < share * device:
        outside = sum(live.total for live in residue(serving)) - round(constant("cuda_context"))
        best = max(0, math.floor(100 * (free - outside) / device)) / 100  # graphs and NCCL come on top of the share
        return (
            f"{key} = {share:g} asks for {_gib(share * device)} of {_gib(device)}, but {_gib(free)} are free when the engine "
            f"starts beside the models of the trainer; offload those or set at most {best:.2f}"
        )
    if available <= 0:
        whole = free if serving.engine == "sglang" else device
        return (
            f"{key} = {share:g} gives {_gib(share * whole)}; weights of {_gib(weights)} and a forward pass leave "
            f"{_gib(available)} for the KV cache; raise the share, or cut the model over more than "
            f"{serving.mesh.tp * serving.mesh.pp} devices"
        )
    longest = serving.max_model_tokens
    wanted = kv_cache.needed(architecture, serving, sequences=1, tokens=longest) if longest else 0
    if wanted > available:
        return (
            f"max_model_len = {longest} tokens need {_gib(wanted)} of KV cache, and {_gib(available)} are left; "
            f"raise {key} or shorten the samples"
        )
    if used > device:
        return (
            f"awake the engine and what rests beside it come to {_gib(used)} on a device of {_gib(device)}; "
            f"lower {key} or offload the models of the trainer"
        )
    return ""


def _awake(serving: Serving, weights: int, pool: kv_cache.Pool, peak: int) -> tuple[Live, ...]:
    return (
        _param(weights, serving.engine),
        _pool(pool.bytes, f"{pool.blocks} blocks of {pool.block_tokens} tokens"),
        Live(name="hidden_states", kind="temporary", bytes=peak, label="a forward pass of the engine's largest batch"),
        *residue(serving),
    )


def asleep(serving: Serving, weights: int = 0, pool: int = 0, level: int = 2) -> tuple[Live, ...]:
    """What stays while the trainer has the device: all of it without sleep, else what torch cannot give back."""
    if not serving.sleeps:
        return (
            _param(weights, serving.engine),
            _pool(pool, "blocks of an engine that never sleeps"),
            *residue(serving),
        )
    if level == 1:
        copy = Live(name="params", kind="param", bytes=weights, label="weights of the sleeping engine", host=True)
        return (copy, *residue(serving))
    return residue(serving)


def residue(serving: Serving) -> tuple[Live, ...]:
    """What the engine's process holds of the device beside tensors, awake or asleep."""
    sizes = [
        ("context of the engine's process", "cuda_context"),
        ("cuBLAS, kernels, communicators at start", _non_torch_name(serving)),
    ]
    if serving.cuda_graphs:
        sizes.append(("CUDA graphs", "cuda_graphs"))
    if _several(serving):
        sizes.append(("buffers of NCCL communicators", "engine_nccl_awake"))
    return tuple(
        Live(name="residue", kind="residue", bytes=round(constant(name)), label=label, formula=name, persistent=True)
        for label, name in sizes
    )


def _param(size: int, who: str) -> Live:
    return Live(name="params", kind="param", bytes=size, label=f"weights of {who}", persistent=True)


def _pool(size: int, label: str) -> Live:
    return Live(name="kv_cache", kind="kv_cache", bytes=size, label=label, persistent=True)


def _in_process(
    architecture: Architecture, serving: Serving, *, rows: int, positions: int, dtype: Dtype, shared: bool,
    lora: Lora | None,
) -> Served:  # fmt: skip
    """Generation inside the trainer's process: a cache of `rows` slots of `positions` tokens, and the policy or a copy."""
    item = ITEMSIZE.get(dtype, 2)
    cache_item = ITEMSIZE[serving.kv_dtype] if serving.kv_dtype else item
    each = kv_cache.bytes_per_token(architecture, serving.mesh, cache_item)
    if serving.engine == "flowledger":
        cache = kv_cache.slot_bytes(architecture, slots=rows, positions=positions, item=cache_item)
    else:
        cache = rows * kv_cache.sequence_bytes(architecture, serving.mesh, cache_item, positions)
    weights = 0 if shared else weight_bytes(architecture, serving.mesh, dtype, padded=False, lora=lora)
    logits = rows * architecture.vocab
    sampling = logits * item + (16 * min(logits, SAMPLING_CHUNK) if serving.engine == "flowledger" else 12 * logits)
    grown = 0 if serving.engine == "flowledger" else cache // max(1, architecture.layers)  # torch.cat of one layer
    copy = (_param(weights, "the rollout's copy of the policy"),) if weights else ()
    return Served(
        weights=weights,
        kv_pool=cache,
        kv_blocks=rows,
        kv_tokens=rows * positions,
        bytes_per_token=each,
        profile_peak=sampling + grown,
        graphs=0,
        non_torch=0,
        awake=(
            *copy,
            Live(name="kv_cache", kind="kv_cache", bytes=cache, label=f"{rows} slots of {positions} tokens"),
            Live(name="logits", kind="temporary", bytes=sampling + grown, label="logits and sampling of one token"),
        ),
        asleep=copy,
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
