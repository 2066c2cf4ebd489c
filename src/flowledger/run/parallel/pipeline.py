"""Pipeline parallelism: each rank of `pp` has some of the layers, and micro-batches pass through all of them."""

from torch import nn

from flowledger.run.parallel.ranks import Ranks


def cut(model: nn.Module, ranks: Ranks) -> None:
    """Leave this rank its part of the model, in place."""
