"""Collectives on a group; where it is alone they change nothing. The last ones are part of a graph and have gradients.

torch's own functions are called by their names in `torch.distributed`, so that a recorder sees them there.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowledger.run.parallel.ranks import Group


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over a group of tensors of equal shape."""
    return _reduced(x, group, dist.ReduceOp.SUM)


def largest(x: Tensor, group: Group) -> Tensor:
    """The elementwise maximum over a group."""
    return _reduced(x, group, dist.ReduceOp.MAX)


def gathered(x: Tensor, group: Group, counts: Sequence[int] = ()) -> Tensor:
    """The rows of all ranks [Σ n, ...] in the order of the group; counts: those of each, where not all have as many."""
    if group.alone:
        return x
    most = max(counts, default=len(x))
    padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) if len(x) < most else x.contiguous()
    made = x.new_empty(group.size, most, *x.shape[1:])
    dist.all_gather_single(made.flatten(0, 1), padded, group=group.handle)
    return torch.cat([part[:n] for part, n in zip(made, counts, strict=True)]) if counts else made.flatten(0, 1)


def spread(x: Tensor, counts: Sequence[int], arriving: Sequence[int], group: Group) -> Tensor:
    """Send `counts[i]` rows of x to rank i of the group, in a row; returns the `arriving[i]` rows of each, in a row."""
    if group.alone:
        return x
    made = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(made, x.contiguous(), list(arriving), list(counts), group=group.handle)
    return made


def sent(x: Tensor, source: int, group: Group) -> Tensor:
    """The tensor of the rank at place `source` of a group, on all of them; x gives shape and dtype on the others."""
    if group.alone:
        return x
    made = x.contiguous().clone()
    dist.broadcast(made, src=group.ranks[source], group=group.handle)
    return made


def told(value: Any, group: Group) -> list[Any]:
    """What each rank of a group says, any object."""
    if group.alone:
        return [value]
    said: list[Any] = [None] * group.size
    dist.all_gather_object(said, value, group=group.handle)
    return said


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over a group of parts of one result; each rank goes on with the whole, so its gradient is that of its part."""
    return x if group.alone else _Summed.apply(x, group)  # type: ignore[no-untyped-call]  # torch's own


def copied(x: Tensor, group: Group) -> Tensor:
    """x itself, used by each rank of a group for another part of a result: its gradient is the sum of theirs."""
    return x if group.alone else _Copied.apply(x, group)  # type: ignore[no-untyped-call]  # torch's own


def carried(x: Tensor, counts: Sequence[int], arriving: Sequence[int], group: Group) -> Tensor:
    """`spread`, with a gradient: that of each row travels back to where the row came from."""
    return x if group.alone else _Carried.apply(x, counts, arriving, group)  # type: ignore[no-untyped-call]  # torch's own


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return total(grad, ctx.group), None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], arriving: Sequence[int], group: Group) -> Tensor:
        ctx.way = arriving, counts, group
        return spread(x, counts, arriving, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return spread(grad, *ctx.way), None, None, None


def _reduced(x: Tensor, group: Group, how: Any) -> Tensor:
    if group.alone:
        return x
    made = x.detach().clone().contiguous()
    dist.all_reduce(made, op=how, group=group.handle)
    return made
