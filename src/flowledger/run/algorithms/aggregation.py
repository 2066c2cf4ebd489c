"""Aggregation: how the losses of tokens become one number, and what every token weighs in it.

Every mode is loss = scale · Σ_sequences (Σ_tokens loss_mat / length): a weighted sum over tokens. The scale comes from
totals, and these are those of the mini-batch over all ranks. So the split into micro-batches cannot change the
gradient, and weight·loss_mat is a token's share of the loss. `ranks` undoes the mean over data-parallel ranks that
follows. A total of zero (all is masked) gives the loss 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowledger.config.algorithm import Aggregation

Mode = Aggregation | Literal["row-mean"]  # the last belongs to losses that bring it along; no setting selects it


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Normalisers of one mini-batch."""

    tokens: int  # unmasked ones, over all ranks
    sequences: int  # kept before rejection, over all ranks: a response that was rejected whole counts, as in verl
    rows: int  # all sequences of this rank, masked ones too
    horizon: int  # fixed length that divides in seq-mean-token-sum-norm
    ranks: int = 1  # data-parallel ranks whose gradients are averaged


def totals_of(mask: Tensor, *, horizon: int, sequences: int | None = None) -> Totals:
    """The totals of a mini-batch's loss mask [B_mini, S_resp] on one rank; sequences None: those with an unmasked token."""
    lengths = mask.sum(-1)
    counted = int((lengths > 0).sum()) if sequences is None else sequences
    return Totals(tokens=int(lengths.sum()), sequences=counted, rows=len(mask), horizon=horizon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """The loss of a micro-batch [], the weight of each token in it and its share of it [B_micro, S_resp]."""

    loss: Tensor
    weight: Tensor
    share: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One mode. `by` says what a sequence's sum is divided by; None: tokens are added up across sequences at once."""

    by: Callable[[Tensor], Tensor] | None  # mask [B_micro, S_resp] -> [B_micro]
    scale: Callable[[Totals], float]
    exact: bool = False  # sequences are added up in float64, so that the mean of equal numbers is that number

    def weight(self, mask: Tensor, totals: Totals) -> Tensor:
        """What each token weighs [B_micro, S_resp]; 0 where it is masked."""
        share = mask if self.by is None else mask / self.by(mask)[:, None]
        return share * self.scale(totals)

    def loss(self, values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
        """Σ weight·values [], summed in verl's order: where terms cancel, the rounding is verl's too."""
        if self.by is None:
            return values.sum() * self.scale(totals)
        sums = values.sum(-1, dtype=torch.float64 if self.exact else None)
        return (sums / self.by(mask)).to(values.dtype).sum() * self.scale(totals)


def one(mask: Tensor) -> Tensor:
    """A sequence counts with its sum."""
    return torch.ones_like(mask[:, 0])


def length(mask: Tensor) -> Tensor:
    """A sequence counts with its mean."""
    return mask.sum(-1).clamp(min=1)


def per(number: int) -> float:
    """1 / number; 1 where there is nothing to divide."""
    return 1 / max(number, 1)


REDUCTIONS: dict[Mode, Reduction] = {
    # Every token weighs the same: 1 / tokens.
    "token-mean": Reduction(by=None, scale=lambda t: t.ranks * per(t.tokens)),
    # Every token weighs 1.
    "token-sum": Reduction(by=None, scale=lambda t: float(t.ranks)),
    # Tokens of a sequence add up, sequences average: 1 / sequences.
    "seq-mean-token-sum": Reduction(by=one, scale=lambda t: t.ranks * per(t.sequences)),
    # The same over a fixed horizon, so that length does not weigh (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783).
    "seq-mean-token-sum-norm": Reduction(by=one, scale=lambda t: t.ranks * per(t.sequences * t.horizon)),
    # Tokens of a sequence average, sequences average (Shao et al. 2024, GRPO, arXiv 2402.03300).
    "seq-mean-token-mean": Reduction(by=length, scale=lambda t: t.ranks * per(t.sequences)),
    # The same, but masked sequences count, and the mean is of this rank alone: for a loss that gives every token the
    # number of its sequence (verl's geo_mean).
    "row-mean": Reduction(by=length, scale=lambda t: per(t.rows), exact=True),
}


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """The values, 0 where masked. A masked value can be NaN: neither it nor its gradient passes."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def aggregate_tokens(loss_mat: Tensor, *, mask: Tensor, mode: Mode, totals: Totals) -> Aggregated:
    """loss = Σ weight·loss_mat over unmasked tokens, all [B_micro, S_resp]; any loss: of policy, values, KL, entropy."""
    values, mask = unmasked(loss_mat, mask), mask.to(loss_mat.dtype)
    weight = REDUCTIONS[mode].weight(mask, totals)
    return Aggregated(loss=REDUCTIONS[mode].loss(values, mask, totals), weight=weight, share=weight * values)
