"""Rank classes: ranks that hold equal shares of everything, found without looking at each rank.

A chunk cut gives whole pieces, then a shorter one, then none: along every axis the positions fall into a few intervals
within which all pieces are alike. The classes are products of such intervals; those with equal shares are one class.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowledger.flow.axes import DENSE
from flowledger.flow.mesh import Mesh, Step, cuts, local_shape

Cut = tuple[tuple[int, ...], Mapping[str, str]]  # logical shape and placements of a tensor
Cell = dict[Step, tuple[int, ...]]  # digit of the mesh -> positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks with equal shares: the products of the positions in each of `cells`."""

    name: str
    first: int
    count: int
    cells: tuple[Cell, ...]

    def holds(self, on: Mesh, rank: int) -> bool:
        """Whether a rank belongs to it."""
        if not 0 <= rank < on.size:
            return False
        return any(
            all(rank // stride % degree in places for (stride, degree), places in cell.items()) for cell in self.cells
        )

    def ranks(self, on: Mesh) -> tuple[int, ...]:
        """All its ranks in order."""
        return tuple(sorted(rank for cell in self.cells for rank in _ranks(cell)))


def rank_classes(on: Mesh, tensors: Iterable[Cut] = (), stages: Sequence[Sequence[int]] = ()) -> tuple[RankClass, ...]:
    """The classes of a mesh that cuts these tensors, in the order of their first ranks.

    `stages`: the layers of each pipeline rank. The first stage (embedding) and the last (head) are classes of their own,
    the others are alike where they have equally many layers.
    """
    cut = list(tensors)
    found: dict[object, list[Cell]] = {}
    for cell in _cells(on, cut, stages):
        first = _first(cell)
        shapes = tuple(local_shape(shape, placements, on, first) for shape, placements in cut)
        found.setdefault((shapes, _stage(stages, on.at(first, "pp"))), []).append(cell)
    classes = [_class(on, _merged(cells), stages) for cells in found.values()]
    return tuple(sorted(classes, key=lambda one: one.first))


def _cells(on: Mesh, tensors: Sequence[Cut], stages: Sequence[Sequence[int]]) -> Iterable[Cell]:
    """Products of intervals within which no share changes."""
    breaks: dict[Step, set[int]] = {digit: {0, digit[1]} for digit in on.digits}
    if stages:
        at = {at for at in range(1, on.degree("pp")) if _stage(stages, at) != _stage(stages, at - 1)}
        _break(breaks, on, "pp", at)
    for shape, placements in tensors:
        lengths = [{size} for size in shape]
        for axis, dim in cuts(placements, len(shape), on):
            _break(breaks, on, axis, {at for size in lengths[dim] for at in _changes(size, on.degree(axis))})
            lengths[dim] = {piece for size in lengths[dim] for piece in _pieces(size, on.degree(axis))}
    intervals = [[tuple(range(*pair)) for pair in itertools.pairwise(sorted(at))] for at in breaks.values()]
    for place in itertools.product(*intervals):
        yield dict(zip(breaks, place, strict=True))


def _break(breaks: dict[Step, set[int]], on: Mesh, axis: str, positions: Iterable[int]) -> None:
    """Note along each digit of an axis that its pieces change at these positions."""
    digits = on.digits_of(axis)
    whole = math.prod(degree for _, degree in digits) == on.degree(axis)
    for position in positions:
        for digit in reversed(digits):
            position, at = divmod(position, digit[1])
            breaks[digit] |= {at, at + 1} if whole else set(range(digit[1]))


def _changes(size: int, degree: int) -> set[int]:
    """The positions where pieces of `size` elements change: after the whole ones, and after the shorter one."""
    whole, rest = divmod(size, max(1, -(-size // degree)))
    return {whole, whole + (rest > 0)} - {degree}


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
    """Cells that differ along one digit only become one, digit by digit."""
    for digit in reversed(cells[0]):
        alike: dict[object, Cell] = {}
        for cell in cells:
            key = tuple(positions for other, positions in cell.items() if other != digit)
            known = alike.setdefault(key, {**cell, digit: ()})
            known[digit] = tuple(sorted({*known[digit], *cell[digit]}))
        cells = list(alike.values())
    return tuple(cells)


def _ranks(cell: Cell) -> Iterable[int]:
    return map(sum, itertools.product(*([at * stride for at in places] for (stride, _), places in cell.items())))


def _first(cell: Cell) -> int:
    return sum(positions[0] * stride for (stride, _), positions in cell.items())


def _class(on: Mesh, cells: tuple[Cell, ...], stages: Sequence[Sequence[int]]) -> RankClass:
    count = sum(math.prod(map(len, cell.values())) for cell in cells)
    names = [_name(on, cell, len(stages)) for cell in cells]
    return RankClass(name="; ".join(names), first=min(map(_first, cells)), count=count, cells=cells)


def _name(on: Mesh, cell: Cell, stages: int) -> str:
    """What this cell is not the whole of: `first stage, dp 0-2`; `all` where nothing differs."""
    words = []
    for digit, positions in cell.items():
        if len(positions) == digit[1]:
            continue
        axis = _axis(on, digit)
        if axis == "pp" and stages and positions in ((0,), (stages - 1,)):
            words.append("first stage" if positions == (0,) else "last stage")
        else:
            words.append(f"{'stage' if axis == 'pp' else axis} {spans(positions)}")
    return ", ".join(words) or "all"


def _axis(on: Mesh, digit: Step) -> str:
    """The axis that is this digit alone; where there is none, how its positions follow from a rank."""
    exact = (axis for axis in ("pp", "ep", *DENSE[1:], "edp") if on.steps(axis) == (digit,))
    return next(exact, f"rank//{digit[0]}%{digit[1]}")


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


def count_of(ranks: str) -> int | None:
    """How many numbers `spans` wrote: 5 for `0-3, 8`, 128 for `0-1016:8`; None where it left some out."""
    if "…" in ranks:
        return None
    total = 0
    for part in ranks.split(", "):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        total += len(range(int(first), int(last or first) + 1, int(stride or 1)))
    return total
