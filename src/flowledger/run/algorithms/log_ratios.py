"""The one bound of log ratios: clamped to ±20 before they are exponentiated, so that no ratio leaves float32 (as in verl)."""

from torch import Tensor

BOUND = 20.0  # e^20 is far beyond any weight that is of use


def clamped(log_ratio: Tensor) -> Tensor:
    """A log ratio, any shape, within ±20. Where the clamp holds there is no gradient."""
    return log_ratio.clamp(-BOUND, BOUND)
