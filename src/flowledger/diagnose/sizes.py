"""Whether a recorded shape is the planned one, and if it is not, whether one of the few good reasons explains it.

A plan knows limits where only the data know lengths, and full micro-batches where the last one may be smaller. What a
configuration decides (prompts, samples of a prompt, the sizes of the model, the cut over ranks) has to be equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowledger.flow.dims import Dim, parse_shape
from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import TensorRow

EQUAL, EXPLAINED, UNEQUAL = "equal", "explained", "unequal"
OUTCOMES = (EQUAL, EXPLAINED, UNEQUAL)  # from the best to the worst

# Symbol that the data decide, up to the planned limit -> what there was of it.
UP_TO = {
    "S_prompt": "prompts have at most {seen} tokens, the limit is {planned}",
    "S_resp": "responses have at most {seen} tokens, the limit is {planned}",
    "S": "samples have at most {seen} tokens, the limit is {planned}",
    "S_cache": "samples need at most {seen} positions, the limit is {planned}",
    "T": "fewer tokens than the limit: {seen} of {planned}",
    "T_logit": "fewer tokens than the limit: {seen} of {planned}",
    "N_decode": "fewer decode steps than the limit: {seen} of {planned}",
}
# Symbol whose largest has to be the planned one: smaller are what is left, or still runs.
LARGEST = frozenset({"B_micro", "B_run", "B_slot", "B_admit"})
MULTIPLES = (2, 4, 8, 16, 32, 64, 128)  # that frameworks pad lengths to
ALONG_SEQUENCE = ("cp:", "sp:")
PERSISTENT = ("param", "grad", "optimizer")


class Seen(NamedTuple):
    """What one rank has recorded of a tensor in a stage, in one form: the smallest and the largest sizes."""

    stage: str
    tensor_name: str
    dims: str | None
    access: str | None
    layer: int | None
    rank: int | None  # None: a process that is none of the ranks
    placement: tuple[str, ...] | None
    dtype: str
    padding: str | None
    smallest: tuple[int, ...]
    largest: tuple[int, ...]
    logical: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leeway:
    """What a run may do that its plan could not know."""

    named: bool = True  # its dimensions are named for certain, and its forms are those of the flow
    pads: bool = False  # lengths may be padded to a multiple above the limit
    longest: int = 0  # limit of prompt and response together
    group: int = 1  # samples of a prompt
    dynamic: frozenset[str] = frozenset()  # stages whose micro-batches are filled with tokens
    dropped: int = 0  # samples that were not trained on
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # symbol -> limit of the plan, and of the run


class Judged(NamedTuple):
    """How a recorded shape compares with a planned one, and in words why."""

    outcome: str
    why: tuple[str, ...] = ()


def judge(planned: TensorRow, seen: Seen, leeway: Leeway) -> Judged:
    """The recorded part of a tensor against the planned part, dimension by dimension; then its dtype and its cut."""
    local = planned.local_shape or []
    if len(local) != len(seen.largest):
        return Judged(UNEQUAL, (f"{len(seen.largest)} dimensions, not {len(local)}",))
    parts = _shape(planned, local, seen, leeway)
    if parts.outcome == UNEQUAL and (whole := _whole(planned, seen, leeway)).outcome != UNEQUAL:
        return _worst([whole, _padding(planned, seen), _dtype(planned, seen)])
    return _worst([parts, _padding(planned, seen), _dtype(planned, seen), _cut(planned, seen, leeway)])


def _whole(planned: TensorRow, seen: Seen, leeway: Leeway) -> Judged:
    """A tensor that is planned in parts, and of which a process has all: a driver's, or one that ranks have gathered."""
    local, logical = planned.local_shape or [], planned.logical_shape or []
    cut = [at for at, size in enumerate(logical) if local[at] != size]
    dims = parse_shape(planned.dims or "[]")
    said = seen.rank is None or not leeway.named or seen.logical == seen.largest
    if not cut or not said or any(dims[at].symbols & LARGEST or seen.largest[at] != logical[at] for at in cut):
        return Judged(UNEQUAL)
    where = "in a process that is no rank" if seen.rank is None else "on each rank"
    return _worst([Judged(EXPLAINED, (f"whole {where}, not cut",)), _shape(planned, logical, seen, leeway)])


def _shape(planned: TensorRow, sizes: Sequence[int], seen: Seen, leeway: Leeway) -> Judged:
    dims, whole = parse_shape(planned.dims or "[]"), planned.logical_shape or ()
    lengths_decide = any(one.startswith(ALONG_SEQUENCE) for one in planned.placement or ())  # whose tokens a rank has
    most = [
        max(size, of) if lengths_decide and "T_logit" in dim.symbols else size
        for dim, size, of in zip(dims, sizes, whole, strict=True)
    ]
    return _worst(
        _size(dim, size, seen.smallest[at], seen.largest[at], seen, leeway)
        for at, (dim, size) in enumerate(zip(dims, most, strict=True))
    )


