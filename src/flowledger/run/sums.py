"""What the update adds up on its way: means over tokens, and what it saw of each sample at first."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowledger.run.batching import Indices
from flowledger.run.loss import MicroBatchLoss
from flowledger.run.parallel.collectives import largest, sent, total
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
        return cls(
            new_log_prob=torch.zeros(loss_mask.shape, device=loss_mask.device), loss_mask=torch.zeros_like(loss_mask)
        )

    def add(self, samples: Indices, *, new_log_prob: Tensor, loss_mask: Tensor) -> None:
        """What a micro-batch of these samples showed, each [B_micro, S_resp]; later passes change nothing."""
        if not self.seen.issuperset(samples):
            self.seen.update(samples)
            self.new_log_prob[list(samples)] = new_log_prob.to(self.new_log_prob)
            self.loss_mask[list(samples)] = loss_mask

    def columns(self, *, mask: bool) -> dict[str, Tensor]:
        """What others want of it; mask: the loss mask too."""
        return {"new_log_prob": self.new_log_prob, **({"loss_mask": self.loss_mask} if mask else {})}


NAMES = ("tokens", "clip_ratio", "clip_ratio/dual", "entropy", "policy_kl", "ref_kl")


@dataclass(slots=True, kw_only=True)
class Sums:
    """What the update adds up over micro-batches, weighted by tokens where it is a mean over tokens."""

    names: tuple[str, ...] = ()  # those of NAMES that this update has
    totals: Tensor | None = None  # float64 [N], of each
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
        values = torch.stack([value.float() for value in means.values()])  # [N, B_micro, S_resp]
        sums = torch.where(kept, values, 0).flatten(1).sum(1, dtype=torch.float64)
        self.names, self.totals = tuple(means), sums if self.totals is None else self.totals + sums
        highest = torch.where(kept, made.ratio, 0).max() if kept.numel() else torch.zeros((), device=kept.device)
        self.ratio_max = highest if self.ratio_max is None else torch.maximum(self.ratio_max, highest)

    def metrics(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Means over all tokens that were in the loss, on all data-parallel ranks. A pipeline's last stage has seen them."""
        group, ratio_max = ranks.group("dp"), 0.0 if self.ratio_max is None else float(self.ratio_max)
        totals = dict(zip(self.names, [] if self.totals is None else self.totals.tolist(), strict=True))
        here = [x for name in NAMES for x in (totals.get(name, 0.0), name in totals)]
        seen = sent(torch.tensor([*here, ratio_max], dtype=torch.float64), -1, ranks.group("pp"))
        sums = total(seen[:-1], group).view(-1, 2).tolist()
        found = {name: value for name, (value, there) in zip(NAMES, sums, strict=True) if there}
        tokens = max(found.pop("tokens", 0.0), 1.0)
        means = {name: value / tokens for name, value in found.items()}
        return means | ({"ratio/max": float(largest(seen[-1], group))} if found else {})
