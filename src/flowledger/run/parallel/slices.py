"""A packed row that the ranks of cp and sp share: which of its tokens this one has (`flow.slices`), how they attend together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from flowledger.flow.slices import Slices
from flowledger.run.parallel.ranks import Group, Ranks
from flowledger.run.parallel.ring import Ring


@dataclass(frozen=True)
class Shared:
    """The row, and who does what in attention: all of it by exchange of heads, or cp by a ring of keys and values."""

    slices: Slices
    heads: Group  # exchange heads for tokens: the ranks of sp, and those of cp too where they are not a ring
    ring: Ring | None

    @cached_property
    def order(self) -> Tensor:
        """Place in the row of each token when the slices of all ranks stand one after another, int64 [T]."""
        ranks = ((cp, sp) for cp in range(self.slices.cp) for sp in range(self.slices.sp))
        return torch.cat([places(self.slices, cp, sp) for cp, sp in ranks])


def shared(samples: Sequence[int], ranks: Ranks) -> Shared | None:
    """How ranks share a row of samples with so many tokens, filled up where needed; None where nobody shares it."""
    cp, sp = ranks.group("cp"), ranks.group("sp")
    if cp.alone and sp.alone:
        return None
    slices = Slices(lengths=tuple(samples), cp=cp.size, sp=sp.size)
    if cp.alone or ranks.cp_kind == "ring":
        return Shared(slices, sp, None if cp.alone else Ring(tuple(samples), cp))
    return Shared(slices, cp if sp.alone else ranks.group("tokens"), None)


def places(slices: Slices, cp: int, sp: int) -> Tensor:
    """The place in the row of each token that the rank at these coordinates has, in its order, int64 [T/(cp*sp)]."""
    starts = (0, *accumulate(slices.filled))
    pieces = slices.of_rank(cp=cp, sp=sp)
    held = [torch.arange(starts[one.sample] + one.start, starts[one.sample] + one.stop) for one in pieces]
    return torch.cat(held)
