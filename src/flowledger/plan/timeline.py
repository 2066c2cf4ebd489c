"""Tensors with birth and death over the instants of a stage; their sum over instants gives the peak and what made it.

The only place where a peak is found. An instant is a name in order of time (`update_actor/forward/layer 3`); a tensor
lives from the instant of its birth through the instant of its death, both included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

BLOCK = 512  # the CUDA caching allocator hands out multiples of this
END = 10**9  # later than any instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One tensor (or `count` equal ones) on one rank, from `born` to `dies`: indices of instants."""

    name: str  # a tensor of the flow: params, grads, activations, logits, …
    kind: str  # a memory kind of flow/kinds
    bytes: int  # of one
    count: int = 1
    born: int = 0
    dies: int = END
    label: str = ""  # which one: `layer 3 gate‖up`, `fp32 copy of logits`
    formula: str = ""  # how the bytes come about, in symbols
    source: str = ""  # of the formula
    host: bool = False  # in host memory
    persistent: bool = False  # lives on after the stage

    @property
    def total(self) -> int:
        return self.bytes * self.count

    def rounded(self, block: int = BLOCK) -> int:
        """Bytes as the caching allocator counts them: each tensor rounded up to a block."""
        return -(-self.bytes // block) * block * self.count


@dataclass(frozen=True, slots=True)
class Timeline:
    """The instants of one stage on one rank, and what lives when."""

    instants: tuple[str, ...]
    lives: tuple[Live, ...]

    def totals(self, *, block: int = 1, host: bool = False) -> list[int]:
        """Bytes alive at each instant."""
        change = [0] * (len(self.instants) + 1)
        for live in self.lives:
            if live.host == host and live.born < len(self.instants):
                size = live.rounded(block)
                change[max(0, live.born)] += size
                change[min(live.dies, len(self.instants) - 1) + 1] -= size
        totals, running = [], 0
        for step in change[:-1]:
            running += step
            totals.append(running)
        return totals

    def peak(self, *, block: int = 1, host: bool = False) -> "Peak":
        """The instant with the most bytes (the first of equals) and the tensors alive then."""
        totals = self.totals(block=block, host=host)
        at = max(range(len(totals)), key=lambda index: totals[index])
        return Peak(self.instants[at], totals[at], self.alive(at, host=host))

    def alive(self, at: int, *, host: bool = False) -> tuple[Live, ...]:
        """The tensors that live at an instant."""
        last = len(self.instants) - 1
        return tuple(live for live in self.lives if live.host == host and live.born <= at <= min(live.dies, last))

    def with_(self, *more: Live) -> "Timeline":
        """The same instants with further tensors."""
        return Timeline(self.instants, (*self.lives, *more))

    def beside(self, others: Iterable[Live]) -> "Timeline":
        """The same stage with tensors of elsewhere resting beside it from begin to end (another model, an engine)."""
        return self.with_(*(live if _always(live) else replace(live, born=0, dies=END) for live in others))


def _always(live: Live) -> bool:
    return live.born == 0 and live.dies == END


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst instant of a stage."""

    instant: str
    bytes: int
    lives: tuple[Live, ...]

    def by_kind(self) -> dict[str, int]:
        """Memory kind -> bytes, largest first."""
        sums: dict[str, int] = {}
        for live in self.lives:
            sums[live.kind] = sums.get(live.kind, 0) + live.total
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class Clock:
    """Names instants while a stage is written down: `at = clock.tick("forward/layer 3")`."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def tick(self, name: str) -> int:
        """The index of a new instant of this name."""
        self._names.append(name)
        return len(self._names) - 1

    @property
    def now(self) -> int:
        return len(self._names) - 1

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._names)
