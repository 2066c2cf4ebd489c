"""A replay of CUDA's caching allocator: what is reserved when tensors are asked for and given back in this order.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.1 to 2.13): requests are rounded to 512 bytes; up to 1 MiB come from
2 MiB segments, up to 10 MiB from 20 MiB ones, larger ones from segments of their size rounded to 2 MiB; the smallest free
block that is large enough is taken, and split when more than 1 MiB would be left over; free neighbours merge. Each stream
has blocks of its own. Expandable segments grow instead, so that reserved follows allocated.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUND, SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, GROWTH = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    size: int
    small: bool  # of a segment for small requests
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(slots=True)
class Pool:
    """The blocks of one stream: small ones and large ones apart."""

    reserved: int = 0
    allocated: int = 0
    small: list[tuple[int, int, Block]] = field(default_factory=list)
    large: list[tuple[int, int, Block]] = field(default_factory=list)

    def take(self, wanted: int) -> Block:
        """A block of at least this many bytes."""
        size = max(ROUND, -(-wanted // ROUND) * ROUND)
        is_small = size <= SMALL
        kept = self.small if is_small else self.large
        at = bisect_left(kept, (size, 0))
        block = kept.pop(at)[2] if at < len(kept) else self._segment(size)
        block.free = False
        rest = block.size - size
        if rest >= ROUND if is_small else rest > SMALL:
            other = Block(rest, is_small, True, block, block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            insort(kept, (rest, id(other), other))
        self.allocated += block.size
        return block

    def give(self, block: Block) -> None:
        """The block back; it merges with free neighbours."""
        self.allocated -= block.size
        kept = self.small if block.small else self.large
        for other in (block.before, block.after):
            if other is not None and other.free:
                kept.pop(bisect_left(kept, (other.size, id(other))))
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after:
                        block.after.before = block
        block.free = True
        insort(kept, (block.size, id(block), block))

    def _segment(self, size: int) -> Block:
        whole = SMALL_SEGMENT if size <= SMALL else MIDDLE_SEGMENT if size < MIDDLE else -(-size // GROWTH) * GROWTH
        self.reserved += whole
        return Block(whole, size <= SMALL)
