"""Tensor parallelism: each rank of `tp` has some heads and a part of every linear weight."""

from torch import nn

from flowledger.run.parallel.ranks import Ranks


def cut(model: nn.Module, ranks: Ranks) -> None:
    """Leave this rank its part of the model, in place."""
