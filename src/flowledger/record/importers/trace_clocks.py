"""One clock for the traces of several ranks: what they have in common are their collectives, which end everywhere at once.

A trace counts from an origin of its own. Where it says when that was (`baseTimeNanoseconds`, or times since 1970), that
counts, unless the collectives contradict it: nobody leaves one before all have come, so that on one clock the intervals of a
meeting overlap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

MOST_MEETINGS = 400_000  # of all files together
CONTRADICTED = 0.5  # of the meetings in common that cannot be on one clock, from which on a clock is not believed
SINCE_1970 = 1e14  # microseconds: nothing runs for three years, and 1973 is long over

Meeting = tuple[str, tuple[int, ...], int | None, int]  # kind, ranks, step, how manieth of these


class When(NamedTuple):
    """From when to when a rank was in a collective, in nanoseconds."""

    start: int
    end: int
    rank: int | None


@dataclass(slots=True)
class Clocks:
    """The meetings that the traces of an import have told of so far, on the clock of the first."""

    _met: dict[Meeting, When] = field(default_factory=dict)
    _files: int = 0

    def shift(
        self, mine: Mapping[Meeting, tuple[int, int]], rank: int | None, *, told: bool, remark: Callable[[str], None]
    ) -> int:
        """Nanoseconds to add to every time of a file. `told`: it says when its clock began; `remark` takes what a reader must know."""
        pairs = [
            (self._met[key], when) for key, when in mine.items() if key in self._met and self._met[key].rank != rank
        ]
        found, why = self._shift(pairs, told=told)
        if why:
            remark(why)
        for key, (start, end) in mine.items():
            if len(self._met) < MOST_MEETINGS:
                self._met.setdefault(key, When(start + found, end + found, rank))
        self._files += 1
        return found

    def _shift(self, pairs: Sequence[tuple[When, tuple[int, int]]], *, told: bool) -> tuple[int, str]:
        if not pairs:
            alone = told or not self._files
            return 0, "" if alone else (
                "its times count from an origin that it does not tell, and no collective in common with another trace tells it "
                "either; they cannot be compared with those of other ranks"
            )
        apart = sum(start > other.end or end < other.start for other, (start, end) in pairs)
        if told and apart <= CONTRADICTED * len(pairs):
            return 0, ""
        found = round(median(other.end - end for other, (_, end) in pairs))
        why = (
            f"its clock is {abs(found) / 1e9:.6g} s off that of another rank, by {apart:,} of {len(pairs):,} collectives "
            "that end before the other begins"
            if told
            else f"its times count from an origin that it does not tell; {len(pairs):,} collectives in common with other ranks do"
        )
        return found, f"{why}; its times are moved so that these end at once"
