"""From rewards to what the update trains on: the KL penalty, the correction of rollout log-probs, the estimator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.config.passes import BYPASS
from flowledger.run import correction, dropped
from flowledger.run.algorithms import groups
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.aggregation import unmasked
from flowledger.run.algorithms.estimate import AdvantageInputs
from flowledger.run.algorithms.kl import penalised, token_kl
from flowledger.run.algorithms.masked import masked_mean
from flowledger.run.algorithms.rollout_correction import Correction
from flowledger.run.batches import Advantages
from flowledger.run.parallel.rows import WHOLE, Rows


def advantages(
    *,
    algorithm: Algorithm,
    kl_coef: float,
    component_weights: tuple[float, ...],
    token_level_reward: Tensor,
    reward_components: Tensor,
    loss_mask: Tensor,
    dropped_reason: Sequence[str | None],
    rollout_log_prob: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    values: Tensor | None,
    sum_pi_squared: Tensor | None,
    baseline_reward: Tensor | None,
    group_id: Tensor,
    rows: Rows = WHOLE,
) -> Advantages:
    """Advantages of one step. Samples whose last token is rejected here stay in the statistics of their group.

    Each tensor holds the rows of this rank, but for baseline_reward [B_prompt], which holds all. Groups, whitening and
    rejection look at the whole step, so every rank computes it and goes on with its own rows.
    """
    if rows.split:
        dropped_reason = dropped.decoded(rows.whole(dropped.codes(dropped_reason)))
        token_level_reward, reward_components = rows.whole(token_level_reward), rows.whole(reward_components)
        loss_mask, rollout_log_prob = rows.whole(loss_mask), rows.whole(rollout_log_prob)
        old_log_prob, ref_log_prob = rows.maybe_whole(old_log_prob), rows.maybe_whole(ref_log_prob)
        values, sum_pi_squared = rows.maybe_whole(values), rows.maybe_whole(sum_pi_squared)
        group_id = rows.whole(group_id)
    kl = _kl_in_reward(algorithm, old_log_prob, ref_log_prob, loss_mask)
    if kl is not None:
        token_level_reward = penalised(token_level_reward=token_level_reward, kl=kl, coef=kl_coef)
    corrected = _corrected(algorithm, old_log_prob, rollout_log_prob, loss_mask)
    mask = loss_mask if corrected is None else corrected.loss_mask
    kept = torch.tensor([reason is None for reason in dropped_reason], device=loss_mask.device)
    group_size = len(group_id) // len(baseline_reward) if baseline_reward is not None else 1
    inputs = AdvantageInputs(
        token_level_reward=token_level_reward,
        mask=mask,
        groups=groups.groups_of(group_id=group_id, kept=kept),
        settings=algorithm,
        old_log_prob=old_log_prob,
        values=values,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=corrected.rollout_is_weights if corrected else None,
        baseline_reward=None if baseline_reward is None else baseline_reward.repeat_interleave(group_size),
        reward_components=reward_components,
        component_weights=component_weights,
    )
    made = ADVANTAGES[algorithm.advantage](inputs)
    rejects = corrected is not None and bool(algorithm.rollout_correction.rejections)
    advantage = unmasked(made.advantage, mask.any(-1))  # of one that was rejected whole, as of a dropped one
    reasons = rows.of(_reasons(dropped_reason, mask)) if rejects else None
    return Advantages(
        advantage=rows.mine(advantage),
        advantages=rows.mine(made.advantages),
        returns=rows.mine(made.returns),
        token_level_reward=None if kl is None else rows.mine(token_level_reward),
        kl=None if kl is None else rows.mine(kl),
        rollout_is_weights=rows.maybe_mine(inputs.rollout_is_weights),
        loss_mask=rows.mine(mask) if rejects else None,
        dropped_reason=reasons,
        metrics=(dict(corrected.metrics) if corrected else {})
        | ({} if kl is None else {"reward_kl": float(masked_mean(kl[kept], loss_mask[kept], dim=-1).mean())}),
    )


def _kl_in_reward(
    algorithm: Algorithm, old_log_prob: Tensor | None, ref_log_prob: Tensor | None, loss_mask: Tensor
) -> Tensor | None:
    """KL of the policy from the reference on each unmasked token [B_prompt*G, S_resp], where it goes into the reward."""
    if algorithm.kl_in != "reward" or ref_log_prob is None or old_log_prob is None:
        return None
    return token_kl(new_log_prob=old_log_prob, ref_log_prob=ref_log_prob, mask=loss_mask, form=algorithm.kl_estimator)


def _corrected(
    algorithm: Algorithm, old_log_prob: Tensor | None, rollout_log_prob: Tensor, loss_mask: Tensor
) -> Correction | None:
    """What is done about rollout's log-probs before the loss; `bypass_mode` does it in the loss itself."""
    settings = algorithm.rollout_correction
    if not settings.active or algorithm.policy_loss == BYPASS or old_log_prob is None:
        return None
    return correction.corrected(
        old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, loss_mask=loss_mask, settings=settings
    )


def _reasons(dropped_reason: Sequence[str | None], mask: Tensor) -> tuple[str | None, ...]:
    """Why each sample is not trained on: what it was before, or `rejected` where no token is left."""
    left = mask.any(-1).tolist()
    return tuple(reason or (None if some else "rejected") for reason, some in zip(dropped_reason, left, strict=True))
