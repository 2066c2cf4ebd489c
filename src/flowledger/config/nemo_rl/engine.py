"""How NeMo-RL holds the policy: DTensor (FSDP2 of Automodel) or Megatron-Core.

Facts: nemo_rl/models/policy/workers, nemo_rl/models/automodel/setup.py, nemo_rl/models/megatron/setup.py. DTensor loads
float32 weights and casts units to `precision`; its FSDP2 policy hands logits out in float32.
"""

from flowledger.config.settings import Draft, Settings

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "bf16": "bfloat16", "fp16": "float16"}
EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ENGINE = "actor.engine"


def engine(settings: Settings, draft: Draft, backend: str) -> None:
    """`actor.engine.*` of `backend` (dtensor_cfg, megatron_cfg). Raises BadInput for an unknown precision."""
    word = str(settings.get("policy.precision"))
    if word not in DTYPES:
        raise settings.bad("policy.precision", "should be float32, bfloat16 or float16; use bfloat16")
    draft.copy("mesh", f"{ENGINE}.mesh")
    if backend == "megatron_cfg":
        _megatron(settings, draft, DTYPES[word])
    else:
        _dtensor(settings, draft, DTYPES[word])
    _padding(settings, draft)
    _logits(settings, draft, backend)
    colocated = "policy.generation.colocated.enabled"
    if settings.flag(colocated):  # weights and optimizer go to the host while vLLM generates
        for part in ("param", "optimizer"):
            draft.put(f"{ENGINE}.offload.{part}", True, colocated)


def _dtensor(settings: Settings, draft: Draft, compute: str) -> None:
    own = "policy.dtensor_cfg"
    draft.put(f"{ENGINE}.strategy", "fsdp2", f"{own}.enabled")
    draft.put(f"{ENGINE}.outside", "root", f"{own}.enabled")  # models/dtensor/parallelize.py: layers, then the model
    draft.put(f"{ENGINE}.param_dtype", "float32", f"{own}.enabled")
    draft.put("model.dtype", "float32", f"{own}.enabled")
    draft.put(f"{ENGINE}.compute_dtype", compute, "policy.precision")
    draft.put(f"{ENGINE}.reduce_dtype", "float32", f"{own}.enabled")
    draft.put(f"{ENGINE}.kernels", "hf")
    draft.put(
        f"{ENGINE}.accumulates_unsharded", settings.flag(f"{own}.defer_fsdp_grad_sync"), f"{own}.defer_fsdp_grad_sync"
    )
    draft.put(f"{ENGINE}.sequence_parallel", settings.flag(f"{own}.sequence_parallel"), f"{own}.sequence_parallel")
    recomputes = settings.flag(f"{own}.activation_checkpointing")
    draft.put("actor.activation_checkpointing", recomputes, f"{own}.activation_checkpointing")
    draft.put(f"{ENGINE}.recompute.granularity", "full" if recomputes else "none", f"{own}.activation_checkpointing")
    kwargs = "policy.optimizer.kwargs"
    fused, foreach = settings.flag(f"{kwargs}.fused"), settings.get(f"{kwargs}.foreach")
    kind = str(settings.get("policy.optimizer.name")).rpartition(".")[2].lower()
    draft.put(f"{ENGINE}.optimizer.kind", kind if kind in ("adam", "sgd") else "adamw", "policy.optimizer.name")
    how = "fused" if fused else "loop" if foreach is False else "foreach"
    draft.put(f"{ENGINE}.optimizer.implementation", how, f"{kwargs}.fused", f"{kwargs}.foreach")
    if settings.flag(f"{own}.cpu_offload"):
        for part in ("param", "grad", "optimizer", "streamed"):
            draft.put(f"{ENGINE}.offload.{part}", True, f"{own}.cpu_offload")


