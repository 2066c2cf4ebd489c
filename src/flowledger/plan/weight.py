"""One parameter tensor of a model, and how much of it one rank holds."""

from dataclasses import dataclass
from math import prod

ADAPTER = "adapter"  # the part of a LoRA matrix


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor `[out, in]`, or `count` equal ones (the experts of one layer).

    `tp_dim` is the dimension that tensor parallelism cuts (column-parallel 0, row-parallel 1, embedding and head 0);
    None: whole on every rank. `unit`: the smallest piece it is cut into (one head of keys is copied, not cut).
    """

    name: str
    part: str
    layer: int | None
    shape: tuple[int, ...]
    tp_dim: int | None = None
    expert: bool = False
    count: int = 1
    unit: int = 1

    @property
    def numel(self) -> int:
        """count * prod(shape)."""
        return self.count * prod(self.shape)


def local_numel(weight: Weight, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
    """Elements of a weight on one rank: experts are dealt to ep ranks and cut by etp (null: tp), the rest is cut by tp.

    A dimension that does not divide is rounded up: the figure of the fullest rank.
    """
    degree = (etp or tp) if weight.expert else tp
    number = -(-weight.count // ep) if weight.expert else weight.count
    if weight.tp_dim is None:
        return number * prod(weight.shape)
    cut = weight.shape[weight.tp_dim]
    piece = min(cut, max(-(-cut // degree), weight.unit))
    return number * prod(weight.shape) // cut * piece
