"""How many micro-batches of which chunk a pipeline rank has in flight when its memory is fullest.

1F1B: rank i of p has min(m, p - i). Interleaved (v chunks a rank): 2(p - i - 1) + (v - 1)*group warm-up forwards and one
more, dealt to chunks in groups of `group` micro-batches (p unless told). Source: arXiv 2104.04473 section 2.2,
megatron/core/pipeline_parallel/schedules.py.
"""

from collections import Counter
from functools import lru_cache


@lru_cache(maxsize=1024)
def in_flight(
    pp: int,
    rank: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    ahead: int = 0,
    weights: tuple[int, ...] = (),
    at_work: int | None = None,
) -> tuple[int, ...]:
    """Micro-batches alive of each chunk, that of the forward at work included, when the memory is fullest.

    `weights`: bytes of one micro-batch of each chunk. `at_work`: only moments at which this chunk runs (the head's);
    None: any. `ahead`: further warm-up forwards (expert-communication overlap).
    """
    if chunks == 1:
        return (min(micro_batches, pp - rank),)
    group = min(group or pp, micro_batches)
    total = micro_batches * chunks
    warm = min(total, 2 * (pp - rank - 1) + (chunks - 1) * group + ahead)
    steps = _steps(chunks, micro_batches, group)
    alive = Counter(steps[:warm])
    best: tuple[int, tuple[int, ...]] | None = None
    for index in range(warm, max(total, warm + 1)):
        if index < total:
            alive[steps[index]] += 1
        running = steps[min(index, total - 1)]
        if at_work is None or running == at_work or index >= total:
            held = tuple(alive[chunk] for chunk in range(chunks))
            size = sum(number * weight for number, weight in zip(held, weights or (1,) * chunks, strict=True))
            if best is None or size > best[0]:
                best = (size, held)
        if index >= total:
            break
        alive[chunks - 1 - steps[index - warm]] -= 1
        if index > warm + 2 * chunks * group:
            break
    assert best is not None
    return best[1]


def _steps(chunks: int, micro_batches: int, group: int) -> list[int]:
    """The chunk of each forward in order: a group of micro-batches through every chunk, then the next group."""
    found: list[int] = []
    for start in range(0, micro_batches, group):
        found += [chunk for chunk in range(chunks) for _ in range(min(group, micro_batches - start))]
    return found
