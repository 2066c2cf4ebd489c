"""Rank classes: ranks that hold equal shares of everything, found without looking at each rank.

A chunk cut gives whole pieces, then a shorter one, then none: along every axis the positions fall into a few intervals
within which all pieces are alike. The classes are products of such intervals; those with equal shares are one class.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowledger.flow.axes import EXPERT
from flowledger.flow.mesh import Mesh, cuts, local_shape, parts

Cut = tuple[tuple[int, ...], Mapping[str, str]]  # logical shape and placements of a tensor
Cell = dict[str, tuple[int, ...]]  # axis of EXPERT -> positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks with equal shares: the products of the positions in each of `cells`."""

    name: str
    first: int
    count: int
    cells: tuple[Cell, ...]

    def holds(self, on: Mesh, rank: int) -> bool:
        """Whether a rank belongs to it."""
        at = on.expert_coordinates(rank)
        return any(all(at[axis] in positions for axis, positions in cell.items()) for cell in self.cells)

    def ranks(self, on: Mesh) -> tuple[int, ...]:
        """All its ranks in order."""
        return tuple(sorted(rank for cell in self.cells for rank in on.ranks(cell)))


def rank_classes(on: Mesh, tensors: Iterable[Cut] = (), stages: Sequence[Sequence[int]] = ()) -> tuple[RankClass, ...]:
    """The classes of a mesh that cuts these tensors, in the order of their first ranks.

    `stages`: the layers of each pipeline rank. The first stage (embedding) and the last (head) are classes of their own,
    the others are alike where they have equally many layers.
    """
    cut = list(tensors)
    found: dict[object, list[Cell]] = {}
    for cell in _cells(on, cut, stages):
        first = on.rank({axis: positions[0] for axis, positions in cell.items()})
        shapes = tuple(local_shape(shape, placements, on, first) for shape, placements in cut)
        found.setdefault((shapes, _stage(stages, cell["pp"][0])), []).append(cell)
    classes = [_class(on, _merged(cells), stages) for cells in found.values()]
    return tuple(sorted(classes, key=lambda one: one.first))


def _cells(on: Mesh, tensors: Sequence[Cut], stages: Sequence[Sequence[int]]) -> Iterable[Cell]:
    """Products of intervals within which no share changes."""
    breaks: dict[str, set[int]] = {axis: {0, on.degree(axis)} for axis in EXPERT}
    if stages:
        breaks["pp"] |= {at for at in range(1, on.degree("pp")) if _stage(stages, at) != _stage(stages, at - 1)}
    for shape, placements in tensors:
        lengths = [{size} for size in shape]
        for axis, dim in cuts(placements, len(shape), on):
            for size in lengths[dim]:
                _break(breaks, on, axis, size)
            lengths[dim] = {piece for size in lengths[dim] for piece in _pieces(size, on.degree(axis))}
    intervals = {axis: [tuple(range(*pair)) for pair in itertools.pairwise(sorted(at))] for axis, at in breaks.items()}
    for place in itertools.product(*intervals.values()):
        yield dict(zip(intervals, place, strict=True))


def _break(breaks: dict[str, set[int]], on: Mesh, axis: str, size: int) -> None:
    """Note along each part of an axis where pieces of `size` elements change: after the whole ones, and after the shorter one."""
    whole, rest = divmod(size, max(1, -(-size // on.degree(axis))))
    for position in {whole, whole + (rest > 0)} - {on.degree(axis)}:
        for one in reversed(parts(axis)):
            position, at = divmod(position, on.degree(one))
            breaks[one] |= {at, at + 1}


def _pieces(size: int, degree: int) -> set[int]:
    """The sizes that occur among the pieces of a chunk cut."""
    length = -(-size // degree)
    whole, rest = divmod(size, max(1, length))
    return (
        ({length} if whole else set()) | ({rest} if rest else set()) | ({0} if whole + (rest > 0) < degree else set())
    )


def _stage(stages: Sequence[Sequence[int]], at: int) -> tuple[int, bool, bool]:
    """What tells a pipeline stage from others: how many layers, whether it is the first, whether the last."""
    return (len(stages[at]), at == 0, at == len(stages) - 1) if stages else (0, False, False)


def _merged(cells: list[Cell]) -> tuple[Cell, ...]:
    """Cells that differ along one axis only become one, axis by axis."""
    for axis in reversed(EXPERT):
        alike: dict[object, Cell] = {}
        for cell in cells:
            key = tuple(positions for other, positions in cell.items() if other != axis)
            known = alike.setdefault(key, {**cell, axis: ()})
            known[axis] = tuple(sorted({*known[axis], *cell[axis]}))
        cells = list(alike.values())
    return tuple(cells)


def _class(on: Mesh, cells: tuple[Cell, ...], stages: Sequence[Sequence[int]]) -> RankClass:
    first = min(on.rank({axis: positions[0] for axis, positions in cell.items()}) for cell in cells)
    count = sum(math.prod(map(len, cell.values())) for cell in cells)
    names = [_name(on, cell, len(stages)) for cell in cells]
    return RankClass(name="; ".join(names), first=first, count=count, cells=cells)


def _name(on: Mesh, cell: Cell, stages: int) -> str:
    """What this cell is not the whole of: `first stage, dp 0-2`; `all` where nothing differs."""
    words = []
    for axis, positions in cell.items():
        if len(positions) == on.degree(axis):
            continue
        if axis == "pp" and stages and positions in ((0,), (stages - 1,)):
            words.append("first stage" if positions == (0,) else "last stage")
        else:
            shown = "dp" if axis == "edp" and on.degree("ep") == 1 else "stage" if axis == "pp" else axis
            words.append(f"{shown} {spans(positions)}")
    return ", ".join(words) or "all"


def spans(numbers: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8; with a stride (`0-1016:8`) where every eighth is one."""
    if len(numbers) > 2 and len({b - a for a, b in itertools.pairwise(numbers)}) == 1:
        stride = numbers[1] - numbers[0]
        return f"{numbers[0]}-{numbers[-1]}" + (f":{stride}" if stride > 1 else "")
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:8]]
    return ", ".join([*named, "…"] if len(runs) > 8 else named)
