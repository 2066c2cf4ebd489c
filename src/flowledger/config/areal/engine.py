"""How AReaL holds a model: FSDP2 or Megatron, in which dtypes, what is recomputed and offloaded.

Facts: areal 1.0.4, engine/fsdp_engine.py, engine/fsdp_utils/parallel.py, engine/megatron_engine.py. FSDP2 stores weights in
`optimizer_dtype` and computes in `dtype`; before that key existed both were `dtype`, with Adam states to match.
"""

from flowledger.config.areal.allocation import Allocation
from flowledger.config.settings import Draft, Settings, table

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
KINDS = {"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd"}


def engine(settings: Settings, draft: Draft, role: str, place: Allocation, source: str) -> None:
    """`<role>.engine.*` of one model (`actor`, `critic`, `ref`). `source`: the key that gave its degrees."""
    target = f"{role}.engine"
    _mesh(draft, target, place, source)
    draft.put(f"{target}.packed", True)
    draft.put(f"{target}.pads_to_multiple", table("areal")["fixed"]["pads_to_multiple"])
    draft.put(
        f"{target}.attention", "sdpa" if settings.text(f"{role}.attn_impl") == "sdpa" else "flash", f"{role}.attn_impl"
    )
    if place.backend == "megatron":
        _megatron(settings, draft, role)
    else:
        _fsdp(settings, draft, role, place)
    _logits(draft, target, place)
    _lora(settings, draft, role)


def dtype(settings: Settings, key: str) -> str:
    """A dtype by any of its names. Raises BadInput."""
    word = str(settings.get(key))
    if word not in DTYPES:
        raise settings.bad(key, "should be float32, bfloat16 or float16; use bfloat16")
    return DTYPES[word]


def _mesh(draft: Draft, target: str, place: Allocation, source: str) -> None:
    """FSDP2 cuts sequences as Ulysses does (sp), Megatron with context parallelism (cp); both are `c`."""
    sequence = "cp" if place.backend == "megatron" else "sp"
    degrees = {"dp": place.dp, "tp": place.tp, "pp": place.pp, sequence: place.cp, "ep": place.ep}
    for axis, degree in degrees.items():
        draft.put(f"{target}.mesh.{axis}", degree, source)
    if place.ep > 1:
        draft.put(f"{target}.mesh.etp", place.etp, source)


def _fsdp(settings: Settings, draft: Draft, role: str, place: Allocation) -> None:
    target, compute = f"{role}.engine", dtype(settings, f"{role}.dtype")
    stored = compute if is_older(settings) else dtype(settings, f"{role}.optimizer_dtype")
    draft.put(f"{target}.strategy", "fsdp2", f"{role}.backend", "allocation_mode")
    draft.put(f"{target}.outside", "embedding", f"{role}.backend", "allocation_mode")  # utils/fsdp apply_fsdp2
    draft.put(
        f"{target}.param_dtype", stored, *((f"{role}.dtype",) if is_older(settings) else (f"{role}.optimizer_dtype",))
    )
    draft.put(f"{target}.compute_dtype", compute, f"{role}.dtype")
    draft.put(f"{target}.reduce_dtype", dtype(settings, f"{role}.grad_reduce_dtype"), f"{role}.grad_reduce_dtype")
    draft.put(f"{target}.kernels", "hf")
    recomputes = settings.flag(f"{role}.gradient_checkpointing")
    draft.put(f"{target}.recompute.granularity", "full" if recomputes else "none", f"{role}.gradient_checkpointing")
    kind = settings.text(f"{role}.optimizer.type")
    draft.put(f"{target}.optimizer.kind", KINDS.get(str(kind), "adamw") if kind else "none", f"{role}.optimizer.type")
    draft.put(
        f"{target}.optimizer.implementation", "loop" if kind == "adam_bf16" else "fused", f"{role}.optimizer.type"
    )
    key = "archon" if place.backend == "archon" else "fsdp"
    offloads = f"{role}.{key}.offload_params"
    if settings.flag(offloads):
        for part in ("param", "grad", "optimizer", "streamed"):
            draft.put(f"{target}.offload.{part}", True, offloads)
    if key == "fsdp" and settings.flag(f"{role}.fsdp.per_layer_optim_step"):
        draft.put(f"{target}.offload.optimizer", True, f"{role}.fsdp.per_layer_optim_step")
    if key == "archon":
        settings.notes.append(f"{role}: archon is planned as FSDP2")


