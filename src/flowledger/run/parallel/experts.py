"""Expert parallelism: each rank of `ep` has some of the experts, and tokens travel to theirs."""

from torch import nn

from flowledger.run.parallel.ranks import Ranks


def cut(model: nn.Module, ranks: Ranks) -> None:
    """Leave this rank its part of the model, in place."""
