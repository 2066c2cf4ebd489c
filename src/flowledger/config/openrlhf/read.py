"""OpenRLHF's `train_ppo_ray`: a launch with dotted flags (0.10.4 and later) or underscore flags (before) as a RunConfig.

Facts: the parsers and the DeepSpeed set-up of the wheels named in tables/openrlhf.toml. `train.batch_size` counts samples over
all ranks, `rollout.batch_size` prompts. Parameters are bfloat16; DeepSpeed holds float32 master weights and Adam states, cut
over the data-parallel ranks. Logits are made float32 before anything reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.config import flag_words
from flowledger.config.dotted import Tree, place
from flowledger.config.foreign import Reading
from flowledger.config.near_key import near
from flowledger.config.openrlhf.correction import corrected
from flowledger.config.openrlhf.engine import engine
from flowledger.config.openrlhf.models import critic, reference, rewards, serving
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import left_open
from flowledger.flow.errors import BadInput

NO_DUAL_CLIP = 1e6  # the bound of algorithm.clip_dual: never reached
PROGRAM = ("train_ppo_ray",)


def read(
    source: Launched | None, overrides: Sequence[str], *, assume: Mapping[str, str], version: str | None
) -> Reading:
    """The RunConfig of an OpenRLHF launch. `overrides`: `train.batch_size=256` counts above the script.

    Raises BadInput for a flag that argparse refuses, with the nearest name, and for values that it refuses.
    """
    facts = table("openrlhf")
    words = flag_words.program_words(source, PROGRAM) if source is not None else []
    older = _is_older([word for word, _ in words], facts, version)
    rows = _rows(facts, older)
    release = f"openrlhf {version or facts['older_version' if older else 'version']}"
    given = flag_words.given(words, rows, release, unset=source.unset if source is not None else ())
    _refuse_unknown(given, rows, release)
    flag_words.overridden(given, overrides, rows)
    settings = _settings(given, rows, release, assume)
    if older and version is None:
        settings.notes.append("underscore flags: read with the defaults of OpenRLHF 0.9.0")
    _unknown_values(source, settings)
    draft = Draft(settings)
    derived = _derive(settings)
    world = _hardware(settings, draft)
    _lengths(settings, draft)
    _batch(settings, draft)
    engine(settings, draft, world)
    _algorithm(settings, draft)
    serving(settings, draft)
    rewards(settings, draft)
    reference(settings, draft)
    critic(settings, draft)
    return draft.reading(f"{source.file}:{source.line}" if source else flag_words.COMMAND_LINE, derived)


def _is_older(words: Sequence[str], facts: Mapping[str, Any], version: str | None) -> bool:
    """Whether the underscore flags hold: by the version asked for, else by the flags themselves."""
    if version is not None:
        return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < (0, 10, 1)
    names = [word[2:].split("=")[0] for word in words if word.startswith("--")]
    dotted = {row["key"] for row in facts["flag"]}
    older = {row["older"] for row in facts["flag"] if "older" in row}
    return sum(name in older for name in names) > sum(name in dotted for name in names)


def _rows(facts: Mapping[str, Any], older: bool) -> dict[str, flag_words.Row]:
    """Flag without dashes -> row, with the default of that dialect."""
    if not older:
        return {row["key"]: row for row in facts["flag"] if not row["key"].startswith("older.")}
    return {
        row["older"]: {
            **row,
            "choices": row.get("older_choices", row.get("choices")),
            "default": None if row.get("older_unset") else row.get("older_default", row.get("default")),
        }
        for row in facts["flag"]
        if "older" in row
    }


def _refuse_unknown(given: flag_words.Given, rows: Mapping[str, Any], release: str) -> None:
    lines = [
        f"{place}: --{name}: {release} has no such flag and does not start{near(name, rows)}"
        for name, (_, place) in given.unknown.items()
    ]
    if lines:
        raise BadInput("\n".join(lines))


def _settings(
    given: flag_words.Given, rows: Mapping[str, flag_words.Row], release: str, assume: Mapping[str, str]
) -> Settings:
    tree: Tree = {}
    for row in table("openrlhf")["flag"]:  # keys that the dialect has no flag for keep their default
        if not row["key"].startswith("older."):
            place(tree, row["key"], row.get("default"))
    for row in rows.values():
        place(tree, row["key"], row.get("default"))
    for key, value in given.values.items():
        place(tree, key, value)
    settings = Settings(release, tree, given.places, assume, given.gaps)
    settings.spelt = {row["key"]: f"--{flag}" for flag, row in rows.items() if flag != row["key"]}
    return settings


def _unknown_values(source: Launched | None, settings: Settings) -> None:
    """Values of the script that nobody knows before the run, and variables that are not set."""
    if source is None:
        return
    settings.notes += source.notes
    settings.notes += left_open(source.unset, source.unknown)


def _derive(settings: Settings) -> dict[str, Any]:
    """What the launcher itself changes before it starts; the effective values go into the settings' tree."""
    said: dict[str, Any] = {}
    if (settings.integer("ds.ring_attn_size") or 1) > 1 or settings.flag("train.dynamic_batch_enable"):
        said["ds.packing_samples"] = True
    if settings.flag("train.dynamic_batch_enable") and settings.get("rollout.max_tokens_per_gpu") is None:
        said["rollout.max_tokens_per_gpu"] = settings.integer("train.max_tokens_per_gpu")
    if settings.flag("vllm.enable_sleep") and not settings.flag("train.colocate_all"):
        said["vllm.enable_sleep"] = False
        settings.notes.append("vllm.enable_sleep is turned off: it works only with train.colocate_all")
    if settings.get("rollout.vllm_generate_batch_size") is None:
        said["rollout.vllm_generate_batch_size"] = settings.integer("rollout.batch_size")
    if settings.has("train.agent_func_path"):
        said["reward.remote_url"] = "agent"
    for key, value in said.items():
        place(settings.tree, key, value)
    return said


