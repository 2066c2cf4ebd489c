"""KL between two policies from the log-probs of sampled tokens: forms, straight-through forms, and the coefficient.

Every form is a function of δ = log π - log π_ref, any shape, in nats.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.run.algorithms.aggregation import unmasked
from flowledger.run.algorithms.log_ratios import clamped

Form = Callable[[Tensor], Tensor]


def k1(delta: Tensor) -> Tensor:
    """log π - log π_ref: unbiased, high variance."""
    return delta


def k2(delta: Tensor) -> Tensor:
    """½(log π - log π_ref)²: low variance, biased; its gradient is that of the KL, without bias."""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """exp(-δ) - 1 + δ: unbiased, low variance (Schulman 2020, joschu.net/blog/kl-approx); δ clamped to ±20, k3 to ±10.

    Where a clamp holds there is no gradient.
    """
    minus = clamped(-delta)
    return (minus.exp() - minus - 1).clamp(-10.0, 10.0)


def straight_through(form: Form) -> Form:
    """The value of `form`, the gradient of k2 (verl's names with a +)."""

    def through(delta: Tensor) -> Tensor:
        slope = k2(delta)
        return slope - slope.detach() + form(delta).detach()

    return through


KL_FORMS: dict[str, Form] = {
    "k1": k1,
    "kl": k1,
    "abs": torch.abs,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
    "k1+": straight_through(k1),
    "kl+": straight_through(k1),
    "abs+": straight_through(torch.abs),
    "k2+": straight_through(k2),
    "mse+": straight_through(k2),
    "k3+": straight_through(k3),
    "low_var_kl+": straight_through(k3),
}


def token_kl(*, new_log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, form: str) -> Tensor:
    """The KL estimate of each token [B, S_resp] by a form of KL_FORMS; 0 where masked, whatever stands there."""
    return KL_FORMS[form](unmasked(new_log_prob, mask) - unmasked(ref_log_prob, mask))


def penalised(*, token_level_reward: Tensor, kl: Tensor, coef: float) -> Tensor:
    """token_level_reward - coef·kl [B, S_resp]: the KL penalty inside the reward."""
    return token_level_reward - kl * coef


@dataclass(slots=True)
class KlControl:
    """The KL coefficient, fixed, or adaptive after Ziegler et al. 2019 (arXiv 1909.08593, section 2.2)."""

    coef: float
    target: float | None = None  # nats; None: fixed
    horizon: int = 10_000  # samples

    @classmethod
    def of(cls, algorithm: Algorithm) -> "KlControl":
        """What the settings kl_coef, kl_control, kl_target and kl_horizon ask for."""
        target = algorithm.kl_target if algorithm.kl_control == "adaptive" else None
        return cls(coef=algorithm.kl_coef, target=target, horizon=algorithm.kl_horizon)

    def update(self, kl: float, samples: int) -> None:
        """After `samples` whose mean KL is `kl`: coef ·= 1 + clip(kl/target - 1, ±0.2)·samples/horizon.

        A fixed coefficient stays, and so does an adaptive one where kl is NaN.
        """
        if self.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * samples / self.horizon
