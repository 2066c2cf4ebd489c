"""Which sample runs in which slot: samples are admitted in order as slots free, and running slots stay compact.

Plain integers; the cache and the tensors of a rollout follow what is decided here. Sample index = prompt*G + k.

A prompt is prefilled once. Because samples are admitted in order, at most one prompt has some responses admitted and
others still waiting, and one slot (`_prefix_row`) holds its tokens: either that slot is still running, or it has just
been freed and is then the first to be filled again, with a response to the same prompt. So the prompt never needs a
place outside the slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turnover:
    """What to do, in this order, after some samples ended."""

    admitted: tuple[int, ...] = ()  # samples that begin
    prefill: tuple[tuple[int, int], ...] = ()  # (slot, prompt): run the prompt through the model into this slot
    # (slot, slot that holds the prompt, prompt): take the prompt over, or go back to its end where both are the same
    shares: tuple[tuple[int, int, int], ...] = ()
    moves: tuple[tuple[int, int], ...] = ()  # (freed slot, slot whose running sample moves down into it)


@dataclass(slots=True)
class Scheduler:
    """Slots 0..running-1 hold the running samples; the samples from `_next` on are waiting."""

    slots: int  # B_slot
    total: int  # B
    group_size: int  # G
    samples: list[int] = field(default_factory=list)  # slot -> sample, for the running slots
    _next: int = 0
    _prefix_row: int = -1  # the slot that holds the tokens of the prompt admitted last

    @property
    def running(self) -> int:
        return len(self.samples)

    @property
    def waiting(self) -> int:
        return self.total - self._next

    def turn_over(self, freed: Sequence[int]) -> Turnover:
        """End the samples in the freed slots, admit waiting ones, and close the gaps that remain."""
        free = [*sorted(freed, key=lambda row: (row != self._prefix_row, row)), *range(self.running, self.slots)]
        filled, open_rows = free[: self.waiting], [row for row in free[self.waiting :] if row < self.running]
        admitted: list[int] = []
        prefill: list[tuple[int, int]] = []
        shares: list[tuple[int, int, int]] = []
        for row in filled:
            sample, prompt = self._next, self._next // self.group_size
            if sample % self.group_size == 0:
                prefill.append((row, prompt))
                self._prefix_row = row
            else:
                shares.append((row, self._prefix_row, prompt))
            self._place(row, sample)
            admitted.append(sample)
            self._next += 1
        return Turnover(tuple(admitted), tuple(prefill), tuple(shares), self._compact(open_rows))

    def _place(self, row: int, sample: int) -> None:
        if row == self.running:
            self.samples.append(sample)
        else:
            self.samples[row] = sample

    def _compact(self, open_rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Fill open slots from the end; only when nobody waits, so the prefix slot is no longer needed."""
        kept = self.running - len(open_rows)
        sources = [row for row in range(kept, self.running) if row not in set(open_rows)]
        moves = tuple(zip(sorted(row for row in open_rows if row < kept), sources, strict=True))
        for row, source in moves:
            self.samples[row] = self.samples[source]
        del self.samples[kept:]
        return moves
