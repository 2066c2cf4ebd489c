"""The device mesh: which rank stands where on which axis, and which piece of a tensor it holds, uneven splits included.

Placements are spelled as in `torch.distributed.tensor`: `Shard(d)`, `Replicate()`, `Partial()`, one per axis. Axes that
shard the same dimension cut it one after another, in the order of the mesh, each cutting what the one before has left.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowledger.flow.axes import AXES
from flowledger.flow.errors import BadInput

ORDER = ("pp", "dp", "cp", "sp", "ep", "tp")  # slowest first: neighbouring ranks differ in tp, which talks the most

Interval = tuple[int, int]  # start, stop
Box = tuple[Interval, ...]  # one interval a dimension


@dataclass(frozen=True, slots=True)
class Placement:
    """How one axis of the mesh holds a tensor: a piece of dimension `dim`, a copy, or a summand."""

    kind: Literal["Shard", "Replicate", "Partial"]
    dim: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}({'' if self.dim is None else self.dim})"


def parse_placement(text: str) -> Placement:
    """`Shard(0)`, `Replicate()` or `Partial()`; torch's own spelling `S(0)`, `Partial(sum)` too. Raises BadInput."""
    match = re.fullmatch(
        r"(?:_?(Shard|S)\((?:dim=)?(-?\d+)\)|(Replicate|R)(?:\(\))?|(Partial|P)(?:\(\w*\))?)", text.strip()
    )
    if match is None:
        raise BadInput(f"placement {text!r} is none of Shard(d), Replicate() and Partial()")
    if match[1]:
        return Placement("Shard", int(match[2]))
    return Placement("Replicate" if match[3] else "Partial")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with their degrees, slowest first; ranks are numbered in row-major order."""

    degrees: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for axis, degree in self.degrees:
            if axis not in AXES:
                raise BadInput(f"mesh axis {axis!r} is none of {', '.join(AXES)}")
            if degree < 1:
                raise BadInput(f"mesh.{axis} = {degree}: a degree is at least 1")
        if len({axis for axis, _ in self.degrees}) < len(self.degrees):
            raise BadInput(f"mesh {self.degrees}: an axis is named twice")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(degree for _, degree in self.degrees)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> position of this rank along it. Raises BadInput for a rank outside the mesh."""
        if not 0 <= rank < self.size:
            raise BadInput(f"rank {rank} is outside a mesh of {self.size}; ranks run from 0 to {self.size - 1}")
        found: dict[str, int] = {}
        for axis, degree in reversed(self.degrees):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis, _ in self.degrees}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis that is not given counts as 0. Raises BadInput outside the mesh."""
        number = 0
        for axis, degree in self.degrees:
            position = coordinates.get(axis, 0)
            if not 0 <= position < degree:
                raise BadInput(f"{axis} = {position} is outside the mesh; it runs from 0 to {degree - 1}")
            number = number * degree + position
        return number

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along one axis only, itself included: who takes part in a collective."""
        here = self.coordinates(rank)
        return tuple(self.rank({**here, axis: position}) for position in range(dict(self.degrees).get(axis, 1)))


def mesh(**degrees: int) -> Mesh:
    """The mesh with these degrees in the fixed order of ORDER; axes not named have degree 1."""
    unknown = set(degrees) - set(ORDER)
    if unknown:
        raise BadInput(f"mesh axis {min(unknown)!r} is none of {', '.join(ORDER)}")
    return Mesh(tuple((axis, degrees.get(axis, 1)) for axis in ORDER))


def cut(interval: Interval, pieces: int, index: int) -> Interval:
    """Piece `index` of an interval cut as torch.chunk does: pieces of ceiling size, the last ones smaller or empty."""
    start, stop = interval
    length = -(-(stop - start) // pieces)
    return min(stop, start + index * length), min(stop, start + (index + 1) * length)


def local_box(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> Box:
    """Start and stop along every dimension of this rank's piece. Raises BadInput for a dim out of range."""
    box: list[Interval] = [(0, size) for size in shape]
    where = on.coordinates(rank)
    for axis, degree in on.degrees:
        placement = parse_placement(placements.get(axis, "Replicate()"))
        if placement.dim is None:
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise BadInput(f"{axis} = {placement}: a tensor of shape {list(shape)} has no dimension {placement.dim}")
        box[placement.dim] = cut(box[placement.dim], degree, where[axis])
    return tuple(box)


def local_shape(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of the piece that this rank holds; 0 along a dimension of which nothing is left for it."""
    return tuple(stop - start for start, stop in local_box(shape, placements, on, rank))


def local_slices(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> tuple[slice, ...]:
    """The same as slices, to index the logical tensor with."""
    return tuple(slice(start, stop) for start, stop in local_box(shape, placements, on, rank))


def holders(index: Sequence[int], shape: Sequence[int], placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The ranks that hold an element. More than one where an axis replicates it (or each holds a summand of it)."""
    if len(index) != len(shape) or any(not 0 <= at < size for at, size in zip(index, shape, strict=True)):
        raise BadInput(f"element {list(index)} is outside a tensor of shape {list(shape)}")
    return tuple(
        rank
        for rank in range(on.size)
        if all(
            start <= at < stop for at, (start, stop) in zip(index, local_box(shape, placements, on, rank), strict=True)
        )
    )


def authoritative(placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The ranks whose pieces together are the tensor, each element once: position 0 on every axis that does not shard.

    Along a `Partial()` axis the pieces of all positions must be added up first; the sum then counts as position 0's.
    """
    sharding = {axis for axis, text in placements.items() if parse_placement(text).dim is not None}
    ranks = [0]
    for axis, degree in on.degrees:
        ranks = [rank * degree + at for rank in ranks for at in (range(degree) if axis in sharding else (0,))]
    return tuple(ranks)


def logical_shape(locals_: Mapping[int, Sequence[int]], placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The shape that local shapes (rank -> shape, all ranks) add up to: sharded dimensions summed, the others alike.

    Raises BadInput when ranks disagree on a dimension that is not sharded between them, or the pieces do not fit.
    """
    owners = authoritative(placements, on)
    missing = sorted(set(range(on.size)) - set(locals_))
    if missing:
        raise BadInput(f"no local shape for rank {missing[0]} of {on.size}")
    rank_count = {len(shape) for shape in locals_.values()}
    if len(rank_count) != 1:
        raise BadInput(f"ranks hold tensors of different rank: {sorted(rank_count)} dimensions")
    shape = tuple(_length_along(dim, owners, locals_, placements, on) for dim in range(rank_count.pop()))
    for rank, held in locals_.items():
        due = local_shape(shape, placements, on, rank)
        if due != tuple(held):
            raise BadInput(f"rank {rank} holds {list(held)}; of a whole {list(shape)} it should hold {list(due)}")
    return shape


def elements(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index of a tensor in row-major order."""
    return itertools.product(*(range(size) for size in shape))


def _length_along(
    dim: int, owners: Sequence[int], locals_: Mapping[int, Sequence[int]], placements: Mapping[str, str], on: Mesh
) -> int:
    """The pieces of one dimension added up: along the axes that cut it, with all others held at 0."""
    rank_of = len(locals_[owners[0]])
    cutting = {axis for axis, text in placements.items() if _cuts(parse_placement(text), dim, rank_of)}
    line = [r for r in owners if all(axis in cutting or at == 0 for axis, at in on.coordinates(r).items())]
    return sum(locals_[rank][dim] for rank in line)


def _cuts(placement: Placement, dim: int, rank_of: int) -> bool:
    return placement.dim is not None and placement.dim % rank_of == dim
