"""NeMo-RL's YAML as a RunConfig: inheritance by `defaults:`, Hydra's overrides, DTensor (FSDP2) or Megatron.

Facts: NVIDIA-NeMo/RL nemo_rl/algorithms/grpo.py, models/policy/lm_policy.py, examples/configs. Batch sizes of `policy.*`
count samples over all ranks. Keys beside the known ones pass (the models of its configuration allow extra keys).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flowledger.config import correction
from flowledger.config.dotted import ABSENT, at, flat, merged, override
from flowledger.config.foreign import Reading
from flowledger.config.interpolation import resolved
from flowledger.config.near_key import near
from flowledger.config.nemo_rl.engine import engine, lora
from flowledger.config.nemo_rl.inheritance import Composed, composed, of_table, places
from flowledger.config.nemo_rl.rollout import lengths, rollout
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.yaml_text import COMMAND_LINE
from flowledger.flow.errors import BadInput

NO_DUAL_CLIP = 1e6  # the bound of algorithm.clip_dual: never reached
GROUP = "grpo.num_generations_per_prompt"


def read(
    source: Path | str | None, overrides: Sequence[str], *, assume: Mapping[str, str], version: str | None
) -> Reading:
    """The RunConfig of a NeMo-RL GRPO file. Raises BadInput."""
    found = of_table("grpo_math_1B") if source is None else composed(Path(source), assume)
    for text in overrides:
        override(found.tree, found.marks, text)
    settings = _settings(found, assume, version)
    draft = Draft(settings)
    backend = _backend(settings)
    world = _hardware(settings, draft, backend)
    draft.put_model("policy.model_name")
    _batch(settings, draft)
    engine(settings, draft, backend)
    _reference(settings, draft)
    lora(settings, draft, backend)
    lengths(settings, draft)
    _algorithm(settings, draft)
    _optimizer(settings, draft, backend)
    rollout(settings, draft, world)
    return draft.reading(COMMAND_LINE if source is None else str(source), {})


def _settings(found: Composed, assume: Mapping[str, str], version: str | None) -> Settings:
    facts = table("nemo_rl")
    release = f"nemo_rl {version or facts['version']}"
    leaves = {*flat(of_table("grpo_math_1B").tree), *flat(facts["fallback"])}
    sections = {leaf.rpartition(".")[0] for leaf in leaves}
    where = places(found)
    effective = resolved(merged(facts["fallback"], found.tree), assume)
    settings = Settings(release, effective, where, assume)
    if "defaults" in assume and any("not at hand" in note for note in found.notes):
        settings.assumed("defaults")
    settings.notes += found.notes
    if version is not None and version != facts["version"]:
        settings.notes.append(f"defaults are those of nemo_rl {facts['version']}, not of {version}")
    for key in where:
        above = key.rpartition(".")[0]
        if above in sections and key not in leaves | sections and not key.startswith(("env.", "data.", "logger.")):
            settings.notes.append(f"{where[key]}: {key} is no key of the base configuration{near(key, leaves)}")
    return settings


def _backend(settings: Settings) -> str:
    """megatron_cfg or dtensor_cfg, whichever is enabled. Raises BadInput for both or neither."""
    megatron, dtensor = (settings.flag(f"policy.{one}.enabled") for one in ("megatron_cfg", "dtensor_cfg"))
    if megatron == dtensor:
        word = "both are" if megatron else "neither is"
        raise settings.bad(
            "policy.megatron_cfg.enabled", f"{word} enabled of megatron_cfg and dtensor_cfg; enable exactly one"
        )
    return "megatron_cfg" if megatron else "dtensor_cfg"


def _hardware(settings: Settings, draft: Draft, backend: str) -> int:
    """Devices of the cluster; the trainer's mesh over those that generation does not have for itself.

    Returns the devices of generation. Raises BadInput where the degrees do not divide the trainer's devices.
    """
    nodes, each = settings.count("cluster.num_nodes"), settings.count("cluster.gpus_per_node")
    draft.put("hardware.nodes", nodes, "cluster.num_nodes")
    draft.put("hardware.gpus_per_node", each, "cluster.gpus_per_node")
    world, own = nodes * each, _own_devices(settings, nodes, each)
    train = world - own
    prefix = f"policy.{backend}"
    names = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "ep": "expert_parallel_size"}
    if backend == "megatron_cfg":
        names = {
            "tp": "tensor_model_parallel_size",
            "pp": "pipeline_model_parallel_size",
            "cp": "context_parallel_size",
            "ep": "expert_model_parallel_size",
            "etp": "expert_tensor_parallel_size",
        }
    degrees = {axis: settings.count(f"{prefix}.{name}") for axis, name in names.items()}
    model = degrees["tp"] * degrees.get("pp", 1) * degrees["cp"]
    if train < model or train % model:
        raise settings.bad(
            f"{prefix}.{names['tp']}",
            f"tp*pp*cp = {model} does not divide the {train} devices that train; use cluster.num_nodes or smaller degrees",
        )
    for axis, degree in degrees.items():
        if axis != "etp" or degrees["ep"] > 1:
            draft.put(f"mesh.{axis}", degree, f"{prefix}.{names[axis]}")
    draft.put("mesh.dp", train // model, "cluster.gpus_per_node", "cluster.num_nodes", f"{prefix}.{names['tp']}")
    return own or world


def _own_devices(settings: Settings, nodes: int, each: int) -> int:
    """Devices that only generate: whole nodes, or part of the one node."""
    prefix = "policy.generation.colocated"
    if settings.flag(f"{prefix}.enabled"):
        return 0
    per_node, count = (
        settings.integer(f"{prefix}.resources.gpus_per_node"),
        settings.integer(f"{prefix}.resources.num_nodes"),
    )
    if nodes == 1:
        if not per_node or per_node >= each:
            raise settings.bad(
                f"{prefix}.resources.gpus_per_node", f"should be from 1 to {max(1, each - 1)} of the node's {each}"
            )
        return per_node
    if not count or count >= nodes:
        raise settings.bad(
            f"{prefix}.resources.num_nodes", f"should be from 1 to {nodes - 1} of the cluster's {nodes} nodes"
        )
    return count * (per_node or each)


def _batch(settings: Settings, draft: Draft) -> None:
    prompts = settings.count("grpo.num_prompts_per_step")
    draft.put("data.prompts_per_step", prompts, "grpo.num_prompts_per_step")
    draft.put("rollout.samples_per_prompt", settings.count(GROUP), GROUP)
    draft.put(
        "actor.mini_batch_samples", settings.count("policy.train_global_batch_size"), "policy.train_global_batch_size"
    )
    draft.put("actor.epochs", 1)
    _micro(settings, draft, "actor.micro_batch", "train_micro_batch_size", "train_mb_tokens")
    _micro(settings, draft, "actor.log_prob_micro_batch", "logprob_batch_size", "logprob_mb_tokens")
    packs = settings.flag("policy.sequence_packing.enabled")
    for target in ("actor.packed", "actor.engine.packed"):
        draft.put(target, packs, "policy.sequence_packing.enabled")
    longest = settings.integer("grpo.max_num_steps")
    draft.put("steps", longest, "grpo.max_num_steps")
    if settings.flag("checkpointing.enabled"):
        draft.put("checkpoint.every_steps", settings.integer("checkpointing.save_period"), "checkpointing.save_period")


def _micro(settings: Settings, draft: Draft, target: str, static: str, tokens: str) -> None:
    """Packing fills bins of `*_mb_tokens` tokens; dynamic batching groups samples whose padded tokens reach them."""
    packs, groups = (settings.flag(f"policy.{one}.enabled") for one in ("sequence_packing", "dynamic_batching"))
    if packs and groups:
        raise settings.bad("policy.sequence_packing.enabled", "excludes dynamic_batching; enable one of them")
    if packs or groups:
        key = f"policy.{'sequence_packing' if packs else 'dynamic_batching'}.{tokens}"
        parts = (f"policy.{static}", "policy.max_total_sequence_length")  # of which the base makes the budget
        if not settings.said(key) and settings.has(parts[0]):
            settings.get(parts[0])
        name = "max_tokens" if packs else "max_padded_tokens"
        draft.put(f"{target}.{name}", settings.count(key), key, *(() if settings.said(key) else parts))
        draft.put(f"{target}.balance", False)
    elif settings.has(f"policy.{static}"):
        draft.put(f"{target}.samples", settings.count(f"policy.{static}"), f"policy.{static}")


def _algorithm(settings: Settings, draft: Draft) -> None:
    loss, estimator = "loss_fn", "grpo.adv_estimator.name"
    draft.put("algorithm.advantage", settings.text(estimator) or "grpo", estimator, "grpo.use_leave_one_out_baseline")
    settings.get("grpo.use_leave_one_out_baseline")
    draft.put("algorithm.norm_by_std", settings.flag("grpo.normalize_rewards"), "grpo.normalize_rewards")
    names = {"use_cispo": "cispo", "sequence_level_importance_ratios": "gspo", "disable_ppo_ratio": "reinforce"}
    chosen = [(key, name) for key, name in names.items() if settings.flag(f"{loss}.{key}")]
    key, name = chosen[0] if chosen else ("use_cispo", "vanilla")
    draft.put("algorithm.policy_loss", name, f"{loss}.{key}")
    aggregation = "token-mean" if settings.flag(f"{loss}.token_level_loss") else "seq-mean-token-mean"
    draft.put("algorithm.loss_aggregation", aggregation, f"{loss}.token_level_loss")
    draft.put("algorithm.clip_low", settings.number(f"{loss}.ratio_clip_min"), f"{loss}.ratio_clip_min")
    draft.put("algorithm.clip_high", settings.number(f"{loss}.ratio_clip_max"), f"{loss}.ratio_clip_max")
    draft.put("algorithm.clip_dual", settings.number(f"{loss}.ratio_clip_c") or NO_DUAL_CLIP, f"{loss}.ratio_clip_c")
    draft.put(
        "algorithm.kl_coef",
        settings.number(f"{loss}.reference_policy_kl_penalty"),
        f"{loss}.reference_policy_kl_penalty",
    )
    draft.put(
        "algorithm.kl_form", settings.text(f"{loss}.reference_policy_kl_type"), f"{loss}.reference_policy_kl_type"
    )
    _corrected(settings, draft, loss)
    in_reward = settings.flag(f"{loss}.use_kl_in_reward")
    draft.put("algorithm.kl_in", "reward" if in_reward else "loss", f"{loss}.use_kl_in_reward")
    draft.put("seed", settings.integer("grpo.seed"), "grpo.seed")


def _corrected(settings: Settings, draft: Draft, loss: str) -> None:
    """Weights of what generation and trainer disagree on (algorithms/loss/loss_functions.py::ClippedPGLossFn)."""
    switch, bound = f"{loss}.use_importance_sampling_correction", f"{loss}.truncated_importance_sampling_ratio"
    if not settings.flag(switch):
        return
    level = "sequence" if settings.flag(f"{loss}.sequence_level_importance_ratios") else "token"
    high, low = settings.number(bound), settings.number(f"{bound}_min")
    kind = settings.text(f"{loss}.truncated_importance_sampling_type") if high is not None else None
    if kind == "seq-mask-tis":
        correction.rejected(draft, "seq_mean_k1", switch, bound, high=high, low=low)
    else:
        put = correction.banded if kind == "icepop" else correction.truncated
        put(draft, level, switch, bound, high=high, low=low)


def _reference(settings: Settings, draft: Draft) -> None:
    """Computed whatever its weight is, unless it is skipped; its weights lie in host memory and are swapped in."""
    skipped = "grpo.skip_reference_policy_logprobs_calculation"
    if settings.flag(skipped):
        return
    draft.put("ref.path", "start", "loss_fn.reference_policy_kl_penalty")
    draft.copy("actor.engine", "ref.engine")
    draft.put("ref.engine.offload.param", True)
    settings.notes.append("the reference's weights lie in host memory and take the policy's place for their pass")


def _optimizer(settings: Settings, draft: Draft, backend: str) -> None:
    if backend == "megatron_cfg":
        own = "policy.megatron_cfg.optimizer"
        keys = (f"{own}.lr", f"{own}.adam_beta1", f"{own}.adam_beta2", f"{own}.adam_eps", f"{own}.weight_decay")
        clip = f"{own}.clip_grad"
    else:
        own, clip = "policy.optimizer.kwargs", "policy.max_grad_norm"
        keys = (f"{own}.lr", f"{own}.betas", f"{own}.betas", f"{own}.eps", f"{own}.weight_decay")
    lr, first, second, eps, decay = keys
    draft.put("optim.lr", settings.number(lr), lr)
    if first == second:  # one list of two
        pair = settings.get(first)
        if pair is not None and not (isinstance(pair, list) and len(pair) == 2):
            raise settings.bad(first, "should be a list of two numbers; use [0.9, 0.999]")
    else:
        pair = [settings.number(first), settings.number(second)]
    draft.put("optim.betas", pair if pair and None not in pair else None, first, second)
    draft.put("optim.eps", settings.number(eps), eps)
    draft.put("optim.weight_decay", settings.number(decay), decay)
    draft.put("actor.grad_clip", settings.number(clip), clip)
    if at(settings.tree, lr) is ABSENT:
        raise BadInput(f"{settings.release}: {lr} is missing; add it, or inherit from grpo_math_1B.yaml")
