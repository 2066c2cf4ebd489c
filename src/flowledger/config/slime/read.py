"""slime: `train.py` / `train_async.py` with Megatron's flags, SGLang's (`--sglang-…`) and its own, as a RunConfig.

`rollout_batch_size` counts prompts, `global_batch_size` samples of one optimizer step. slime reads its command line with
unknown flags allowed, so a misspelt flag is not refused: it is named among what was ignored, with the nearest flag.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.config import flag_words
from flowledger.config.dotted import Tree
from flowledger.config.foreign import Reading
from flowledger.config.near_key import near
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import left_open
from flowledger.config.shown import shown_setting
from flowledger.config.slime.correction import corrected
from flowledger.config.slime.engine import engine
from flowledger.config.slime.rollout import rewards, rollout, serving
from flowledger.flow.errors import BadInput

NO_DUAL_CLIP = 1e6  # the bound of algorithm.clip_dual: never reached
PROGRAM = ("train", "train_async")


def read(
    source: Launched | None, overrides: Sequence[str], *, assume: Mapping[str, str], version: str | None
) -> Reading:
    """The RunConfig of a slime launch. `overrides`: `global_batch_size=256` counts above the script.

    Raises BadInput for values that a flag refuses and for a model whose sizes are neither said nor known.
    """
    words = flag_words.program_words(source, PROGRAM) if source is not None else []
    rows = _rows()
    release = f"slime {version or table('slime')['version']}"
    unset = source.unset if source is not None else ()
    given = flag_words.given(words, rows, release, abbreviations=False, unset=unset)
    megatron = _megatron(given)
    _override(given, overrides, rows, megatron)
    settings = _settings(given, megatron, release, assume)
    if source is not None:
        settings.notes += source.notes
        settings.notes += left_open(source.unset, source.unknown)
    draft = Draft(settings)
    derived = _derive(settings)
    world = _hardware(settings, draft)
    engine(settings, draft, world)
    _batch(settings, draft)
    _algorithm(settings, draft)
    rollout(settings, draft)
    serving(settings, draft)
    rewards(settings, draft)
    _other_models(settings, draft)
    _pace(settings, draft, source)
    return draft.reading(f"{source.file}:{source.line}" if source else flag_words.COMMAND_LINE, derived)


def _rows() -> dict[str, flag_words.Row]:
    found: dict[str, flag_words.Row] = {}
    for row in table("slime")["flag"]:
        name = row["key"].replace("_", "-")
        found[name] = {**row, "negates": False}
        if row.get("negates"):
            found[f"no-{name}"] = {**row, "negates": True}
    return found


def _megatron(given: flag_words.Given) -> dict[str, Any]:
    """All other flags: a switch without a word, else a value or a list of them."""
    found: dict[str, Any] = {}
    for name, (values, place) in given.unknown.items():
        key = name.replace("-", "_")
        read_values = [_scalar(value) for value in values]
        found[key] = True if not values else read_values[0] if len(values) == 1 else read_values
        given.places[key] = place
    return found


def _override(
    given: flag_words.Given, overrides: Sequence[str], rows: Mapping[str, flag_words.Row], megatron: dict[str, Any]
) -> None:
    own = {row["key"] for row in rows.values()}
    for text in overrides:
        name, equals, value = text.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if key in own:
            flag_words.overridden(given, [f"{key}={value}" if equals else key], rows)
        elif equals and key in _known(megatron):
            megatron[key] = _scalar(value)
            given.places[key] = flag_words.COMMAND_LINE
            given.gaps.pop(key, None)
        else:
            hint = near(key, _known(megatron))
            raise BadInput(
                f"{flag_words.COMMAND_LINE}: {shown_setting(text)!r} is no setting that is known; write key=value{hint}"
            )


def _known(megatron: Mapping[str, Any]) -> list[str]:
    facts = table("slime")
    return [*(row["key"] for row in facts["flag"]), *facts["others"], *facts["megatron"], *megatron]


def _scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _settings(
    given: flag_words.Given, megatron: Mapping[str, Any], release: str, assume: Mapping[str, str]
) -> Settings:
    facts = table("slime")
    tree: Tree = {row["key"]: row.get("default") for row in facts["flag"]}
    tree |= {key: None for key in facts["megatron"] if key in assume}
    settings = Settings(release, {**tree, **megatron, **given.values}, given.places, assume, given.gaps)
    settings.spelt = {key: f"--{key.replace('_', '-')}" for key in given.gaps}
    _refuse_open(settings, facts["megatron"], megatron)
    known = [*facts["megatron"], *facts["others"], *tree]
    for key in megatron:
        if key in facts["megatron"]:
            settings.get(key)  # a plan depends on it
        elif key not in facts["others"] and not key.startswith("sglang_"):
            hint = near(key, known)
            settings.notes.append(f"{given.places[key]}: --{key.replace('_', '-')} is no flag that is known here{hint}")
    return settings


def _refuse_open(settings: Settings, read: Sequence[str], megatron: Mapping[str, Any]) -> None:
    """Megatron's flags are read all at once: what is not known of one that a plan depends on is said here."""
    lines = [str(settings.bad(key, "")) for key in megatron if key in settings.gaps and key in read]
    if lines:
        raise BadInput("\n".join(lines))


