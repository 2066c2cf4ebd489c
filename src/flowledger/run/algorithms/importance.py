"""Importance weights π_old / π_rollout: what makes samples of a slightly different policy count as the trainer's own.

Engines and trainers disagree on the log-probs of the same weights, and samples may be stale. The weight of a token, or of
its whole response, goes onto its loss; it carries no gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flowledger.config.algorithm import RolloutCorrection
from flowledger.run.algorithms.log_ratios import clamped
from flowledger.run.algorithms.masked import TINY, masked_mean, masked_sum


def importance_weights(log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection) -> Tensor:
    """Weights [B_prompt*G, S_resp] from log_ratio = log π_old - log π_rollout, 0 where `mask` is 0.

    `importance` is `token` (ratio of each token) or `sequence` (product over a response's unmasked tokens). Truncated at
    `high` (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"); with `low`, what
    is outside [low, high] becomes 0 instead (IcePop, Ling team 2025, arXiv 2510.18855). Log ratios are clamped to ±20, so
    a weight is finite for every finite log-prob. A masked token may hold anything.
    """
    weights = bounded(raw_weights(log_ratio, mask, settings), settings)
    return normalized(weights, mask, settings) if settings.normalize else weights


def raw_weights(log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection) -> Tensor:
    """The ratios themselves [B_prompt*G, S_resp], clamped to e^±20 and 0 where `mask` is 0."""
    ratio = clamped(LOG_RATIOS[settings.importance](log_ratio, mask)).exp()
    return torch.where(mask.bool(), ratio, torch.zeros_like(log_ratio))


def bounded(weights: Tensor, settings: RolloutCorrection) -> Tensor:
    """Cut off at `high`; with `low`, 0 outside [low, high]."""
    if settings.low is None:
        return weights.clamp(max=settings.high)
    inside = (weights >= settings.low) & (weights <= settings.high)
    return torch.where(inside, weights, torch.zeros_like(weights))


def normalized(weights: Tensor, mask: Tensor, settings: RolloutCorrection) -> Tensor:
    """Divided by their mean: over tokens, or over responses where a response has one weight; all 0 stays all 0."""
    mean = MEANS[settings.importance](weights, mask)
    return torch.where(mean > TINY, weights / mean, weights)


def response_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Σ over a response's unmasked tokens [B_prompt*G, 1]: the log ratio of the whole response."""
    return masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1)


def _token_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio


def _response_mean(weights: Tensor, mask: Tensor) -> Tensor:
    present = (mask.sum(-1) > 0).to(weights.dtype)
    return (masked_mean(weights, mask, dim=-1) * present).sum() / present.sum().clamp(min=TINY)


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _token_log_ratio,
    "sequence": response_log_ratio,
}
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": masked_mean,
    "sequence": _response_mean,
}
