"""A model's parameters on each rank: FSDP2 over what tensor, expert and pipeline parallelism leave of each weight.

Each weight is cut by itself: tp cuts `tp_dim`, ep the experts, then FSDP2 dim 0 of what is left, in torch.chunk's pieces. What a
rank has of a layer is the sum over its weights, and not P/n.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from flowledger.flow.mesh import Mesh, local_shape, mesh
from flowledger.flow.rank_classes import rank_classes
from flowledger.plan.weight import ADAPTER, Weight

FIRST, LAST = ("embed", "positions"), ("final_norm", "head")  # parts outside layers -> the stage of a pipeline


@dataclass(frozen=True, slots=True)
class Cut:
    """One weight as its axes cut it."""

    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts of a layer are one tensor [E, ...]."""
        one = self.weight
        return (one.count, *one.shape) if one.expert else one.shape

    @property
    def placements(self) -> Mapping[str, str]:
        """Axis -> placement; whoever cuts last waits for the others."""
        one = self.weight
        if one.expert:
            return {"ep": "Shard(0)", "expert_shards": "_StridedShard(0)"}
        return {"shards": "_StridedShard(0)"} | ({} if one.tp_dim is None else {"tp": f"Shard({one.tp_dim})"})

    @property
    def left(self) -> Mapping[str, str]:
        """The same without FSDP's axis: what is whole while a layer computes."""
        return {axis: text for axis, text in self.placements.items() if not axis.endswith("shards")}


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One model on a mesh."""

    weights: tuple[Weight, ...]
    on: Mesh
    stages: tuple[tuple[int, ...], ...]  # the layers of each rank of pp
    tied: bool = False  # one weight is embedding and head: both ends of a pipeline have it
    adapted: bool = False  # its adapters alone are trained

    def held(self, rank: int, layer: int | None) -> tuple[Cut, ...]:
        """What the pipeline stage of a rank has of a layer, or (null) of what no layer owns."""
        return self._of_layer.get(layer, ()) if layer is not None else self._outside(self.on.at(rank, "pp"))

    def trains(self, one: Weight) -> bool:
        """Whether a weight of it is trained."""
        return not self.adapted or one.part == ADAPTER

    @cached_property
    def trained(self) -> "Shards":
        """What is trained of it."""
        return replace(self, weights=tuple(one for one in self.weights if self.trains(one)))

    def whole(self, rank: int, layer: int | None) -> int:
        """P: its elements on all ranks of the stage together."""
        return sum(cut.weight.numel for cut in self.held(rank, layer))

    def local(self, rank: int, layer: int | None) -> int:
        """Its elements on this rank."""
        return sum(self.piece(cut, rank) for cut in self.held(rank, layer))

    def piece(self, cut: Cut, rank: int) -> int:
        """Elements of a weight on a rank."""
        return prod(local_of(cut, self.on, rank))

    def left(self, cut: Cut, rank: int) -> tuple[int, ...]:
        """The shape of what all axes but FSDP's leave of a weight on a rank."""
        return _left(cut, self.on, rank)

    def classes(self, layer: int | None, first: int) -> tuple[tuple[int, int], ...]:
        """(first, count) of the ranks with equal pieces of every weight, in the pipeline stage whose first rank is given."""
        flat = mesh(**{**dict(self.on.degrees), "pp": 1})
        alike = _classes(
            flat, tuple(dict.fromkeys((cut.shape, *cut.placements.items()) for cut in self.held(first, layer)))
        )
        return tuple((first + start, count) for start, count in alike)

    @cached_property
    def _of_layer(self) -> Mapping[int, tuple[Cut, ...]]:
        found: dict[int, list[Cut]] = {}
        for one in self.weights:
            if one.layer is not None:
                found.setdefault(one.layer, []).append(Cut(one))
        return {layer: tuple(cuts) for layer, cuts in found.items()}

    def _outside(self, stage: int) -> tuple[Cut, ...]:
        last = stage == len(self.stages) - 1
        parts = {*(FIRST if stage == 0 else ()), *(LAST if last else ()), *(("embed",) if self.tied and last else ())}
        return tuple(Cut(one) for one in self.weights if one.layer is None and one.part in parts)


@lru_cache(maxsize=4096)
def local_of(cut: Cut, on: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of the piece that a rank has of a weight."""
    return local_shape(cut.shape, cut.placements, on, rank)


@lru_cache(maxsize=4096)
def _left(cut: Cut, on: Mesh, rank: int) -> tuple[int, ...]:
    return local_shape(cut.shape, cut.left, on, rank)


@lru_cache(maxsize=512)
def _classes(on: Mesh, cuts: tuple[tuple[Any, ...], ...]) -> tuple[tuple[int, int], ...]:
    found = rank_classes(on, [(shape, dict(placements)) for shape, *placements in cuts])
    return tuple((one.first, one.count) for one in found)
