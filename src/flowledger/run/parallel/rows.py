"""The rows of a batch on their way between ranks: from who sampled them to who trains on them, and together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from flowledger.run.batching import Indices
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import ALONE, Group, Ranks, coordinates

Columns = Mapping[str, Tensor]  # by flow name, each with one row a sample

# Columns whose numbers fit into less than their own dtype, and travel in that.
NARROW = {
    "full_sequence": torch.int32, "position_ids": torch.int32, "attention_mask": torch.bool, "response_mask": torch.bool,
    "loss_mask": torch.bool, "dropped_reason": torch.int8,
}  # fmt: skip


def part_of(total: int, ranks: Ranks) -> range:
    """The rows of this process where all ranks share `total` rows: chunks as torch.chunk cuts them, the last ones shorter."""
    each = _each(total, ranks)
    return range(min(ranks.rank * each, total), min((ranks.rank + 1) * each, total))


def counts_of(total: int, ranks: Ranks) -> list[int]:
    """How many of these rows each rank has."""
    each = _each(total, ranks)
    return [min(each, max(0, total - rank * each)) for rank in range(ranks.size)]


def _each(total: int, ranks: Ranks) -> int:
    """Rows of the first ranks: all but the last have so many."""
    return -(-total // ranks.size)


def cut(x: Tensor, part: range) -> Tensor:
    """Those rows of x as a tensor of their own; x itself where they are all."""
    return x if len(part) == len(x) else x[part.start : part.stop].clone()


def widened(x: Tensor, width: int, value: int = 0) -> Tensor:
    """[n, S] padded on the right to [n, width]."""
    return x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which rows of a step's B samples this rank holds, and how those of all data-parallel ranks become one again."""

    group: Group = field(default_factory=lambda: ALONE.group("dp"))
    samples: Tensor | None = None  # [B/dp] of the step, in the order of the rows; None: all of them, in their order
    order: Tensor | None = None  # [B] where each sample stands when the rows of all ranks are joined

    def whole(self, columns: Columns) -> dict[str, Tensor]:
        """Columns [B/dp, ...] of every rank as [B, ...], samples in the order of the step: one all-gather."""
        if self.order is None:
            return dict(columns)
        return unpacked(collectives.gathered(packed(columns), self.group)[self.order], columns)

    def mine(self, whole: Tensor) -> Tensor:
        """[B, ...] in the order of the step, as the rows that this rank holds."""
        return whole if self.samples is None else whole[self.samples]

    def maybe_mine(self, whole: Tensor | None) -> Tensor | None:
        """`mine`, of what need not be there."""
        return None if whole is None else self.mine(whole)


WHOLE = Rows()


def held_rows(taken: Sequence[Indices], ranks: Ranks) -> Rows:
    """The rows of this rank where each data-parallel rank takes these samples of a step."""
    group = ranks.group("dp")
    if group.alone:
        return WHOLE
    joined = torch.tensor([sample for samples in taken for sample in samples])
    return Rows(group=group, samples=torch.tensor(taken[group.at]), order=joined.argsort())


def moved(columns: Columns, taken: Sequence[Indices], group_size: int, ranks: Ranks) -> dict[str, Tensor]:
    """Each column [n, ...] of what this rank has sampled as the rows [B/dp, ...] that it trains on.

    taken: the samples of each data-parallel rank; group_size: samples of one prompt, which one rank has sampled. Every
    rank sends to every other what its data-parallel rank has taken of its rows: one all-to-all.
    """
    if ranks.size == 1:
        return dict(columns)
    return exchanged(columns=columns, taken=taken, group_size=group_size, ranks=ranks)


def exchanged(*, columns: Columns, taken: Sequence[Indices], group_size: int, ranks: Ranks) -> dict[str, Tensor]:
    """`moved` between ranks."""
    world, prompts = ranks.group("world"), sum(len(samples) for samples in taken) // group_size
    own, each = part_of(prompts, ranks), _each(prompts, ranks) * group_size
    here = range(own.start * group_size, own.stop * group_size)
    sending = [[sample for sample in sorted(taken[dp]) if sample in here] for dp in dp_of_ranks(ranks)]
    mine = taken[ranks.at("dp")]
    arriving = [0] * world.size
    for sample in mine:
        arriving[sample // each] += 1
    index = torch.tensor([sample - here.start for samples in sending for sample in samples], dtype=torch.int64)
    counts = [len(samples) for samples in sending]
    ordered = torch.tensor(mine).argsort().argsort()  # they arrive in the order of the step
    return unpacked(collectives.spread(packed(columns)[index], counts, arriving, world)[ordered], columns)


def packed(columns: Columns) -> Tensor:
    """Columns [n, ...] side by side as bytes, uint8 [n, bytes of a row], on the device of the first."""
    device = next(iter(columns.values())).device
    narrow = (x.to(device, NARROW.get(name, x.dtype)) for name, x in columns.items())
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).contiguous().view(torch.uint8) for x in narrow], 1)


def unpacked(rows: Tensor, like: Columns) -> dict[str, Tensor]:
    """What was `packed` of other rows of such columns, each in its own shape and dtype, on its own device."""
    made, end = {}, 0
    for name, x in like.items():
        dtype = NARROW.get(name, x.dtype)
        start, end = end, end + prod(x.shape[1:]) * dtype.itemsize
        part = rows[:, start:end].clone(memory_format=torch.contiguous_format)  # aligned
        made[name] = part.view(dtype).view(len(rows), *x.shape[1:]).to(x.device, x.dtype)
    return made


def dp_of_ranks(ranks: Ranks) -> list[int]:
    """The dp coordinate of every rank of the world."""
    places = (coordinates(ranks.degrees, rank) for rank in range(ranks.size))
    return [place["edp"] * ranks.degrees["ep"] + place["ep"] for place in places]
