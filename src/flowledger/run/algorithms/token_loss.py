"""What every policy loss takes and gives, and how the losses of tokens become one number."""

from dataclasses import dataclass

from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.run.algorithms.aggregation import Aggregated, Mode, Totals, aggregate_tokens, unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What policy losses may read, each [B_micro, S_resp].

    Losses see 0 where the mask is 0: what stands there, NaN and inf too, reaches neither a loss nor a gradient.
    """

    new_log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    settings: Algorithm
    rollout_is_weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("new_log_prob", "old_log_prob", "advantages", "rollout_is_weights"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, unmasked(values, self.mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token and what the policy did there, each [B_micro, S_resp]."""

    loss_mat: Tensor
    ratio: Tensor  # π_new / π_old of the token, or of its sequence where the loss judges sequences; no gradient
    clipped: Tensor  # bool: the loss limited this token
    dual_clipped: Tensor | None = None  # bool: of these, where clip_dual did
    aggregation: Mode | None = None  # where the loss comes with one of its own, whatever the settings say
    mask: Tensor | None = None  # where the loss takes tokens out of the mask
    weighted: bool = False  # rollout_is_weights are already in loss_mat


def aggregate(token: TokenLoss, inputs: LossInputs, totals: Totals) -> Aggregated:
    """loss = Σ weight·loss_mat over unmasked tokens, by the loss's own aggregation or that of the settings."""
    loss_mat = token.loss_mat
    if inputs.rollout_is_weights is not None and not token.weighted:
        loss_mat = loss_mat * inputs.rollout_is_weights
    return aggregate_tokens(
        loss_mat,
        mask=inputs.mask if token.mask is None else token.mask,
        mode=token.aggregation or inputs.settings.loss_aggregation,
        totals=totals,
    )
