"""The weights that rollout samples with: an object of its own, also where it shares the policy's tensors."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from flowledger.run.parallel import sharded
from flowledger.run.parallel.ranks import ALONE, Ranks


@dataclass(slots=True, kw_only=True)
class RolloutWeights:
    """The model that generates, and the version of the policy that it holds (0: the start model)."""

    model: nn.Module
    shared: bool
    version: int = 0

    @torch.no_grad()
    def take(self, policy: nn.Module, ranks: Ranks = ALONE) -> float | None:
        """Take over the policy's trainable tensors, one at a time. Returns ‖Δ‖ / ‖w‖ over all of them, None if shared.

        Where the policy is cut over ranks, each tensor is gathered whole, and let go before the next.
        """
        self.version += 1
        if self.shared:
            return None
        mine = dict(self.model.named_parameters())
        moved, size = 0.0, 0.0
        for name, part in policy.named_parameters():
            if part.requires_grad:
                theirs = sharded.whole(part)
                moved += float((theirs - mine[name]).float().square().sum())
                size += float(theirs.float().square().sum())
                mine[name].copy_(theirs)
        return (moved / size) ** 0.5 if size else 0.0


def rollout_weights(policy: nn.Module, *, shared: bool) -> RolloutWeights:
    """A copy of the policy that never needs gradients, or the policy itself."""
    if shared:
        return RolloutWeights(model=policy, shared=True)
    model = copy.deepcopy(policy).eval().requires_grad_(False)
    return RolloutWeights(model=model, shared=False)
