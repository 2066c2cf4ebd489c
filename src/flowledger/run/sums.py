"""What the update adds up on its way: means over tokens, and what it saw of each sample at first."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowledger.run.batching import Indices
from flowledger.run.loss import MicroBatchLoss
from flowledger.run.parallel.collectives import largest, total
from flowledger.run.parallel.ranks import ALONE, Ranks


@dataclass(slots=True, kw_only=True)
class FirstPass:
    """What the update shows when it meets a sample for the first time, each [B_prompt*G, S_resp]; 0 for dropped samples."""

    new_log_prob: Tensor
    loss_mask: Tensor  # less what the loss itself rejected
    seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, loss_mask: Tensor) -> "FirstPass":
        """Nothing seen yet, of a step with this loss mask."""
        return cls(new_log_prob=torch.zeros(loss_mask.shape), loss_mask=torch.zeros_like(loss_mask))

    def add(self, samples: Indices, *, new_log_prob: Tensor, loss_mask: Tensor) -> None:
        """What a micro-batch of these samples showed, each [B_micro, S_resp]; later passes change nothing."""
        if not self.seen.issuperset(samples):
            self.seen.update(samples)
            self.new_log_prob[list(samples)] = new_log_prob.to(self.new_log_prob)
            self.loss_mask[list(samples)] = loss_mask


@dataclass(slots=True, kw_only=True)
class Sums:
    """What the update adds up over micro-batches, weighted by tokens where it is a mean over tokens."""

    totals: dict[str, Tensor] = field(default_factory=dict)  # name -> []
    ratio_max: Tensor | None = None
    first: FirstPass | None = None  # what the first pass over each sample showed, where somebody wants to know

    def add(self, made: MicroBatchLoss, entropy: Tensor, old: Tensor, new: Tensor) -> None:
        kept = made.mask.bool()
        means = {
            "tokens": made.mask,
            "clip_ratio": made.clipped,
            "entropy": entropy.detach(),
            "policy_kl": old - new.detach(),
        }
        if made.dual_clipped is not None:
            means["clip_ratio/dual"] = made.dual_clipped
        if made.kl is not None:
            means["ref_kl"] = made.kl
        for name, value in means.items():
            self.totals[name] = self.totals.get(name, 0) + torch.where(kept, value, 0).sum()
        highest = torch.where(kept, made.ratio, 0).max() if kept.numel() else torch.zeros(())
        self.ratio_max = highest if self.ratio_max is None else torch.maximum(self.ratio_max, highest)

    def metrics(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Means over all tokens that were in the loss, on all data-parallel ranks."""
        group = ranks.group("dp")
        if not group.alone and self.ratio_max is not None:
            self.ratio_max = largest(self.ratio_max, group)
            added = total(torch.stack([torch.as_tensor(self.totals[name]) for name in sorted(self.totals)]), group)
            self.totals = dict(zip(sorted(self.totals), added, strict=True))
        sums = {name: float(value) for name, value in self.totals.items()}
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        means = {name: value / tokens for name, value in sums.items()}
        return means if self.ratio_max is None else means | {"ratio/max": float(self.ratio_max)}
