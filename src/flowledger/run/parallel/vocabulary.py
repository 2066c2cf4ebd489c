"""A distribution over a vocabulary that ranks share: each has the logits of some tokens, and none has all of them.

As Megatron-LM's vocabulary-parallel cross entropy (arXiv 1909.08053 §3): a maximum, a sum of exponentials and the one
logit that is looked for are put together over the ranks, [T] numbers each.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flowledger.run.parallel.collectives import largest, summed, total
from flowledger.run.parallel.ranks import ALONE, Group


def share_of(weight: Tensor) -> tuple[Group, int]:
    """Who shares the vocabulary of an output embedding [V, H], and the first token of this rank's share.

    What is cut over `tp` is cut as torch.chunk does: all shares but the last have ceil(V/tp) tokens.
    """
    if not isinstance(weight, DTensor) or weight.device_mesh.mesh_dim_names != ("tp",):
        return ALONE.group("tp"), 0
    assert weight.placements == (Shard(0),), weight.placements
    mesh = weight.device_mesh
    group = Group("tp", tuple(mesh.mesh.tolist()), mesh.get_local_rank(), mesh.get_group())
    return group, group.at * -(-len(weight) // group.size)


def log_softmax(logits: Tensor, group: Group) -> Tensor:
    """Log-probs of this rank's share of the vocabulary [T, V/tp]; the distribution is over the shares of all ranks."""
    return logits.log_softmax(-1) if group.alone else _LogSoftmax.apply(logits, group)  # type: ignore[no-untyped-call]  # torch's own


def picked(log_probs: Tensor, tokens: Tensor, first: int, group: Group) -> Tensor:
    """The log-prob [T] of each of `tokens` [T], from the rank whose share [T, V/tp], from token `first` on, it is in."""
    if group.alone:
        return log_probs.gather(-1, tokens[:, None])[:, 0]
    place = tokens - first
    mine = (place >= 0) & (place < log_probs.shape[-1])
    found = log_probs.gather(-1, (place * mine)[:, None])[:, 0]
    return summed(found.masked_fill(~mine, 0.0), group)


class _LogSoftmax(torch.autograd.Function):
    """As torch's own it keeps its result alone: d logits = d - softmax * Σ d, and that sum is over all shares."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group) -> Tensor:
        shifted = logits - largest(logits.amax(-1, keepdim=True), group)
        log_probs = shifted.sub_(total(shifted.exp().sum(-1, keepdim=True), group).log())
        ctx.save_for_backward(log_probs)
        ctx.group = group
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (log_probs,) = ctx.saved_tensors
        return grad - log_probs.exp() * total(grad.sum(-1, keepdim=True), ctx.group), None
