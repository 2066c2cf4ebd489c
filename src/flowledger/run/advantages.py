"""Advantage estimators: rewards of samples in, advantages of tokens out. To add one, write a function and a line in ADVANTAGES."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flowledger.config.schema import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What estimators may read. A sample without unmasked tokens is out of its group."""

    token_level_reward: Tensor  # float32 [B_prompt*G, S_resp]
    mask: Tensor  # loss_mask, int64 [B_prompt*G, S_resp]
    group_size: int  # G
    settings: Algorithm
    old_log_prob: Tensor | None = None  # [B_prompt*G, S_resp]
    values: Tensor | None = None  # [B_prompt*G, S_resp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """advantage [B_prompt*G] per sample, advantages and returns [B_prompt*G, S_resp] per token."""

    advantage: Tensor
    advantages: Tensor
    returns: Tensor


def by_group(*, reward: Tensor, group_size: int) -> Tensor:
    """[B_prompt*G] -> [B_prompt, G]: the responses of one prompt stand in one row (sample index = prompt*G + k)."""
    return reward.view(-1, group_size)


def spread(*, advantage: Tensor, mask: Tensor) -> Tensor:
    """[B_prompt*G] -> [B_prompt*G, S_resp]: a sample's advantage on each of its unmasked tokens."""
    return advantage[:, None] * mask


def grpo(inputs: AdvantageInputs) -> Estimate:
    """(r - mean) / (std + 1e-6) over the group (Shao et al. 2024, arXiv 2402.03300, eq. 3); std is unbiased.

    A group of one keeps its raw reward (mean 0, std 1), as verl does. Samples out of the loss are out of the statistics.
    """
    counted = (inputs.mask.sum(-1) > 0).to(inputs.token_level_reward.dtype).view(-1, inputs.group_size)  # [B_prompt, G]
    rewards = by_group(reward=inputs.token_level_reward.sum(-1), group_size=inputs.group_size)
    n = counted.sum(1, keepdim=True)  # [B_prompt, 1]
    mean = (rewards * counted).sum(1, keepdim=True) / n.clamp(min=1)
    variance = ((rewards - mean) ** 2 * counted).sum(1, keepdim=True) / (n - 1).clamp(min=1)
    alone = n <= 1
    mean, std = mean.masked_fill(alone, 0.0), variance.sqrt().masked_fill(alone, 1.0)
    centred = (rewards - mean) * counted
    grouped = centred / (std + 1e-6) if inputs.settings.norm_by_std else centred  # [B_prompt, G]
    advantage = grouped.reshape(-1)
    advantages = spread(advantage=advantage, mask=inputs.mask)
    return Estimate(advantage=advantage, advantages=advantages, returns=advantages)


ADVANTAGES: dict[str, Callable[[AdvantageInputs], Estimate]] = {
    "grpo": grpo,
}
