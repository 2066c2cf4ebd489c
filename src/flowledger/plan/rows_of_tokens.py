"""A micro-batch as one row of tokens: how long it is, and which of its tokens a rank of cp and sp has.

The arithmetic of filling, counted out once more: what the loop does is written elsewhere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

Interval = tuple[int, int]  # start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens of one sample, and which prompt it answers: neighbours with the same number have the same prompt."""

    prompt: int
    response: int
    group: int = 0


Micro = tuple[Sample, ...]  # the samples of one micro-batch on one data-parallel rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who shares a row. `tp` is 1 but where norms and residuals are cut along the sequence."""

    cp: int = 1
    sp: int = 1
    tp: int = 1
    shared_prompts: bool = True

    @property
    def chunks(self) -> int:
        """Pieces of a sample: under cp each rank has one from its front and one from its end."""
        return 2 * self.cp if self.cp > 1 else 1


@dataclass(frozen=True)
class TokenRow:
    """One micro-batch in one row, filled so that every rank has equally many tokens."""

    micro: Micro
    sharing: Sharing

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Tokens of each sample in the row with its filling; a prompt counts with the first of its neighbours."""
        chunks = self.sharing.chunks
        found = [one.response + (one.prompt if self._leads(at) else 0) for at, one in enumerate(self.micro)]
        return tuple(-(-tokens // chunks) * chunks for tokens in found)

    @cached_property
    def tokens(self) -> int:
        """T. A row without samples is there all the same: every rank takes part."""
        ways = self.sharing
        multiple = math.lcm(ways.chunks, ways.cp * ways.sp * ways.tp)
        return -(-max(sum(self.held), 1) // multiple) * multiple

    @property
    def local_tokens(self) -> int:
        """T/(cp*sp): tokens of one rank."""
        return self.tokens // (self.sharing.cp * self.sharing.sp)

    def wanted(self, cp: int = 0, sp: int = 0) -> int:
        """T_resp: response tokens whose state, that of the token before, is on the rank at these coordinates."""
        return sum(
            max(0, min(last, stop) - max(first, start))
            for start, stop in self._of_rank(cp, sp)
            for first, last in self._before
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.held))

    @cached_property
    def _before(self) -> list[Interval]:
        """The tokens before each response token; the first of a response is predicted by the prompt's last."""
        found, ends = [], 0
        for at, one in enumerate(self.micro):
            if self._leads(at):
                ends = self._starts[at] + one.prompt
                start = ends
            else:
                start = self._starts[at]
            if one.response:
                found += [(ends - 1, ends), (start, start + one.response - 1)]
        return found

    def _leads(self, at: int) -> bool:
        alone = not self.sharing.shared_prompts or self.sharing.cp > 1
        return alone or at == 0 or self.micro[at].group != self.micro[at - 1].group

    def _of_rank(self, cp: int, sp: int) -> Iterator[Interval]:
        """The intervals of the row that a rank has: its cp slice of every sample, and a window of that."""
        size, place = self.local_tokens, 0
        first, last = sp * size, (sp + 1) * size
        for start, stop in self._of_cp(cp):
            begin, end = max(first - place, 0), min(last - place, stop - start)
            if begin < end:
                yield start + begin, start + end
            place += stop - start

    def _of_cp(self, cp: int) -> Iterator[Interval]:
        starts = (*self._starts, self.tokens)
        for start, stop in pairwise(starts):  # the samples, then the filling at the row's end
            if self.sharing.cp == 1:
                yield start, stop
                continue
            size = (stop - start) // self.sharing.chunks
            for chunk in (cp, self.sharing.chunks - 1 - cp):
                yield start + chunk * size, start + (chunk + 1) * size


def alike(samples: int, *, prompt: int, response: int, group: int) -> Micro:
    """A micro-batch of so many samples of full length, `group` of them in a row to one prompt."""
    return tuple(Sample(prompt=prompt, response=response, group=at // group) for at in range(samples))
