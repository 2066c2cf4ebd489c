"""The loss of one micro-batch: policy loss, KL and entropy from log-probs, and whom to blame when it is not finite."""

import math
from dataclasses import dataclass

from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.run.algorithms.aggregation import Totals, aggregate_tokens
from flowledger.run.algorithms.kl import token_kl
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES
from flowledger.run.algorithms.token_loss import LossInputs, aggregate
from flowledger.run.finite import NotFinite, first_not_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch; all matrices [B_micro, S_resp], losses are its share of the mini-batch's."""

    loss: Tensor  # [] what backward starts from
    policy_loss: Tensor  # []
    kl_loss: Tensor  # []
    entropy_loss: Tensor  # []
    loss_mat: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor | None
    loss_share: Tensor  # weight * loss_mat: sums to policy_loss
    mask: Tensor  # tokens that the policy loss is made of: loss_mask, less what the loss itself rejects
    kl: Tensor | None  # where there is a reference, and KL is in the loss


def micro_batch_loss(
    *,
    algorithm: Algorithm,
    kl_coef: float,
    totals: Totals,
    sample_id: Tensor,
    new_log_prob: Tensor,
    entropy: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    rollout_is_weights: Tensor | None,
) -> MicroBatchLoss:
    """This micro-batch's share of the mini-batch's loss: policy + kl_coef * KL - entropy_coef * entropy.

    KL and entropy are aggregated as the settings say, also where a policy loss brings an aggregation of its own.
    Raises NotFinite where the loss is not finite, naming the first input, sample and token that are not.
    """
    inputs = LossInputs(
        new_log_prob=new_log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=loss_mask, settings=algorithm,
        rollout_is_weights=rollout_is_weights,
    )  # fmt: skip
    token = POLICY_LOSSES[algorithm.policy_loss](inputs)
    policy = aggregate(token, inputs, totals)
    mode = algorithm.loss_aggregation
    entropy_loss = aggregate_tokens(entropy, mask=loss_mask, mode=mode, totals=totals).loss
    loss = policy.loss - algorithm.entropy_coef * entropy_loss if algorithm.entropy_coef else policy.loss
    kl, kl_loss = None, policy.loss.new_zeros(())
    if ref_log_prob is not None and algorithm.kl_in == "loss":
        kl = token_kl(new_log_prob=new_log_prob, ref_log_prob=ref_log_prob, mask=loss_mask, form=algorithm.kl_estimator)
        kl_loss = aggregate_tokens(kl, mask=loss_mask, mode=mode, totals=totals).loss
        loss = loss + kl_coef * kl_loss
    if not math.isfinite(float(loss.detach())):
        made_before = {
            "advantages": advantages, "rollout_is_weights": rollout_is_weights, "old_log_prob": old_log_prob,
            "ref_log_prob": ref_log_prob, "new_log_prob": new_log_prob,
        }  # fmt: skip
        guilty = first_not_finite(made_before, loss_mask, sample_id)
        raise NotFinite(
            f"the loss is not finite: {guilty or 'its inputs are, but the log ratio or the advantages overflow'}"
        )
    return MicroBatchLoss(
        loss=loss,
        policy_loss=policy.loss.detach(),
        kl_loss=kl_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        loss_mat=token.loss_mat.detach(),
        ratio=token.ratio,
        clipped=token.clipped,
        dual_clipped=token.dual_clipped,
        loss_share=policy.share.detach(),
        mask=loss_mask if token.mask is None else token.mask,
        kl=kl.detach() if kl is not None else None,
    )
