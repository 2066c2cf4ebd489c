"""The metrics of one step, each from the step's own tensors; their names are rows of the metrics table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.flow.words import FINISH_REASONS
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
from flowledger.run.figures import Figures, figures
from flowledger.run.parallel.ranks import ALONE, Ranks

POLICY = ("policy_loss", "kl_loss", "entropy_loss", "grad_norm")

# Numbers -> their figures that are metrics: `reward/mean`, …
FIGURES: dict[str, tuple[str, ...]] = {
    "prompt_length": ("mean", "max"), "response_length": ("mean", "min", "max"), "turns": ("mean",),
    "reward": ("mean", "std", "min", "max"), "advantage": ("mean", "std"), "rollout_gap": ("mean", "max"),
}  # fmt: skip
# Yes or no -> the share of yes.
SHARES = ("truncation_ratio", "abort_ratio", "zero_variance_groups", "dropped_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a rank has made in a step that its metrics are taken of."""

    prompts: Prompts
    rollouts: Rollouts
    rewards: Rewards
    filtered: Filtered
    balanced: Balanced
    old: OldLogProbs | None
    values: Tensor | None
    advantages: Advantages
    critic: CriticUpdate | None
    update: Update | None


def measure(
    made: Made, *, ranks: Ranks = ALONE, synced: Synced, lr: float, kl_coef: float, seconds: float
) -> dict[str, float]:
    """Every metric of a step of all ranks by its canonical name.

    Rejected samples had rewards; trained on are those that are left. Each rank has the numbers of what it sampled; those
    of what it trained on are taken of the first of the ranks that train on the same.
    """
    trained = _trained(made)
    if 0 not in ranks.group("dp").ranks:
        trained = {name: numbers[:0] for name, numbers in trained.items()}
    of = figures(_sampled(made.prompts, made.rollouts) | _rewards(made) | trained, ranks.group("world"))
    critic, update = made.critic, made.update
    found = {f"{name}/{one}": getattr(of[name], one) for name in FIGURES if name in of for one in FIGURES[name]}
    found |= {name: of[name].mean for name in SHARES}
    found |= {f"reward/{name}/mean": of[f"reward/{name}"].mean for name in made.rewards.component_names}
    found |= _tokens(of, made.rollouts.response_mask.shape[1]) | dict(made.advantages.metrics)
    found |= {"lr": lr, "kl_coef": kl_coef, "step_time_s": seconds, "tokens_per_s": found["total_tokens"] / seconds}
    if update is not None:
        found |= {name: float(getattr(update, name).mean()) for name in POLICY} | dict(update.metrics)
        if "ref_kl" not in update.metrics:  # no reference, or KL is in the reward: the loss has no such term
            del found["kl_loss"]
    if critic is not None:
        found |= _critic(critic, left=of["unexplained"].variance, all_of_it=of["returns"].variance)
    if synced.update_ratio is not None:
        found["update_ratio"] = synced.update_ratio
    return found


def _sampled(prompts: Prompts, rollouts: Rollouts) -> dict[str, Tensor]:
    """Numbers of the prompts and samples that this rank has sampled."""
    sampled, ended = rollouts.response_mask, rollouts.finish_reason
    written = rollouts.attention_mask[:, -sampled.shape[1] :]  # with what an environment wrote
    code = {word: number for number, word in enumerate(FINISH_REASONS)}
    return {
        "prompt_length": prompts.prompt_length,
        "response_length": written.sum(-1),
        "sampled": sampled.sum(-1),
        "tokens": rollouts.attention_mask.sum(-1),
        "turns": rollouts.turns,
        "truncation_ratio": ended == code["length"],
        "abort_ratio": (ended == code["abort"]) | (ended == code["timeout"]),
    }


def _tokens(of: dict[str, Figures], width: int) -> dict[str, float]:
    """Metrics of tokens; width: S_resp."""
    sampled, written = of["sampled"], of["response_length"].sum
    return {
        "environment_tokens": 1.0 - sampled.sum / max(1.0, written),
        "total_tokens": of["tokens"].sum,
        "mask_ratio": sampled.mean / width,
    }


def _rewards(made: Made) -> dict[str, Tensor]:
    """Numbers of the samples that this rank has sampled and that were kept, and whether each group's rewards are equal."""
    kept, rewards = _kept(made.filtered.dropped_reason), made.rewards
    reward, parts = rewards.reward[kept], rewards.reward_components[kept]
    return {
        "reward": reward,
        "zero_variance_groups": _flat_groups(reward, made.prompts.group_id[kept]),
        **{f"reward/{name}": parts[:, i] for i, name in enumerate(rewards.component_names)},
    }


def _flat_groups(reward: Tensor, group_id: Tensor) -> Tensor:
    """Of each group whether all its samples have the same reward: then they teach nothing."""
    groups = [reward[group_id == group] for group in sorted(set(group_id.tolist()))]
    return torch.tensor([bool((group == group[0]).all()) for group in groups])


def _trained(made: Made) -> dict[str, Tensor]:
    """Numbers of the samples and tokens that this rank has trained on."""
    balanced, advantages, update = made.balanced, made.advantages, made.update
    loss_mask = balanced.loss_mask if advantages.loss_mask is None else advantages.loss_mask
    kept = _kept(advantages.dropped_reason or balanced.dropped_reason)
    found = {"dropped_ratio": ~kept, "advantage": advantages.advantage[kept]}
    trainers = made.old.old_log_prob if made.old else update.first_log_prob if update else None
    if trainers is not None:
        in_loss = loss_mask if update is None or update.loss_mask is None else update.loss_mask
        found["rollout_gap"] = (balanced.rollout_log_prob - trainers)[in_loss.bool()].abs()
    if made.values is not None:
        kept = loss_mask.bool()
        found |= {"returns": advantages.returns[kept], "unexplained": (advantages.returns - made.values)[kept]}
    return found


def _kept(reasons: Sequence[str | None]) -> Tensor:
    return torch.tensor([reason is None for reason in reasons], dtype=torch.bool)


def _critic(critic: CriticUpdate, *, left: float, all_of_it: float) -> dict[str, float]:
    """The critic's loss and gradient, and the share of the returns' variance that its values explain."""
    return {
        "value_loss": float(critic.value_loss.mean()),
        "critic_grad_norm": float(critic.grad_norm.mean()),
        "explained_variance": 1 - left / all_of_it if all_of_it > 0 else 0.0,
        **critic.metrics,
    }
