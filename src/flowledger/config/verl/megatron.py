"""verl's Megatron engine: bfloat16 parameters, float32 gradients and optimizer states, and Megatron's own settings."""

from flowledger.config.megatron_layout import stages_of
from flowledger.config.settings import Draft, Settings
from flowledger.config.verl.roles import Role
from flowledger.config.verl.words import word
from flowledger.flow.errors import BadInput
from flowledger.tables import models

ENDS = ("embedding", "loss")

_SWITCHES = {  # key below override_transformer_config -> key of Engine
    "num_layers_in_first_pipeline_stage": "layers_in_first_stage",
    "num_layers_in_last_pipeline_stage": "layers_in_last_stage",
    "gradient_accumulation_fusion": "gradient_accumulation_fusion",
}


def megatron(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Fill `target` from `role.section.megatron` (verl/workers/engine/megatron/transformer_impl.py)."""
    section = f"{role.section}.megatron"
    own = f"{section}.override_transformer_config"
    draft.put(f"{target}.param_dtype", word(settings, "dtype", f"{section}.dtype"), f"{section}.dtype")
    draft.put(f"{target}.compute_dtype", word(settings, "dtype", f"{section}.dtype"), f"{section}.dtype")
    draft.put(f"{target}.kernels", "te", f"{role.section}.strategy")
    sharded = f"{section}.use_distributed_optimizer"
    draft.put(f"{target}.distributed_optimizer", settings.flag(sharded), sharded)
    wide = (settings.integer(f"{section}.tensor_model_parallel_size") or 1) > 1
    along = f"{section}.sequence_parallel"
    draft.put(
        f"{target}.sequence_parallel", wide and settings.flag(along), along, f"{section}.tensor_model_parallel_size"
    )
    for name, key in _SWITCHES.items():
        draft.put(f"{target}.{key}", settings.get(f"{own}.{name}"), f"{own}.{name}")
    _stages(settings, draft, role, target)
    attention = f"{own}.attention_backend"
    draft.put(f"{target}.attention", word(settings, "attention", attention), attention)
    packed = f"{role.model}.use_remove_padding"  # which verl writes over the engine's own (engine_workers.py)
    draft.put(f"{target}.packed", settings.flag(packed), packed)
    _padding(settings, draft, section, target)
    _offload(settings, draft, section, target)
    if role.trains:
        _recompute(settings, draft, own, target)
        _optimizer(settings, draft, role, target)
        _lora(settings, draft, role, target)
    else:
        draft.put(f"{target}.optimizer.kind", "none")
    if settings.get(f"{own}.fp8") is not None:
        settings.notes.append(
            f"{settings.origin(f'{own}.fp8')}: planned in {settings.text(f'{section}.dtype')}, without FP8 copies"
        )


def _stages(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Layers of each (virtual) stage where a layout names them, or where embedding and loss count as layers."""
    section = f"{role.section}.megatron"
    own = f"{section}.override_transformer_config"
    layout = f"{own}.pipeline_model_parallel_layout"
    given = settings.get(layout)
    if isinstance(given, list):  # one list of words a stage
        sizes = tuple(stage.count("decoder") if isinstance(stage, list) else 0 for stage in given)
        draft.put(f"{target}.layers_in_stages", sizes, layout)
        return
    ends = {f"account-for-{end}-in-pipeline-split": f"{own}.account_for_{end}_in_pipeline_split" for end in ENDS}
    counted = {word_: True for word_, key in ends.items() if settings.flag(key)}
    if given is None and not counted:
        return
    path = settings.text(f"{role.model}.path") or ""
    architecture = models.find(path)
    if given is None and architecture is None:
        settings.notes.append(
            f"{own}: stages count embedding or loss as layers, and the layers of {path} are not known"
        )
        return
    degrees = {
        "pp": f"{section}.pipeline_model_parallel_size",
        "vpp": f"{section}.virtual_pipeline_model_parallel_size",
    }
    sizes_of: dict[str, object] = {
        **counted,
        "num-virtual-stages-per-pipeline-rank": settings.integer(degrees["vpp"]) or 1,
    }
    if given is not None:
        sizes_of["pipeline-model-parallel-layout"] = str(given)
    try:
        layers = architecture.layers if architecture else 0
        sizes, _ = stages_of(sizes_of, layers, settings.integer(degrees["pp"]) or 1)
    except BadInput as error:
        raise settings.bad(degrees["pp"], str(error)) from None
    draft.put(
        f"{target}.layers_in_stages", sizes, layout if given is not None else next(iter(ends.values())), degrees["pp"]
    )


def _padding(settings: Settings, draft: Draft, section: str, target: str) -> None:
    """Packed sequences are padded to 2*tp*cp where cp > 1, else to tp (verl/models/mcore/util.py), or to a bucket."""
    tp = settings.integer(f"{section}.tensor_model_parallel_size") or 1
    cp = settings.integer(f"{section}.context_parallel_size") or 1
    pads, bucket = f"{section}.pad_to_length", f"{section}.pad_to_length_bucket"
    if settings.flag(pads):
        draft.put(f"{target}.pads_to_multiple", settings.integer(bucket), bucket)
    else:
        keys = (f"{section}.tensor_model_parallel_size", f"{section}.context_parallel_size")
        draft.put(f"{target}.pads_to_multiple", tp * cp * 2 if cp > 1 else tp, *keys)


def _offload(settings: Settings, draft: Draft, section: str, target: str) -> None:
    """Gradient buffers go with the parameters: both are one DDP buffer's storages (verl/utils/megatron_utils.py)."""
    param, grad = f"{section}.param_offload", f"{section}.grad_offload"
    draft.put(f"{target}.offload.param", settings.flag(param), param)
    draft.put(f"{target}.offload.grad", settings.flag(grad) or settings.flag(param), grad, param)
    optimizer = f"{section}.optimizer_offload"
    draft.put(f"{target}.offload.optimizer", settings.flag(optimizer), optimizer)


def _recompute(settings: Settings, draft: Draft, own: str, target: str) -> None:
    granularity = f"{own}.recompute_granularity"
    how = settings.text(granularity)
    draft.put(f"{target}.recompute.granularity", how or "none", granularity)
    if how == "full":
        method, layers = f"{own}.recompute_method", f"{own}.recompute_num_layers"
        draft.put(f"{target}.recompute.method", settings.text(method), method)
        draft.put(f"{target}.recompute.layers", settings.integer(layers), layers)
    elif how == "selective":
        modules = f"{own}.recompute_modules"
        draft.put(f"{target}.recompute.modules", settings.words(modules), modules)


def _optimizer(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    """Gradients are accumulated and reduced in float32; precision-aware states have dtypes of their own.

    `override_optimizer_config` goes to Megatron's OptimizerConfig last, so it wins.
    """
    optim, override = role.optim, f"{role.optim}.override_optimizer_config"
    kind = settings.text(f"{optim}.optimizer")
    draft.put(f"{target}.optimizer.kind", kind if kind in ("sgd", "muon") else "adam", f"{optim}.optimizer")
    draft.put(f"{target}.optimizer.implementation", "fused", f"{optim}.optimizer")
    draft.put(f"{target}.optimizer.master_dtype", "float32", f"{role.section}.strategy")
    aware = _either(settings, override, optim, "use_precision_aware_optimizer")
    gradients, moments = "float32", "float32"
    if settings.flag(aware):
        gradients = word(settings, "dtype", _either(settings, override, optim, "main_grads_dtype")) or "float32"
        moments = word(settings, "dtype", _either(settings, override, optim, "exp_avg_dtype")) or "float32"
    draft.put(f"{target}.optimizer.moment_dtype", moments, aware)
    draft.put(f"{target}.grad_dtype", gradients, aware)
    draft.put(f"{target}.reduce_dtype", gradients, aware)
    on_host = f"{override}.optimizer_cpu_offload"
    fraction = f"{override}.optimizer_offload_fraction"
    share = settings.number(fraction)
    if settings.flag(on_host):
        draft.put(f"{target}.offload.optimizer_fraction", 1.0 if share is None else share, fraction, on_host)


def _either(settings: Settings, first: str, second: str, key: str) -> str:
    return f"{first}.{key}" if settings.get(f"{first}.{key}") is not None else f"{second}.{key}"


def _lora(settings: Settings, draft: Draft, role: Role, target: str) -> None:
    section = f"{role.model}.lora"
    if not settings.integer(f"{section}.rank"):
        return
    draft.put(f"{target}.lora.rank", settings.integer(f"{section}.rank"), f"{section}.rank")
    draft.put(f"{target}.lora.alpha", settings.number(f"{section}.alpha"), f"{section}.alpha")
    draft.put(f"{target}.lora.target_modules", settings.words(f"{section}.target_modules"), f"{section}.target_modules")
    draft.put(f"{target}.lora.dtype", word(settings, "dtype", f"{section}.dtype"), f"{section}.dtype")
