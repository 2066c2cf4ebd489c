"""Estimators whose advantage differs along the tokens of a response. Each names its paper.

Tokens that the environment wrote (mask 0 inside a response) are passed over: they earn nothing and cost no discount.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowledger.flow.errors import BadInput
from flowledger.run.algorithms.estimate import AdvantageInputs, Estimate
from flowledger.run.algorithms.groups import Groups, by_size
from flowledger.run.algorithms.masked import TINY, masked_sum, masked_whiten
from flowledger.run.algorithms.scans import compact, expand, following, masked_suffix_sums, suffix_sums

SUPPLIED_BY = {  # what some estimators need beside rewards -> how a run comes by it
    "values": "add a `critic:` section",
    "baseline_reward": "give the reward of the greedy response to each prompt",
    "old_log_prob": "set actor.old_log_prob to true",
    "sum_pi_squared": "set actor.old_log_prob to true",
}


def gae(inputs: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation, then whitened (Schulman et al. 2015, arXiv 1506.02438).

    δ_t = r_t + γ*V_{t+1} - V_t, A_t = δ_t + γλ*A_{t+1}, returns = A + V, where t+1 is the next unmasked token. As in
    verl, masked tokens are whitened too and do not hold 0; the loss does not look at them.

    Raises BadInput without `values`.
    """
    values, mask, s = needed(inputs, "gae", "values"), inputs.mask, inputs.settings
    delta = inputs.token_level_reward + s.gamma * following(values, mask) - values
    advantages = masked_suffix_sums(delta, mask, s.gamma * s.lam)
    return per_token(inputs, masked_whiten(advantages, mask), advantages + values)


def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """Discounted reward-to-go G_t = r_t + γ*G_{t+1}, whitened over the batch (Hu et al. 2025, arXiv 2501.03262)."""
    returns = masked_suffix_sums(inputs.token_level_reward, inputs.mask, inputs.settings.gamma) * inputs.mask
    return per_token(inputs, masked_whiten(returns, inputs.mask) * inputs.mask, returns)


def remax(inputs: AdvantageInputs) -> Estimate:
    """Reward-to-go minus the reward of the greedy response to the same prompt (Li et al. 2023, arXiv 2310.10505).

    Raises BadInput without `baseline_reward`.
    """
    baseline = needed(inputs, "remax", "baseline_reward")[:, None] * inputs.mask
    returns = reward_to_go(inputs)
    return per_token(inputs, returns - baseline, returns)


def optimal_token_baseline(inputs: AdvantageInputs) -> Estimate:
    """G_t - B_t, B_t = Σ G_t*W_t / Σ W_t over the group at position t (Li et al. 2026, arXiv 2602.07078).

    W_t = Σ_{j<=t} w_j; w_j = 1 - 2π_j + Σ_v π_v² is the squared norm of the score, times the squared rollout weight
    where there is one. `zero_tail`: no baseline where only the longest response of a group is left. A group of one has
    none either. The longest response is the one with most unmasked tokens, and its tail begins at the position that is
    the count of the second longest, as in verl: environment tokens shift it (the `tir_` form does not have this).

    Raises BadInput without `old_log_prob` or `sum_pi_squared`.
    """
    returns = reward_to_go(inputs)
    energy = _energy(inputs, "optimal_token_baseline")
    baseline = _group_baseline(returns, energy, inputs.mask, inputs.groups, zero_tail=inputs.settings.zero_tail)
    return per_token(inputs, (returns - baseline) * inputs.mask, returns)


def tir_optimal_token_baseline(inputs: AdvantageInputs) -> Estimate:
    """optimal_token_baseline for several turns: position t counts unmasked tokens only.

    So responses are compared by what the policy has written, wherever the environment spoke between. Responses without
    an unmasked token are in no group.

    Raises BadInput without `old_log_prob` or `sum_pi_squared`.
    """
    returns, mask, groups = reward_to_go(inputs), inputs.mask, inputs.groups
    energy = _energy(inputs, "tir_optimal_token_baseline")
    lengths = mask.sum(-1).long()
    longest = int(lengths.max())
    baseline = _group_baseline(
        compact(returns, mask)[:, :longest],
        compact(energy, mask)[:, :longest],
        (torch.arange(longest, device=mask.device) < lengths[:, None]).to(returns.dtype),
        dataclasses.replace(groups, present=groups.present & (lengths > 0)[groups.members]),
        zero_tail=inputs.settings.zero_tail,
    )
    baseline = pad(baseline, (0, 1))  # behind the longest
    return per_token(inputs, (returns - expand(baseline, mask)) * mask, returns)


def reward_to_go(inputs: AdvantageInputs) -> Tensor:
    """Σ of the rewards from each position to the end, of unmasked tokens [B_prompt*G, S_resp]."""
    return suffix_sums(inputs.token_level_reward * inputs.mask, 1.0)


def per_token(inputs: AdvantageInputs, advantages: Tensor, returns: Tensor) -> Estimate:
    """The estimate of an estimator by tokens; a sample's advantage is the mean of its unmasked tokens, 0 without any."""
    advantage = masked_sum(advantages, inputs.mask, -1) / inputs.mask.sum(-1).clamp(min=1)
    return Estimate(advantage=advantage, advantages=advantages, returns=returns)


def needed(inputs: AdvantageInputs, estimator: str, name: str) -> Tensor:
    """The optional input `name`, or BadInput that says how a run comes by it."""
    value: Tensor | None = getattr(inputs, name)
    if value is None:
        raise BadInput(
            f"algorithm.advantage = {estimator} needs {name}, and there are none; {SUPPLIED_BY[name]}, "
            "or use algorithm.advantage = rloo, which needs rewards only"
        )
    return value


def _energy(inputs: AdvantageInputs, estimator: str) -> Tensor:
    """W_t = Σ_{j<=t} (1 - 2π_j + Σ_v π_v²) * weight_j² over unmasked tokens [B_prompt*G, S_resp]."""
    old_log_prob = needed(inputs, estimator, "old_log_prob")
    norm = 1 - 2 * old_log_prob.exp() + needed(inputs, estimator, "sum_pi_squared")
    if inputs.rollout_is_weights is not None:
        norm = norm * inputs.rollout_is_weights**2
    return (norm * inputs.mask).cumsum(-1)


def _group_baseline(returns: Tensor, energy: Tensor, mask: Tensor, groups: Groups, *, zero_tail: bool) -> Tensor:
    """Σ G_t*W_t / Σ W_t over each group at each position, on each of its samples [B_prompt*G, S]; 0 in a group of one."""
    baseline = torch.zeros_like(returns)
    for n, inside in by_size(groups):
        if n == 1:
            continue
        rows = groups.members[inside].view(-1, n)  # [N, n]
        weight = energy[rows] * mask[rows]  # [N, n, S]
        shared = (returns[rows] * weight).sum(1, keepdim=True) / (weight.sum(1, keepdim=True) + TINY)
        baseline[rows] = torch.where(_tail(mask[rows]), 0.0, shared) if zero_tail else shared
    return baseline


def _tail(mask: Tensor) -> Tensor:
    """Where only the longest response of its group is left, bool [N, n, S]; nowhere where two are the longest."""
    lengths = mask.sum(-1)
    longest, second = lengths.topk(2, dim=1).values.unsqueeze(-1).unbind(1)  # [N, 1] each
    alone = (lengths == longest) & (longest > second)
    return alone[..., None] & (torch.arange(mask.shape[-1], device=mask.device) >= second[..., None])
