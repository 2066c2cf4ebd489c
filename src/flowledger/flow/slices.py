"""Which tokens of a packed row are on which rank of cp, sp and, under Megatron's sequence parallelism, tp.

Under cp every sample is filled to a multiple of 2*cp tokens and cut into 2*cp chunks; cp rank r has the chunks r and
2*cp - 1 - r, so that all ranks attend to equally many tokens under a causal mask (zig-zag; as Megatron-Core and
Transformer Engine cut packed rows). What a cp rank has of all samples is one row, which sp cuts into equal neighbours,
and tp each of these again. Filling at the row's end makes that even.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowledger.flow.errors import BadInput

Interval = tuple[int, int]  # start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring tokens of one sample: [start, stop) counted in the sample. Those from its length on are filling."""

    sample: int  # its place in the row; the number of samples: the filling at the row's end
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a token is: the rank's position along each axis, and the token's place in that rank's piece of the row."""

    cp: int
    sp: int
    tp: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """A packed row of samples over cp*sp*tp ranks. `tp` is 1 but where the norms' sequence is cut over it."""

    lengths: tuple[int, ...]  # tokens of each sample
    cp: int = 1
    sp: int = 1
    tp: int = 1
    at_least: int = 0  # tokens that the row is filled up to in any case: a pipeline's buffers have one length

    def __post_init__(self) -> None:
        if min(self.cp, self.sp, self.tp, *self.lengths, 1) < 0 or not self.cp * self.sp * self.tp:
            raise BadInput(f"a row of samples {list(self.lengths)} over cp {self.cp}, sp {self.sp}, tp {self.tp}")

    @property
    def multiple(self) -> int:
        """The row is filled up to a multiple of it, and at least to that: every rank takes part."""
        return math.lcm(_chunks(self.cp), self.cp * self.sp * self.tp)

    @property
    def filled(self) -> tuple[int, ...]:
        """Tokens of each sample with its filling, and of the filling at the row's end (0 where there is none)."""
        samples = [-(-length // _chunks(self.cp)) * _chunks(self.cp) for length in self.lengths]
        due = max(sum(samples), self.at_least, 1)
        return (*samples, due + -due % self.multiple - sum(samples))

    @property
    def tokens(self) -> int:
        """T: tokens of the whole row, filling included."""
        return sum(self.filled)

    @property
    def local_tokens(self) -> int:
        """Tokens of one rank's piece, the same on every rank."""
        return self.tokens // (self.cp * self.sp * self.tp)

    def of_rank(self, *, cp: int = 0, sp: int = 0, tp: int = 0) -> tuple[Piece, ...]:
        """What a rank has of the row, in the order of its piece."""
        start = (sp * self.tp + tp) * self.local_tokens
        return tuple(_window(self._of_cp(cp), start, start + self.local_tokens))

    def spot(self, sample: int, token: int) -> Spot:
        """The one rank that has a token. Raises BadInput for a token or sample that the row does not have."""
        if not 0 <= sample < len(self.filled) or not 0 <= token < self.filled[sample]:
            raise BadInput(f"token {token} of sample {sample} is not in a row of samples {list(self.filled)}")
        chunk = token // max(1, self.filled[sample] // _chunks(self.cp)) if self.cp > 1 else 0
        cp = min(chunk, 2 * self.cp - 1 - chunk)
        at = 0
        for piece in self._of_cp(cp):
            if piece.sample == sample and piece.start <= token < piece.stop:
                at += token - piece.start
                break
            at += piece.tokens
        along, index = divmod(at, self.local_tokens)
        sp, tp = divmod(along, self.tp)
        return Spot(cp=cp, sp=sp, tp=tp, index=index)

    def token(self, spot: Spot) -> tuple[int, int]:
        """(sample, token) at a place. Raises BadInput for a place outside the piece."""
        at = spot.index
        for piece in self.of_rank(cp=spot.cp, sp=spot.sp, tp=spot.tp):
            if 0 <= at < piece.tokens:
                return piece.sample, piece.start + at
            at -= piece.tokens
        raise BadInput(f"index {spot.index} is outside a piece of {self.local_tokens} tokens")

    def pairs(self, cp: int) -> int:
        """Query-key pairs that a cp rank computes under a causal mask, filling included: its share of the work."""
        return sum((piece.stop * (piece.stop + 1) - piece.start * (piece.start + 1)) // 2 for piece in self._of_cp(cp))

    def _of_cp(self, cp: int) -> Iterator[Piece]:
        for sample, length in enumerate(self.filled):
            for start, stop in zigzag(length, self.cp, cp):
                if stop > start:
                    yield Piece(sample=sample, start=start, stop=stop)


def zigzag(length: int, ranks: int, rank: int) -> tuple[Interval, ...]:
    """The intervals of one of `ranks` ranks: of 2*ranks chunks those at `rank` from both ends; all of it for one rank."""
    if ranks == 1:
        return ((0, length),)
    size = -(-length // (2 * ranks))
    ends = [(min(length, size * chunk), min(length, size * (chunk + 1))) for chunk in (rank, 2 * ranks - 1 - rank)]
    return tuple(ends)


def _chunks(cp: int) -> int:
    return 2 * cp if cp > 1 else 1


def _window(pieces: Iterator[Piece] | Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """What lies in [start, stop) when the pieces stand one after another."""
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.tokens)
        if first < last:
            yield Piece(sample=piece.sample, start=piece.start + first, stop=piece.start + last)
        at += piece.tokens
