"""Why a local shape is not the expected one: which axis cuts a dimension, and what kind of cut that is.

A size that is off by a factor says by which: an axis degree (or the product of two), the group size, a dtype's width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import prod

from flowledger.flow.dims import parse_shape

# Axis -> what it cuts.
CUT = {"dp": "batch", "cp": "sequence", "sp": "sequence", "tp": "hidden", "pp": "layer", "ep": "expert"}
# Kind of cut -> symbols of dimensions that it is expected on.
ALONG = {
    "batch": frozenset({"B", "B_prompt", "G", "B_mini", "B_micro", "B_run", "B_slot", "B_admit"}),
    "sequence": frozenset({"S", "S_prompt", "S_resp", "S_cache", "T", "T_logit"}),
    "hidden": frozenset({"A", "K", "H", "F", "V", "D", "P"}),
    "layer": frozenset({"L"}),
    "expert": frozenset({"E"}),
}
TIMES = {2: "half", 3: "a third", 4: "a quarter"}
WIDTHS = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Axes whose degrees make up a factor."""

    axes: tuple[str, ...]
    factor: int

    @property
    def kind(self) -> str:
        return "a " + " and ".join(dict.fromkeys(CUT[axis] for axis in self.axes)) + " cut"

    def __str__(self) -> str:
        return "*".join(self.axes)


def cut_of(factor: Fraction | int, degrees: Mapping[str, int], symbols: Iterable[str] = ()) -> Cut | None:
    """The axes whose degrees give a factor above 1: one, or two together; those that cut such a dimension come first."""
    if factor <= 1 or factor != int(factor):
        return None
    named, whole = frozenset(symbols), int(factor)
    axes = [axis for axis in CUT if degrees.get(axis, 1) > 1]
    found = [
        Cut(some, whole)
        for count in (1, 2)
        for some in combinations(axes, count)
        if prod(degrees[axis] for axis in some) == whole
    ]
    return min(
        found, key=lambda cut: (not any(ALONG[CUT[axis]] & named for axis in cut.axes), len(cut.axes)), default=None
    )


def shape_told(
    expected: Sequence[int], observed: Sequence[int], dims: str, degrees: Mapping[str, int], group: int = 1
) -> str:
    """`dim 1 is halved by cp, a sequence cut; expected dp, a batch cut`; empty where no factor names what was done.

    expected, observed: shapes of one rank; dims: their dimensions in words; degrees: of the mesh; group: samples of a prompt.
    """
    if len(expected) != len(observed):
        return ""
    symbols = [dim.symbols for dim in parse_shape(dims)] if dims.strip("[] ") else [frozenset()] * len(expected)
    if len(symbols) != len(expected) or 0 in (*expected, *observed):
        return ""
    done: list[str] = []
    missed: list[Cut] = []
    for at, (want, got) in enumerate(zip(expected, observed, strict=True)):
        if want == got:
            continue
        cut, missing = (cut_of(Fraction(*pair), degrees, symbols[at]) for pair in ((want, got), (got, want)))
        if cut is not None:
            done.append(f"dim {at} is {_divided(cut.factor)} by {cut}, {cut.kind}")
        elif missing is not None:
            missed.append(missing)
        elif group > 1 and want == got * group:
            done.append(f"dim {at} has prompts where samples are expected: it was not repeated n = {group} times")
        elif group > 1 and got == want * group:
            done.append(f"dim {at} was repeated n = {group} times once too often")
        else:
            return rearranged(expected, observed)
    absent = "; ".join(f"expected {cut}, {cut.kind}" for cut in missed)
    if done and absent:
        return f"{'; '.join(done)}; {absent}"
    if absent:
        return f"{absent}, and it is not cut so"
    return "; ".join(done) + (", which is not expected there" if done and "cut" in done[-1] else "")


def rearranged(expected: Sequence[int], observed: Sequence[int]) -> str:
    """`the dimensions stand in another order (a transpose)`, or `as many elements in another shape (a reshape)`."""
    if list(expected) == list(observed) or 0 in (*expected, *observed):
        return ""
    if sorted(expected) == sorted(observed):
        return "the dimensions stand in another order (a transpose)"
    if prod(expected) == prod(observed):
        return "as many elements in another shape (a reshape)"
    return ""


def number_told(expected: float, observed: float, degrees: Mapping[str, int], group: int = 1) -> str:
    """`2 times what is expected: dp, the size of a float16 beside a float32`: what a factor between two numbers may come from."""
    if not expected or not observed:
        return ""
    large, small = max(expected, observed), min(expected, observed)
    factor = Fraction(large / small).limit_denominator(1)
    if factor <= 1 or abs(large / small / factor - 1) > 1e-3:
        return ""
    reasons = [f"{cut}, {cut.kind}" for cut in [cut_of(factor, degrees)] if cut is not None]
    reasons += [f"n = {group}, the samples of a prompt"] if group > 1 and factor == group else []
    reasons += ["the width of another dtype"] if factor in (2, 4) else []
    if not reasons:
        return ""
    how = f"{factor} times" if observed > expected else f"1/{factor} of"
    return f"{how} what is expected: {', or '.join(reasons)}"


def _divided(factor: int) -> str:
    return "halved" if factor == 2 else f"divided {factor}-fold"