def _hardware(settings: Settings, draft: Draft) -> int:
    """The GPUs of the policy; its world."""
    nodes, gpus = settings.count("actor.num_nodes"), settings.count("actor.num_gpus_per_node")
    draft.put("hardware.nodes", nodes, "actor.num_nodes")
    draft.put("hardware.gpus_per_node", gpus, "actor.num_gpus_per_node")
    return nodes * gpus


def _lengths(settings: Settings, draft: Draft) -> None:
    """`data.max_len` bounds prompt and response together; the underscore flags bounded each."""
    longest, response = settings.integer("data.max_len"), settings.integer("rollout.max_new_tokens")
    response = settings.integer("older.max_new_tokens") or response
    prompt = settings.integer("older.prompt_max_len") if longest is None else None
    longest = longest or (prompt or 1024) + (response or 1024)
    if response is None:
        settings.notes.append(f"no rollout.max_new_tokens: responses go on to data.max_len = {longest}")
    response = min(response or longest - 1, longest - 1)
    settings.get("data.max_len")
    draft.put(
        "data.max_prompt_tokens",
        prompt or max(1, longest - response),
        "older.prompt_max_len" if prompt else "data.max_len",
    )
    draft.put(
        "rollout.max_response_tokens",
        max(1, response),
        "rollout.max_new_tokens",
        "older.max_new_tokens",
        "data.max_len",
    )
    draft.put(
        "rollout.serving.max_model_tokens", longest, "data.max_len", "older.prompt_max_len", "rollout.max_new_tokens"
    )


