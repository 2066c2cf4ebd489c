"""Rejection: tokens or whole responses on which trainer and rollout disagree too much leave the loss mask.

A kind is a level and an estimator of divergence. Estimators are functions of log π_old - log π_rollout [B, S_resp]; levels
take them to a statistic [B, S_resp] or [B, 1].
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowledger.config.algorithm import Rejection
from flowledger.run.algorithms.log_ratios import clamped
from flowledger.run.algorithms.masked import masked_mean, masked_sum


def keep(log_ratio: Tensor, mask: Tensor, rejections: Sequence[Rejection]) -> Tensor:
    """`mask` [B_prompt*G, S_resp] in its own dtype, 0 also where any of `rejections` rejects.

    log_ratio = log π_old - log π_rollout. k1 is kept in [log low, log high], where low defaults to 1 / high; k2 and k3 up
    to `high`. k1 is minus the log ratio, so `low` bounds π_rollout / π_old. An unmasked NaN is rejected; a masked
    token may hold anything.
    """
    log_ratio = clamped(torch.where(mask.bool(), log_ratio, torch.zeros_like(log_ratio)))
    kept = mask.bool()
    for rejection in rejections:
        level, estimator = rejection.kind.rsplit("_", 1)
        low, high = _bounds(rejection, estimator)
        statistic = LEVELS[level](ESTIMATORS[estimator](log_ratio), mask)
        kept = kept & (statistic >= low) & (statistic <= high)
    return torch.where(kept, mask, torch.zeros_like(mask))


def _bounds(rejection: Rejection, estimator: str) -> tuple[float, float]:
    if estimator != "k1":
        return -math.inf, rejection.high
    low = 1 / rejection.high if rejection.low is None else rejection.low
    return math.log(low), math.log(rejection.high)


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1.0 - log_ratio


def _each_token(divergence: Tensor, mask: Tensor) -> Tensor:
    return divergence


def _sum(divergence: Tensor, mask: Tensor) -> Tensor:
    return masked_sum(divergence, mask, dim=-1).unsqueeze(-1)


def _mean(divergence: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(divergence, mask, dim=-1).unsqueeze(-1)


def _maximum(divergence: Tensor, mask: Tensor) -> Tensor:
    """k2 and k3 are never negative, so 0 in masked places cannot win."""
    return torch.where(mask.bool(), divergence, torch.zeros_like(divergence)).amax(-1, keepdim=True)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}  # Schulman 2020
LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _each_token,
    "seq_sum": _sum,
    "seq_mean": _mean,
    "seq_max": _maximum,
}
