"""What torch's caching allocator hands out beyond what was asked for when long-lived tensors are laid into segments.

Source: pytorch c10/cuda/CUDACachingAllocator.cpp. Tensors up to 1 MiB share small segments that are cut exactly. Above,
a block comes from a segment of 20 MiB (or, from 10 MiB on, of its own size up to a multiple of 2 MiB), best fit, and a
rest of 1 MiB or less is not split off: it counts as allocated.
"""

from collections.abc import Iterable

SMALL = 2**20
SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
ROUND = 2 * 2**20
BLOCK = 512


def unsplit(sizes: Iterable[int]) -> int:
    """Bytes of rests that cannot be split off when tensors of these sizes are allocated one after the other."""
    free: list[int] = []
    rests = 0
    for asked in sizes:
        size = -(-asked // BLOCK) * BLOCK
        if size <= SMALL:
            continue
        fitting = [block for block in free if block >= size]
        if fitting:
            block = min(fitting)
            free.remove(block)
        else:
            block = SEGMENT if size < OWN_SEGMENT else -(-size // ROUND) * ROUND
        if block - size > SMALL:
            free.append(block - size)
        else:
            rests += block - size
    return rests
