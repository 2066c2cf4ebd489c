"""Policy losses, KL forms and aggregation: everything between log-probs and one number. Each is a function and a line in a dict.

Every aggregation is a weighted sum over tokens, loss = Σ weight·loss_mat·mask, whose weights come from the totals of the
mini-batch. So the split into micro-batches cannot change the gradient, and weight·loss_mat is a token's share of the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.config.schema import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What policy losses may read, each [B_micro, S_resp]."""

    new_log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    settings: Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token and what the policy did there, each [B_micro, S_resp]."""

    loss_mat: Tensor
    ratio: Tensor
    clipped: Tensor  # bool: the clip decided the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Normalisers of one mini-batch: unmasked tokens, sequences with at least one of them, and the fixed horizon."""

    tokens: int
    sequences: int
    horizon: int


def vanilla(inputs: LossInputs) -> TokenLoss:
    """Clipped surrogate with asymmetric bounds and dual clip (Schulman et al. 2017; Ye et al. 2020, arXiv 1912.09729).

    max(-ρA, -clip(ρ, 1-ε_low, 1+ε_high)A), and at most -cA where A < 0; log ρ is clamped to ±20.
    """
    s, a = inputs.settings, inputs.advantages
    ratio = (inputs.new_log_prob - inputs.old_log_prob).clamp(-20.0, 20.0).exp()
    free = -a * ratio
    held = -a * ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    upper = torch.maximum(free, held)
    bounded = torch.where(a < 0, torch.minimum(upper, -a * s.clip_dual), upper)
    clipped = (held > free) | ((a < 0) & (upper > -a * s.clip_dual))
    return TokenLoss(loss_mat=bounded, ratio=ratio.detach(), clipped=clipped)


POLICY_LOSSES: dict[str, Callable[[LossInputs], TokenLoss]] = {
    "vanilla": vanilla,
}


def k1(delta: Tensor) -> Tensor:
    """log π - log π_ref: unbiased, high variance."""
    return delta


def k2(delta: Tensor) -> Tensor:
    """½(log π - log π_ref)²: low variance, biased."""
    return 0.5 * delta**2


def k3(delta: Tensor) -> Tensor:
    """exp(-δ) - 1 + δ: unbiased, low variance (Schulman 2020); δ clamped to ±20, the result to ±10."""
    delta = delta.clamp(-20.0, 20.0)
    return ((-delta).exp() - 1 + delta).clamp(-10.0, 10.0)


KL_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": torch.abs,
    "k2": k2,
    "k3": k3,
}


def token_mean(mask: Tensor, totals: Totals) -> Tensor:
    """Every token weighs the same: 1 / tokens."""
    return mask / totals.tokens


def token_sum(mask: Tensor, totals: Totals) -> Tensor:
    """Every token weighs 1."""
    return mask.float()


def seq_mean_token_sum(mask: Tensor, totals: Totals) -> Tensor:
    """Tokens of a sequence add up, sequences average: 1 / sequences."""
    return mask / totals.sequences


def seq_mean_token_sum_norm(mask: Tensor, totals: Totals) -> Tensor:
    """The same over a fixed horizon, so that length does not weigh (Dr. GRPO): 1 / (sequences * horizon)."""
    return mask / (totals.sequences * totals.horizon)


def seq_mean_token_mean(mask: Tensor, totals: Totals) -> Tensor:
    """Tokens of a sequence average, sequences average (GRPO): 1 / (sequences * length)."""
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / totals.sequences


AGGREGATION_WEIGHTS: dict[str, Callable[[Tensor, Totals], Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "seq-mean-token-mean": seq_mean_token_mean,
}
