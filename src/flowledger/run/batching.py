"""Mini-batches and micro-batches: which samples go through one optimizer step, and which through one forward pass.

Static micro-batches take so many samples in a row. Dynamic ones close on the first limit hit; with `balance` the same
number of micro-batches is then evened out (Karmarkar-Karp), as long as every limit still holds.

Data-parallel ranks take equally many samples of each mini-batch, with nearly equal tokens, and cut them into equally
many micro-batches, empty ones where samples do not suffice: they pass through the same collectives, so none may be
missing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one data-parallel rank takes of a step."""

    samples: Indices  # indices into the step's B samples, in the order of this rank's rows
    batches: Batches  # indices into those rows


def split(
    *, lengths: Sequence[int], kept: Sequence[bool], mini_batch_samples: int, limits: MicroBatch, bytes_per_token: int
) -> Batches:
    """Cut B samples into mini-batches of `mini_batch_samples` in a row, and the kept ones of each into micro-batches.

    `lengths` are tokens without padding. A mini-batch of which nothing is kept has no micro-batches.
    """
    (whole,) = shares(
        lengths=lengths, kept=kept, mini_batch_samples=mini_batch_samples, limits=limits,
        bytes_per_token=bytes_per_token,
    )  # fmt: skip
    return whole.batches


def shares(
    *,
    lengths: Sequence[int],
    kept: Sequence[bool],
    mini_batch_samples: int,
    limits: MicroBatch,
    bytes_per_token: int,
    ranks: int = 1,
    dealt_samples: int | None = None,
) -> tuple[Share, ...]:
    """The same split dealt to `ranks` data-parallel ranks: whatever their number, mini-batches have the same samples.

    `dealt_samples`: so many in a row are dealt evenly; a divisor of mini_batch_samples (None: those), divisible by
    `ranks` as B is. Where the critic has smaller mini-batches than the policy, it is those.
    """
    taken: list[list[int]] = [[] for _ in range(ranks)]
    minis: list[list[MiniBatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), mini_batch_samples):
        samples = range(start, min(start + mini_batch_samples, len(lengths)))
        sequences = sum(kept[i] for i in samples)
        firsts = [len(rows) for rows in taken]
        for first in range(0, len(samples), dealt_samples or mini_batch_samples):
            unit = samples[first : first + (dealt_samples or mini_batch_samples)]
            for rows, part in zip(taken, _dealt(unit, lengths, kept, ranks), strict=True):
                rows += part
        local = [[lengths[i] for i in rows] for rows in taken]
        mine = [tuple(range(first, len(rows))) for first, rows in zip(firsts, taken, strict=True)]
        trained = [tuple(i for i in rows if kept[taken[rank][i]]) for rank, rows in enumerate(mine)]
        micros = _equally_many(trained, local, limits, bytes_per_token)
        for rank, parts in enumerate(micros):
            minis[rank].append(MiniBatch(samples=mine[rank], micro_batches=parts, sequences=sequences))
    return tuple(
        Share(samples=tuple(rows), batches=Batches(mini_batches=tuple(cut)))
        for rows, cut in zip(taken, minis, strict=True)
    )


def _dealt(samples: Sequence[int], lengths: Sequence[int], kept: Sequence[bool], ranks: int) -> list[list[int]]:
    """Equally many samples for each rank, with nearly equal tokens to train on; in order within a rank."""
    if ranks == 1:
        return [list(samples)]
    weights = [lengths[i] if kept[i] else 0 for i in samples]
    return [sorted(samples[i] for i in part) for part in karmarkar_karp(weights, ranks, equally_many=True)]


def _equally_many(
    trained: Sequence[Indices], lengths: Sequence[Sequence[int]], limits: MicroBatch, bytes_per_token: int
) -> list[tuple[Indices, ...]]:
    """Micro-batches of each rank, as many as the rank that needs most; empty ones where a rank has too few samples."""
    found = [micro_batches(rows, of, limits, bytes_per_token) for rows, of in zip(trained, lengths, strict=True)]
    most = max(len(parts) for parts in found)
    return [at_least(most, parts, of) for parts, of in zip(found, lengths, strict=True)]


def at_least(number: int, micro_batches: tuple[Indices, ...], lengths: Sequence[int]) -> tuple[Indices, ...]:
    """These micro-batches cut finer until there are so many, empty ones last where there are fewer samples than that."""
    if len(micro_batches) >= number:
        return micro_batches
    rows = sorted(i for part in micro_batches for i in part)
    finer = karmarkar_karp([lengths[i] for i in rows], number) if rows else [[]] * number
    return tuple(sorted((tuple(sorted(rows[i] for i in part)) for part in finer), key=lambda part: (not part, part)))


def without(batches: Batches, rejected: Set[int], *, keep_empty: bool = False) -> Batches:
    """The same split, these samples taken out of its micro-batches: nobody computes what enters no loss.

    Samples and `sequences` of a mini-batch stay as they were cut: rejection thins out a mean over sequences, as in verl.
    """
    minis = []
    for mini in batches.mini_batches:
        left = (tuple(i for i in micro if i not in rejected) for micro in mini.micro_batches)
        minis.append(replace(mini, micro_batches=tuple(micro for micro in left if micro or keep_empty)))
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


def karmarkar_karp(weights: Sequence[int], parts: int, *, equally_many: bool = False) -> list[list[int]]:
    """Indices of `weights` in `parts` lists of nearly equal sum: the largest differencing method (Karmarkar & Karp 1982).

    A state is `parts` lists; the two states with the widest spread are merged, heaviest list onto lightest. Ties go to
    the list that is heavier, then longer, then has the later samples, as in verl, so that partitions are equal to verl's.
    `equally_many`: lists of one length (which divides the weights); each state starts with one weight in every list.
    """
    State = list[tuple[int, int, list[int]]]  # (weight, count, indices), heaviest first

    def order(state: State) -> tuple[int, int, int, list[int]]:
        weight, count, indices = state[0]
        return state[-1][0] - weight, -weight, -count, [-index for index in indices]

    heap: list[tuple[tuple[int, int, int, list[int]], State]] = []
    together = parts if equally_many else 1
    ascending = sorted(range(len(weights)), key=lambda i: (weights[i], i)) if equally_many else range(len(weights))
    for start in range(0, len(weights), together):
        first = sorted(((weights[i], 1, [i]) for i in ascending[start : start + together]), reverse=True)
        state: State = first + [(0, 0, [])] * (parts - together)
        heapq.heappush(heap, (order(state), state))
    while len(heap) > 1:
        _, widest = heapq.heappop(heap)
        _, next_widest = heapq.heappop(heap)
        pairs = zip(widest, reversed(next_widest), strict=True)
        merged = sorted(((a + b, m + n, x + y) for (a, m, x), (b, n, y) in pairs), reverse=True)
        heapq.heappush(heap, (order(merged), merged))
    return [indices for _, _, indices in heap[0][1]] if heap else [[] for _ in range(parts)]
