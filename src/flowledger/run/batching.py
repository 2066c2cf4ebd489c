"""Mini-batches and micro-batches: which samples go through one optimizer step, and which through one forward pass.

Static micro-batches take so many samples in a row. Dynamic ones close on the first limit hit; with `balance` the same
number of micro-batches is then evened out (Karmarkar-Karp), as long as every limit still holds.
"""

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from flowledger.config.schema import MicroBatch

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step, and how they are split into forward passes; indices into the step's B samples."""

    samples: Indices
    micro_batches: tuple[Indices, ...]
    sequences: int  # samples that were kept when it was cut: what losses of sequences are divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The split of one step."""

    mini_batches: tuple[MiniBatch, ...]

    @property
    def micro_batches(self) -> tuple[Indices, ...]:
        """All micro-batches of the step in order."""
        return tuple(micro for mini in self.mini_batches for micro in mini.micro_batches)


def split(
    *, lengths: Sequence[int], kept: Sequence[bool], mini_batch_samples: int, limits: MicroBatch, bytes_per_token: int
) -> Batches:
    """Cut B samples into mini-batches of `mini_batch_samples` in a row, and the kept ones of each into micro-batches.

    `lengths` are tokens without padding. A mini-batch of which nothing is kept has no micro-batches.
    """
    minis = []
    for start in range(0, len(lengths), mini_batch_samples):
        samples = tuple(range(start, min(start + mini_batch_samples, len(lengths))))
        trained = tuple(i for i in samples if kept[i])
        micros = micro_batches(trained, lengths, limits, bytes_per_token)
        minis.append(MiniBatch(samples=samples, micro_batches=micros, sequences=len(trained)))
    return Batches(mini_batches=tuple(minis))


def without(batches: Batches, rejected: Set[int]) -> Batches:
    """The same split, these samples taken out of its micro-batches: nobody computes what enters no loss.

    Samples and `sequences` of a mini-batch stay as they were cut: rejection thins out a mean over sequences, as in verl.
    """
    minis = []
    for mini in batches.mini_batches:
        left = (tuple(i for i in micro if i not in rejected) for micro in mini.micro_batches)
        minis.append(replace(mini, micro_batches=tuple(micro for micro in left if micro)))
    return Batches(mini_batches=tuple(minis))


def micro_batches(
    samples: Indices, lengths: Sequence[int], limits: MicroBatch, bytes_per_token: int
) -> tuple[Indices, ...]:
    """Split samples into micro-batches that hold every limit; a single sample above a limit gets one of its own."""
    greedy = _greedy(samples, lengths, limits, bytes_per_token)
    if not (limits.dynamic and limits.balance) or len(greedy) < 2:
        return greedy
    parts = karmarkar_karp([lengths[i] for i in samples], len(greedy))
    balanced = tuple(tuple(sorted(samples[i] for i in part)) for part in parts if part)
    even = all(len(part) == 1 or fits(part, lengths, limits, bytes_per_token) for part in balanced)
    return tuple(sorted(balanced)) if even else greedy


def fits(samples: Sequence[int], lengths: Sequence[int], limits: MicroBatch, bytes_per_token: int) -> bool:
    """Whether these samples together hold every limit that is set."""
    inside = [lengths[i] for i in samples]
    return _holds(len(inside), sum(inside), max(inside), limits, bytes_per_token)


def _greedy(samples: Indices, lengths: Sequence[int], limits: MicroBatch, bytes_per_token: int) -> tuple[Indices, ...]:
    """Samples in a row, closed on the first limit hit. Totals are kept as it goes: one pass, however large the batch."""
    closed: list[Indices] = []
    current: list[int] = []
    tokens, longest = 0, 0
    for sample in samples:
        length = lengths[sample]
        if current and not _holds(len(current) + 1, tokens + length, max(longest, length), limits, bytes_per_token):
            closed.append(tuple(current))
            current, tokens, longest = [], 0, 0
        current.append(sample)
        tokens, longest = tokens + length, max(longest, length)
    return (*closed, tuple(current)) if current else tuple(closed)


def _holds(count: int, tokens: int, longest: int, limits: MicroBatch, bytes_per_token: int) -> bool:
    return (
        (limits.samples is None or count <= limits.samples)
        and (limits.max_tokens is None or tokens <= limits.max_tokens)
        and (limits.max_padded_tokens is None or count * longest <= limits.max_padded_tokens)
        and (limits.max_bytes is None or tokens * bytes_per_token <= limits.max_bytes)
    )


def karmarkar_karp(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `weights` in `parts` lists of nearly equal sum: the largest differencing method (Karmarkar & Karp 1982).

    A state is `parts` lists; the two states with the widest spread are merged, heaviest list onto lightest. Ties go to
    the list that is heavier, then longer, then has the later samples, as in verl, so that partitions are equal to verl's.
    """
    State = list[tuple[int, int, list[int]]]  # (weight, count, indices), heaviest first

    def order(state: State) -> tuple[int, int, int, list[int]]:
        weight, count, indices = state[0]
        return state[-1][0] - weight, -weight, -count, [-index for index in indices]

    heap: list[tuple[tuple[int, int, int, list[int]], State]] = []
    for index, weight in enumerate(weights):
        state: State = [(weight, 1, [index])] + [(0, 0, [])] * (parts - 1)
        heapq.heappush(heap, (order(state), state))
    while len(heap) > 1:
        _, widest = heapq.heappop(heap)
        _, next_widest = heapq.heappop(heap)
        pairs = zip(widest, reversed(next_widest), strict=True)
        merged = sorted(((a + b, m + n, x + y) for (a, m, x), (b, n, y) in pairs), reverse=True)
        heapq.heappush(heap, (order(merged), merged))
    return [indices for _, _, indices in heap[0][1]] if heap else [[] for _ in range(parts)]