def _derive(settings: Settings) -> dict[str, Any]:
    """What slime_validate_args changes; the effective values go into the settings' tree."""
    tree = settings.tree
    said: dict[str, Any] = {}
    if settings.get("rollout_batch_size") is None:
        raise BadInput(
            f"{settings.release}: --rollout-batch-size is not given, and slime demands it; give it, or --assume rollout_batch_size=N"
        )
    colocate = settings.flag("colocate")
    for key in ("offload_train", "offload_rollout"):
        if settings.flag("offload"):
            said[key] = True
        elif settings.get(key) is None:
            said[key] = colocate
    if settings.text("advantage_estimator") == "ppo":
        said["offload_train"] = True
    if settings.flag("release_train"):
        said |= {"offload_train": False, "offload_rollout": True} if colocate else {}
    if colocate and settings.get("rollout_num_gpus") is None:
        said["rollout_num_gpus"] = settings.count("actor_num_nodes") * settings.count("actor_num_gpus_per_node")
    steps = settings.integer("num_steps_per_rollout")
    samples = settings.count("rollout_batch_size") * settings.count("n_samples_per_prompt")
    if steps and settings.get("global_batch_size") is None:
        said["global_batch_size"] = max(1, samples // steps)
    if settings.flag("use_dynamic_batch_size") and settings.get("log_probs_max_tokens_per_gpu") is None:
        said["log_probs_max_tokens_per_gpu"] = settings.integer("max_tokens_per_gpu")
    if settings.get("eps_clip_high") is None:
        said["eps_clip_high"] = settings.number("eps_clip")
    said |= {"critic_num_nodes": tree["actor_num_nodes"], "critic_num_gpus_per_node": tree["actor_num_gpus_per_node"]}
    said |= {
        short: settings.integer(long)
        for short, long in (
            ("sglang_pp_size", "sglang_pipeline_parallel_size"),
            ("sglang_ep_size", "sglang_expert_parallel_size"),
        )
        if settings.get(long) is not None
    }
    said["accumulate_allreduce_grads_in_fp32"] = True  # Megatron sets it for float32 main gradients, its default
    tree |= said
    return said


def _hardware(settings: Settings, draft: Draft) -> int:
    nodes, gpus = settings.count("actor_num_nodes"), settings.count("actor_num_gpus_per_node")
    draft.put("hardware.nodes", nodes, "actor_num_nodes")
    draft.put("hardware.gpus_per_node", gpus, "actor_num_gpus_per_node")
    return nodes * gpus


def _batch(settings: Settings, draft: Draft) -> None:
    prompts, group = settings.count("rollout_batch_size"), settings.count("n_samples_per_prompt")
    draft.put("data.prompts_per_step", prompts, "rollout_batch_size")
    draft.put("rollout.samples_per_prompt", group, "n_samples_per_prompt")
    batch = settings.integer("global_batch_size")
    if batch is None:
        settings.notes.append("neither --global-batch-size nor --num-steps-per-rollout: one optimizer step is planned")
    draft.put("actor.mini_batch_samples", batch or prompts * group, "global_batch_size", "num_steps_per_rollout")
    cp = draft.data["actor"]["engine"].get("mesh", {}).get("cp", 1)
    limits = (
        ("actor.micro_batch", "max_tokens_per_gpu"),
        ("actor.log_prob_micro_batch", "log_probs_max_tokens_per_gpu"),
    )
    for target, key in limits:
        budget = settings.integer(key) if settings.flag("use_dynamic_batch_size") else None
        if budget is None:
            draft.put(f"{target}.samples", settings.count("micro_batch_size"), "micro_batch_size")
        else:
            draft.put(f"{target}.max_tokens", budget * cp, key, "max_tokens_per_gpu")
    balanced = settings.flag("balance_data") or settings.flag("balance_by_flops")
    draft.put("actor.micro_batch.balance", balanced, "balance_data", "balance_by_flops")
    draft.put("actor.grad_clip", settings.number("clip_grad"), "clip_grad")
    draft.put("optim.lr", settings.number("lr"), "lr")
    draft.put("optim.betas", (settings.number("adam_beta1"), settings.number("adam_beta2")), "adam_beta1", "adam_beta2")
    draft.put("optim.eps", settings.number("adam_eps"), "adam_eps")
    draft.put("optim.weight_decay", settings.number("weight_decay"), "weight_decay")
    draft.put("seed", settings.integer("seed"), "seed")


def _algorithm(settings: Settings, draft: Draft) -> None:
    estimator, loss = table("slime")["estimator"][str(settings.get("advantage_estimator"))]
    draft.put("algorithm.advantage", estimator, "advantage_estimator")
    draft.put("algorithm.policy_loss", loss, "advantage_estimator")
    divides = not settings.flag("disable_grpo_std_normalization") and settings.count("n_samples_per_prompt") > 1
    draft.put("algorithm.norm_by_std", divides, "disable_grpo_std_normalization", "n_samples_per_prompt")
    draft.put("algorithm.clip_low", settings.number("eps_clip"), "eps_clip")
    draft.put("algorithm.clip_high", settings.number("eps_clip_high"), "eps_clip_high", "eps_clip")
    draft.put("algorithm.clip_dual", settings.number("eps_clip_c") or NO_DUAL_CLIP, "eps_clip_c")
    in_loss = settings.flag("use_kl_loss")
    key = "kl_loss_coef" if in_loss else "kl_coef"
    draft.put("algorithm.kl_coef", settings.number(key), key)
    draft.put("algorithm.kl_in", "loss" if in_loss else "reward", "use_kl_loss")
    draft.put("algorithm.kl_form", settings.text("kl_loss_type"), "kl_loss_type")
    draft.put("algorithm.entropy_coef", settings.number("entropy_coef"), "entropy_coef")
    draft.put("algorithm.gamma", settings.number("gamma"), "gamma")
    draft.put("algorithm.lam", settings.number("lambd"), "lambd")
    corrected(settings, draft)
    per_token = settings.flag("calculate_per_token_loss")
    draft.put(
        "algorithm.loss_aggregation", "token-mean" if per_token else "seq-mean-token-mean", "calculate_per_token_loss"
    )
    draft.put(
        "actor.log_prob_entropy", "full" if settings.flag("use_rollout_entropy") else "none", "use_rollout_entropy"
    )


def _other_models(settings: Settings, draft: Draft) -> None:
    """The reference's weights rest on the host and take the policy's place for their pass; the critic is a second model."""
    if settings.flag("use_kl_loss") or settings.number("kl_coef"):
        draft.put("ref.path", settings.text("ref_load") or "start", "ref_load", "use_kl_loss")
        draft.copy("actor.log_prob_micro_batch", "ref.micro_batch")
        draft.copy("actor.engine", "ref.engine")
        draft.put("ref.engine.offload.param", True, "use_kl_loss")
        for what in ("grad", "optimizer"):
            draft.put(f"ref.engine.offload.{what}", False)
        draft.data["ref"]["engine"]["optimizer"] = {"kind": "none"}
    if settings.text("advantage_estimator") == "ppo":
        draft.put("critic.path", settings.text("hf_checkpoint") or "start", "hf_checkpoint")
        draft.put("critic.lr", settings.number("lr"), "lr")
        draft.put("critic.clip_value", settings.number("value_clip"), "value_clip")
        draft.put("critic.grad_clip", settings.number("clip_grad"), "clip_grad")
        draft.put("critic.warmup_steps", settings.integer("num_critic_only_steps"), "num_critic_only_steps")
        for part in ("engine", "micro_batch"):
            draft.copy(f"actor.{part}", f"critic.{part}")
        draft.copy("actor.log_prob_micro_batch", "critic.values_micro_batch")


def _pace(settings: Settings, draft: Draft, source: Launched | None) -> None:
    draft.put("steps", settings.integer("num_rollout"), "num_rollout")
    draft.put("checkpoint.every_steps", settings.integer("save_interval"), "save_interval")
    ahead = source is not None and any(word.endswith("train_async.py") for word in source.argv)
    function = str(settings.get("rollout_function_path"))
    if settings.integer("flush_cache_interval") != 1 or "fully_async" in function:
        draft.put("async.mode", "fully_async", "flush_cache_interval", "rollout_function_path")
        draft.put("async.max_staleness", 1, "flush_cache_interval")
    elif ahead:
        draft.put("async.mode", "one_step_off")
        draft.put("async.max_staleness", 1)
