"""Policy losses that hold back the few tokens whose update would collapse the entropy (Cui et al. 2025, 2505.22617).

Such a token has a high covariance of log-prob and advantage, (A - mean A)(log π - mean log π). Means and numbers of
tokens are those of the micro-batch, as in verl: here, unlike elsewhere, its split changes the gradient. log ρ is not
clamped.
"""

import torch
from torch import Tensor

from flowledger.run.algorithms.masked import masked_mean
from flowledger.run.algorithms.ratio_losses import surrogate
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss


def clip_cov(inputs: LossInputs) -> TokenLoss:
    """Clipped surrogate without dual clip; a few tokens of high covariance, chosen at random, are taken out.

    clip_cov_ratio of the tokens, at least one, from those with a covariance between clip_cov_low and clip_cov_high
    that the clip leaves alone. Draws from torch's global generator on the CPU. `clipped`: by the clip, or taken out.
    """
    s, a, mask = inputs.settings, inputs.advantages, inputs.mask
    ratio = (inputs.new_log_prob - inputs.old_log_prob).exp()
    free, held = surrogate(inputs, ratio)
    clipped = held > free
    new = inputs.new_log_prob.detach()
    covariance = (a - masked_mean(a, mask)) * (new - masked_mean(new, mask))
    between = (covariance > s.clip_cov_low) & (covariance < s.clip_cov_high) & mask.bool() & ~clipped
    candidates = between.flatten().nonzero()[:, 0]
    most = max(int(s.clip_cov_ratio * mask.sum().item()), 1)
    chosen = candidates[torch.randperm(len(candidates))[:most].to(candidates.device)] if len(candidates) else candidates
    kept = torch.ones_like(a).flatten().index_fill(0, chosen, 0).view_as(a)
    return TokenLoss(loss_mat=torch.maximum(free, held) * kept, ratio=ratio.detach(), clipped=clipped | (kept == 0))


def kl_cov(inputs: LossInputs) -> TokenLoss:
    """-ρA, and + kl_cov_coef·|log ρ| on the tokens of highest covariance: kl_cov_ratio of them, at least one.

    There is no clip. `clipped`: the tokens held back.
    """
    s, a = inputs.settings, inputs.advantages
    log_ratio = inputs.new_log_prob - inputs.old_log_prob
    ratio = log_ratio.exp()
    held = _highest_covariance(inputs, share=s.kl_cov_ratio)
    free = -a * ratio
    return TokenLoss(
        loss_mat=torch.where(held, free + s.kl_cov_coef * log_ratio.abs(), free), ratio=ratio.detach(), clipped=held
    )


def _highest_covariance(inputs: LossInputs, *, share: float) -> Tensor:
    """bool [B_micro, S_resp]: this share of the unmasked tokens, at least one; none where all are masked."""
    valid = inputs.mask.bool()
    a, new = inputs.advantages[valid], inputs.new_log_prob.detach()[valid]  # [T_resp]
    held = torch.zeros_like(a, dtype=torch.bool)
    if len(a):
        covariance = (a - a.mean()) * (new - new.mean())
        held[covariance.topk(max(1, int(len(a) * share))).indices] = True
    return torch.zeros_like(valid).masked_scatter(valid, held)
