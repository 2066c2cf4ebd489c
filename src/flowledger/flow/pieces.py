"""What a rank holds of a tensor of the flow, index by index: logical -> local, and local -> logical.

A piece is, for each dimension, the intervals of the logical tensor that stand one after another in the local one. It is
one interval a dimension but for packed tokens under cp, which are dealt in a zig-zag (see `flow.slices`).
"""

import math
from collections.abc import Mapping, Sequence

from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Interval, Mesh, authoritative, cuts
from flowledger.flow.slices import zigzag
from flowledger.flow.tensors import Form, Tensor

Piece = tuple[tuple[Interval, ...], ...]  # one list of intervals a dimension


def placements_of(row: Tensor, form: Form | None = None, variant: str | None = None) -> dict[str, str]:
    """Axis -> placement of a form, or of the main form in one of its variants. Raises BadInput for a variant it lacks."""
    if variant is None:
        return row.placement_of(form)
    if variant not in row.variants:
        raise BadInput(f"{row.name} has no variant {variant!r}; it has {', '.join(row.variants) or 'none'}")
    return dict(row.variants[variant])


def piece_of(
    row: Tensor, on: Mesh, rank: int, sizes: Mapping[str, int], *, form: Form | None = None, variant: str | None = None
) -> Piece:
    """What a rank holds of a tensor, whose symbols have these sizes. Packed tokens count as one sample a dp rank."""
    shown = form or row.forms[0]
    found: list[tuple[Interval, ...]] = [((0, dim.resolve(sizes)),) for dim in shown.dims]
    for axis, dim in cuts(placements_of(row, form, variant), len(found), on):
        deal = _zigzagged if axis == "cp" and shown.padding == "packed" else _chunk
        found[dim] = deal(found[dim], on.degree(axis), on.at(rank, axis))
    return tuple(found)


def shape_of(piece: Piece) -> tuple[int, ...]:
    """The local shape."""
    return tuple(_length(intervals) for intervals in piece)


def to_logical(piece: Piece, local: Sequence[int]) -> tuple[int, ...]:
    """The logical index of an element at a local index. Raises BadInput for one outside the piece."""
    if len(local) != len(piece):
        raise BadInput(f"element {list(local)} is outside a piece of shape {list(shape_of(piece))}")
    return tuple(_from_start(intervals, at) for intervals, at in zip(piece, local, strict=True))


def to_local(piece: Piece, index: Sequence[int]) -> tuple[int, ...] | None:
    """The local index of a logical element; None where the rank does not hold it."""
    found = tuple(_from_intervals(intervals, at) for intervals, at in zip(piece, index, strict=True))
    return None if any(at is None for at in found) else tuple(at for at in found if at is not None)


def owner(
    row: Tensor, on: Mesh, index: Sequence[int], sizes: Mapping[str, int], *, form: Form | None = None,
    variant: str | None = None,
) -> int:  # fmt: skip
    """The one rank whose copy of an element counts. Raises BadInput for an element that the tensor does not have."""
    for rank in authoritative(placements_of(row, form, variant), on):
        if to_local(piece_of(row, on, rank, sizes, form=form, variant=variant), index) is not None:
            return rank
    raise BadInput(f"{row.name} has no element {list(index)}")


def _chunk(intervals: tuple[Interval, ...], degree: int, at: int) -> tuple[Interval, ...]:
    size = math.ceil(_length(intervals) / degree)
    return _window(intervals, at * size, (at + 1) * size)


def _zigzagged(intervals: tuple[Interval, ...], degree: int, at: int) -> tuple[Interval, ...]:
    return tuple(
        one for start, stop in zigzag(_length(intervals), degree, at) for one in _window(intervals, start, stop)
    )


def _window(intervals: tuple[Interval, ...], start: int, stop: int) -> tuple[Interval, ...]:
    """What lies in [start, stop) when the intervals stand one after another."""
    found, at = [], 0
    for first, last in intervals:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            found.append((first + low, first + high))
        at += last - first
    return tuple(found)


def _length(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _from_start(intervals: Sequence[Interval], at: int) -> int:
    left = at
    for start, stop in intervals:
        if 0 <= left < stop - start:
            return start + left
        left -= stop - start
    raise BadInput(f"index {at} is outside a piece of {_length(intervals)}")


def _from_intervals(intervals: Sequence[Interval], index: int) -> int | None:
    at = 0
    for start, stop in intervals:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    return None
