"""Estimators that compare a response with the others of its group: one number a sample, repeated along its tokens.

Every one names its paper. A group of one keeps its raw reward where the docstring does not say otherwise: it has no mean
to take away. That is verl's behaviour. Dropped samples are in no statistics and get 0.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from flowledger.flow.errors import BadInput
from flowledger.run.algorithms import estimate, groups
from flowledger.run.algorithms.estimate import AdvantageInputs, Estimate
from flowledger.run.algorithms.masked import moments, whitened

EPSILON = 1e-6  # beside every standard deviation that divides


def grpo(inputs: AdvantageInputs) -> Estimate:
    """(r - mean) / (std + 1e-6) over the group; std is unbiased (Shao et al. 2024, arXiv 2402.03300).

    With `norm_by_std` false, r - mean. Equal rewards in a group give 0, up to the rounding of their mean.
    """
    return per_sample(inputs, _each_group(inputs, _normalised if inputs.settings.norm_by_std else _centred))


def dr_grpo(inputs: AdvantageInputs) -> Estimate:
    """r - mean over the group, whatever `norm_by_std` says (Liu et al. 2025, arXiv 2503.20783)."""
    return per_sample(inputs, _each_group(inputs, _centred))


def grpo_vectorized(inputs: AdvantageInputs) -> Estimate:
    """grpo with mean and std computed in float32 whatever the dtype of the rewards, as verl's function of this name."""
    norm = inputs.settings.norm_by_std
    return per_sample(inputs, _each_group(inputs, _normalised_in_float32 if norm else _centred_in_float32))


def gdpo(inputs: AdvantageInputs) -> Estimate:
    """Σ_k w_k * grpo(r_k), each reward component by itself, then whitened over tokens (arXiv 2601.05242).

    `reward_components` [B_prompt*G, N_reward] are taken in float32, as in verl. Without them the one component is the
    token-level reward. A component of weight 1 where `component_weights` is None.

    Raises BadInput where there are not as many weights as components.
    """
    standing = _normalised if inputs.settings.norm_by_std else _centred
    if inputs.reward_components is None:
        columns = [inputs.token_level_reward.sum(-1)]
    else:
        columns = list(inputs.reward_components.float().unbind(1))
    weights = inputs.component_weights or (1.0,) * len(columns)
    if len(weights) != len(columns):
        raise BadInput(
            f"algorithm.advantage = gdpo has {len(columns)} reward components and {len(weights)} weights; give a weight "
            f"for each entry of reward.components: {len(columns)}"
        )
    total = inputs.token_level_reward.new_zeros(len(inputs.mask))
    for weight, column in zip(weights, columns, strict=True):
        total = total + weight * _standing(inputs, column, standing)
    return _whitened_over_tokens(inputs, total)


def grpo_passk(inputs: AdvantageInputs) -> Estimate:
    """(best - second best) / (std + 1e-6) for the best response of a group, 0 for the others (arXiv 2503.19595).

    With `norm_by_std` false, best - second best. Two best responses give 0, and so does one whose group was dropped.

    Raises BadInput for a group of one: it has no second best.
    """
    norm = inputs.settings.norm_by_std
    if (inputs.groups.present.any(1) & (inputs.groups.sizes < 2)).any():
        raise BadInput(
            "algorithm.advantage = grpo_passk compares the two best responses to a prompt, and a group here has 1; "
            "set rollout.samples_per_prompt to 2 or more"
        )

    def lead_of_the_best(rewards: Tensor) -> Tensor:  # [N, n]
        if rewards.shape[1] == 1:
            return torch.zeros_like(rewards)
        best, place = rewards.topk(2, dim=1)
        lead = best[:, :1] - best[:, 1:]
        lead = lead / (_std(rewards) + EPSILON) if norm else lead
        return torch.zeros_like(rewards).scatter(1, place[:, :1], lead)

    return per_sample(inputs, _each_group(inputs, lead_of_the_best))


def rloo(inputs: AdvantageInputs) -> Estimate:
    """r - mean of the others = (r - mean) * n / (n - 1) (Ahmadian et al. 2024, arXiv 2402.14740)."""

    def above_the_others(rewards: Tensor) -> Tensor:  # [N, n]
        n = rewards.shape[1]
        return rewards if n == 1 else rewards * n / (n - 1) - rewards.mean(1, keepdim=True) * n / (n - 1)

    return per_sample(inputs, _each_group(inputs, above_the_others))


def rloo_vectorized(inputs: AdvantageInputs) -> Estimate:
    """(n*r - Σr) / (n - 1): rloo, but 0 for a group of one."""

    def above_the_others(rewards: Tensor) -> Tensor:  # [N, n]
        n = rewards.shape[1]
        return (n * rewards - _sum_in_order(rewards)) / max(n - 1, 1) * float(n > 1)

    return per_sample(inputs, _each_group(inputs, above_the_others))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """r - mean over the group, then whitened over the tokens of the batch (Hu et al. 2025, arXiv 2501.03262)."""
    return _whitened_over_tokens(inputs, _each_group(inputs, _centred))


