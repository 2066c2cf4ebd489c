"""The device mesh: which rank stands where on which axis, and which piece of a tensor it holds, uneven splits included.

Placements are those of `flow.placements`, one an axis, by the axis's name: one of DENSE, of EXPERT, or a JOINED one.
Axes that shard the same dimension cut it one after another in the order of the mesh, each cutting what the one before
has left; one that is placed as `_StridedShard` waits for the faster ones.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowledger.flow.axes import AXES, DENSE, EXPERT, JOINED
from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.flow.placements import Placement, parse_placement

Interval = tuple[int, int]  # start, stop
Box = tuple[Interval, ...]  # one interval a dimension


@dataclass(frozen=True, slots=True)
class Mesh:
    """The degrees of EXPERT, slowest axis first; ranks are numbered in row-major order."""

    expert_degrees: tuple[int, ...] = (1,) * len(EXPERT)

    @property
    def size(self) -> int:
        """How many ranks there are: pp*dp*cp*sp*tp."""
        return math.prod(self.expert_degrees)

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """(axis, degree) of the axes of DENSE in their order, and of ep, which rides on dp."""
        return tuple((axis, self.degree(axis)) for axis in (*DENSE, "ep"))

    def degree(self, axis: str) -> int:
        """How many positions an axis has."""
        return math.prod(degree for _, degree in _steps(self.expert_degrees, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis of DENSE -> position of this rank along it. Raises BadInput for a rank outside the mesh."""
        return {axis: self.at(rank, axis) for axis in DENSE}

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Axis of EXPERT -> position of this rank along it. Raises BadInput for a rank outside the mesh."""
        return {axis: self.at(rank, axis) for axis in EXPERT}

    def at(self, rank: int, axis: str) -> int:
        """The position of a rank along any axis, a joined one too. Raises BadInput for a rank outside the mesh."""
        if not 0 <= rank < self.size:
            raise BadInput(f"rank {rank} is outside a mesh of {self.size}; ranks run from 0 to {self.size - 1}")
        position = 0
        for stride, degree in _steps(self.expert_degrees, axis):
            position = position * degree + rank // stride % degree
        return position

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis that is not given counts as 0. Raises BadInput outside the mesh."""
        found = dict.fromkeys(EXPERT, 0)  # what each axis adds to the rank
        for axis, position in coordinates.items():
            if not 0 <= position < self.degree(axis):
                raise BadInput(f"{axis} = {position} is outside the mesh; it runs from 0 to {self.degree(axis) - 1}")
            for one, (stride, degree) in zip(
                reversed(parts(axis)), reversed(_steps(self.expert_degrees, axis)), strict=True
            ):
                position, at = divmod(position, degree)
                found[one] = at * stride
        return sum(found.values())

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along one axis only, itself included: who takes part in a collective."""
        here = self.expert_coordinates(rank)
        return self.ranks({**{one: (at,) for one, at in here.items()}, axis: range(self.degree(axis))})

    def beside(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """What ranks that differ along these axes alone have in common: the positions along all others."""
        differing = {one for axis in axes for one in parts(axis)}
        return tuple(at for axis, at in self.expert_coordinates(rank).items() if axis not in differing)

    def ranks(self, positions: Mapping[str, Iterable[int]]) -> tuple[int, ...]:
        """The ranks whose position along each of these axes is one of those given; an axis not given may be anywhere.

        A joined axis takes the place of its parts. Raises BadInput for positions outside the mesh.
        """
        covered = {one for axis in positions if axis in JOINED for one in parts(axis)}
        free = {one: range(self.degree(one)) for one in EXPERT if one not in covered}
        along = {**free, **{axis: at for axis, at in positions.items() if axis not in covered}}
        offsets = [[self.rank({axis: at}) for at in positions] for axis, positions in along.items()]
        return tuple(sorted(map(sum, itertools.product(*offsets))))


def parts(axis: str) -> tuple[str, ...]:
    """The axes of EXPERT that an axis is made of. Raises BadInput for a name that is no axis."""
    if axis in JOINED:
        return JOINED[axis]
    if axis not in EXPERT:
        raise BadInput(f"mesh axis {axis!r} is none of {', '.join(dict.fromkeys((*AXES, *EXPERT, *JOINED)))}")
    return (axis,)


@lru_cache(maxsize=4096)
def _steps(expert_degrees: tuple[int, ...], axis: str) -> tuple[tuple[int, int], ...]:
    """(ranks from one position to the next, degree) of each part of an axis."""
    places = [EXPERT.index(one) for one in parts(axis)]
    return tuple((math.prod(expert_degrees[place + 1 :]), expert_degrees[place]) for place in places)


def mesh(**degrees: int) -> Mesh:
    """The mesh with these degrees of AXES; axes not named have degree 1.

    Raises BadInput for other axes, for a degree below 1, and where ep does not divide dp.
    """
    for axis, degree in degrees.items():
        if axis not in AXES:
            raise BadInput(f"mesh axis {axis!r} is none of {', '.join(AXES)}")
        if degree < 1:
            raise BadInput(f"mesh.{axis} = {degree}: a degree is at least 1")
    dp, ep = degrees.get("dp", 1), degrees.get("ep", 1)
    if dp % ep:
        raise BadInput(f"mesh.ep = {ep} does not divide mesh.dp = {dp}; nearest: ep = {nearest_divisor(ep, dp)}")
    found = {**degrees, "edp": dp // ep, "ep": ep}
    return Mesh(tuple(found.get(axis, 1) for axis in EXPERT))


def cut(interval: Interval, pieces: int, index: int) -> Interval:
    """Piece `index` of an interval cut as torch.chunk does: pieces of ceiling size, the last ones smaller or empty."""
    start, stop = interval
    length = -(-(stop - start) // pieces)
    return min(stop, start + index * length), min(stop, start + (index + 1) * length)


def cuts(placements: Mapping[str, str], dims: int, on: Mesh) -> list[tuple[str, int]]:
    """(axis, dim) of every cut of a tensor with `dims` dimensions, in the order in which they are made.

    Raises BadInput for a dimension that is not there, axes that overlap, or a split factor that is not the mesh's.
    """
    sharding: list[tuple[str, Placement, int]] = []
    for axis, text in placements.items():
        placement = parse_placement(text)
        if placement.dim is None:
            continue
        if not -dims <= placement.dim < dims:
            raise BadInput(f"{axis} = {placement}: a tensor of {dims} dimensions has no dimension {placement.dim}")
        sharding.append((axis, placement, placement.dim % dims))
    sharding.sort(key=lambda one: EXPERT.index(parts(one[0])[0]))
    _check_overlap([axis for axis, _, _ in sharding])
    waiting = [one for one in sharding if one[1].kind == "_StridedShard"]
    for axis, placement, dim in waiting:
        _check_split_factor(axis, placement, [other for other, _, at in sharding if at == dim], on)
    at_once = [one for one in sharding if one[1].kind == "Shard"]
    return [(axis, dim) for axis, _, dim in (*at_once, *reversed(waiting))]


def _check_overlap(axes: Sequence[str]) -> None:
    used: dict[str, str] = {}
    for axis in axes:
        for one in parts(axis):
            if one in used:
                raise BadInput(
                    f"placements along {used[one]} and {axis}: both are counted along {one}; give one of them"
                )
            used[one] = axis


def _check_split_factor(axis: str, placement: Placement, same_dim: Sequence[str], on: Mesh) -> None:
    faster = math.prod(on.degree(other) for other in same_dim[same_dim.index(axis) + 1 :])
    if placement.split_factor not in (None, faster):
        raise BadInput(f"{axis} = {placement}: faster axes of this mesh cut that dimension into {faster} pieces")


def local_box(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> Box:
    """Start and stop along every dimension of this rank's piece. Raises BadInput for a dim out of range."""
    box: list[Interval] = [(0, size) for size in shape]
    for axis, dim in cuts(placements, len(shape), on):
        box[dim] = cut(box[dim], on.degree(axis), on.at(rank, axis))
    return tuple(box)


