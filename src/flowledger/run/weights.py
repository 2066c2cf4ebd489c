"""The weights that rollout samples with: an object of its own, also where it shares the policy's tensors."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowledger.run.parallel import pipeline, sharded
from flowledger.run.parallel.collectives import sent
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
        mine, theirs = dict(self.model.named_parameters()), dict(policy.named_parameters())
        moved, size = 0.0, 0.0
        for name, place in pipeline.holders(policy).items():
            weight = gather_one(name=name, part=theirs.get(name), like=mine[name], place=place, ranks=ranks)
            moved += float((weight - mine[name]).float().square().sum())
            size += float(weight.float().square().sum())
            mine[name].copy_(weight)
        return (moved / size) ** 0.5 if size else 0.0


def gather_one(*, name: str, part: Tensor | None, like: Tensor, place: int, ranks: Ranks = ALONE) -> Tensor:
    """One tensor of the policy, whole on every rank: put together on the stage at `place` in pp, then sent to the others.

    part: what this rank has of it; like: a tensor of its shape and dtype.
    """
    here = sharded.whole(part) if part is not None and place == ranks.at("pp") else like
    return sent(here, place, ranks.group("pp"))


def rollout_weights(policy: nn.Module, *, shared: bool) -> RolloutWeights:
    """A copy of the policy that never needs gradients, or the policy itself."""
    if shared:
        return RolloutWeights(model=policy, shared=True)
    model = copy.deepcopy(policy).eval().requires_grad_(False)
    return RolloutWeights(model=model, shared=False)