def opo(inputs: AdvantageInputs) -> Estimate:
    """r - Σ length*r / Σ length: a mean weighted by unmasked tokens (Hao et al. 2025, arXiv 2505.23585).

    A group without an unmasked token has baseline 0.
    """

    def above_the_mean_of_tokens(rewards: Tensor, lengths: Tensor) -> Tensor:  # [N, n] each
        if rewards.shape[1] == 1:
            return rewards
        return rewards - (lengths * rewards).sum(1, keepdim=True) / lengths.sum(1, keepdim=True).clamp(min=1)

    return per_sample(inputs, _each_group(inputs, above_the_mean_of_tokens, inputs.mask.sum(-1)[inputs.groups.members]))


def gpg(inputs: AdvantageInputs) -> Estimate:
    """α * (r - mean) with α = samples / samples whose reward is not 0 (Chu et al. 2025, arXiv 2504.02546).

    The paper counts the samples whose advantage is not 0; verl counts rewards, and so does this. Dropped samples do not
    count. α is the number of samples where every reward is 0.
    """
    rewards = inputs.token_level_reward.sum(-1)[inputs.groups.members]
    present = inputs.groups.present
    alpha = present.sum() / ((rewards != 0) & present).sum().clamp(min=1)
    return per_sample(inputs, alpha * _each_group(inputs, _centred))


def per_sample(inputs: AdvantageInputs, advantage: Tensor) -> Estimate:
    """The estimate of an estimator that gives one number [B_prompt*G] a sample: returns are the advantages."""
    advantages = estimate.spread(advantage=advantage, mask=inputs.mask)
    return Estimate(advantage=advantage, advantages=advantages, returns=advantages)


def _each_group(inputs: AdvantageInputs, statistic: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """`statistic` of the rewards of each group, and of `others` [B_prompt, G] beside them -> [B_prompt*G]."""
    return _standing(inputs, inputs.token_level_reward.sum(-1), statistic, *others)


def _standing(inputs: AdvantageInputs, reward: Tensor, statistic: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """The same of any reward [B_prompt*G]."""
    rewards = groups.by_group(reward=reward, groups=inputs.groups)
    return groups.each_group(inputs.groups, statistic, rewards, *others)


def _whitened_over_tokens(inputs: AdvantageInputs, score: Tensor) -> Estimate:
    """`score` [B_prompt*G], whitened by the mean and variance of the batch in which every unmasked token has it once.

    So long responses weigh more. 0 where fewer than two tokens are unmasked.
    """
    return per_sample(inputs, whitened(score, moments(score[:, None] * inputs.mask, inputs.mask)))


def _centred(rewards: Tensor) -> Tensor:
    """[N, n]: r - mean."""
    return rewards if rewards.shape[1] == 1 else rewards - rewards.mean(1, keepdim=True)


def _normalised(rewards: Tensor) -> Tensor:
    """[N, n]: (r - mean) / (std + 1e-6)."""
    return _centred(rewards) / (_std(rewards) + EPSILON)


def _std(rewards: Tensor) -> Tensor:
    """[N, n] -> [N, 1]: unbiased; 1 for a group of one.

    In float64 around a mean in the rewards' dtype: so torch computes the std of one whole tensor, and so verl that of
    each group. Where all rewards of a group are equal, the rounding of their mean is all there is.
    """
    n = rewards.shape[1]
    if n == 1:
        return torch.ones_like(rewards)
    apart = rewards.double() - rewards.mean(1, keepdim=True).double()
    return ((apart**2).sum(1, keepdim=True) / (n - 1)).sqrt().to(rewards.dtype)


def _centred_in_float32(rewards: Tensor) -> Tensor:
    """[N, n]: r - mean, the mean in float32."""
    n = rewards.shape[1]
    return rewards if n == 1 else rewards - _sum_in_order(rewards.float()) / n


def _normalised_in_float32(rewards: Tensor) -> Tensor:
    """[N, n]: (r - mean) / (std + 1e-6), mean and std in float32."""
    n = rewards.shape[1]
    apart = rewards.float() - _sum_in_order(rewards.float()) / n
    std = (_sum_in_order(apart * apart) / max(n - 1, 1)).sqrt() if n > 1 else torch.ones_like(apart)
    return _centred_in_float32(rewards) / (std + EPSILON)


def _sum_in_order(rewards: Tensor) -> Tensor:
    """[N, n] -> [N, 1]: added one after the other, as verl's vectorised forms do; equal rewards round as theirs."""
    return reduce(torch.add, rewards.unbind(1))[:, None]
