"""How OpenRLHF trains: DeepSpeed ZeRO, ring attention, dtypes, optimizer, logits, LoRA.

Source: utils/deepspeed/deepspeed_utils.py, models/actor.py, models/utils.py of openrlhf 0.11.2.
"""

from flowledger.config.settings import Draft, Settings, table
from flowledger.flow.errors import nearest

EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def engine(settings: Settings, draft: Draft, world: int) -> None:
    cp, tp = settings.count("ds.ring_attn_size"), settings.count("ds.tensor_parallel_size")
    if world % (cp * tp):
        raise settings.bad(
            "ds.ring_attn_size" if cp > 1 else "ds.tensor_parallel_size",
            f"the {world} GPUs of the policy are not divisible by ring_attn_size * tensor_parallel_size = {cp * tp}",
        )
    for target in ("mesh", "actor.engine.mesh"):
        draft.put(f"{target}.dp", world // (cp * tp), "actor.num_gpus_per_node", "actor.num_nodes")
        draft.put(f"{target}.cp", cp, "ds.ring_attn_size")
        draft.put(f"{target}.tp", tp, "ds.tensor_parallel_size")
    stage = settings.integer("ds.zero_stage")
    if stage not in (0, 1, 2, 3):
        raise settings.bad("ds.zero_stage", "should be 0, 1, 2 or 3; use 2")
    put = draft.put
    put("actor.engine.strategy", f"zero{stage}" if stage else "ddp", "ds.zero_stage")
    draft.put_model("actor.model_name_or_path", settings.assumed("model.path"))
    _dtypes(settings, draft)
    packed = settings.flag("ds.packing_samples")
    put("actor.packed", packed, "ds.packing_samples")
    put("actor.engine.packed", packed, "ds.packing_samples")
    put("actor.engine.pads_to_multiple", cp, "ds.ring_attn_size")
    recomputes = settings.flag("actor.gradient_checkpointing_enable")
    put("actor.activation_checkpointing", recomputes, "actor.gradient_checkpointing_enable")
    put("actor.engine.recompute.granularity", "full" if recomputes else "none", "actor.gradient_checkpointing_enable")
    put("actor.engine.kernels", "liger" if settings.flag("ds.use_liger_kernel") else "hf", "ds.use_liger_kernel")
    put("actor.engine.compile", settings.flag("ds.deepcompile"), "ds.deepcompile")
    attention = (
        "flash" if packed else table("openrlhf")["attention"].get(settings.text("ds.attn_implementation"), "flash")
    )
    put("actor.engine.attention", attention, "ds.attn_implementation")
    _optimizer(settings, draft)
    _logits(settings, draft)
    _lora(settings, draft)


def _dtypes(settings: Settings, draft: Draft) -> None:
    dtype = DTYPES[str(settings.get("ds.param_dtype"))]
    settings.get("older.bf16")
    draft.put("model.dtype", dtype if dtype != "float16" else None, "ds.param_dtype", "older.bf16")
    quantised = settings.flag("ds.load_in_4bit")
    draft.put(
        "actor.engine.param_dtype", "int4" if quantised else dtype, "ds.load_in_4bit" if quantised else "ds.param_dtype"
    )
    draft.put("actor.engine.compute_dtype", dtype, "ds.param_dtype")
    kept = settings.text("ds.grad_accum_dtype")
    if kept is not None and kept not in DTYPES:
        raise settings.bad("ds.grad_accum_dtype", f"should be one of {', '.join(DTYPES)}{nearest(kept, DTYPES)}")
    draft.put("actor.engine.grad_dtype", DTYPES[kept] if kept else dtype, "ds.grad_accum_dtype", "ds.param_dtype")


def _optimizer(settings: Settings, draft: Draft) -> None:
    muon = settings.text("actor.optim") == "muon"
    draft.put("actor.engine.optimizer.kind", "muon" if muon else "adamw", "actor.optim")
    draft.put("actor.engine.optimizer.implementation", "fused", "actor.optim")
    draft.put("actor.engine.optimizer.master_dtype", "float32")
    on_cpu = settings.flag("ds.adam_offload")
    rests = on_cpu or settings.flag("ds.enable_sleep")
    draft.put("actor.engine.offload.optimizer", rests, "ds.adam_offload", "ds.enable_sleep")
    draft.put("actor.engine.offload.grad", rests and not on_cpu, "ds.enable_sleep")
    draft.put("actor.engine.offload.optimizer_fraction", 1.0 if on_cpu else 0.0, "ds.adam_offload")
    prefix = "actor.muon" if muon else "actor.adam"
    draft.put("optim.lr", settings.number(f"{prefix}.lr"), f"{prefix}.lr")
    draft.put("optim.betas", tuple(settings.get("actor.adam.betas")), "actor.adam.betas")
    draft.put("optim.eps", settings.number("actor.adam.eps"), "actor.adam.eps")
    draft.put("optim.weight_decay", settings.number("actor.adam.weight_decay"), "actor.adam.weight_decay")


def _logits(settings: Settings, draft: Draft) -> None:
    """`logits.to(float32)`, scaled in place; log-probs by flash-attn's cross-entropy; entropy only where it has a weight."""
    draft.put("actor.engine.logits.dtype", "float32")
    draft.put("actor.engine.logits.upcast", True)
    draft.put("actor.engine.logits.cross_entropy", "flash")
    draft.put(
        "actor.engine.logits.entropy", "full" if settings.has("actor.entropy_coef") else "none", "actor.entropy_coef"
    )
    draft.put("actor.log_prob_entropy", "none")


def _lora(settings: Settings, draft: Draft) -> None:
    rank = settings.integer("ds.lora.rank")
    if not rank:
        return
    modules = settings.words("ds.lora.target_modules")
    modules = EVERY_LINEAR if modules in (("all-linear",), ()) else modules
    for target in ("actor.engine.lora", "model.lora"):
        draft.put(f"{target}.rank", rank, "ds.lora.rank")
        draft.put(f"{target}.alpha", settings.number("ds.lora.alpha"), "ds.lora.alpha")
        draft.put(f"{target}.target_modules", modules, "ds.lora.target_modules")
