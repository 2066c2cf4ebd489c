"""AReaL's YAML as a RunConfig: `actor.backend: fsdp:d4t2`, `rollout.backend: sglang:d4`, or the older `allocation_mode`.

Facts: areal 1.0.4 (api/cli_args.py, trainer/rl_trainer.py, trainer/ppo/actor.py). Overrides are Hydra's. A structured
config refuses a key that its classes do not have; so does this reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowledger.config.areal.allocation import Allocation, component, parts
from flowledger.config.areal.correction import corrected
from flowledger.config.areal.engine import engine
from flowledger.config.areal.keys import defaults, known, unknown
from flowledger.config.areal.rollout import rollout
from flowledger.config.dotted import ABSENT, Tree, at, flat, merged, override
from flowledger.config.foreign import Reading
from flowledger.config.interpolation import resolved
from flowledger.config.settings import Draft, Settings, table
from flowledger.config.yaml_text import COMMAND_LINE, document, text_of
from flowledger.flow.errors import BadInput

NO_DUAL_CLIP = 1e6  # the bound of algorithm.clip_dual: never reached


@dataclass(frozen=True, slots=True)
class Places:
    """The degrees of every model, and the key that gave them."""

    actor: Allocation
    serving: Allocation
    colocated: bool
    key: str


def read(
    source: Path | str | None, overrides: Sequence[str], *, assume: Mapping[str, str], version: str | None
) -> Reading:
    """The RunConfig of an AReaL GRPO or PPO file. Raises BadInput with a line for each key that AReaL refuses."""
    where = COMMAND_LINE if source is None else str(source)
    tree, marks = ({}, {}) if source is None else _file(Path(source))
    for text in overrides:
        override(tree, marks, text)
    settings = _settings(tree, marks, assume, version)
    draft = Draft(settings)
    places = _places(settings)
    _hardware(settings, draft, places)
    _batch(settings, draft, places)
    _algorithm(settings, draft)
    _models(settings, draft, places)
    rollout(settings, draft, places.serving, places.colocated, places.key)
    recomputes = _recomputes(settings)
    draft.put("actor.old_log_prob", recomputes, "actor.recompute_logprob")
    return draft.reading(where, {"recompute_logp": recomputes, "_areal.rollout_world": places.serving.world})


def _file(path: Path) -> tuple[Tree, dict[str, str]]:
    tree, marks, line = document(text_of(path), str(path))
    if not isinstance(tree, dict):
        raise BadInput(f"{path}:{line or 1}: expected `key: value` lines, found {type(tree).__name__}")
    return tree, marks


def _settings(tree: Tree, marks: Mapping[str, str], assume: Mapping[str, str], version: str | None) -> Settings:
    facts, leaves = table("areal"), flat(tree)
    older = [key for key in facts["older"] if at(tree, key) is not ABSENT]
    before = older or (tree.get("allocation_mode") and at(tree, "actor.backend") is ABSENT)
    release = version or (facts["oldest"] if before else facts["version"])
    effective = resolved(merged(defaults(facts["root"], tree), tree), assume)
    settings = Settings(f"areal {release}", effective, {key: marks.get(key, COMMAND_LINE) for key in leaves}, assume)
    wrong = list(unknown(facts["root"], tree))
    if release != facts["version"]:
        wrong = [key for key in wrong if not any(key == old or key.startswith(f"{old}.") for old in facts["older"])]
        settings.notes.append(
            f"read as areal {release}, before optimizer_dtype: FSDP2 stores weights and Adam states in `dtype`"
            + (f" ({facts['version']} refuses {', '.join(older)})" if older else "")
        )
    settings.refuse_unknown(wrong, known(facts["root"]))
    return settings


def _places(settings: Settings) -> Places:
    """The actor's and the inference engine's degrees. Raises BadInput where neither key says them."""
    if settings.get("actor.backend"):
        actor = component(str(settings.get("actor.backend")), _where(settings, "actor.backend"))
        word = settings.text("rollout.backend")
        if word is None:
            raise BadInput(
                f"{settings.release}: rollout.backend is missing; write sglang:d4t1 or --assume rollout.backend=…"
            )
        serving = component(word, _where(settings, "rollout.backend"))
        together = settings.text("rollout.scheduling_strategy.type") == "colocation"
        return Places(actor, serving, together, "actor.backend")
    text = settings.text("allocation_mode") or ""
    if not text:
        raise BadInput(
            f"{settings.release}: actor.backend is missing; write fsdp:d8, or --assume actor.backend=fsdp:d8"
        )
    found = parts(text, _where(settings, "allocation_mode"))
    training = [one for one in found if not one.serves]
    serving_parts = [one for one in found if one.serves]
    if not training or len(serving_parts) != 1:
        raise settings.bad("allocation_mode", "needs one inference engine and a trainer, such as sglang:d4+fsdp:d4")
    actor = next((one for one in training if one.name == "actor"), training[0])
    return Places(actor, serving_parts[0], bool(serving_parts[0].beside), "allocation_mode")


def _where(settings: Settings, key: str) -> str:
    return f"{settings.places.get(key, settings.release)}: {key}"


def _hardware(settings: Settings, draft: Draft, places: Places) -> None:
    """The cluster as configured; nodes follow from the degrees where n_nodes is not set (its default is 32)."""
    each = settings.count("cluster.n_gpus_per_node")
    needed = places.actor.world + (0 if places.colocated else places.serving.world)
    key = "cluster.n_nodes" if settings.said("cluster.n_nodes") else places.key
    nodes = settings.count("cluster.n_nodes") if settings.said("cluster.n_nodes") else -(-needed // each)
    if needed > nodes * each:
        raise settings.bad(
            places.key,
            f"takes {needed} devices, the cluster has {nodes}*{each}; use cluster.n_nodes={-(-needed // each)}",
        )
    draft.put("hardware.nodes", nodes, key)
    draft.put("hardware.gpus_per_node", min(each, needed), "cluster.n_gpus_per_node")


def _batch(settings: Settings, draft: Draft, places: Places) -> None:
    """`train_dataset.batch_size` prompts; each optimizer step takes 1/ppo_n_minibatches of a rank's samples."""
    prompts, group = settings.count("train_dataset.batch_size"), settings.count("gconfig.n_samples")
    mini = -(-prompts * group // settings.count("actor.ppo_n_minibatches"))
    draft.put("data.prompts_per_step", prompts, "train_dataset.batch_size")
    draft.put("rollout.samples_per_prompt", group, "gconfig.n_samples")
    draft.put("actor.mini_batch_samples", mini, "actor.ppo_n_minibatches", "train_dataset.batch_size")
    draft.put("actor.epochs", 1)
    _micro(settings, draft, "actor.mb_spec", "actor.micro_batch", mini, places.actor.dp)
    _micro(settings, draft, "actor.mb_spec", "actor.log_prob_micro_batch", prompts * group, places.actor.dp)


def _micro(settings: Settings, draft: Draft, key: str, target: str, samples: int, dp: int) -> None:
    """First-fit bins of `max_tokens_per_mb` tokens; without it, n_mbs equal parts of a rank's samples."""
    tokens, pieces = settings.integer(f"{key}.max_tokens_per_mb"), settings.integer(f"{key}.n_mbs") or 1
    if tokens:
        draft.put(f"{target}.max_tokens", tokens, f"{key}.max_tokens_per_mb")
        draft.put(f"{target}.balance", settings.text(f"{key}.packing_algorithm") == "kk", f"{key}.packing_algorithm")
    else:
        draft.put(f"{target}.samples", max(1, -(-samples // (dp * pieces))), f"{key}.n_mbs")


def _algorithm(settings: Settings, draft: Draft) -> None:
    norm = "actor.reward_norm"
    groups = settings.has(norm) and settings.text(f"{norm}.mean_level") == "group"
    alone = groups and settings.flag(f"{norm}.mean_leave1out")
    critic = settings.has("critic")
    name = "gae" if critic else "rloo" if alone else "grpo" if groups else "reinforce"
    draft.put("algorithm.advantage", name, "critic" if critic else norm)
    draft.put(
        "algorithm.norm_by_std", groups and settings.text(f"{norm}.std_level") is not None, f"{norm}.std_level", norm
    )
    sequence = settings.text("actor.importance_sampling_level") == "sequence"
    decoupled = settings.flag("actor.use_decoupled_loss")
    loss = (
        "sapo"
        if settings.flag("actor.use_sapo_loss")
        else "gspo"
        if sequence
        else "decoupled"
        if decoupled
        else "vanilla"
    )
    draft.put(
        "algorithm.policy_loss",
        loss,
        "actor.use_sapo_loss",
        "actor.importance_sampling_level",
        "actor.use_decoupled_loss",
    )
    draft.put("algorithm.loss_aggregation", "token-mean")
    low, high = settings.number("actor.eps_clip"), settings.number("actor.eps_clip_higher")
    draft.put("algorithm.clip_low", low, "actor.eps_clip")
    draft.put("algorithm.clip_high", low if high is None else high, "actor.eps_clip_higher", "actor.eps_clip")
    draft.put("algorithm.clip_dual", settings.number("actor.c_clip") or NO_DUAL_CLIP, "actor.c_clip")
    draft.put("algorithm.kl_coef", settings.number("actor.kl_ctl"), "actor.kl_ctl")
    draft.put("algorithm.kl_form", settings.text("actor.kl_estimator"), "actor.kl_estimator")
    draft.put("algorithm.kl_in", "reward")
    draft.put("algorithm.gamma", settings.number("actor.discount"), "actor.discount")
    draft.put("algorithm.lam", settings.number("actor.gae_lambda"), "actor.gae_lambda")
    if loss == "sapo":
        for target, key in (("positive", "actor.sapo_tau_pos"), ("negative", "actor.sapo_tau_neg")):
            draft.put(f"algorithm.sapo_tau_{target}", settings.number(key), key)
    if decoupled:
        corrected(settings, draft)


def _models(settings: Settings, draft: Draft, places: Places) -> None:
    draft.put_model("actor.path", settings.assumed("model.path"))
    if "model" not in draft.data:
        raise BadInput(f"{settings.release}: actor.path is missing; name the model, or --assume model.path=NAME")
    engine(settings, draft, "actor", places.actor, places.key)
    draft.copy("actor.engine.mesh", "mesh")
    if draft.data["actor"]["engine"]["param_dtype"] != "float16":
        draft.copy("actor.engine.param_dtype", "model.dtype")
    draft.put(
        "actor.activation_checkpointing", settings.flag("actor.gradient_checkpointing"), "actor.gradient_checkpointing"
    )
    if settings.flag("actor.offload") or (places.colocated and settings.flag("enable_offload")):
        for part in ("param", "grad", "optimizer"):
            draft.put(f"actor.engine.offload.{part}", True, "actor.offload", "enable_offload")
    own = "actor.optimizer"
    if settings.has(own):
        draft.put("optim.lr", settings.number(f"{own}.lr"), f"{own}.lr")
        draft.put(
            "optim.betas",
            (settings.number(f"{own}.beta1"), settings.number(f"{own}.beta2")),
            f"{own}.beta1",
            f"{own}.beta2",
        )
        draft.put("optim.eps", settings.number(f"{own}.eps"), f"{own}.eps")
        draft.put("optim.weight_decay", settings.number(f"{own}.weight_decay"), f"{own}.weight_decay")
        draft.put("actor.grad_clip", settings.number(f"{own}.gradient_clipping"), f"{own}.gradient_clipping")
    draft.put("seed", settings.integer("seed"), "seed")
    draft.put("steps", settings.integer("total_train_steps"), "total_train_steps")
    _reference(settings, draft, places)
    _critic(settings, draft, places)


def _reference(settings: Settings, draft: Draft, places: Places) -> None:
    """Made only with a `ref` section and kl_ctl above 0."""
    if not settings.has("ref") or not settings.number("actor.kl_ctl"):
        if settings.has("ref"):
            settings.notes.append("actor.kl_ctl is 0: the reference policy is not made")
        return
    path = settings.text("ref.path")
    draft.put("ref.path", "start" if path in (None, "", draft.data["model"]["path"]) else path, "ref.path")
    _beside(settings, draft, "ref", places)
    _micro(settings, draft, "ref.mb_spec", "ref.micro_batch", _samples(draft), places.actor.dp)
    if settings.flag("ref.offload") or settings.flag("ref.fsdp.offload_params"):
        draft.put("ref.engine.offload.param", True, "ref.offload", "ref.fsdp.offload_params")


def _critic(settings: Settings, draft: Draft, places: Places) -> None:
    if not settings.has("critic"):
        return
    path = settings.text("critic.path")
    draft.put("critic.path", "start" if path in (None, "", draft.data["model"]["path"]) else path, "critic.path")
    _beside(settings, draft, "critic", places)
    mini = -(-_samples(draft) // settings.count("critic.ppo_n_minibatches"))
    draft.put(
        "critic.mini_batch_prompts",
        max(1, mini // draft.data["rollout"]["samples_per_prompt"]),
        "critic.ppo_n_minibatches",
    )
    _micro(settings, draft, "critic.mb_spec", "critic.micro_batch", mini, places.actor.dp)
    draft.put("critic.lr", settings.number("critic.optimizer.lr"), "critic.optimizer.lr")


def _beside(settings: Settings, draft: Draft, role: str, places: Places) -> None:
    """Another model's engine: its own backend where it names one, else the actor's degrees."""
    word = settings.text(f"{role}.backend")
    place = component(word, _where(settings, f"{role}.backend")) if word else places.actor
    engine(settings, draft, role, place, f"{role}.backend" if word else places.key)


def _samples(draft: Draft) -> int:
    count: int = draft.data["data"]["prompts_per_step"] * draft.data["rollout"]["samples_per_prompt"]
    return count


def _recomputes(settings: Settings) -> bool:
    """Whether a pass of its own computes log-probs of the policy before the update (should_compute_prox_logp)."""
    method = settings.text("actor.prox_logp_method")
    if settings.flag("actor.use_decoupled_loss"):
        return method != "loglinear"
    return settings.flag("actor.recompute_logprob")
