"""The training engine of a role: FSDP, Megatron, and what VeOmni and torchtitan come to in the same terms."""

from collections.abc import Callable, Mapping

from flowledger.config.settings import Draft, Settings
from flowledger.config.verl.batches import data_parallel
from flowledger.config.verl.megatron import megatron
from flowledger.config.verl.roles import FSDP, Role, sequence_ranks, strategy
from flowledger.config.verl.words import word
from flowledger.flow.errors import nearest

_OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "sgd": "sgd", "muon": "muon", "adamw8bit": "adamw_8bit"}


def engine(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Fill `target` (`actor.engine`, …) from a role's keys. Raises BadInput for a strategy that is not known."""
    name = strategy(settings, role)
    fill = _FILLS.get(name)
    key = f"{role.section}.strategy"
    if fill is None:
        raise settings.bad(key, f"is no strategy of verl{nearest(name, _FILLS)}; use {', '.join(_FILLS)}")
    draft.put(f"{target}.strategy", {"fsdp": "fsdp1", "megatron": "megatron"}.get(name, "fsdp2"), key)
    draft.put(f"{target}.outside", "tail" if name == "torchtitan" else "head", key)  # utils/fsdp_utils.py apply_fsdp2
    _mesh(settings, draft, role, f"{target}.mesh")
    fill(settings, draft, role, target)
    _logits(settings, draft, role, target)


def _mesh(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    name = strategy(settings, role)
    section = role.engine(name)
    ranks, key = sequence_ranks(settings, role)
    draft.put(f"{target}.dp", data_parallel(settings, role), "trainer.n_gpus_per_node", "trainer.nnodes", key)
    draft.put(f"{target}.{'sp' if name in (*FSDP, 'veomni') else 'cp'}", ranks, key)
    keys = {
        "megatron": {
            "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "etp": "expert_tensor_parallel_size",
            "ep": "expert_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
        },
        "veomni": {"ep": "expert_parallel_size"},
        "torchtitan": {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size"},
    }.get(name, {})  # fmt: skip
    for axis, word_ in keys.items():
        draft.put(f"{target}.{axis}", settings.integer(f"{section}.{word_}"), f"{section}.{word_}")


def _fsdp(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """verl/workers/engine/fsdp/transformer_impl.py: parameters in model_dtype, units cast by the mixed precision policy."""
    section = role.fsdp
    draft.put(f"{target}.param_dtype", word(settings, "dtype", f"{section}.model_dtype"), f"{section}.model_dtype")
    _precision(settings, draft, section, target)
    size = settings.integer(f"{section}.fsdp_size")
    draft.put(f"{target}.shard_size", size if size and size > 0 else None, f"{section}.fsdp_size")
    for key in ("reshard_after_forward", "forward_prefetch"):
        draft.put(f"{target}.{key}", settings.flag(f"{section}.{key}"), f"{section}.{key}")
    sync = f"{section}.use_no_sync_for_gradient_accumulation"
    always = settings.release.endswith(" head")  # unconditional there
    whole = role.trains and (always or settings.flag(sync))
    draft.put(f"{target}.accumulates_unsharded", whole, f"{role.section}.strategy" if always else sync)
    _offload(settings, draft, role, target)
    _hf(settings, draft, role, target)
    _bucket(settings, draft, role, target)


def _precision(settings: Settings, draft: Draft, section: str, target: str) -> None:
    policy = f"{section}.mixed_precision"
    given = isinstance(settings.get(policy), dict)
    compute = word(settings, "dtype", f"{policy}.param_dtype") if given else None
    reduce = word(settings, "dtype", f"{policy}.reduce_dtype") if given else None
    usual = None if given else word(settings, "dtype", f"{section}.dtype")
    draft.put(f"{target}.compute_dtype", compute or usual or "bfloat16", f"{policy}.param_dtype", f"{section}.dtype")
    draft.put(f"{target}.reduce_dtype", reduce or "float32", f"{policy}.reduce_dtype")


def _offload(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """`offload_policy` (FSDP2) and `forward_only` stream parameters from the host and switch the other offloads off."""
    section = role.fsdp
    policy, forward = f"{section}.offload_policy", f"{section}.forward_only"
    only_forward = settings.flag(forward)
    by_policy = strategy(settings, role) != "fsdp" and settings.flag(policy)
    streamed = only_forward or by_policy
    draft.put(f"{target}.offload.streamed", streamed, *((forward,) if only_forward else (policy,)))
    for name, key in (("param", "param_offload"), ("optimizer", "optimizer_offload")):
        draft.put(f"{target}.offload.{name}", settings.flag(f"{section}.{key}") and not streamed, f"{section}.{key}")
    draft.put(
        f"{target}.offload.grad", settings.flag(f"{section}.param_offload") and not streamed, f"{section}.param_offload"
    )


def _hf(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """What the model's own section says: recomputation, kernels, attention, packing, LoRA; and the optimizer."""
    model = role.model
    recompute, offload = f"{model}.enable_gradient_checkpointing", f"{model}.enable_activation_offload"
    full = settings.flag(recompute) and role.trains
    draft.put(f"{target}.recompute.granularity", "full" if full else "none", recompute)
    draft.put(f"{target}.offload.activation", settings.flag(offload) and role.trains, offload)
    draft.put(f"{target}.kernels", "liger" if settings.flag(f"{model}.use_liger") else "hf", f"{model}.use_liger")
    attention = f"{model}.override_config.attn_implementation"
    draft.put(f"{target}.attention", _attention(settings, attention), attention)
    draft.put(f"{target}.packed", settings.flag(f"{model}.use_remove_padding"), f"{model}.use_remove_padding")
    if role.trains:
        _optimizer(settings, draft, role, target)
        _lora(settings, draft, role, target)
    else:
        draft.put(f"{target}.optimizer.kind", "none")


def _attention(settings: Settings, key: str) -> str:
    """flash-attn where nothing is said; `veomni_flash_attention_2_with_sp` and others of its kind are flash-attn too."""
    text = settings.text(key)
    return "flash" if text is None or "flash" in text else word(settings, "attention", key) or "flash"


def _bucket(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Packed tokens are padded to what sp divides, or to a bucket where `pad_to_length` asks for it."""
    section = role.engine(strategy(settings, role))
    pads, bucket = f"{section}.pad_to_length", f"{section}.pad_to_length_bucket"
    ranks, key = sequence_ranks(settings, role)
    if settings.flag(pads):
        draft.put(f"{target}.pads_to_multiple", settings.integer(bucket), bucket, pads)
    else:
        draft.put(f"{target}.pads_to_multiple", ranks, key)


def _optimizer(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    key = f"{role.optim}.optimizer"
    name = settings.text(key) or settings.text(f"{role.optim}.name") or "AdamW"
    kind = _OPTIMIZERS.get(name.lower().lstrip("_"))
    if kind is None:
        settings.notes.append(f"{settings.origin(key)}: the states of optimizer {name} are not known; taken as AdamW's")
    draft.put(f"{target}.optimizer.kind", kind or "adamw", key)
    fused = f"{role.optim}.override_optimizer_config.fused"
    draft.put(f"{target}.optimizer.implementation", "fused" if settings.flag(fused) else "foreach", fused, key)


def _lora(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    rank = f"{role.model}.lora_rank"
    if not settings.integer(rank):
        return
    modules, alpha = f"{role.model}.target_modules", f"{role.model}.lora_alpha"
    draft.put(f"{target}.lora.rank", settings.integer(rank), rank)
    draft.put(f"{target}.lora.alpha", settings.number(alpha), alpha)
    draft.put(f"{target}.lora.target_modules", settings.words(modules) or None, modules)


def _logits(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Who computes log-probs: fused kernels, flash-attn's cross-entropy (FSDP), Megatron's own over a cut vocabulary."""
    fused = f"{role.model}.use_fused_kernels"
    name = strategy(settings, role)
    draft.put(f"{target}.logits.implementation", "fused" if settings.flag(fused) else "full", fused)
    draft.put(f"{target}.logits.kept", False, fused)  # forward_step returns before backward begins
    draft.put(
        f"{target}.logits.cross_entropy", "parallel" if name == "megatron" else "flash", f"{role.section}.strategy"
    )
    draft.put(f"{target}.logits.temperature_copy", name != "megatron" and not settings.flag(fused), fused)
    if name == "megatron":
        draft.put(f"{target}.logits.dtype", "float32", f"{role.section}.strategy")
    if not role.trains or role.name == "critic":
        return
    wanted, coefficient = f"{role.section}.calculate_entropy", f"{role.section}.entropy_coeff"
    chunked = f"{role.section}.entropy_from_logits_with_chunking"
    if settings.flag(wanted) or settings.number(coefficient):
        key = wanted if settings.flag(wanted) else coefficient
        draft.put(f"{target}.logits.entropy", "chunked" if settings.flag(chunked) else "full", key, chunked)
    else:
        draft.put(f"{target}.logits.entropy", "none", wanted, coefficient)


def _turbo(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """MindSpeed's FSDP2 (verl/workers/engine/fsdp/fsdp_turbo_impl.py), planned as torch's own."""
    _fsdp(settings, draft, role, target)
    settings.notes.append(
        f"{settings.origin(f'{role.section}.strategy')} = fsdp_turbo is planned as fsdp2; its own kernels are not known"
    )


def _veomni(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """verl/workers/engine/veomni: FSDP2 over float32 parameters where mixed precision is on, else over bfloat16 ones."""
    section = role.engine("veomni")
    mixed = f"{section}.mixed_precision"
    draft.put(f"{target}.param_dtype", "float32" if settings.flag(mixed) else "bfloat16", mixed)
    draft.put(f"{target}.compute_dtype", "bfloat16", mixed)
    draft.put(f"{target}.reduce_dtype", "float32" if settings.flag(mixed) else "bfloat16", mixed)
    size = settings.integer(f"{section}.fsdp_size")
    draft.put(f"{target}.shard_size", size if size and size > 0 else None, f"{section}.fsdp_size")
    draft.put(
        f"{target}.reshard_after_forward", settings.flag(f"{section}.enable_full_shard"), f"{section}.enable_full_shard"
    )
    draft.put(f"{target}.forward_prefetch", settings.flag(f"{section}.forward_prefetch"), f"{section}.forward_prefetch")
    _held(settings, draft, section, target)
    _hf(settings, draft, role, target)
    attention = f"{section}.attn_implementation"
    draft.put(f"{target}.attention", _attention(settings, attention), attention)
    _bucket(settings, draft, role, target)


def _torchtitan(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """verl/workers/engine/torchtitan: FSDP2 with torchtitan's own parallel model."""
    section = role.engine("torchtitan")
    draft.put(f"{target}.param_dtype", "float32", f"{section}.mixed_precision")
    draft.put(f"{target}.compute_dtype", word(settings, "dtype", f"{section}.dtype"), f"{section}.dtype")
    draft.put(f"{target}.reduce_dtype", "float32", f"{section}.mixed_precision")
    shard = settings.integer(f"{section}.data_parallel_shard_size")
    draft.put(f"{target}.shard_size", shard if shard and shard > 0 else None, f"{section}.data_parallel_shard_size")
    _held(settings, draft, section, target)
    _hf(settings, draft, role, target)
    kept = f"{section}.activation_checkpoint"
    how = settings.text(kept)
    draft.put(f"{target}.recompute.granularity", how if how in ("none", "selective", "full") else "none", kept)
    settings.notes.append(
        f"{section}: torchtitan's engine is planned as FSDP2 with its degrees; its kernels are not known"
    )


def _held(settings: Settings, draft: Draft, section: str, target: str) -> None:
    for name, key in (("param", "param_offload"), ("optimizer", "optimizer_offload")):
        draft.put(f"{target}.offload.{name}", settings.flag(f"{section}.{key}"), f"{section}.{key}")


_FILLS: Mapping[str, Callable[[Settings, Draft, Role, str], None]] = {
    "fsdp": _fsdp,
    "fsdp2": _fsdp,
    "fsdp_turbo": _turbo,
    "megatron": megatron,
    "veomni": _veomni,
    "torchtitan": _torchtitan,
}
