"""Policy losses that judge a whole response by one ratio."""

import torch

from flowledger.run.algorithms.masked import TINY
from flowledger.run.algorithms.ratio_losses import surrogate
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss


def gspo(inputs: LossInputs) -> TokenLoss:
    """Clipped surrogate of the sequence ratio s = exp(mean log ρ) (Zheng et al. 2025, arXiv 2507.18071, GSPO-token).

    Each token carries sg(s)·π/sg(π): the value is that of s, the gradient goes to its own log-prob. log s is clamped
    to at most 10. There is no dual clip. `ratio` [B_micro, S_resp] repeats s. The paper averages per sequence
    (seq-mean-token-mean); as in verl the aggregation of the settings holds.
    """
    new = inputs.new_log_prob
    lengths = inputs.mask.sum(-1).clamp(min=1)
    log_ratio = ((new - inputs.old_log_prob) * inputs.mask).sum(-1) / lengths  # [B_micro]
    ratio = (new - new.detach() + log_ratio.detach()[:, None]).clamp(max=10.0).exp()
    free, held = surrogate(inputs, ratio)
    return TokenLoss(loss_mat=torch.maximum(free, held), ratio=ratio.detach(), clipped=held > free)


def geo_mean(inputs: LossInputs) -> TokenLoss:
    """-mean(A)·exp(mean of clipped log ρ) per sequence (Zhao et al. 2025, GMPO, arXiv 2507.20673).

    log ρ is clipped to [-ε_low, ε_high], only against the way A pushes; it is not clamped otherwise. The loss of a
    sequence stands on each of its tokens, `ratio` repeats its geometric mean, `clipped` is per token. As in verl the
    aggregation of the settings is ignored: a plain mean over all rows of this rank, those without a token too.
    rollout_is_weights enter by their geometric mean.
    """
    s, a, mask = inputs.settings, inputs.advantages, inputs.mask
    lengths = mask.sum(-1) + TINY
    log_ratio = inputs.new_log_prob - inputs.old_log_prob
    sign = a.sign()
    free, held = sign * log_ratio, sign * log_ratio.clamp(-s.clip_low, s.clip_high)
    kept = sign * torch.min(free, held)
    ratio = ((kept * mask).sum(-1) / lengths).exp()  # [B_micro]
    loss = -((a * mask).sum(-1) / lengths) * ratio  # [B_micro]
    if inputs.rollout_is_weights is not None:
        loss = loss * (((inputs.rollout_is_weights + 1e-10).log() * mask).sum(-1) / lengths).exp()
    return TokenLoss(
        loss_mat=loss[:, None].expand_as(a),
        ratio=ratio.detach()[:, None].expand_as(a),
        clipped=free > held,
        aggregation="row-mean",
        weighted=True,
    )
