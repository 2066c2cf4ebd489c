"""TRL's GRPO trainer: a YAML file of TrlParser or a launch (`accelerate launch … --flags`, `trl grpo …`) as a RunConfig.

Facts: trl 1.16 (grpo_config.py, grpo_trainer.py), transformers 5.24, accelerate 1.15. Batch sizes of TRL count
completions: a generation batch holds `per_device_train_batch_size * world * steps_per_generation` of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowledger.config.dotted import place
from flowledger.config.foreign import Reading
from flowledger.config.near_key import near
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import left_open
from flowledger.config.trl import accelerate
from flowledger.config.trl.accelerate import PREFIX
from flowledger.config.trl.arguments import Command, Given, given
from flowledger.config.trl.rollout import corrected, old_log_probs, rewards, rollout
from flowledger.flow.errors import nearest
from flowledger.tables import rules

DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}
EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_DEFAULT = ("q_proj", "v_proj")  # peft's own choice for Llama, Qwen2, Qwen3, Mistral and Gemma
NO_DUAL_CLIP = 1e6  # the bound of algorithm.clip_dual: never reached


def read(
    source: Path | str | Command | None, overrides: Sequence[str], *, assume: Mapping[str, str], version: str | None
) -> Reading:
    """The RunConfig of a TRL run.

    `source`: a YAML file, one command line of a script (words and places), or nothing but overrides. Raises BadInput
    with a line for each key that TRL refuses.
    """
    arguments = given(source, overrides)
    settings = _settings(arguments, assume, version)
    if isinstance(source, Launched):
        settings.notes += source.notes
        settings.notes += left_open(source.unset, source.unknown)
    draft = Draft(settings)
    world = _hardware(settings, draft)
    derived = _batch(settings, draft, world)
    _model(settings, draft)
    _algorithm(settings, draft)
    _update(settings, draft)
    _logits(settings, draft, version)
    chunks = derived["_trl.steps_per_generation"]
    rollout(settings, draft, chunks)
    rewards(settings, draft)
    corrected(settings, draft)
    derived["old_per_token_logps"] = old_log_probs(settings, chunks)
    draft.put("actor.old_log_prob", derived["old_per_token_logps"], "steps_per_generation")
    for fact in rules.table("trl").facts:  # what a check reads is not ignored
        for key in fact.keys:
            settings.get(key)
    return draft.reading(arguments.where, derived)


def _settings(arguments: Given, assume: Mapping[str, str], version: str | None) -> Settings:
    facts = table("trl")
    known = {**facts["defaults"], **dict.fromkeys(facts["unset"])}
    older = version is not None and version != facts["version"]
    tree = {**known, **(dict.fromkeys(facts["older"]) if older else {})}
    options, option_places = accelerate.of_trainer(arguments.values, arguments.places, arguments.folder)
    options |= arguments.launch
    option_places |= arguments.launch_places
    for key in ("accelerate_config", "num_processes"):  # what --assume may give of the launcher
        if key in assume and key not in options:
            options[key], option_places[key] = assume[key], "--assume"
    launch, launch_places = accelerate.effective(options, option_places, arguments.folder)
    for key, value in arguments.values.items():
        place(tree, key, value)
    tree["accelerate"] = {"num_processes": None, **launch}
    places = {**arguments.places, **{PREFIX + key: where for key, where in launch_places.items()}}
    settings = Settings(f"trl {version or facts['version']}", tree, places, assume)
    for key in ("deepspeed", "fsdp", "fsdp_config"):
        settings.get(key)
    for key in ("accelerate_config", "num_processes"):
        if option_places.get(key) == "--assume":
            settings.assumed(key)
    if older:
        settings.notes.append(f"defaults and memory are those of trl {facts['version']}, not of {version}")
    unknown = [key for key in arguments.values if key not in known and not key.startswith("env.")]
    unknown = [key for key in unknown if not (older and key in facts["older"])]
    if arguments.own_script:
        settings.notes += [
            f"{key} is no argument of TRL, the script's own is assumed"
            + (f" (of TRL's own, {facts['moved'][key]})" if key in facts["moved"] else near(key, known))
            for key in unknown
        ]
    else:
        settings.refuse_unknown(unknown, known)
    return settings


def _hardware(settings: Settings, draft: Draft) -> int:
    processes, machines = f"{PREFIX}num_processes", f"{PREFIX}num_machines"
    world, nodes = accelerate.world(settings), settings.count(machines)
    if world % nodes:
        raise settings.bad(
            processes, f"is not divisible by num_machines = {nodes}; use {nodes * max(1, world // nodes)}"
        )
    draft.put("hardware.nodes", nodes, machines)
    draft.put("hardware.gpus_per_node", world // nodes, processes)
    draft.put("mesh.dp", world, processes)
    return world


def _batch(settings: Settings, draft: Draft, world: int) -> dict[str, Any]:
    """Prompts of a generation, completions of an optimizer step; what GRPOConfig derives of them, under `_trl.`.

    `steps_per_generation` is gradient_accumulation_steps unless it or generation_batch_size is set. A step here is one
    generation with the optimizer steps that use it: steps_per_generation * num_iterations / gradient_accumulation_steps.
    """
    per_rank, accumulate = "per_device_train_batch_size", "gradient_accumulation_steps"
    micro, steps = settings.count(per_rank), settings.count(accumulate)
    group, iterations = settings.count("num_generations"), settings.count("num_iterations")
    given_batch, given_steps = settings.integer("generation_batch_size"), settings.integer("steps_per_generation")
    if given_batch is None:
        chunks = given_steps or steps
        batch = micro * world * chunks
    else:
        batch, chunks = given_batch, given_steps or max(1, given_batch // (micro * world))
    chain = ("generation_batch_size", "steps_per_generation", accumulate, per_rank)
    draft.put("data.prompts_per_step", max(1, batch // group), *chain)
    draft.put("rollout.samples_per_prompt", group, "num_generations")
    draft.put("actor.mini_batch_samples", micro * steps * world, accumulate, per_rank, f"{PREFIX}num_processes")
    draft.put("actor.epochs", iterations, "num_iterations")
    draft.put("actor.micro_batch.samples", micro, per_rank)
    draft.put("actor.log_prob_micro_batch.samples", micro, per_rank)
    longest = settings.integer("max_steps")
    if longest is not None and longest > 0:
        draft.put("steps", max(1, longest * steps // (chunks * iterations)), "max_steps")
    saves = settings.number("save_steps") or 0
    if settings.text("save_strategy") == "steps" and saves >= 1:
        draft.put("checkpoint.every_steps", max(1, int(saves) * steps // (chunks * iterations)), "save_steps")
    return {"_trl.generation_batch_size": batch, "_trl.steps_per_generation": chunks, "world_size": world}


def _model(settings: Settings, draft: Draft) -> None:
    draft.put_model("model_name_or_path", settings.assumed("model.path"))
    if "model" not in draft.data:
        settings.notes.append("no model is named; --assume model.path=NAME")
    inner = settings.get("model_init_kwargs")
    inner = inner if isinstance(inner, dict) else {}
    word = str(inner.get("dtype", settings.get("dtype"))).removeprefix("torch.")
    if word not in DTYPES and word != "auto":
        raise settings.bad("dtype", f"should be one of {', '.join(DTYPES)}; use float32")
    dtype = DTYPES.get(word, "bfloat16")
    keys = ("model_init_kwargs", "dtype") if "dtype" in inner else ("dtype",)
    draft.put("model.dtype", dtype if dtype != "float16" else None, *keys)
    draft.put("actor.engine.param_dtype", dtype, *keys)
    for key, quantised in (("load_in_4bit", "int4"), ("load_in_8bit", "int8")):
        if settings.flag(key):
            draft.put("actor.engine.param_dtype", quantised, key)
    attention = inner.get("attn_implementation", settings.get("attn_implementation")) or "sdpa"
    kernel = table("trl")["attention"].get(str(attention).partition(":")[0], "flash")
    draft.put("actor.engine.attention", kernel, "attn_implementation", "model_init_kwargs")
    liger = settings.flag("use_liger_kernel") or bool(inner.get("use_kernels"))
    draft.put("actor.engine.kernels", "liger" if liger else "hf", "use_liger_kernel", "model_init_kwargs")
    _lora(settings, draft)


def _lora(settings: Settings, draft: Draft) -> None:
    if not settings.flag("use_peft"):
        return
    modules = settings.words("lora_target_modules")
    if modules == ("all-linear",):
        modules = EVERY_LINEAR
    for target in ("actor.engine.lora", "model.lora"):
        draft.put(f"{target}.rank", settings.count("lora_r"), "lora_r")
        draft.put(f"{target}.alpha", settings.number("lora_alpha"), "lora_alpha")
        draft.put(f"{target}.target_modules", modules or PEFT_DEFAULT, "lora_target_modules")
        draft.put(f"{target}.extra_trainable", settings.words("lora_modules_to_save") or None, "lora_modules_to_save")
    if draft.data["actor"]["engine"]["param_dtype"] in ("int4", "int8"):
        draft.put("actor.engine.lora.dtype", "bfloat16", "load_in_4bit", "load_in_8bit")


def _algorithm(settings: Settings, draft: Draft) -> None:
    facts, loss = table("trl"), str(settings.get("loss_type"))
    if loss not in facts["aggregation"]:
        raise settings.bad("loss_type", f"is no loss of {settings.release}{nearest(loss, facts['aggregation'])}")
    scale = {"true": "group", "false": "none"}.get(
        str(settings.get("scale_rewards")).lower(), settings.get("scale_rewards")
    )
    sequence = settings.text("importance_sampling_level") == "sequence"
    draft.put("algorithm.advantage", "grpo")
    draft.put("algorithm.norm_by_std", scale != "none", "scale_rewards")
    if sequence and facts["policy_loss"][loss] == "vanilla":
        draft.put("algorithm.policy_loss", "gspo", "importance_sampling_level")
    else:
        draft.put("algorithm.policy_loss", facts["policy_loss"][loss], "loss_type")
    draft.put("algorithm.loss_aggregation", facts["aggregation"][loss], "loss_type")
    if loss == "dr_grpo":
        draft.put("algorithm.loss_scale_factor", settings.count("max_completion_length"), "max_completion_length")
    _clips(settings, draft, loss)
    beta = settings.number("beta") or 0.0
    draft.put("algorithm.kl_coef", beta, "beta")
    draft.put("algorithm.kl_form", "k3")
    draft.put("algorithm.kl_in", "loss")
    draft.put("algorithm.entropy_coef", settings.number("entropy_coef"), "entropy_coef")
    if beta:
        draft.put("ref.path", "start", "beta")
        draft.put(
            "ref.micro_batch.samples", settings.count("per_device_train_batch_size"), "per_device_train_batch_size"
        )
        if settings.flag("use_peft"):
            settings.notes.append("the reference is the policy with its adapters off: it has no weights of its own")


def _clips(settings: Settings, draft: Draft, loss: str) -> None:
    """Bounds of the ratio as distances from 1; CISPO's epsilon_high is the bound itself, and it has no lower one."""
    low, high = settings.number("epsilon"), settings.number("epsilon_high")
    high = low if high is None else high
    if loss == "cispo" and high is not None:
        if high < 1:
            settings.notes.append(f"{settings.origin('epsilon_high')} = {high}: cispo cuts every weight off at {high}")
        low, high = 1.0, max(0.0, high - 1)
    draft.put("algorithm.clip_low", low, "epsilon")
    draft.put("algorithm.clip_high", high, "epsilon_high", "epsilon")
    draft.put("algorithm.clip_dual", settings.number("delta") or NO_DUAL_CLIP, "delta")
    for target, key in (("positive", "sapo_temperature_pos"), ("negative", "sapo_temperature_neg")):
        draft.put(f"algorithm.sapo_tau_{target}", settings.number(key) if loss == "sapo" else None, key)


