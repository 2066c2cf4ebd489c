"""The metrics of one step, each from the step's own tensors; their names are rows of the metrics table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.words import FINISH_REASONS
from flowledger.run import dropped
from flowledger.run.batches import (
    Advantages,
    Balanced,
    CriticUpdate,
    Filtered,
    OldLogProbs,
    Prompts,
    Rewards,
    Rollouts,
    Synced,
    Update,
)
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import Ranks

POLICY = ("policy_loss", "kl_loss", "entropy_loss", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a step has made that its metrics are taken of."""

    prompts: Prompts
    rollouts: Rollouts
    rewards: Rewards
    filtered: Filtered
    old: OldLogProbs | None
    advantages: Advantages
    update: Update | None
    values: Tensor | None


def measure(
    made: Made, *, critic: CriticUpdate | None, synced: Synced, lr: float, kl_coef: float, seconds: float
) -> dict[str, float]:
    """Every metric of a step by its canonical name. Rejected samples had rewards; trained on are those that are left."""
    rollouts, filtered, advantages, update = made.rollouts, made.filtered, made.advantages, made.update
    reasons = advantages.dropped_reason or filtered.dropped_reason
    loss_mask = filtered.loss_mask if advantages.loss_mask is None else advantages.loss_mask
    found = (
        _lengths(made.prompts, rollouts)
        | _rewards(made.rewards, filtered, made.prompts.group_id)
        | _advantages(advantages, reasons)
        | dict(advantages.metrics)
        | {"lr": lr, "kl_coef": kl_coef, "step_time_s": seconds}
        | {"tokens_per_s": float(rollouts.attention_mask.sum()) / seconds}
    )
    trainers = made.old.old_log_prob if made.old else update.first_log_prob if update else None
    if trainers is not None:
        in_loss = loss_mask if update is None or update.loss_mask is None else update.loss_mask
        found |= _gap(rollouts.rollout_log_prob, trainers, in_loss)
    if update is not None:
        found |= {name: float(getattr(update, name).mean()) for name in POLICY} | dict(update.metrics)
        if "ref_kl" not in update.metrics:  # no reference, or KL is in the reward: the loss has no such term
            del found["kl_loss"]
    if critic is not None and made.values is not None:
        found |= _critic(critic, made.values, advantages.returns, loss_mask)
    if synced.update_ratio is not None:
        found["update_ratio"] = synced.update_ratio
    return found


def whole(made: Made, balanced: Balanced, ranks: Ranks) -> Made:
    """The same of all ranks: the parts that each has sampled, and the rows that each has trained on."""
    if ranks.size == 1:
        return made
    rows, world = balanced.rows, ranks.group("world")

    def sampled(holder: Any, *names: str) -> Any:
        return replace(holder, **{name: collectives.gathered(getattr(holder, name), world) for name in names})

    def trained(holder: Any, *names: str) -> Any:
        there = [name for name in names if getattr(holder, name, None) is not None]
        return holder and replace(holder, **{name: rows.whole(getattr(holder, name)) for name in there})

    def told(reasons: Sequence[str | None]) -> tuple[str | None, ...]:
        return dropped.decoded(rows.whole(dropped.codes(reasons)))

    reasons, later = balanced.dropped_reason, made.advantages.dropped_reason
    lengths = ("attention_mask", "response_mask", "finish_reason", "turns", "rollout_log_prob")
    return Made(
        prompts=sampled(made.prompts, "prompt_length", "group_id"),
        rollouts=sampled(made.rollouts, *lengths),
        rewards=sampled(made.rewards, "reward", "reward_components"),
        filtered=replace(sampled(made.filtered, "loss_mask"), dropped_reason=told(reasons)),
        old=trained(made.old, "old_log_prob"),
        advantages=replace(
            trained(made.advantages, "advantage", "returns", "loss_mask"), dropped_reason=later and told(later)
        ),
        update=trained(made.update, "first_log_prob", "loss_mask"),
        values=rows.maybe_whole(made.values),
    )


def _lengths(prompts: Prompts, rollouts: Rollouts) -> dict[str, float]:
    prompt = prompts.prompt_length.float()
    sampled = rollouts.response_mask
    written = rollouts.attention_mask[:, -sampled.shape[1] :]  # with what an environment wrote
    response = written.sum(-1).float()
    ended = rollouts.finish_reason
    share = {word: float((ended == code).float().mean()) for code, word in enumerate(FINISH_REASONS)}
    return {
        "prompt_length/mean": float(prompt.mean()),
        "prompt_length/max": float(prompt.max()),
        "response_length/mean": float(response.mean()),
        "response_length/min": float(response.min()),
        "response_length/max": float(response.max()),
        "turns/mean": float(rollouts.turns.float().mean()),
        "environment_tokens": 1.0 - float(sampled.sum()) / max(1.0, float(written.sum())),
        "total_tokens": float(rollouts.attention_mask.sum()),
        "truncation_ratio": share["length"],
        "abort_ratio": share["abort"] + share["timeout"],
        "mask_ratio": float(sampled.float().mean()),
    }


def _rewards(rewards: Rewards, filtered: Filtered, group_id: Tensor) -> dict[str, float]:
    kept = torch.tensor([reason is None for reason in filtered.dropped_reason])
    reward, parts = rewards.reward[kept], rewards.reward_components[kept]
    per_part = {f"reward/{name}/mean": float(parts[:, i].mean()) for i, name in enumerate(rewards.component_names)}
    return {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std(correction=0)),
        "reward/min": float(reward.min()),
        "reward/max": float(reward.max()),
        "zero_variance_groups": _flat_groups(reward, group_id[kept]),
        **per_part,
    }


def _flat_groups(reward: Tensor, group_id: Tensor) -> float:
    """Share of groups whose samples all have the same reward: they teach nothing."""
    groups = [reward[group_id == group] for group in sorted(set(group_id.tolist()))]
    flat = [bool((group == group[0]).all()) for group in groups]
    return sum(flat) / len(flat)


def _advantages(advantages: Advantages, reasons: Sequence[str | None]) -> dict[str, float]:
    kept = torch.tensor([reason is None for reason in reasons])
    value = advantages.advantage[kept]
    return {
        "dropped_ratio": 1.0 - float(kept.float().mean()),
        "advantage/mean": float(value.mean()),
        "advantage/std": float(value.std(correction=0)),
    }


def _gap(rollout_log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
    gap = (rollout_log_prob - old_log_prob)[mask.bool()].abs()
    return {"rollout_gap/mean": float(gap.mean()), "rollout_gap/max": float(gap.max())}


def _critic(critic: CriticUpdate, values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """The critic's loss and gradient, and the share of the returns' variance that its values explain."""
    kept = mask.bool()
    left, all_of_it = (returns - values)[kept].var(correction=0), returns[kept].var(correction=0)
    return {
        "value_loss": float(critic.value_loss.mean()),
        "critic_grad_norm": float(critic.grad_norm.mean()),
        "explained_variance": float(1 - left / all_of_it) if float(all_of_it) > 0 else 0.0,
        **critic.metrics,
    }