def _megatron(settings: Settings, draft: Draft, role: str) -> None:
    target, own, half = f"{role}.engine", f"{role}.megatron", dtype(settings, f"{role}.dtype")
    wide = settings.flag(f"{own}.ddp.grad_reduce_in_fp32")
    draft.put(f"{target}.strategy", "megatron", f"{role}.backend", "allocation_mode")
    draft.put(f"{target}.param_dtype", half, f"{role}.dtype")
    for name in ("grad_dtype", "reduce_dtype"):
        draft.put(f"{target}.{name}", "float32" if wide else half, f"{own}.ddp.grad_reduce_in_fp32")
    draft.put(f"{target}.kernels", "te")
    draft.put(
        f"{target}.sequence_parallel",
        draft.data[role]["engine"]["mesh"]["tp"] > 1,
        f"{role}.backend",
        "allocation_mode",
    )
    sharded = f"{own}.ddp.use_distributed_optimizer"
    draft.put(f"{target}.distributed_optimizer", settings.flag(sharded), sharded)
    draft.put(
        f"{target}.mesh.vpp",
        settings.count(f"{own}.virtual_pipeline_parallel_size"),
        f"{own}.virtual_pipeline_parallel_size",
    )
    kind = settings.text(f"{role}.optimizer.type")
    draft.put(
        f"{target}.optimizer.kind", ("sgd" if kind == "sgd" else "adam") if kind else "none", f"{role}.optimizer.type"
    )
    draft.put(f"{target}.optimizer.implementation", "fused")
    aware = settings.flag(f"{own}.use_precision_aware_optimizer") or kind == "adam_bf16"
    keys = [f"{own}.main_params_dtype", f"{own}.exp_avg_dtype"]
    master, moment = (dtype(settings, key) for key in keys) if aware else ("float32", "float32")
    if kind:
        draft.put(f"{target}.optimizer.master_dtype", master, keys[0])
        draft.put(f"{target}.optimizer.moment_dtype", moment, keys[1])
    _recompute(settings, draft, role)


def _recompute(settings: Settings, draft: Draft, role: str) -> None:
    """Full, uniform, one layer at a time, where gradient checkpointing is on."""
    target, own = f"{role}.engine.recompute", f"{role}.megatron"
    granularity = settings.text(f"{own}.recompute_granularity")
    if not settings.flag(f"{role}.gradient_checkpointing") or granularity is None:
        draft.put(f"{target}.granularity", "none", f"{role}.gradient_checkpointing")
        return
    draft.put(f"{target}.granularity", granularity, f"{own}.recompute_granularity")
    if granularity == "full":
        draft.put(f"{target}.method", settings.text(f"{own}.recompute_method"), f"{own}.recompute_method")
        draft.put(f"{target}.layers", settings.integer(f"{own}.recompute_num_layers"), f"{own}.recompute_num_layers")
    else:
        draft.put(f"{target}.modules", settings.words(f"{own}.recompute_modules") or None, f"{own}.recompute_modules")


def _logits(draft: Draft, target: str, place: Allocation) -> None:
    """All logits exist; log-probs are made of them in float32, 1024 rows at a time; with tp over the cut vocabulary."""
    draft.put(f"{target}.logits.implementation", "full")
    draft.put(f"{target}.logits.entropy", "chunked")
    if place.tp > 1:
        draft.put(f"{target}.logits.cross_entropy", "parallel")
        draft.put(f"{target}.logits.chunk_tokens", table("areal")["fixed"]["logits_chunk_tokens"])
        return
    draft.put(f"{target}.logits.dtype", "float32")
    draft.put(f"{target}.logits.upcast", True)
    draft.put(f"{target}.logits.chunk_tokens", table("areal")["fixed"]["logits_chunk_tokens"])


def _lora(settings: Settings, draft: Draft, role: str) -> None:
    if not settings.flag(f"{role}.use_lora"):
        return
    for target in (f"{role}.engine.lora", *(("model.lora",) if role == "actor" else ())):
        draft.put(f"{target}.rank", settings.count(f"{role}.lora_rank"), f"{role}.lora_rank")
        draft.put(f"{target}.alpha", settings.number(f"{role}.lora_alpha"), f"{role}.lora_alpha")
        draft.put(f"{target}.target_modules", _modules(settings, role), f"{role}.target_modules")


def _modules(settings: Settings, role: str) -> tuple[str, ...]:
    words = settings.words(f"{role}.target_modules")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return every if not words or words == ("all-linear",) else words


def is_older(settings: Settings) -> bool:
    """Whether the file is read as of a release before the one of the table."""
    return settings.release != f"areal {table('areal')['version']}"
