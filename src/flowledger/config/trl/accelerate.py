"""How `accelerate launch` spreads a training: processes, FSDP, DeepSpeed, from its file, its options, or TRL's shortcuts.

Names are those of accelerate's own options: `num_processes`, `fsdp_version`, `zero_stage`, … A file's `fsdp_config` and
`deepspeed_config` sections are flattened to them, as accelerate does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowledger.config.dotted import Tree, flat
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.yaml_text import document, text_of
from flowledger.flow.errors import BadInput, nearest

PREFIX = "accelerate."
MULTI = ("MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU")
SHARDINGS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
Placed = tuple[dict[str, Any], dict[str, str]]  # values, and the place of each


def effective(options: Mapping[str, Any], places: Mapping[str, str], folder: Path) -> Placed:
    """accelerate's keys in effect: options above the file above the defaults. Raises BadInput for a file that is not there."""
    values: dict[str, Any] = dict(table("trl")["accelerate"])
    found: dict[str, str] = {}
    for key in ("accelerate_config", "config_file"):
        if key in options:
            below, below_places = _launch_file(str(options[key]), folder, places.get(key, ""))
            values |= below
            found |= below_places
    values |= {key: value for key, value in options.items() if key not in ("accelerate_config", "config_file")}
    found |= {key: place for key, place in places.items() if key not in ("accelerate_config", "config_file")}
    for switch, kind in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")):
        if options.get(switch):
            values["distributed_type"], found["distributed_type"] = kind, places.get(switch, "")
    file = values.get("deepspeed_config_file")
    if file:
        below, below_places = deepspeed_file(str(file), folder, found.get("deepspeed_config_file", ""))
        values |= below
        found |= below_places
    return values, found


def _launch_file(name: str, folder: Path, place: str) -> Placed:
    """One of TRL's shortcuts by name, or an accelerate YAML file."""
    shortcuts = table("trl")["shortcuts"]
    if name in shortcuts:
        return dict(shortcuts[name]), dict.fromkeys(shortcuts[name], f"trl/accelerate_configs/{name}.yaml")
    path = found_file(name, folder, place, tuple(shortcuts))
    tree, marks, line = document(text_of(path), str(path))
    if not isinstance(tree, dict):
        raise BadInput(f"{path}:{line or 1}: expected accelerate's `key: value` lines")
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value in flat(tree).items():
        section, _, inner = key.partition(".")
        short = inner or section
        if section == "fsdp_config" and inner and not inner.startswith("fsdp"):
            short = f"fsdp_{inner}"
        values[short], places[short] = value, marks.get(key, str(path))
    return values, places


def found_file(name: str, folder: Path, place: str, known: tuple[str, ...] = ()) -> Path:
    """A file named on a command line, beside the script or in the working directory."""
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path
    words = f" and none of {', '.join(known)}" if known else ""
    where = f"{place}: " if place else ""
    raise BadInput(f"{where}{name}: no such file{words}{nearest(name, known)}")


def deepspeed_file(name: str, folder: Path, place: str) -> Placed:
    """ZeRO stage and offload of a DeepSpeed JSON file; `auto` values are accelerate's to fill in."""
    path = found_file(name, folder, place)
    tree, marks, line = document(text_of(path), str(path))
    if not isinstance(tree, dict):
        raise BadInput(f"{path}:{line or 1}: expected a JSON object of DeepSpeed's settings")
    return deepspeed(tree, marks, str(path))


def deepspeed(tree: Tree, marks: Mapping[str, str], where: str) -> Placed:
    """The same of a dictionary. Without `zero_optimization` the stage is 0."""
    zero = tree.get("zero_optimization") or {}
    values: dict[str, Any] = {"zero_stage": zero.get("stage", 0)}
    places = {"zero_stage": marks.get("zero_optimization.stage", where)}
    for part in ("optimizer", "param"):
        section = zero.get(f"offload_{part}")
        if isinstance(section, dict):
            values[f"offload_{part}_device"] = section.get("device", "none")
            places[f"offload_{part}_device"] = marks.get(f"zero_optimization.offload_{part}.device", where)
    return values, places


def of_trainer(values: Mapping[str, Any], places: Mapping[str, str], folder: Path) -> Placed:
    """accelerate's keys as TrainingArguments gives them itself: `deepspeed`, or `fsdp` with `fsdp_config`."""
    if values.get("deepspeed"):
        inner, place = values["deepspeed"], places.get("deepspeed", "")
        is_tree = isinstance(inner, dict)
        found, where = deepspeed(inner, {}, place) if is_tree else deepspeed_file(str(inner), folder, place)
        return {**found, "distributed_type": "DEEPSPEED"}, {**where, "distributed_type": place}
    if not values.get("fsdp"):
        return {}, {}
    words = str(values["fsdp"]).lower()
    options: dict[str, Any] = {"distributed_type": "FSDP"}
    for word, sharding in (
        ("full_shard", "FULL_SHARD"),
        ("shard_grad_op", "SHARD_GRAD_OP"),
        ("hybrid_shard", "HYBRID_SHARD"),
    ):
        if word in words:
            options["fsdp_sharding_strategy"] = sharding
    if "offload" in words:
        options["fsdp_offload_params"] = True
    given = values.get("fsdp_config")
    inside = (
        {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in given.items()} if isinstance(given, dict) else {}
    )
    return {**options, **inside}, {
        **dict.fromkeys(options, places.get("fsdp", "")),
        **dict.fromkeys(inside, places.get("fsdp_config", "")),
    }


