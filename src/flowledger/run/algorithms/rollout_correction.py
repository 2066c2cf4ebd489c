"""Rollout correction: weights, a smaller loss mask and figures for samples whose rollout log-probs are not the trainer's.

The order is verl's: weights over the whole loss mask first, then rejection, which leaves the weights as they are.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.config.algorithm import RolloutCorrection
from flowledger.run.algorithms import importance, rejection
from flowledger.run.algorithms.log_ratios import BOUND, clamped
from flowledger.run.algorithms.masked import TINY, masked_mean

SHARE_OF_RANGE = 0.9  # exponents end at this share of what the dtype holds, so that sums of figures stay finite
PREFIX = "rollout_correction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What goes onto the loss, and how far trainer and rollout were apart."""

    rollout_is_weights: Tensor | None  # [B_prompt*G, S_resp]; None where importance is `none`
    loss_mask: Tensor  # [B_prompt*G, S_resp], in the dtype that came in
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    *, old_log_prob: Tensor, rollout_log_prob: Tensor, loss_mask: Tensor, settings: RolloutCorrection
) -> Correction:
    """Weights and mask for these samples, each [B_prompt*G, S_resp].

    Where every token is masked nothing is corrected, and the figures are those of policies that agree.
    """
    log_ratio = old_log_prob - rollout_log_prob
    metrics = divergence(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, mask=loss_mask)
    weights, kept = None, loss_mask
    if settings.importance != "none":
        bounded = importance.bounded(importance.raw_weights(log_ratio, loss_mask, settings), settings)
        weights = importance.normalized(bounded, loss_mask, settings) if settings.normalize else bounded
        metrics |= weight_figures(bounded, log_ratio, loss_mask, settings)
    if settings.rejections:
        kept = rejection.keep(log_ratio, loss_mask, settings.rejections)
        metrics |= rejected_shares(before=loss_mask, after=kept)
    return Correction(
        rollout_is_weights=weights, loss_mask=kept, metrics={f"{PREFIX}/{name}": x for name, x in metrics.items()}
    )


def divergence(*, old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
    """How far two policies are apart on the same tokens; log-probs [B_prompt*G, S_resp].

    kl and k3_kl: KL(π_rollout ‖ π_old) in nats per token (Schulman 2020). chi2: E[ρ²] - 1 of tokens and of responses.
    Perplexities are means over responses, and a response without unmasked tokens counts as 1, as in verl.
    """
    log_ratio = old_log_prob - rollout_log_prob
    token = clamped(log_ratio)
    whole = clamped(importance.response_log_ratio(log_ratio, mask))
    return {
        "training_ppl": float(_perplexity(old_log_prob, mask)),
        "rollout_ppl": float(_perplexity(rollout_log_prob, mask)),
        "kl": float(masked_mean(-log_ratio, mask)),
        "k3_kl": float(masked_mean(_finite_exp(log_ratio) - log_ratio - 1, mask)),
        "chi2_token": float(masked_mean(token.exp().square(), mask) - 1) if bool(mask.any()) else 0.0,
        "chi2_seq": float((2.0 * whole).exp().mean() - 1),
    }


def weight_figures(weights: Tensor, log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection) -> dict[str, float]:
    """Mean and effective sample size (share of the tokens) of the bounded weights before they are normalized.

    weight_max is of the bounded weights of tokens, but of the unbounded ratio of responses, as in verl.
    """
    mean = masked_mean(weights, mask)
    square = float(masked_mean((weights / (mean + TINY)).square(), mask))
    whole = importance.response_log_ratio(log_ratio, mask).clamp(max=BOUND).exp()
    return {
        "weight_mean": float(mean),
        "weight_max": float((weights if settings.importance == "token" else whole).max()),
        "effective_sample_size": 1 / square if square else 0.0,
    }


def rejected_shares(*, before: Tensor, after: Tensor) -> dict[str, float]:
    """Shares of the unmasked tokens, and of all responses, from which something was rejected."""
    gone = before.bool() & ~after.bool()  # [B_prompt*G, S_resp]
    return {
        "rejected_tokens": int(gone.sum()) / max(1, int(before.bool().sum())),
        "rejected_samples": int(gone.any(-1).sum()) / max(1, len(gone)),
    }


def _perplexity(log_prob: Tensor, mask: Tensor) -> Tensor:
    return _finite_exp(-masked_mean(log_prob, mask, dim=-1)).mean()


def _finite_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(max=SHARE_OF_RANGE * math.log(torch.finfo(exponent.dtype).max)).exp()
