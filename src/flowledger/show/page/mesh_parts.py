"""The parts of one tensor on its ranks, and the first law: put together they are the whole, none missing, none twice."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from flowledger.flow.axes import DENSE
from flowledger.flow.dims import parse_shape
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Interval, Mesh, cuts
from flowledger.flow.pieces import piece_of, shape_of
from flowledger.flow.slices import zigzag
from flowledger.flow.tensors import Form, Tensor

__all__ = ["Lie", "Part", "law", "lines", "parts", "shape_of"]

Part = tuple[tuple[Interval, ...], ...]  # one list of intervals a dimension


@dataclass(frozen=True, slots=True)
class Lie:
    """How a tensor lies on a mesh. `packed`: its tokens are dealt in a zig-zag where `cp` cuts them."""

    on: Mesh
    placement: Mapping[str, str]
    packed: bool = False

    def cuts(self, dims: int) -> list[tuple[str, int]]:
        """(axis, dim) of every cut that divides something."""
        return [(axis, dim) for axis, dim in cuts(self.placement, dims, self.on) if self.on.degree(axis) > 1]

    def line(self, dim: int, dims: int) -> tuple[str, ...]:
        """The axes that cut one dimension, in the order of their cuts."""
        return tuple(axis for axis, at in self.cuts(dims) if at == dim)

    def replicated(self, dims: int, holders: Sequence[int]) -> list[str]:
        """The axes along which ranks hold copies, or summands of one."""
        cut = {axis for axis, _ in self.cuts(dims)}
        return [axis for axis in _apart(self.on, tuple(holders)) if axis not in cut]


@lru_cache(maxsize=256)
def _apart(on: Mesh, holders: tuple[int, ...]) -> list[str]:
    """The axes along which these ranks stand at more than one place."""
    return [axis for axis in DENSE if len({on.at(rank, axis) for rank in holders}) > 1]


def parts(
    lie: Lie,
    logical: tuple[int, ...] | None,
    local: Mapping[int, tuple[int, ...]],
    holders: Sequence[int],
    *,
    planned: bool,
) -> tuple[dict[int, Part], tuple[int, ...]]:
    """(rank -> its part, the logical shape). By arithmetic where that gives what ranks hold; else by what they hold.

    Raises BadInput where neither does, with what does not fit.
    """
    if logical is None:
        return _as_held(lie, local, logical)
    even = Even(lie, logical)
    odd = next((rank for rank, shape in local.items() if shape_of(even.part(rank)) != shape), None)
    if odd is None:
        return {rank: even.part(rank) for rank in holders}, logical
    if planned:
        raise BadInput(
            f"rank {odd} holds {list(local[odd])} of {list(logical)}, which these placements do not give on this mesh"
        )
    return _as_held(lie, local, logical)


class Even:
    """Parts as the flow cuts them: chunks, and the zig-zag of packed tokens."""

    def __init__(self, lie: Lie, logical: tuple[int, ...]) -> None:
        self._asked = (lie.on, tuple(lie.placement.items()), lie.packed, logical)

    def part(self, rank: int) -> Part:
        return _even(*self._asked, rank)


@lru_cache(maxsize=100_000)
def _even(on: Mesh, placement: tuple[tuple[str, str], ...], packed: bool, logical: tuple[int, ...], rank: int) -> Part:
    form, row = _observed(placement, packed, logical)
    return piece_of(row, on, rank, {}, form=form)


@lru_cache(maxsize=1024)
def _observed(placement: tuple[tuple[str, str], ...], packed: bool, logical: tuple[int, ...]) -> tuple[Form, Tensor]:
    """A form with these very sizes, and a tensor that has nothing but it: what it is called and for does not matter here."""
    dims, padding = parse_shape(str(list(logical))), "packed" if packed else "none"
    form = Form(name="observed", dims=dims, padding=padding, placement=dict(placement))
    return form, Tensor(
        name="", forms=(form,), dtype="", kind="", mask=None, producer="", readers=(), freed_by="", lifetime="", owner="",
        placement={}, common_bug="", common_bug_zh="", purpose="", purpose_zh="",
    )  # fmt: skip


def is_even(lie: Lie, logical: tuple[int, ...], held: Mapping[int, Part]) -> bool:
    """Whether parts lie where the flow cuts them; else they are laid out by size, and where they lie is not known."""
    even = Even(lie, logical)
    return all(shape_of(even.part(rank)) == shape_of(part) for rank, part in held.items())


def _as_held(
    lie: Lie, local: Mapping[int, tuple[int, ...]], logical: tuple[int, ...] | None
) -> tuple[dict[int, Part], tuple[int, ...]]:
    """Laid out by the sizes that ranks recorded: one after another along each cut, of the others each its own length."""
    ndim = {len(shape) for shape in local.values()}
    if len(ndim) != 1:
        raise BadInput(f"ranks hold tensors of {sorted(ndim)} dimensions")
    dims = ndim.pop()
    sides = [_side(lie, dim, dims, local) for dim in range(dims)]
    found = {rank: tuple(side[rank] for side in sides) for rank in local}
    ends = tuple(max((stop for part in found.values() for _, stop in part[dim]), default=0) for dim in range(dims))
    return found, logical if logical is not None else ends


def _side(lie: Lie, dim: int, dims: int, local: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[Interval, ...]]:
    axes, on = lie.line(dim, dims), lie.on
    lines: dict[int, dict[int, int]] = {}
    for rank, shape in local.items():
        lines.setdefault(on.beside(rank, axes), {})[rank] = shape[dim]
    found: dict[int, tuple[Interval, ...]] = {}
    for line in lines.values():
        if len(line) != prod(on.degree(axis) for axis in axes):
            raise BadInput(
                f"of the ranks that share dimension {dim} only {len(line)} recorded it: {', '.join(map(str, line))}"
            )
        found |= _deal(lie, axes, line)
    return found


def _deal(lie: Lie, axes: Sequence[str], line: Mapping[int, int]) -> dict[int, tuple[Interval, ...]]:
    """Rank -> where its part of one line is: neighbours, but for the zig-zag within a `cp` group of equal parts."""
    on = lie.on
    ordered = sorted(line, key=lambda rank: [on.at(rank, axis) for axis in axes])
    starts = dict(zip(ordered, itertools.accumulate((line[rank] for rank in ordered), initial=0), strict=False))
    found: dict[int, tuple[Interval, ...]] = {rank: ((starts[rank], starts[rank] + line[rank]),) for rank in ordered}
    if not lie.packed or axes[-1:] != ("cp",):
        return found
    for rank in ordered:
        ring = [other for other in ordered if on.beside(other, ("cp",)) == on.beside(rank, ("cp",))]
        sizes = {line[other] for other in ring}
        if len(sizes) == 1:
            start, length = min(starts[other] for other in ring), sum(line[other] for other in ring)
            found[rank] = tuple(
                (start + low, start + high) for low, high in zigzag(length, len(ring), on.at(rank, "cp")) if low < high
            )
    return found


def law(
    lie: Lie, logical: tuple[int, ...], held: Mapping[int, Part], holders: Sequence[int], *, counted: bool
) -> dict[str, Any]:
    """Elements of the whole, and of these how many no rank holds and how many different parts share.

    `counted`: the dimension counts the parameters of a layer, and ranks of `tp` each have the small ones whole. `why` names
    what an inequality comes from: `parameters`, `padding`, or null where nothing explains it.
    """
    whole, distinct = prod(logical), list(dict.fromkeys(held.values()))
    if len(held) < len(holders):  # of many ranks those of each cut
        number, missing, twice = _by_cut(lie, logical, holders[0], whole)
    else:
        number, total = len(distinct), sum(prod(shape_of(part)) for part in distinct)
        twice = sum(_shared(one, other) for one, other in itertools.combinations(distinct, 2))
        missing = whole - (total - twice)
        if counted:
            missing, twice = max(0, whole - total), max(0, total - whole)
    why = "parameters" if counted else "padding" if missing and not twice else None
    return {
        "elements": whole, "parts": number, "missing": missing, "twice": twice, "holds": not missing and not twice,
        "copies": len(holders) // number if number and len(holders) % number == 0 else None,
        "why": why if missing or twice else None, "replicated": lie.replicated(len(logical), holders),
    }  # fmt: skip


def lines(lie: Lie, logical: tuple[int, ...], rank: int) -> list[dict[str, Any]]:
    """For each dimension the axes that cut it, and its pieces by their place along these: what any rank holds follows."""
    even, found = Even(lie, logical), list[dict[str, Any]]()
    for dim in range(len(logical)):
        axes = lie.line(dim, len(logical))
        ordered = sorted(lie.on.along(axes, rank), key=lambda other: [lie.on.at(other, axis) for axis in axes])
        found.append({"axes": list(axes), "pieces": [even.part(other)[dim] for other in ordered]})
    return found


def _by_cut(lie: Lie, logical: tuple[int, ...], rank: int, whole: int) -> tuple[int, int, int]:
    """(parts, missing, twice) of parts that are products of pieces of each dimension: piece by piece along each."""
    number, covered, summed = 1, 1, 1
    for line in lines(lie, logical, rank):
        pieces, reached, union = set(line["pieces"]), 0, 0
        for start, stop in sorted(interval for piece in pieces for interval in piece):
            union += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        number *= len(pieces)
        covered *= union
        summed *= sum(stop - start for piece in pieces for start, stop in piece)
    return number, whole - covered, summed - covered


def _shared(one: Part, other: Part) -> int:
    """Elements that two parts have in common."""
    return prod(
        sum(max(0, min(a_stop, b_stop) - max(a, b)) for a, a_stop in mine for b, b_stop in theirs)
        for mine, theirs in zip(one, other, strict=True)
    )
