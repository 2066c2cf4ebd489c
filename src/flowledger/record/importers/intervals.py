"""Lengths of unions of many intervals, in bounded memory: 16 bytes for each stretch that is not covered by others."""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence

RUN = 100_000  # intervals that are sorted at a time

Interval = tuple[float, float]


class Union:
    """Intervals that are added in any order. Those that touch or overlap within a run are one."""

    def __init__(self) -> None:
        self._open: list[Interval] = []
        self._runs: list[tuple[array[float], array[float]]] = []

    def add(self, start: float, end: float) -> None:
        self._open.append((start, end))
        if len(self._open) >= RUN:
            self._close()

    def __bool__(self) -> bool:
        return bool(self._open or self._runs)

    def bounds(self) -> list[float]:
        """The first start and the last end, none where there is nothing."""
        self._close()
        return [edge for starts, ends in self._runs for edge in (starts[0], max(ends))]

    def pieces(self) -> list[Iterator[Interval]]:
        """Iterators in order of time, over runs that may overlap each other."""
        self._close()
        return [zip(starts, ends, strict=True) for starts, ends in self._runs]

    def _close(self) -> None:
        starts, ends = array("d"), array("d")
        for start, end in merged(sorted(self._open)):
            starts.append(start)
            ends.append(end)
        if starts:
            self._runs.append((starts, ends))
        self._open = []


def merged(ordered: Iterable[Interval]) -> Iterator[Interval]:
    """Intervals in order of their start, those that overlap or touch as one."""
    now: Interval | None = None
    for start, end in ordered:
        if now is None:
            now = start, end
        elif start > now[1]:
            yield now
            now = start, end
        elif end > now[1]:
            now = now[0], end
    if now is not None:
        yield now


def lengths(unions: Sequence[Union], windows: Sequence[Interval]) -> list[float]:
    """How much of each window these cover together. Windows: in order of time, none within another."""
    found, first = [0.0] * len(windows), 0
    for start, end in merged(heapq.merge(*(piece for union in unions for piece in union.pieces()))):
        while first < len(windows) and windows[first][1] <= start:
            first += 1
        at = first
        while at < len(windows) and windows[at][0] < end:
            found[at] += max(min(end, windows[at][1]) - max(start, windows[at][0]), 0.0)
            at += 1
    return found
