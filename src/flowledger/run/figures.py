"""Mean, spread and extremes of numbers that several ranks have parts of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.run.parallel.collectives import largest, total
from flowledger.run.parallel.ranks import Group

NOTHING = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)  # smallest and largest of no numbers
SIGNS = torch.tensor([-1.0, 1.0], dtype=torch.float64)  # the smallest is the largest negative one


@dataclass(frozen=True, slots=True)
class Figures:
    """What numbers come to."""

    count: float
    sum: float
    min: float
    max: float
    variance: float  # of the numbers themselves: over their count

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1.0)

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


def figures(numbers: Mapping[str, Tensor], group: Group) -> dict[str, Figures]:
    """Figures of the numbers [n] under each name on all ranks of a group, which know the same names.

    Two all-reduces of a few float64 a name: extremes, then sums. Squares are taken around the largest number, so that
    equal numbers have a variance of exactly 0.
    """
    here = [x.to("cpu", torch.float64) for x in numbers.values()]
    ends = torch.stack([end for x in here for end in (x.aminmax() if len(x) else NOTHING)]).view(-1, 2)
    lows, highs = (largest(ends * SIGNS, group) * SIGNS).unbind(1)
    apart = [x - high for x, high in zip(here, highs.tolist(), strict=True)]
    sums = torch.stack([one for x, rest in zip(here, apart, strict=True) for one in (x.sum(), rest.dot(rest))])
    counts = torch.tensor([len(x) for x in here], dtype=torch.float64)
    counts, added, squares = total(torch.cat([counts[:, None], sums.view(-1, 2)], 1), group).unbind(1)
    variances = (squares / counts - (added / counts - highs).square()).clamp(min=0)
    columns = torch.stack([counts, added, lows, highs, variances], 1).tolist()
    return {name: Figures(*column) for name, column in zip(numbers, columns, strict=True)}
