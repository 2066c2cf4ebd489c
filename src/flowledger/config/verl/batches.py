"""How verl cuts a batch: micro-batches of the update, of log-prob passes and of the critic, and KL's two places."""

from flowledger.config.settings import Draft, Settings
from flowledger.config.verl.roles import ACTOR, CRITIC, REF, Role, sequence_ranks, strategy, world
from flowledger.config.verl.words import dataclass_default, put_loss_rows, word

ROLLOUT = "actor_rollout_ref.rollout"


def algorithm(settings: Settings, draft: Draft) -> None:
    """KL in the loss or in the reward (then another coefficient and form count), and what the chosen loss has of its own."""
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR.section}.use_kl_loss"
    if settings.flag(in_reward):
        draft.put("algorithm.kl_in", "reward", in_reward)
        draft.put("algorithm.kl_coef", settings.number("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_ctrl.kl_coef")
        draft.put("algorithm.kl_form", _kl(settings, "algorithm.kl_penalty"), "algorithm.kl_penalty")
        for name, target in (("type", "kl_control"), ("target_kl", "kl_target"), ("horizon", "kl_horizon")):
            draft.put(f"algorithm.{target}", settings.get(f"algorithm.kl_ctrl.{name}"), f"algorithm.kl_ctrl.{name}")
    else:
        used, coef = settings.flag(in_loss), f"{ACTOR.section}.kl_loss_coef"
        weight = settings.number(coef)
        draft.put("algorithm.kl_in", "loss", in_loss)
        draft.put("algorithm.kl_coef", weight if used else 0.0, *((coef,) if used else (in_loss,)))
        draft.put("algorithm.kl_form", _kl(settings, f"{ACTOR.section}.kl_loss_type"), f"{ACTOR.section}.kl_loss_type")
    put_loss_rows(settings, draft)


def _kl(settings: Settings, key: str) -> str | None:
    """`k3+` has the value of k3 and the gradient of k2: its sizes are those of k3."""
    text = settings.text(key)
    return f"{text}" if text == "full" else word(settings, "kl", key) if text and not text.endswith("+") else text


def actor(settings: Settings, draft: Draft) -> None:
    """Micro-batches of the update and of the old_log_prob pass, which always computes entropy."""
    section = ACTOR.section
    _micro(
        settings, draft, ACTOR, "actor.micro_batch", dynamic=f"{section}.use_dynamic_bsz",
        budget=f"{section}.ppo_max_token_len_per_gpu", each=f"{section}.ppo_micro_batch_size_per_gpu",
        all_ranks=f"{section}.ppo_micro_batch_size",
    )  # fmt: skip
    _log_prob(settings, draft, ACTOR, ROLLOUT, "actor.log_prob_micro_batch")
    chunked = f"{section}.entropy_from_logits_with_chunking"
    draft.put("actor.log_prob_entropy", "chunked" if settings.flag(chunked) else "full", chunked)
    draft.put("actor.log_prob_chunk_tokens", 0)  # all of a micro-batch at once
    draft.put("actor.grad_clip", _grad_clip(settings, ACTOR), f"{ACTOR.optim}.clip_grad", f"{section}.grad_clip")
    packed = f"{ACTOR.model}.use_remove_padding"
    draft.put("actor.packed", settings.flag(packed), packed)
    recompute = f"{ACTOR.model}.enable_gradient_checkpointing"
    draft.put("actor.activation_checkpointing", settings.flag(recompute), recompute)


def _grad_clip(settings: Settings, role: Role) -> float | None:
    """FSDP's engines clip by the optimizer's value; the older key counts where that one is absent."""
    of_optimizer, older = settings.number(f"{role.optim}.clip_grad"), settings.number(f"{role.section}.grad_clip")
    return of_optimizer if of_optimizer is not None else older


def ref(settings: Settings, draft: Draft) -> None:
    """Micro-batches of the reference pass, whose keys follow the actor's where they are not given."""
    _log_prob(settings, draft, REF, REF.section, "ref.micro_batch")


def critic(settings: Settings, draft: Draft, *, v1: bool) -> None:
    """The critic's micro-batches are dynamic whatever its keys say: its engine gets neither `use_dynamic_bsz` nor sizes.

    The budget of the update is `ppo_max_token_len_per_gpu` in V0; V1 takes `ppo_infer_max_token_len_per_gpu` for both
    (verl/trainer/ppo/v1/trainer_base.py, verl/trainer/ppo/ray_trainer.py).
    """
    ranks, _ = sequence_ranks(settings, CRITIC)
    infer_key = "critic.ppo_infer_max_token_len_per_gpu"
    infer = settings.integer(infer_key) or int(dataclass_default(infer_key))
    update_key = infer_key if v1 else "critic.ppo_max_token_len_per_gpu"
    update = infer if v1 else settings.count(update_key)
    draft.put("critic.micro_batch.max_tokens", update * ranks, update_key)
    draft.put("critic.values_micro_batch.max_tokens", infer * ranks, infer_key)
    for key, target in (("ppo_mini_batch_size", "mini_batch_prompts"), ("ppo_epochs", "epochs")):
        draft.put(f"critic.{target}", settings.integer(f"critic.{key}"), f"critic.{key}")
    draft.put("critic.lr", settings.number("critic.optim.lr"), "critic.optim.lr")
    draft.put("critic.path", settings.text("critic.model.path"), "critic.model.path")
    draft.put("critic.clip_value", settings.number("critic.cliprange_value"), "critic.cliprange_value")
    draft.put("critic.grad_clip", _grad_clip(settings, CRITIC), f"{CRITIC.optim}.clip_grad", "critic.grad_clip")
    warmup = (
        settings.integer("trainer.critic_warmup") or 0
    )  # verl counts steps from 1, and the policy learns from this one on
    draft.put("critic.warmup_steps", max(0, warmup - 1), "trainer.critic_warmup")


def turns(settings: Settings, draft: Draft) -> None:
    """Turns of the policy in one response: the agent loop stops at the first limit that is set, none or 0 is no limit
    (verl/experimental/agent_loop/tool_agent_loop.py)."""
    section = f"{ROLLOUT}.multi_turn"
    if not settings.flag(f"{section}.enable"):
        return
    own, others = settings.integer(f"{section}.max_assistant_turns"), settings.integer(f"{section}.max_user_turns")
    limits = [limit for limit in (own, others + 1 if others else None) if limit]
    keys = (f"{section}.max_assistant_turns", f"{section}.max_user_turns")
    draft.put("rollout.max_turns", min(limits, default=None), *keys)
    if not limits:
        settings.notes.append(f"{section}: no limit of turns; a response ends by its tokens alone")


def _log_prob(settings: Settings, draft: Draft, role: Role, section: str, target: str) -> None:
    _micro(
        settings, draft, role, target, dynamic=f"{section}.log_prob_use_dynamic_bsz",
        budget=f"{section}.log_prob_max_token_len_per_gpu", each=f"{section}.log_prob_micro_batch_size_per_gpu",
        all_ranks=f"{section}.log_prob_micro_batch_size",
    )  # fmt: skip


def _micro(
    settings: Settings, draft: Draft, role: Role, target: str, *, dynamic: str, budget: str, each: str, all_ranks: str
) -> None:
    """A token budget (times the ranks that share a sequence), or samples; the deprecated size counts all ranks."""
    if settings.flag(dynamic):
        ranks, key = sequence_ranks(settings, role)
        tokens = settings.integer(budget)
        draft.put(f"{target}.max_tokens", tokens * ranks if tokens else None, budget, key)
        settings.get(each)  # known, and without effect here
        return
    samples, whole = settings.integer(each), settings.integer(all_ranks)
    if samples is None and whole is not None:
        draft.put(f"{target}.samples", max(1, whole // data_parallel(settings, role)), all_ranks)
    else:
        draft.put(f"{target}.samples", samples, each)
    if samples is None and whole is None:
        draft.put(f"{target}.samples", 1)
        settings.notes.append(f"{each} is not given, and {dynamic} is false: taken as 1 sample")


def data_parallel(settings: Settings, role: Role) -> int:
    """Ranks that see different samples; at least 1, also where degrees do not divide the world (a check says so)."""
    name = strategy(settings, role)
    section = role.engine(name)
    model = sequence_ranks(settings, role)[0]
    if name == "megatron":
        model *= settings.integer(f"{section}.tensor_model_parallel_size") or 1
        model *= settings.integer(f"{section}.pipeline_model_parallel_size") or 1
    if name == "torchtitan":
        model *= settings.integer(f"{section}.tensor_parallel_size") or 1
        model *= settings.integer(f"{section}.pipeline_parallel_size") or 1
    return max(1, world(settings) // model)