def local_shape(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of the piece that this rank holds; 0 along a dimension of which nothing is left for it."""
    return tuple(stop - start for start, stop in local_box(shape, placements, on, rank))


def local_slices(shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int) -> tuple[slice, ...]:
    """The same as slices, to index the logical tensor with."""
    return tuple(slice(start, stop) for start, stop in local_box(shape, placements, on, rank))


def buffer_shape(
    shape: Sequence[int], placements: Mapping[str, str], on: Mesh, rank: int, *, axis: str
) -> tuple[int, ...]:
    """The shape of the buffer in which this rank keeps its piece where pieces along `axis` are padded to equal size.

    FSDP2 does so: every buffer is as large as that of the group's first rank, which holds a whole chunk.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `padded_sharded_param_size`.
    """
    first = min(on.group(axis, rank))
    return local_shape(shape, placements, on, first)


def holders(index: Sequence[int], shape: Sequence[int], placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The ranks that hold an element. More than one where an axis replicates it (or each holds a summand of it)."""
    if len(index) != len(shape) or any(not 0 <= at < size for at, size in zip(index, shape, strict=True)):
        raise BadInput(f"element {list(index)} is outside a tensor of shape {list(shape)}")
    box: list[Interval] = [(0, size) for size in shape]
    positions: dict[str, tuple[int]] = {}
    for axis, dim in cuts(placements, len(shape), on):
        start, stop = box[dim]
        position = (index[dim] - start) // -(-(stop - start) // on.degree(axis))
        positions[axis] = (position,)
        box[dim] = cut(box[dim], on.degree(axis), position)
    return on.ranks(positions)


def authoritative(placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The ranks whose pieces together are the tensor, each element once: position 0 on every axis that does not shard.

    Along a `Partial()` axis the pieces of all positions must be added up first; the sum then counts as position 0's.
    """
    sharding = {
        one for axis, text in placements.items() if parse_placement(text).dim is not None for one in parts(axis)
    }
    return on.ranks({axis: (0,) for axis in EXPERT if axis not in sharding})


def logical_shape(locals_: Mapping[int, Sequence[int]], placements: Mapping[str, str], on: Mesh) -> tuple[int, ...]:
    """The shape that local shapes (rank -> shape, all ranks) add up to: sharded dimensions summed, the others alike.

    Raises BadInput when ranks disagree on a dimension that is not sharded between them, or the pieces do not fit.
    """
    missing = sorted(set(range(on.size)) - set(locals_))
    if missing:
        raise BadInput(f"no local shape for rank {missing[0]} of {on.size}")
    dims = {len(shape) for shape in locals_.values()}
    if len(dims) != 1:
        raise BadInput(f"ranks hold tensors of different rank: {sorted(dims)} dimensions")
    shape = tuple(_length_along(dim, locals_, placements, on) for dim in range(dims.pop()))
    for rank, held in locals_.items():
        due = local_shape(shape, placements, on, rank)
        if due != tuple(held):
            raise BadInput(f"rank {rank} holds {list(held)}; of a whole {list(shape)} it should hold {list(due)}")
    return shape


def elements(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index of a tensor in row-major order."""
    return itertools.product(*(range(size) for size in shape))


def _length_along(dim: int, locals_: Mapping[int, Sequence[int]], placements: Mapping[str, str], on: Mesh) -> int:
    """The pieces of one dimension added up: along the axes that cut it, with all others held at 0."""
    cutting = {one for axis, at in cuts(placements, len(locals_[0]), on) if at == dim for one in parts(axis)}
    line = on.ranks({axis: (0,) for axis in EXPERT if axis not in cutting})
    return sum(locals_[rank][dim] for rank in line)
