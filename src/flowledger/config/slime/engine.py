"""How slime trains: Megatron's engine from its flags, with what slime sets for each run."""

import re
from collections.abc import Mapping
from typing import Any

from flowledger.config import megatron_args
from flowledger.config.dotted import flat
from flowledger.config.settings import Draft, Settings, table
from flowledger.flow.errors import BadInput
from flowledger.tables.models import Architecture, find


def architecture_of(raw: Mapping[str, Any]) -> Architecture | None:
    """The model that the Megatron flags of a reading build (`config.raw`); None where they do not say its sizes."""
    try:
        return megatron_args.architecture_of(_dashed(raw))
    except BadInput:
        return None


def _dashed(raw: Mapping[str, Any]) -> dict[str, object]:
    """Megatron's arguments with what slime sets for each run: distributed optimizer, bfloat16 unless --fp16."""
    args: dict[str, object] = {f"--{key.replace('_', '-')}": value for key, value in raw.items()}
    return {**args, "--bf16": not args.get("--fp16"), "--use-distributed-optimizer": True}


def _sized(settings: Settings, args: dict[str, object]) -> dict[str, object]:
    """The arguments with the number of layers, where only the checkpoint's name says it."""
    if args.get("--num-layers") is not None or "--hybrid-override-pattern" in args:
        return args
    model = find(str(settings.get("hf_checkpoint") or ""))
    if model is None:
        checkpoint = settings.text("hf_checkpoint")
        raise BadInput(
            f"{settings.places.get('hf_checkpoint', settings.release)}: no --num-layers, and --hf-checkpoint = {checkpoint} "
            f"names no model that is known; is a file with MODEL_ARGS missing? Give --assume num_layers=N and its other sizes"
        )
    settings.notes.append(f"no --num-layers: the sizes are those of {model.name}, by the name of --hf-checkpoint")
    return {**args, "--num-layers": model.layers}


def engine(settings: Settings, draft: Draft, world: int) -> None:
    args = _sized(settings, _dashed(settings.tree))
    try:
        found = megatron_args.engine_of(args, world)
    except BadInput as fault:
        named = re.search(r"--([a-z-]+)", str(fault))
        place = settings.places.get(named.group(1).replace("-", "_") if named else "", settings.release)
        raise BadInput(f"{place}: {fault}") from None
    values = flat(found.model_dump())
    for key, value in values.items():
        flag = table("slime")["engine"].get(key)
        draft.put(f"actor.engine.{key}", value, *([flag] if flag else []))
    mesh = found.mesh
    assert mesh is not None
    if world % mesh.model:
        raise settings.bad(
            "actor_num_gpus_per_node",
            f"{world} GPUs are not divisible by tp*pp*cp = {mesh.model}; use {-(-world // mesh.model) * mesh.model}",
        )
    draft.copy("actor.engine.mesh", "mesh")
    if found.strategy == "megatron":
        draft.put("actor.engine.strategy", "megatron", "train_backend")
    _memory(settings, draft, mesh.tp * mesh.cp)
    draft.put_model("hf_checkpoint", settings.assumed("model.path"))
    draft.put("model.dtype", "bfloat16" if found.param_dtype == "bfloat16" else None, "bf16")


def _memory(settings: Settings, draft: Draft, shared: int) -> None:
    """Offload, padding, logits: slime asks for float32 logits and always computes the entropy."""
    away = settings.flag("offload_train") or settings.flag("release_train")
    for what in ("param", "grad", "optimizer"):
        draft.put(f"actor.engine.offload.{what}", away, "offload_train", "offload", "colocate")
    full = draft.data["actor"]["engine"].get("recompute", {}).get("granularity") == "full"
    draft.put("actor.activation_checkpointing", full, "recompute_granularity")
    draft.put("actor.packed", True)
    draft.put("actor.engine.packed", True)
    pads = settings.count("data_pad_size_multiplier") * shared
    draft.put("actor.engine.pads_to_multiple", pads, "data_pad_size_multiplier", "tensor_model_parallel_size")
    chunk = settings.integer("log_probs_chunk_size") or -1
    draft.put("actor.engine.logits.implementation", "chunked" if chunk > 0 else "full", "log_probs_chunk_size")
    draft.put("actor.engine.logits.chunk_tokens", chunk if chunk > 0 else None, "log_probs_chunk_size")
    draft.put("actor.engine.logits.dtype", "float32")
    draft.put("actor.engine.logits.upcast", True)
    draft.put(
        "actor.engine.logits.temperature_copy", settings.number("rollout_temperature") != 1.0, "rollout_temperature"
    )
    draft.put("actor.engine.logits.entropy", "full", "entropy_coef")
    draft.put("actor.engine.logits.cross_entropy", "parallel")
    if settings.flag("recompute_loss_function"):
        settings.notes.append("--recompute-loss-function is planned as if it were off: log-probs and entropy are kept")
