"""Sums that run backwards along a response, y_t = x_t + f * y_{t+1}, without a step of Python per token.

Tokens that the environment wrote are passed over: the sum carries on across them as if they were not there. So the
unmasked tokens of each row are moved to its front, summed, and moved back.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens that one row of a matrix product sums; on CPU 32 to 128 take the same time


def suffix_sums(x: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor * y_{t+1} along the last dimension [..., S], 0 <= factor <= 1.

    Each chunk is multiplied by the triangular matrix of powers; what flows in from the chunk behind it is a sum of the
    same kind over the chunks' first values, with factor^CHUNK.
    """
    if factor == 1.0:
        return x.flip(-1).cumsum(-1).flip(-1)
    length = x.shape[-1]
    if length <= CHUNK:
        return x @ _powers(length, factor, x)
    chunks = pad(x, (0, -length % CHUNK)).reshape(*x.shape[:-1], -1, CHUNK)  # [..., S / CHUNK, CHUNK]
    inside = chunks @ _powers(CHUNK, factor, x)
    behind = suffix_sums(inside[..., 0], factor**CHUNK)[..., 1:]
    carried = pad(behind, (0, 1))  # nothing is behind the last chunk
    distance = torch.arange(CHUNK, 0, -1, dtype=torch.float64, device=x.device)
    decay = torch.pow(factor, distance).to(x.dtype)
    return (inside + carried[..., None] * decay).flatten(-2)[..., :length]


def masked_suffix_sums(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor * y_{the next unmasked token} at unmasked tokens of `x`, `mask` [B, S].

    A masked token holds the sum of the next unmasked one, 0 behind the last: what verl's backward loop carries there.
    """
    return expand(suffix_sums(compact(x, mask), factor), mask)


def following(x: Tensor, mask: Tensor) -> Tensor:
    """Value of `x` [B, S] at the first unmasked token after each position; 0 where none follows."""
    return compact(x, mask).gather(1, mask.bool().cumsum(-1))


def compact(x: Tensor, mask: Tensor) -> Tensor:
    """Unmasked tokens of `x` [B, S] at the front of each row and zeros behind them [B, S + 1]."""
    unmasked = mask.bool()
    rows, length = x.shape
    place = torch.where(unmasked, _before(mask), length)  # all masked ones write their 0 to the last column
    return x.new_zeros(rows, length + 1).scatter(1, place, torch.where(unmasked, x, 0.0))


def expand(front: Tensor, mask: Tensor) -> Tensor:
    """What `compact` gave [B, S + 1], back in its places [B, S]; a masked token holds the next unmasked one's value."""
    return front.gather(1, _before(mask))


def _before(mask: Tensor) -> Tensor:
    """How many unmasked tokens stand before each position, int64 [B, S]."""
    unmasked = mask.bool()
    return unmasked.cumsum(-1) - unmasked.long()


def _powers(length: int, factor: float, like: Tensor) -> Tensor:
    """[length, length] with factor^(s - t) at row s, column t <= s, 0 elsewhere; made in float64."""
    step = torch.arange(length, dtype=torch.float64, device=like.device)
    exponent = step[:, None] - step
    return torch.where(exponent >= 0, torch.pow(factor, exponent.clamp(min=0)), 0.0).to(like.dtype)
