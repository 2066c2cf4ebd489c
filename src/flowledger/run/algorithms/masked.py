"""Sum, mean, variance and whitening over the unmasked tokens of a batch. A masked token can hold anything, even NaN.

The operations and the small terms in the denominators are verl's, so that results are equal where rounding decides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-8  # verl's, beside what divides: a number of tokens, a variance, a sum of weights


class Moments(NamedTuple):
    """Statistics of the unmasked tokens, each []."""

    mean: Tensor
    variance: Tensor  # unbiased; 0 below two tokens
    tokens: Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` [B, S] where `mask` [B, S] is 1, over `dim` or over all."""
    kept = torch.where(mask.bool(), values, 0.0) * mask
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` [B, S] where `mask` [B, S] is 1, over `dim` or over all; 0 where nothing is unmasked."""
    tokens = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / (tokens + TINY)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Mean and unbiased variance of `values` [B, S] over all unmasked tokens.

    verl raises where fewer than two tokens are unmasked; here the variance is 0 then.
    """
    mean, tokens = masked_mean(values, mask), mask.sum()
    variance = masked_mean((values - mean) ** 2, mask) * (tokens / (tokens - 1).clamp(min=1))
    return Moments(mean, torch.where(tokens > 1, variance, 0.0), tokens)


def whitened(values: Tensor, found: Moments) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8), any shape; 0 everywhere where `found` has seen fewer than two tokens."""
    scaled = (values - found.mean) * torch.rsqrt(found.variance + TINY)
    return torch.where(found.tokens > 1, scaled, 0.0)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, S] with mean 0 and variance 1 over the unmasked tokens.

    Masked tokens are moved and scaled as well, as in verl: multiply by the mask where they must be 0.
    """
    return whitened(values, moments(values, mask))