def _size(dim: Dim, planned: int, low: int, high: int, seen: Seen, leeway: Leeway) -> Judged:
    """One dimension, of which the run has sizes from `low` to `high`."""
    for symbol in sorted(dim.symbols & leeway.limits.keys()):
        told, has = leeway.limits[symbol]
        return Judged(UNEQUAL, (f"the limit of {symbol} is {told} in the plan and {has} in the run",))
    if low == high == planned:
        return Judged(EQUAL)
    if limited := next((one for one in UP_TO if one in dim.symbols), None):
        if limited == "S_resp" and seen.padding == "jagged" and not leeway.named and planned < high <= leeway.longest:
            return Judged(EXPLAINED, (f"over whole samples, prompts too: at most {high} tokens of {leeway.longest}",))
        symbol = "S" if {"S_prompt", "S_resp"} <= dim.symbols else limited
        return _up_to(symbol, dim, planned, low, high, pads=leeway.pads)
    if dim.symbols & LARGEST:
        return _largest(dim, planned, low, high, seen.stage, leeway)
    if seen.rank is None and not leeway.named and high < planned:
        return Judged(EXPLAINED, (f"handed on in parts, {_range(low, high)} of {planned} at a time",))
    if leeway.group > 1 and dim.text == "B_prompt" and low == high == planned * leeway.group:
        return Judged(EXPLAINED, (f"each prompt stands there {leeway.group} times, once for each of its samples",))
    return Judged(UNEQUAL, (f"{dim} is {_range(low, high)}, planned is {planned}",))


def _up_to(symbol: str, dim: Dim, planned: int, low: int, high: int, *, pads: bool) -> Judged:
    """A dimension that the data decide."""
    if high == planned:
        return Judged(EXPLAINED, (f"{dim} is {planned}, its limit, where it is full, else down to {low}",))
    if high < planned:
        return Judged(EXPLAINED, (UP_TO[symbol].format(seen=high, planned=planned),))
    multiple = next((one for one in MULTIPLES if high % one == 0 and high - planned < one <= planned), None)
    if pads and multiple is not None:
        return Judged(EXPLAINED, (f"{planned} padded to a multiple of {multiple}",))
    return Judged(UNEQUAL, (f"{dim} is up to {high}, above the planned limit of {planned}",))


def _largest(dim: Dim, planned: int, low: int, high: int, stage: str, leeway: Leeway) -> Judged:
    """A dimension that is not always full."""
    micro = "B_micro" in dim.symbols
    if high == planned:
        return Judged(EXPLAINED, (f"{dim} is {planned} where it is full, else down to {low}",))
    if micro and stage in leeway.dynamic:
        return Judged(EXPLAINED, (f"micro-batches are filled with tokens: {_range(low, high)} samples in one",))
    if micro and 0 < planned - high <= leeway.dropped:
        return Judged(EXPLAINED, (f"{leeway.dropped} samples were dropped, micro-batches have at most {high}",))
    return Judged(UNEQUAL, (f"{dim} is at most {high}, planned is {planned}",))


def _padding(planned: TensorRow, seen: Seen) -> Judged:
    """Rows that end where their samples end take no padding; their shape is that of the longest."""
    if seen.padding == "jagged" != planned.padding:
        return Judged(EXPLAINED, ("jagged: each sample has its own length instead of padding",))
    return Judged(EQUAL)


def _dtype(planned: TensorRow, seen: Seen) -> Judged:
    """Another dtype of data is worth a word; of what the model is kept or computed in it is another configuration."""
    if seen.dtype == planned.dtype:
        return Judged(EQUAL)
    facts = tensor(planned.tensor_name)
    decided = facts.dtype == "model" or facts.kind in PERSISTENT
    return Judged(UNEQUAL if decided else EXPLAINED, (f"dtype {seen.dtype}, planned {planned.dtype}",))


def _cut(planned: TensorRow, seen: Seen, leeway: Leeway) -> Judged:
    """The axes along which ranks differ. Of another's loop only the cut of parameters is told, the rest is the flow's."""
    told = leeway.named or planned.kind in PERSISTENT
    if not told or seen.placement is None or set(seen.placement) == set(planned.placement or ()):
        return Judged(EQUAL)
    words = [", ".join(one) or "not cut" for one in (seen.placement, planned.placement or ())]
    return Judged(UNEQUAL, (f"placed {words[0]}, planned {words[1]}",))


def _worst(parts: Iterable[Judged]) -> Judged:
    """The worst outcome of several, with the reasons that led to it and to those above it."""
    found = [one for one in parts if one.outcome != EQUAL]
    if not found:
        return Judged(EQUAL)
    outcome = max((one.outcome for one in found), key=OUTCOMES.index)
    return Judged(outcome, tuple(dict.fromkeys(word for one in found if one.outcome == outcome for word in one.why)))


def _range(low: int, high: int) -> str:
    return str(high) if low == high else f"{low} to {high}"
