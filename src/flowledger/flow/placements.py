"""Placements: how one axis of the mesh holds a tensor, spelled as in `torch.distributed.tensor`."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flowledger.flow.errors import BadInput

# Shard(d) and _StridedShard(d), as reprs and as torch prints them: S(0), _S(0, 2); then Replicate and Partial.
_SPELLING = re.compile(
    r"(?P<shard>Shard|S)\((?:dim=)?(?P<dim>-?\d+)\)"
    r"|_(?:StridedShard|S)\((?:dim=)?(?P<strided>-?\d+)(?:, *(?:sf=|split_factor=)?(?P<factor>\d+))?\)"
    r"|(?P<replicate>Replicate|R)(?:\(\))?"
    r"|(?P<partial>Partial|P)(?:\(\w*\))?"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """How one axis of the mesh holds a tensor: a piece of dimension `dim`, a copy, or a summand.

    `_StridedShard` cuts what faster axes have left of the dimension, where `Shard` cuts before them: FSDP2 cuts the
    pieces that tensor parallelism made. `split_factor` is how many those are, where it was said.
    """

    kind: Literal["Shard", "_StridedShard", "Replicate", "Partial"]
    dim: int | None = None
    split_factor: int | None = None

    def __str__(self) -> str:
        factor = "" if self.split_factor is None else f", {self.split_factor}"
        return f"{self.kind}({'' if self.dim is None else self.dim}{factor})"


@lru_cache(maxsize=256)
def parse_placement(text: str) -> Placement:
    """`Shard(0)`, `_StridedShard(0)`, `Replicate()` or `Partial()`; torch's `S(0)`, `_S(0, 2)`, `P(sum)` too.

    Raises BadInput for anything else.
    """
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"placement {text!r} is none of Shard(d), _StridedShard(d), Replicate() and Partial()")
    if match["shard"]:
        return Placement("Shard", int(match["dim"]))
    if match["strided"]:
        return Placement("_StridedShard", int(match["strided"]), int(match["factor"]) if match["factor"] else None)
    return Placement("Replicate" if match["replicate"] else "Partial")
