"""From rewards to what the update trains on: the KL penalty, the correction of rollout log-probs, the estimator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowledger.config import passes
from flowledger.config.algorithm import Algorithm
from flowledger.run import correction
from flowledger.run.algorithms import groups
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.aggregation import unmasked
from flowledger.run.algorithms.estimate import AdvantageInputs
from flowledger.run.algorithms.kl import penalised, token_kl
from flowledger.run.algorithms.masked import masked_mean
from flowledger.run.algorithms.rollout_correction import Correction
from flowledger.run.batches import Advantages
from flowledger.run.parallel.rows import WHOLE, Columns, Rows


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
    rejection look at the whole step, so every rank gathers what they read, computes it all and goes on with its own rows.
    """
    kl = _kl_in_reward(algorithm, old_log_prob, ref_log_prob, loss_mask)
    if kl is not None:
        token_level_reward = penalised(token_level_reward=token_level_reward, kl=kl, coef=kl_coef)
    reads = passes.reads_whole(algorithm)
    there = {
        "token_level_reward": token_level_reward, "loss_mask": loss_mask, "group_id": group_id,
        "reward_components": reward_components, "rollout_log_prob": rollout_log_prob, "old_log_prob": old_log_prob,
        "values": values, "sum_pi_squared": sum_pi_squared,
    }  # fmt: skip
    step = rows.whole(
        {name: x for name, x in there.items() if name in reads and x is not None}
        | {"kept": torch.tensor([reason is None for reason in dropped_reason], device=loss_mask.device)}
        | ({} if kl is None else {"kl": masked_mean(kl, loss_mask, dim=-1)})
    )
    corrected, kept = _corrected(algorithm, step), step["kept"]
    mask = corrected.loss_mask if corrected else step["loss_mask"]
    group_size = len(kept) // len(baseline_reward) if baseline_reward is not None else 1
    inputs = AdvantageInputs(
        token_level_reward=step["token_level_reward"],
        mask=mask,
        groups=groups.groups_of(group_id=step["group_id"], kept=kept),
        settings=algorithm,
        old_log_prob=step.get("old_log_prob"),
        values=step.get("values"),
        sum_pi_squared=step.get("sum_pi_squared"),
        rollout_is_weights=corrected.rollout_is_weights if corrected else None,
        baseline_reward=None if baseline_reward is None else baseline_reward.repeat_interleave(group_size),
        reward_components=step.get("reward_components"),
        component_weights=component_weights,
    )
    made = ADVANTAGES[algorithm.advantage](inputs)
    left = rows.mine(mask) if corrected and algorithm.rollout_correction.rejections else None
    advantage = unmasked(made.advantage, mask.any(-1))  # of one that was rejected whole, as of a dropped one
    return Advantages(
        advantage=rows.mine(advantage),
        advantages=rows.mine(made.advantages),
        returns=rows.mine(made.returns),
        token_level_reward=None if kl is None else token_level_reward,
        kl=kl,
        rollout_is_weights=rows.maybe_mine(inputs.rollout_is_weights),
        loss_mask=left,
        dropped_reason=None if left is None else _reasons(dropped_reason, left),
        metrics=(dict(corrected.metrics) if corrected else {})
        | ({} if kl is None else {"reward_kl": float(step["kl"][kept].mean())}),
    )


def _kl_in_reward(
    algorithm: Algorithm, old_log_prob: Tensor | None, ref_log_prob: Tensor | None, loss_mask: Tensor
) -> Tensor | None:
    """KL of the policy from the reference on each unmasked token [B_prompt*G, S_resp], where it goes into the reward."""
    if algorithm.kl_in != "reward" or ref_log_prob is None or old_log_prob is None:
        return None
    return token_kl(new_log_prob=old_log_prob, ref_log_prob=ref_log_prob, mask=loss_mask, form=algorithm.kl_estimator)


def _corrected(algorithm: Algorithm, step: Columns) -> Correction | None:
    """What is done about rollout's log-probs before the loss; `bypass_mode` does it in the loss itself."""
    settings = algorithm.rollout_correction
    if not settings.active or algorithm.policy_loss == passes.BYPASS or "old_log_prob" not in step:
        return None
    return correction.corrected(
        old_log_prob=step["old_log_prob"], rollout_log_prob=step["rollout_log_prob"], loss_mask=step["loss_mask"],
        settings=settings,
    )  # fmt: skip


def _reasons(dropped_reason: Sequence[str | None], mask: Tensor) -> tuple[str | None, ...]:
    """Why each sample is not trained on: what it was before, or `rejected` where no token is left."""
    left = mask.any(-1).tolist()
    return tuple(reason or (None if some else "rejected") for reason, some in zip(dropped_reason, left, strict=True))
