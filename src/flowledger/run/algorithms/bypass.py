"""bypass_mode: no old log-probs of the trainer's own; the rollout's stand in, and the correction happens in the loss."""

from collections.abc import Callable
from dataclasses import replace

from flowledger.run.algorithms import importance, ratio_losses, rejection
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss


def bypass_mode(inputs: LossInputs) -> TokenLoss:
    """Two policies instead of three: `old_log_prob` is the rollout's, each [B_micro, S_resp].

    algorithm.rollout_correction.loss `ppo_clip` is `vanilla`, whose ratio π_new / π_rollout already corrects, so importance
    weights are left out; `reinforce` is -w·A·log π_new with the weights w of `importance` (verl's bypass_mode, after Li et
    al. 2025, richardli.xyz/rl-collapse). Weights and rejections follow π_new / π_rollout of this very micro-batch and
    carry no gradient. Rejected tokens leave TokenLoss.mask, not the totals of the mini-batch.
    """
    settings = inputs.settings.rollout_correction
    log_ratio = (inputs.new_log_prob - inputs.old_log_prob).detach()
    mask = rejection.keep(log_ratio, inputs.mask, settings.rejections)
    made = LOSSES[settings.loss](replace(inputs, mask=mask, rollout_is_weights=None))
    loss_mat = made.loss_mat
    if settings.loss == "reinforce" and settings.importance != "none":
        loss_mat = loss_mat * importance.importance_weights(log_ratio, inputs.mask, settings)
    return replace(made, loss_mat=loss_mat, mask=mask, weighted=True)


LOSSES: dict[str, Callable[[LossInputs], TokenLoss]] = {
    "ppo_clip": ratio_losses.vanilla,
    "reinforce": ratio_losses.reinforce,
}
