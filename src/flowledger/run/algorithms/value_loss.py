"""The critic's loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.run.algorithms.aggregation import unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The loss of every value, and where the clip decided it (bool), each [B_micro, S_resp]."""

    loss_mat: Tensor
    clipped: Tensor


def value_loss(*, new_values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> ValueLoss:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²) (Schulman et al. 2017's code; verl), each [B_micro, S_resp].

    The larger of the two: a value that has moved by more than `clip` since the rollout has no gradient towards R.
    0 where masked, whatever stands there.
    """
    new, old, target = (unmasked(values, mask) for values in (new_values, old_values, returns))
    free = (new - target) ** 2
    held = (torch.max(torch.min(new, old + clip), old - clip) - target) ** 2
    return ValueLoss(loss_mat=0.5 * torch.max(free, held), clipped=held > free)