def _megatron(settings: Settings, draft: Draft, half: str) -> None:
    own = "policy.megatron_cfg"
    optimizer, ddp = f"{own}.optimizer", f"{own}.distributed_data_parallel_config"
    draft.put(f"{ENGINE}.strategy", "megatron", f"{own}.enabled")
    draft.put(f"{ENGINE}.param_dtype", half, "policy.precision")
    draft.put("model.dtype", half if half != "float16" else None, "policy.precision")
    wide = settings.flag(f"{ddp}.grad_reduce_in_fp32")
    for name in ("grad_dtype", "reduce_dtype"):
        draft.put(f"{ENGINE}.{name}", "float32" if wide else half, f"{ddp}.grad_reduce_in_fp32")
    draft.put(f"{ENGINE}.kernels", "te")
    draft.put(f"{ENGINE}.sequence_parallel", settings.flag(f"{own}.sequence_parallel"), f"{own}.sequence_parallel")
    for name, key in (("layers_in_first_stage", "first"), ("layers_in_last_stage", "last")):
        full = f"{own}.num_layers_in_{key}_pipeline_stage"
        draft.put(f"{ENGINE}.{name}", settings.integer(full), full)
    sharded = f"{optimizer}.use_distributed_optimizer"
    draft.put(f"{ENGINE}.distributed_optimizer", settings.flag(sharded), sharded)
    draft.put(f"{ENGINE}.optimizer.kind", settings.text(f"{optimizer}.optimizer"), f"{optimizer}.optimizer")
    draft.put(f"{ENGINE}.optimizer.implementation", "fused", f"{optimizer}.use_precision_aware_optimizer")
    settings.get(f"{optimizer}.use_precision_aware_optimizer")
    draft.put(
        f"{ENGINE}.optimizer.master_dtype", settings.text(f"{optimizer}.params_dtype"), f"{optimizer}.params_dtype"
    )
    draft.put(f"{ENGINE}.optimizer.moment_dtype", "float32", f"{optimizer}.use_precision_aware_optimizer")
    if settings.flag(f"{optimizer}.optimizer_cpu_offload"):
        fraction = f"{optimizer}.optimizer_offload_fraction"
        draft.put(f"{ENGINE}.offload.optimizer_fraction", settings.number(fraction), fraction)
    recomputes = settings.flag(f"{own}.activation_checkpointing")
    draft.put("actor.activation_checkpointing", recomputes, f"{own}.activation_checkpointing")
    if recomputes:
        for name, value in (("granularity", "full"), ("method", "uniform"), ("layers", 1)):
            draft.put(f"{ENGINE}.recompute.{name}", value, f"{own}.activation_checkpointing")


def _padding(settings: Settings, draft: Draft) -> None:
    """A packed sequence is padded to 2*cp*tp tokens under context parallelism, else to tp; else the batch as set."""
    tp, cp = draft.data["mesh"]["tp"], draft.data["mesh"]["cp"]
    key = "policy.make_sequence_length_divisible_by"
    if settings.flag("policy.sequence_packing.enabled"):
        draft.put(f"{ENGINE}.pads_to_multiple", 2 * cp * tp if cp > 1 else tp, "policy.sequence_packing.enabled")
        settings.get(key)
        return
    draft.put(f"{ENGINE}.pads_to_multiple", settings.integer(key) or 1, key)


def _logits(settings: Settings, draft: Draft, backend: str) -> None:
    """Float32 logits, cut along the vocabulary over tp; log-probs chunked only where logprob_chunk_size says."""
    target, chunk = f"{ENGINE}.logits", "policy.logprob_chunk_size"
    draft.put(f"{target}.implementation", "full")
    draft.put(f"{target}.chunk_tokens", settings.integer(chunk), chunk)
    draft.put(f"{target}.entropy", "none")
    if backend == "megatron_cfg":
        deferred = "policy.megatron_cfg.defer_fp32_logits"
        draft.put(f"{target}.cross_entropy", "parallel")
        draft.put(f"{target}.dtype", None if settings.flag(deferred) else "float32", deferred)
        return
    draft.put(f"{target}.dtype", "float32", "policy.dtensor_cfg.enabled")
    draft.put(f"{target}.cross_entropy", "parallel" if draft.data["mesh"]["tp"] > 1 else "plain")


def lora(settings: Settings, draft: Draft, backend: str) -> None:
    """`dtensor_cfg.lora_cfg` or `megatron_cfg.peft`, where enabled."""
    own = f"policy.{backend}.{'peft' if backend == 'megatron_cfg' else 'lora_cfg'}"
    if not settings.flag(f"{own}.enabled"):
        return
    words = settings.words(f"{own}.target_modules")
    modules = EVERY_LINEAR if not words or settings.flag(f"{own}.match_all_linear") else words
    for target in (f"{ENGINE}.lora", "model.lora"):
        draft.put(f"{target}.rank", settings.count(f"{own}.dim"), f"{own}.dim")
        draft.put(f"{target}.alpha", settings.number(f"{own}.alpha"), f"{own}.alpha")
        draft.put(f"{target}.target_modules", modules, f"{own}.target_modules")
