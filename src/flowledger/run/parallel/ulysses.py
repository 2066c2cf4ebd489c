"""Ulysses: before attention each rank gives tokens of most heads away and gets all tokens of its own heads; then back.

One all-to-all before attention for each of query, key and value, one after it for what it found; in backward the same
the other way. DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from math import gcd
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.run.parallel.ranks import Group

To = Literal["heads", "tokens"]
BACK: dict[To, To] = {"heads": "tokens", "tokens": "heads"}


def exchange(*, x: Tensor, group: Group, to: To) -> Tensor:
    """[1, A, T/n, D] to [1, A/n, T, D] (`heads`), or back (`tokens`), on n ranks; tokens in the order of the group.

    Raises BadInput where the heads are not divisible.
    """
    if group.alone:
        return x
    if to == "heads" and x.shape[1] % group.size:
        raise BadInput(
            f"{x.shape[1]} attention heads of a rank are not divisible by {group.name} = {group.size}, which exchange "
            f"heads for tokens; use {nearest_divisor(group.size, of=x.shape[1])}"
        )
    return _Exchange.apply(x, group, to)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


def repeated(x: Tensor, group: Group) -> Tensor:
    """Keys or values [1, K, T, D] with each head as often as it takes to give every rank equally many, in their order."""
    times = group.size // gcd(x.shape[1], group.size)
    return x if times == 1 else x.repeat_interleave(times, 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to: To) -> Tensor:
        ctx.group, ctx.to = group, to
        return _exchanged(x, group, to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.group, BACK[ctx.to]), None, None


def _exchanged(x: Tensor, group: Group, to: To) -> Tensor:
    n, (heads, tokens, width) = group.size, x.shape[1:]
    if to == "heads":
        parts = _all_to_all(x.contiguous(), group)
        return parts.view(n, heads // n, tokens, width).transpose(0, 1).reshape(1, heads // n, n * tokens, width)
    parts = x.view(heads, n, tokens // n, width).transpose(0, 1).contiguous()
    return _all_to_all(parts, group).view(1, n * heads, tokens // n, width)


def _all_to_all(parts: Tensor, group: Group) -> Tensor:
    """Send the i-th of n equal parts to rank i; returns those that arrive, in order."""
    made = torch.empty_like(parts)
    dist.all_to_all_single(made, parts, group=group.handle)
    return made