def world(settings: Settings) -> int:
    """Training processes. Raises BadInput where nothing says how many there are and nothing may be assumed."""
    kind = str(settings.get(f"{PREFIX}distributed_type")).upper()
    processes = settings.integer(f"{PREFIX}num_processes") or settings.assumed_count("num_processes")
    if settings.said(f"{PREFIX}distributed_type") and kind == "NO":
        return 1  # accelerate starts one process, whatever num_processes says
    if processes is None:
        if settings.said(f"{PREFIX}distributed_type"):
            raise BadInput(
                f"{settings.release}: num_processes is not said (accelerate would take every GPU it sees); "
                "write --num_processes N, or --assume num_processes=N"
            )
        settings.notes.append("nothing says how many processes are launched: one is planned; --assume num_processes=N")
        return 1
    return processes


def engine(settings: Settings, draft: Draft, half: str | None, accumulates: bool) -> None:
    """`actor.engine.*` of the launch: strategy, dtypes, sharding, offload. `half`: dtype of mixed precision, or null.

    The stored weights are the model's own dtype (`dtype`, float32 by default); FSDP casts whole units, DDP and one
    process run under autocast, DeepSpeed keeps half-precision weights with a float32 master (accelerate 1.15).
    """
    kind = str(settings.get(f"{PREFIX}distributed_type")).upper()
    ranks = draft.data["mesh"]["dp"]
    if kind == "DEEPSPEED":
        _deepspeed(settings, draft, half)
    elif kind == "FSDP":
        _fsdp(settings, draft, half, accumulates)
    elif kind in ("NO", *MULTI):
        keys = (f"{PREFIX}distributed_type", f"{PREFIX}num_processes")
        draft.put("actor.engine.strategy", "ddp" if ranks > 1 else "single", *keys)
        _autocast(draft, half)
    else:
        raise settings.bad(f"{PREFIX}distributed_type", "is not planned for TRL; use NO, MULTI_GPU, FSDP or DEEPSPEED")


def _autocast(draft: Draft, half: str | None) -> None:
    draft.put("actor.engine.compute_dtype", half, "bf16", "fp16")
    draft.put("actor.engine.autocast", half is not None, "bf16", "fp16")


def _fsdp(settings: Settings, draft: Draft, half: str | None, accumulates: bool) -> None:
    version = settings.count(f"{PREFIX}fsdp_version")
    reshard = f"{PREFIX}fsdp_reshard_after_forward"
    old = f"{PREFIX}fsdp_sharding_strategy"
    word = settings.get(reshard)
    if word is None or (version == 1 and settings.said(old)):
        word = settings.get(old)
    sharding = SHARDINGS.get(str(word), str(word).upper()) if word is not None else "FULL_SHARD"
    if sharding == "NO_SHARD":
        draft.put("actor.engine.strategy", "ddp", reshard, old)
        _autocast(draft, half)
        return
    draft.put("actor.engine.strategy", f"fsdp{version}", f"{PREFIX}fsdp_version", f"{PREFIX}distributed_type")
    draft.put("actor.engine.compute_dtype", half, "bf16", "fp16")
    draft.put("actor.engine.reduce_dtype", half, "bf16", "fp16")
    _upcast(draft, half)
    keeps = sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "FALSE")
    draft.put("actor.engine.reshard_after_forward", not keeps, reshard, old)
    if sharding.startswith("HYBRID"):
        draft.put("actor.engine.shard_size", draft.data["hardware"]["gpus_per_node"], reshard, old)
    draft.put(
        "actor.engine.forward_prefetch",
        settings.flag(f"{PREFIX}fsdp_forward_prefetch"),
        f"{PREFIX}fsdp_forward_prefetch",
    )
    draft.put("actor.engine.accumulates_unsharded", accumulates, "gradient_accumulation_steps")
    if settings.flag(f"{PREFIX}fsdp_activation_checkpointing"):
        draft.put("actor.activation_checkpointing", True, f"{PREFIX}fsdp_activation_checkpointing")
        draft.put("actor.engine.recompute.granularity", "full", f"{PREFIX}fsdp_activation_checkpointing")
    if settings.flag(f"{PREFIX}fsdp_offload_params"):
        for part in ("param", "grad", "optimizer", "streamed"):
            draft.put(f"actor.engine.offload.{part}", True, f"{PREFIX}fsdp_offload_params")


def _upcast(draft: Draft, half: str | None) -> None:
    """Under mixed precision accelerate stores what is trained in float32, whatever dtype the model was loaded in."""
    engine = draft.data["actor"]["engine"]
    if half is not None and "lora" in engine:
        draft.put("actor.engine.lora.dtype", engine["lora"].get("dtype", "float32"), "bf16", "fp16")
    elif half is not None and engine["param_dtype"] in ("bfloat16", "float16"):
        draft.put("actor.engine.param_dtype", "float32", "bf16", "fp16")


def _deepspeed(settings: Settings, draft: Draft, half: str | None) -> None:
    key = f"{PREFIX}zero_stage"
    stage = settings.integer(key)
    if stage not in (0, 1, 2, 3):
        raise settings.bad(key, "should be 0, 1, 2 or 3; use 3")
    draft.put("actor.engine.strategy", f"zero{stage}" if stage else "ddp", key, f"{PREFIX}distributed_type")
    if half is not None:
        draft.put("actor.engine.param_dtype", half, "bf16", "fp16")
        draft.put("actor.engine.optimizer.master_dtype", "float32", "bf16", "fp16")
    for part, targets in (("optimizer", ("optimizer",)), ("param", ("param", "streamed"))):
        name = f"{PREFIX}offload_{part}_device"
        if str(settings.get(name) or "none").lower() in ("cpu", "nvme"):
            for target in targets:
                draft.put(f"actor.engine.offload.{target}", True, name)
                if target == "optimizer":  # DeepSpeedCPUAdam steps there: the states never come to the device
                    draft.put("actor.engine.offload.optimizer_fraction", 1.0, name)