def _batch(settings: Settings, draft: Draft) -> None:
    draft.put("data.prompts_per_step", settings.count("rollout.batch_size"), "rollout.batch_size")
    draft.put("data.path", settings.text("data.prompt_dataset") or "prompts", "data.prompt_dataset")
    draft.put("data.prompt_key", settings.text("data.input_key"), "data.input_key")
    draft.put("data.answer_key", settings.text("data.label_key"), "data.label_key")
    draft.put("data.chat_template", settings.flag("data.apply_chat_template"), "data.apply_chat_template")
    draft.put(
        "rollout.samples_per_prompt", settings.count("rollout.n_samples_per_prompt"), "rollout.n_samples_per_prompt"
    )
    draft.put("rollout.temperature", settings.number("rollout.temperature"), "rollout.temperature")
    draft.put("rollout.top_p", settings.number("rollout.top_p"), "rollout.top_p")
    draft.put("actor.mini_batch_samples", settings.count("train.batch_size"), "train.batch_size")
    draft.put("actor.epochs", settings.count("train.max_epochs"), "train.max_epochs")
    micro_batch(settings, draft, "actor.micro_batch", "train")
    micro_batch(settings, draft, "actor.log_prob_micro_batch", "rollout")
    draft.put("actor.grad_clip", settings.number("actor.max_norm"), "actor.max_norm")
    saves = settings.integer("ckpt.save_steps") or -1
    draft.put("checkpoint.every_steps", saves if saves > 0 else None, "ckpt.save_steps")
    draft.put("seed", settings.integer("train.seed"), "train.seed")


def micro_batch(settings: Settings, draft: Draft, target: str, section: str) -> None:
    """A token budget is given per GPU; the ranks that share a sequence fill one micro-batch together."""
    if settings.flag("train.dynamic_batch_enable"):
        shared = settings.count("ds.ring_attn_size") * settings.count("ds.tensor_parallel_size")
        budget = settings.count(f"{section}.max_tokens_per_gpu") * shared
        keys = (f"{section}.max_tokens_per_gpu", "train.max_tokens_per_gpu", "train.dynamic_batch_enable")
        draft.put(f"{target}.max_tokens", budget, *keys)
    else:
        draft.put(f"{target}.samples", settings.count(f"{section}.micro_batch_size"), f"{section}.micro_batch_size")


def _algorithm(settings: Settings, draft: Draft) -> None:
    estimator = str(settings.get("algo.advantage.estimator"))
    name, divides = table("openrlhf")["advantage"][estimator]
    draft.put("algorithm.advantage", name, "algo.advantage.estimator")
    divides = divides and not settings.flag("algo.advantage.no_std_norm")
    draft.put("algorithm.norm_by_std", divides, "algo.advantage.no_std_norm", "algo.advantage.estimator")
    loss = {"ppo": "vanilla", "gspo": "gspo"}[str(settings.get("actor.policy_loss_type"))]
    draft.put("algorithm.policy_loss", loss, "actor.policy_loss_type")
    draft.put("algorithm.loss_aggregation", settings.text("actor.loss_agg_mode"), "actor.loss_agg_mode")
    both = settings.get("actor.eps_clip_low_high")
    low, high = both or [settings.number("actor.eps_clip")] * 2
    draft.put("algorithm.clip_low", low, "actor.eps_clip_low_high", "actor.eps_clip")
    draft.put("algorithm.clip_high", high, "actor.eps_clip_low_high", "actor.eps_clip")
    draft.put("algorithm.clip_dual", settings.number("actor.dual_clip") or NO_DUAL_CLIP, "actor.dual_clip")
    draft.put("algorithm.kl_coef", settings.number("algo.kl.init_coef"), "algo.kl.init_coef")
    draft.put("algorithm.kl_form", settings.text("algo.kl.estimator"), "algo.kl.estimator")
    draft.put("algorithm.kl_in", "loss" if settings.flag("algo.kl.use_loss") else "reward", "algo.kl.use_loss")
    draft.put("algorithm.entropy_coef", settings.number("actor.entropy_coef") or 0.0, "actor.entropy_coef")
    draft.put("algorithm.gamma", settings.number("algo.advantage.gamma"), "algo.advantage.gamma")
    draft.put("algorithm.lam", settings.number("algo.advantage.lambd"), "algo.advantage.lambd")
    if target := settings.number("algo.kl.target"):
        draft.put("algorithm.kl_control", "adaptive", "algo.kl.target")
        draft.put("algorithm.kl_target", target, "algo.kl.target")
        draft.put("algorithm.kl_horizon", settings.integer("algo.kl.horizon"), "algo.kl.horizon")
    if loss == "vanilla":
        corrected(settings, draft)
