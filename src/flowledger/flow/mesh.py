"""The device mesh: which rank stands where on which axis, and which piece of a tensor it holds, uneven splits included.

Placements are those of `flow.placements`, one an axis, by the axis's name: one of DENSE, of EXPERT, or a JOINED one.
The ranks are counted in two ways (see `flow.axes`); an axis is its steps: how far apart neighbours are, and how many.
Axes that shard the same dimension cut it one after another in the order of the mesh, each cutting what the one before
has left; one that is placed as `_StridedShard` waits for the faster ones.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowledger.flow.axes import AXES, DEGREES, DENSE, EXPERT
from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.flow.placements import Placement, parse_placement

Interval = tuple[int, int]  # start, stop
Box = tuple[Interval, ...]  # one interval a dimension


Step = tuple[int, int]  # ranks from one position to the next, how many positions


@dataclass(frozen=True, slots=True)
class Mesh:
    """The degrees of DENSE, slowest axis first; ranks are numbered in row-major order. Experts are dealt along ep.

    Without `etp` ep rides on dp: inside of it are cp, sp and tp. With it (Megatron) only etp ranks are inside of ep.
    """

    dense: tuple[int, ...] = (1,) * len(DENSE)
    ep: int = 1
    etp: int | None = None

    @property
    def size(self) -> int:
        """How many ranks there are: pp*dp*cp*sp*tp."""
        return math.prod(self.dense)

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """(axis, degree) of the axes of DENSE in their order, of ep, and of etp where experts are folded."""
        experts = ("ep",) if self.etp is None else ("ep", "etp")
        return tuple((axis, self.degree(axis)) for axis in (*DENSE, *experts))

    @property
    def digits(self) -> tuple[Step, ...]:
        """Slowest first: a rank written with these digits has its place along both countings of the ranks in whole ones.

        Where no digits do that (cp = 3 and ep = 4), those in question are one.
        """
        return _digits(self)

    def degree(self, axis: str) -> int:
        """How many positions an axis has."""
        return math.prod(degree for _, degree in self.steps(axis))

    def steps(self, axis: str) -> tuple[Step, ...]:
        """The steps of an axis, of a joined one several, slowest first. Raises BadInput for a name that is no axis."""
        known = _steps(self)
        if axis not in known:
            raise BadInput(f"mesh axis {axis!r} is none of {', '.join(dict.fromkeys((*AXES, *known)))}")
        return known[axis]

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
        for stride, degree in self.steps(axis):
            position = position * degree + rank // stride % degree
        return position

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, along axes that do not overlap; an axis not given counts as 0.

        Raises BadInput outside the mesh.
        """
        return sum(self._offset(axis, position) for axis, position in coordinates.items())

    def along(self, axes: Iterable[str], start: int = 0) -> tuple[int, ...]:
        """The ranks that `start` is in line with: those that differ along these axes alone, itself included."""
        steps = {step for axis in axes for step in self.steps(axis)}
        first = start - sum(start // stride % degree * stride for stride, degree in steps)
        offsets = [range(0, stride * degree, stride) for stride, degree in steps]
        return tuple(sorted(first + sum(moved) for moved in itertools.product(*offsets)))

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along one axis only, itself included: who takes part in a collective."""
        self.at(rank, axis)  # raises for a rank outside
        return self.along((axis,), rank)

    def beside(self, rank: int, axes: Iterable[str]) -> int:
        """The first of the ranks that differ from this one along these axes alone: the same for all of them."""
        steps = {step for axis in axes for step in self.steps(axis)}
        return rank - sum(rank // stride % degree * stride for stride, degree in steps)

    def ranks(self, positions: Mapping[str, Iterable[int]]) -> tuple[int, ...]:
        """The ranks whose position along each of these axes is one of those given; an axis not given may be anywhere.

        Raises BadInput for positions outside the mesh.
        """
        free, offsets, apart = set(self.digits), list[Sequence[int]](), dict[str, set[int]]()
        for axis, given in positions.items():
            places, mine = set(given), set(self.digits_of(axis))
            moved = [self._offset(axis, at) for at in places]
            if mine <= free and math.prod(degree for _, degree in mine) == self.degree(axis):
                free -= mine
                offsets.append(moved)
            else:  # an axis of the other counting, in part where those before are
                apart[axis] = places
        offsets += [range(0, stride * degree, stride) for stride, degree in free]
        found = sorted(map(sum, itertools.product(*offsets)))
        return tuple(rank for rank in found if all(self.at(rank, axis) in places for axis, places in apart.items()))

    def digits_of(self, axis: str) -> tuple[Step, ...]:
        """The digits that tell the position along an axis, and more where none tell that alone."""
        return tuple(digit for digit in self.digits if any(_overlap(digit, step) for step in self.steps(axis)))

    def _offset(self, axis: str, position: int) -> int:
        """How far this position along an axis is from the first."""
        if not 0 <= position < self.degree(axis):
            raise BadInput(f"{axis} = {position} is outside the mesh; it runs from 0 to {self.degree(axis) - 1}")
        found = 0
        for stride, degree in reversed(self.steps(axis)):
            position, at = divmod(position, degree)
            found += at * stride
        return found


@lru_cache(maxsize=4096)
def _steps(on: Mesh) -> Mapping[str, tuple[Step, ...]]:
    """Axis -> its steps, slowest first."""
    ends = list(itertools.accumulate(reversed(on.dense), operator.mul, initial=1))
    strides = dict(zip(reversed(DENSE), ends, strict=False))
    one = {axis: (strides[axis], degree) for axis, degree in zip(DENSE, on.dense, strict=True)}
    stage, inside = strides["pp"], strides["dp"] if on.etp is None else on.etp
    one |= {"edp": (inside * on.ep, stage // (inside * on.ep)), "ep": (inside, on.ep), "etp": (1, on.etp or 1)}
    shared = (
        () if on.etp else (one["cp"], one["sp"])
    )  # of the ranks with the same experts those that FSDP cuts them over
    return {axis: (step,) for axis, step in one.items()} | {
        "tokens": (one["cp"], one["sp"]),
        "shards": (one["dp"], one["cp"], one["sp"]),
        "expert_shards": (one["edp"], *shared),
    }


@lru_cache(maxsize=4096)
def _digits(on: Mesh) -> tuple[Step, ...]:
    """Every step of an axis ends one, but where it is not in line with the ends of all others."""
    ends = {end for steps in _steps(on).values() for stride, degree in steps for end in (stride, stride * degree)}
    kept = sorted(end for end in ends if all(end % other == 0 or other % end == 0 for other in ends))
    return tuple((start, end // start) for start, end in itertools.pairwise(kept))[::-1]


def _overlap(one: Step, other: Step) -> bool:
    return max(one[0], other[0]) < min(one[0] * one[1], other[0] * other[1])


def mesh(**degrees: int) -> Mesh:
    """The mesh with these degrees of DEGREES; axes not named have degree 1, and without etp experts ride on dp.

    Raises BadInput for other axes, for a degree below 1, and where ep does not divide dp, or ep*etp a pipeline stage.
    Source of the folding: megatron/core/parallel_state.py, `expert_decoder_rank_generator`.
    """
    for axis, degree in degrees.items():
        if axis not in DEGREES:
            raise BadInput(f"mesh axis {axis!r} is none of {', '.join(DEGREES)}")
        if degree < 1:
            raise BadInput(f"mesh.{axis} = {degree}: a degree is at least 1")
    ep, etp, dp = degrees.get("ep", 1), degrees.get("etp"), degrees.get("dp", 1)
    found = Mesh(tuple(degrees.get(axis, 1) for axis in DENSE), ep, etp)
    if etp is None and dp % ep:
        raise BadInput(f"mesh.ep = {ep} does not divide mesh.dp = {dp}; nearest: ep = {nearest_divisor(ep, dp)}")
    stage = found.size // found.dense[0]
    if etp is not None and stage % (ep * etp):
        there = f"the {stage} ranks of a pipeline stage"
        if stage % etp:
            raise BadInput(f"mesh.etp = {etp} does not divide {there}; nearest: etp = {nearest_divisor(etp, stage)}")
        nearest = nearest_divisor(ep, stage // etp)
        raise BadInput(f"mesh.ep*mesh.etp = {ep}*{etp} does not divide {there}; nearest: ep = {nearest}")
    return found


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
    sharding.sort(key=lambda one: _slowness(on.steps(one[0])[0]), reverse=True)
    _check_overlap([axis for axis, _, _ in sharding], on)
    waiting = [one for one in sharding if one[1].kind == "_StridedShard"]
    for axis, placement, dim in waiting:
        _check_split_factor(axis, placement, [other for other, _, at in sharding if at == dim], on)
    at_once = [one for one in sharding if one[1].kind == "Shard"]
    return [(axis, dim) for axis, _, dim in (*at_once, *reversed(waiting))]


def _slowness(step: Step) -> tuple[int, int]:
    """Greater for a slower axis, degrees of 1 included."""
    return step[0] * step[1], step[0]


def _check_overlap(axes: Sequence[str], on: Mesh) -> None:
    for one, other in itertools.combinations(axes, 2):
        if any(_overlap(*pair) for pair in itertools.product(on.steps(one), on.steps(other))):
            raise BadInput(
                f"placements along {one} and {other}: both are counted over the same ranks; give one of them"
            )


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
    return on.along(axis for axis, text in placements.items() if parse_placement(text).dim is not None)


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
    line = on.along(axis for axis, at in cuts(placements, len(locals_[0]), on) if at == dim)
    return sum(locals_[rank][dim] for rank in line)
