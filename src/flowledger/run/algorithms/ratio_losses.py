"""Policy losses that judge each token by its own ratio ρ = π_new / π_old, or by its log-prob alone.

All take and give [B_micro, S_resp]. log ρ is clamped to ±20 wherever it is exponentiated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flowledger.run.algorithms.log_ratios import clamped
from flowledger.run.algorithms.masked import TINY
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss


def ratio_of(inputs: LossInputs) -> Tensor:
    """ρ [B_micro, S_resp], with its gradient."""
    return clamped(inputs.new_log_prob - inputs.old_log_prob).exp()


def surrogate(inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """-ρA, and -clip(ρ, 1-ε_low, 1+ε_high)A, each [B_micro, S_resp], for any ratio ρ of that shape."""
    s, a = inputs.settings, inputs.advantages
    return -a * ratio, -a * ratio.clamp(1 - s.clip_low, 1 + s.clip_high)


def vanilla(inputs: LossInputs) -> TokenLoss:
    """Clipped surrogate with asymmetric bounds and dual clip (Schulman et al. 2017; Ye et al. 2020, arXiv 1912.09729).

    max(-ρA, -clip(ρ, 1-ε_low, 1+ε_high)A), and at most -cA where A < 0. `clipped`: by either; `dual_clipped`: by c.
    """
    a, ratio = inputs.advantages, ratio_of(inputs)
    free, held = surrogate(inputs, ratio)
    upper = torch.maximum(free, held)
    most = -a * inputs.settings.clip_dual
    dual = (a < 0) & (upper > most)
    return TokenLoss(
        loss_mat=torch.where(a < 0, torch.minimum(most, upper), upper),
        ratio=ratio.detach(),
        clipped=(held > free) | dual,
        dual_clipped=dual,
    )


def reinforce(inputs: LossInputs) -> TokenLoss:
    """-A·log π (Williams 1992; the loss of GPG, Chu et al. 2025, arXiv 2504.02546).

    The old policy does not enter; `ratio` against it is for the eye. Nothing is clipped.
    """
    ratio = ratio_of(inputs).detach()
    loss_mat = -inputs.advantages * inputs.new_log_prob
    return TokenLoss(loss_mat=loss_mat, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


def cispo(inputs: LossInputs) -> TokenLoss:
    """-sg(clip(ρ, 1-ε_low, 1+ε_high))·A·log π (MiniMax 2025, arXiv 2506.13585).

    The clip bounds a weight, so every token keeps a gradient. `clipped`: the weight is not ρ.
    """
    s = inputs.settings
    ratio = ratio_of(inputs).detach()
    weight = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    return TokenLoss(
        loss_mat=-weight * inputs.advantages * inputs.new_log_prob, ratio=ratio, clipped=ratio != weight
    )  # fmt: skip


def sapo(inputs: LossInputs) -> TokenLoss:
    """-(4/τ)·sigmoid(τ(ρ-1))·A, a gate in the place of the clip (Gao et al. 2025, arXiv 2511.20347).

    τ depends on whether A > 0. At ρ = 1 the gradient is -A. Nothing is clipped. As in verl the aggregation is
    seq-mean-token-mean whatever the settings say.
    """
    s, a = inputs.settings, inputs.advantages
    ratio = ratio_of(inputs)
    tau = torch.full_like(a, s.sapo_tau_negative).masked_fill(a > 0, s.sapo_tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return TokenLoss(
        loss_mat=-gate * a,
        ratio=ratio.detach(),
        clipped=torch.zeros_like(ratio, dtype=torch.bool),
        aggregation="seq-mean-token-mean",
    )


def dro(inputs: LossInputs) -> TokenLoss:
    """-(A·log π - ½β(log ρ)²) (Richemond et al. 2024, arXiv 2405.19107): a quadratic pull to the old policy.

    log ρ is not clamped in the loss. Nothing is clipped.
    """
    log_ratio = inputs.new_log_prob - inputs.old_log_prob
    loss_mat = -(inputs.new_log_prob * inputs.advantages - 0.5 * inputs.settings.dro_beta * log_ratio.square())
    ratio = ratio_of(inputs).detach()
    return TokenLoss(loss_mat=loss_mat, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


def dppo_tv(inputs: LossInputs) -> TokenLoss:
    """DPPO with the total variation of "this token or another" (arXiv 2602.04879): |π - π_old|.

    -A·sg(min(ρ, c))·log π. A token has no part in it where the policy has already gone too far the way A pushes:
    π - π_old > ε_high where A > 0, < -ε_low elsewhere. ε are differences of probability here, not of ratios.
    """

    def too_far(new: Tensor, old: Tensor, up: Tensor) -> Tensor:
        moved = new.exp() - old.exp()
        return torch.where(up, moved > inputs.settings.clip_high, moved < -inputs.settings.clip_low)

    return _dppo(inputs, too_far)


def dppo_kl(inputs: LossInputs) -> TokenLoss:
    """DPPO with the KL of "this token or another" (arXiv 2602.04879), KL(π_old ‖ π) of two Bernoulli distributions.

    As dppo_tv, but a token is out where this KL, in nats, is above ε_high (A > 0) or ε_low (elsewhere) and π has moved
    the way A pushes.
    """

    def too_far(new: Tensor, old: Tensor, up: Tensor) -> Tensor:
        p, q = new.exp(), old.exp()
        kl = q * (old - new) + (1 - q) * torch.log((1.0 - q + TINY) / (1.0 - p + TINY))
        s = inputs.settings
        return torch.where(up, ~(kl <= s.clip_high) & ~(p <= q), ~(kl <= s.clip_low) & ~(p >= q))

    return _dppo(inputs, too_far)


def _dppo(inputs: LossInputs, too_far: Callable[[Tensor, Tensor, Tensor], Tensor]) -> TokenLoss:
    """`clipped`: taken out, or the ratio was cut off at c (`dual_clipped`)."""
    new, a, c = inputs.new_log_prob, inputs.advantages, inputs.settings.clip_dual
    ratio = ratio_of(inputs).detach()
    out = too_far(new.detach(), inputs.old_log_prob, a > 0)
    loss_mat = -a * ratio.clamp(max=c) * new * ~out
    cut = (ratio > c) & ~out
    return TokenLoss(loss_mat=loss_mat, ratio=ratio, clipped=out | cut, dual_clipped=cut)
