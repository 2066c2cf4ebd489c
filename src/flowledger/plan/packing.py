"""How samples are put together in micro-batches, as each framework does it: pure functions over token counts.

Five schemes. `balanced` (verl): the token budget fixes only how many micro-batches there are, and Karmarkar-Karp evens
out their work, so that one may hold more tokens than the budget. `balanced_capped` (verl 0.9.1): the same, with one
more micro-batch until all hold the budget. `first_fit` (OpenRLHF): as many as first-fit bins need, then evened out by tokens.
`capped` (slime, AReaL, NeMo-RL): bins closed at the budget; only a sample that is longer exceeds it, alone. `in_order`
(flowledger): closed at the budget in the order of the samples, then evened out as long as the budget holds.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from flowledger.plan.lengths import Lengths
from flowledger.tables.constants import constant

SCHEMES = ("balanced", "balanced_capped", "first_fit", "capped", "in_order")
Parts = list[list[int]]
TOGETHER = ("balanced", "balanced_capped", "first_fit")  # all data-parallel ranks take the largest count
State = list[tuple[int, int, list[int]]]  # (weight, count, indices) of each list
Order = tuple[int, int, int, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The micro-batches of one mini-batch on one rank."""

    parts: Parts  # indices of samples
    tokens: list[int]  # of each part
    samples: list[int]  # in each part

    @property
    def count(self) -> int:
        return len(self.parts)

    @property
    def worst(self) -> int:
        return max(self.tokens, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What packing gives for lengths that were drawn: over draws, the mean count and the worst micro-batch seen."""

    micro_batches: float  # mean, after the largest count over ranks was taken for all
    most_micro_batches: int
    worst_tokens: int  # the fullest micro-batch of all draws
    mean_worst_tokens: float  # of the fullest micro-batch of each draw
    bound_tokens: int  # what no draw could exceed (`bound`)
    draws: int


def work(tokens: int) -> int:
    """Cost of a sample for verl's balancing: 24576*s + s² (dense blocks of a 7B model; verl utils/seqlen_balancing.py)."""
    return int(constant("verl_work_per_token")) * tokens + tokens * tokens


def micro_batch_count(lengths: Sequence[int], budget: int, group: int = 1) -> int:
    """verl: min(samples, ceil(tokens / budget)), rounded up to a multiple of `group` (the virtual pipeline's)."""
    count = min(len(lengths), -(-sum(lengths) // budget))
    return -(-count // group) * group


def pack(lengths: Sequence[int], *, scheme: str, budget: int, count: int | None = None, group: int = 1) -> Packing:
    """The micro-batches of these samples. `count`: at least so many (what the largest data-parallel rank needs).

    Raises ValueError for a scheme that is none of SCHEMES.
    """
    if scheme == "capped":
        parts = _bins(lengths, budget, sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)))
    elif scheme == "first_fit":
        count = max(count or 0, len(_bins(lengths, budget, range(len(lengths)))))
        parts = [part for part in partition(lengths, count) if part]
    elif scheme == "in_order":
        parts = _in_order(lengths, budget)
    elif scheme in SCHEMES:
        parts = _balanced(lengths, budget, max(count or 0, micro_batch_count(lengths, budget, group)), scheme, group)
    else:
        raise ValueError(f"{scheme!r} is none of {', '.join(SCHEMES)}")
    return Packing(parts=parts, tokens=[sum(lengths[i] for i in part) for part in parts], samples=[*map(len, parts)])


def _balanced(lengths: Sequence[int], budget: int, count: int, scheme: str, group: int) -> Parts:
    weights = [work(tokens) for tokens in lengths]
    count = min(count, len(lengths))
    while True:
        parts = [part for part in partition(weights, count) if part]
        fits = all(sum(lengths[i] for i in part) <= budget for part in parts)
        if fits or scheme == "balanced" or count + group > len(lengths):
            return parts
        count += group


def _in_order(lengths: Sequence[int], cap: int) -> Parts:
    """A micro-batch closes when the next sample would exceed the budget; then Karmarkar-Karp, if that holds it too."""
    closed: Parts = [[]]
    tokens = 0
    for index, length in enumerate(lengths):
        if closed[-1] and tokens + length > cap:
            closed.append([])
            tokens = 0
        closed[-1].append(index)
        tokens += length
    even = [part for part in partition(lengths, len(closed)) if part]
    holds = all(len(part) == 1 or sum(lengths[i] for i in part) <= cap for part in even)
    return even if holds else closed


def _bins(lengths: Sequence[int], cap: int, order: Sequence[int]) -> Parts:
    """First fit: each sample, in this order, into the first bin that has room."""
    bins: Parts = []
    room: list[int] = []
    for index in order:
        place = next((n for n, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(cap)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def partition(weights: Sequence[int], parts: int) -> Parts:
    """Indices in `parts` lists of nearly equal weight: largest differencing (Karmarkar and Karp 1982), ties as verl's.

    The heaviest and the lightest list differ by no more than the heaviest single weight: merging two states with spreads a
    and b, heaviest onto lightest, gives a spread of at most max(a, b).
    """
    if not weights:
        return [[] for _ in range(parts)]
    if parts == 1:
        return [list(range(len(weights)))]
    states: list[State] = [[(weight, 1, [n])] for n, weight in enumerate(weights)]
    heap = [(_order(state, parts), state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, one = heapq.heappop(heap)
        _, other = heapq.heappop(heap)
        merged = _merged(one, other, parts)
        heapq.heappush(heap, (_order(merged, parts), merged))
    filled = [indices for _, _, indices in heap[0][1]]
    return filled + [[] for _ in range(parts - len(filled))]


def _order(state: State, parts: int) -> Order:
    """Widest spread first; of equal ones that whose first list is heavier, then longer, then has the later samples."""
    weight, count, indices = state[0]
    lightest = state[-1][0] if len(state) == parts else 0
    return lightest - weight, -weight, -count, [-n for n in indices]


def _merged(one: State, other: State, parts: int) -> State:
    """Two states as one, heaviest onto lightest. A state holds its filled lists only, heaviest first."""
    both = max(0, len(one) + len(other) - parts)
    alone, cut = len(one) - both, len(other) - both
    pairs = zip(one[alone:], reversed(other[cut:]), strict=True)
    joined = [*one[:alone], *other[:cut], *((a + b, m + n, x + y) for (a, m, x), (b, n, y) in pairs)]
    joined.sort(reverse=True)
    return joined


def bound(lengths: Sequence[int], count: int) -> int:
    """Tokens that no micro-batch of `balanced` can exceed for these samples in `count` micro-batches.

    With spread <= the heaviest work w (see `partition`), the heaviest micro-batch has at most W/k + (1 - 1/k)*w of the
    total work W. Work a token rises with length, so that most tokens come with the shortest samples: the bound fills that
    work with the shortest first (the last one in part), which is the linear relaxation of the fullest subset.
    """
    weights = [work(tokens) for tokens in lengths]
    left = sum(weights) / count + (1 - 1 / count) * max(weights)
    tokens = 0.0
    for length in sorted(lengths):
        if work(length) > left:
            return math.floor(tokens + length * left / work(length))
        tokens, left = tokens + length, left - work(length)
    return math.floor(tokens)


def worst_of(samples: int, *, budget: int, longest: int, shortest: int, mean: float) -> int:
    """The same bound from statistics alone, for a mini-batch of `samples` whose mean length is `mean`.

    The squares in the total work are largest when every sample has either of the extreme lengths, so that their mean is at
    most (shortest + longest)*mean - shortest*longest. Where all are equally long it is exact: ceil(samples/count) of them.
    """
    count = max(1, min(samples, math.ceil(samples * mean / budget)))
    if longest <= shortest:
        return math.ceil(samples / count) * longest
    rate = constant("verl_work_per_token")
    total = samples * (rate * mean + (shortest + longest) * mean - shortest * longest)
    heaviest = total / count + (1 - 1 / count) * work(longest)
    return math.floor(min(heaviest / (rate + shortest), samples * mean))


@lru_cache(maxsize=64)
def expected(
    lengths: Lengths,
    *,
    scheme: str,
    budget: int,
    samples: int,
    ranks: int,
    prompt_tokens: int,
    limit: int,
    group: int = 1,
) -> Expected:
    """Micro-batches of `samples` samples a rank, lengths drawn from their quantiles with a fixed seed.

    Up to `packing_ranks` data-parallel ranks are drawn at once; where ranks go together (verl) all take the largest count.
    """
    random = Random(int(constant("packing_seed")))
    ranks = max(1, min(ranks, int(constant("packing_ranks"))))
    draws = max(1, min(int(constant("packing_draws")), int(constant("packing_work")) // max(1, samples * ranks)))
    counts, worst, limits = [], [], []
    for _ in range(draws):
        drawn = [lengths.sample(samples, prompt_tokens=prompt_tokens, limit=limit, random=random) for _ in range(ranks)]
        packings = [pack(batch, scheme=scheme, budget=budget, group=group) for batch in drawn]
        if scheme in TOGETHER and len({packing.count for packing in packings}) > 1:
            most = max(packing.count for packing in packings)
            packings = [pack(batch, scheme=scheme, budget=budget, count=most, group=group) for batch in drawn]
        counts.append(max(packing.count for packing in packings))
        worst.append(max(packing.worst for packing in packings))
        limits.append(
            max(_limit(batch, packing, scheme, budget) for batch, packing in zip(drawn, packings, strict=True))
        )
    return Expected(
        micro_batches=sum(counts) / draws,
        most_micro_batches=max(counts),
        worst_tokens=max(worst),
        mean_worst_tokens=sum(worst) / draws,
        bound_tokens=max(limits),
        draws=draws,
    )


def _limit(lengths: Sequence[int], packing: Packing, scheme: str, budget: int) -> int:
    if scheme == "balanced":
        return bound(lengths, packing.count)
    if scheme == "first_fit":  # evened out by tokens: no further above the mean than one sample
        return math.floor(sum(lengths) / packing.count + (1 - 1 / packing.count) * max(lengths))
    return max(budget, max(lengths))