def _update(settings: Settings, draft: Draft) -> None:
    half = "float16" if settings.flag("fp16") else None
    if half is None and (settings.get("bf16") is None or settings.flag("bf16")):
        half = "bfloat16"
    keys = ("activation_checkpointing", "gradient_checkpointing")  # the first is the newer name
    recomputes = settings.flag(keys[0] if settings.has(keys[0]) else keys[1])
    draft.put("actor.activation_checkpointing", recomputes, *keys[not settings.has(keys[0]) :])
    draft.put(
        "actor.engine.recompute.granularity", "full" if recomputes else "none", *keys[not settings.has(keys[0]) :]
    )
    word = str(settings.get("optim"))
    kind, how = table("trl")["optimizer"].get(word, ("adamw", "foreach"))
    if word not in table("trl")["optimizer"]:
        settings.notes.append(f"optim = {word} is planned as AdamW")
    draft.put("actor.engine.optimizer.kind", kind, "optim")
    draft.put("actor.engine.optimizer.implementation", how, "optim")
    accelerate.engine(settings, draft, half, settings.count("gradient_accumulation_steps") > 1)
    draft.put("actor.packed", False)
    draft.put("actor.engine.packed", False)
    multiple = settings.get("pad_to_multiple_of")
    if multiple not in (None, "auto", "none"):
        draft.put("actor.engine.pads_to_multiple", settings.integer("pad_to_multiple_of"), "pad_to_multiple_of")
    draft.put("actor.engine.compile", settings.flag("torch_compile"), "torch_compile")
    draft.put("actor.grad_clip", settings.number("max_grad_norm"), "max_grad_norm")
    draft.put("optim.lr", settings.number("learning_rate"), "learning_rate")
    draft.put("optim.betas", (settings.number("adam_beta1"), settings.number("adam_beta2")), "adam_beta1", "adam_beta2")
    draft.put("optim.eps", settings.number("adam_epsilon"), "adam_epsilon")
    draft.put("optim.weight_decay", settings.number("weight_decay"), "weight_decay")
    draft.put("seed", settings.integer("seed"), "seed")


def _logits(settings: Settings, draft: Draft, version: str | None) -> None:
    """1.16 fuses head and log-probs in tiles; before, the logits of the completions existed whole, scaled in place."""
    fused = version is None or _release(version) >= _release(str(table("trl")["version"]))
    draft.put("actor.engine.logits.implementation", "fused" if fused else "full")
    draft.put("actor.engine.logits.temperature_copy", False)
    draft.put("actor.engine.logits.kept", False)  # logits are local to the function that takes their log-probs
    draft.put("actor.engine.logits.entropy", "none" if fused else "chunked")
    draft.put("actor.log_prob_entropy", "none")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
