"""A link that takes its time: transfers that sleep for latency + bytes / bandwidth in a thread of their own.

Ranks on one machine share its cores, so that a real transfer takes from the computation that should hide it. A sleeping one
does not: it shows when work covers a transfer, and when it does not.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

Piece = TypeVar("Piece")


@dataclass(frozen=True, slots=True)
class Pace:
    """What a ring took, in seconds; `waited`: of it, what no work covered."""

    total: float
    computed: tuple[float, ...]  # of each piece
    waited: float


class Link:
    """One wire in one direction: transfers follow one another. Use as a context; it ends with its thread."""

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="link")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()

    def seconds(self, size: float) -> float:
        """How long so many bytes take."""
        return self.latency_s + size / self.bytes_per_s

    def start(self, size: float) -> Future[None]:
        """Send so many bytes; the result is there when they are."""
        return self._thread.submit(time.sleep, self.seconds(size))


def ring(pieces: Iterable[Piece], size: float, compute: Callable[[Piece], object], link: Link) -> Pace:
    """Compute piece after piece; while one is computed, the next is on its way. The first is there already.

    `size`: bytes of a piece. With n pieces n - 1 travel, as in ring attention, or where a gathered input is multiplied by shards.
    """
    todo = list(pieces)
    computed, waited, begun = [], 0.0, time.perf_counter()
    for left, piece in zip(reversed(range(len(todo))), todo, strict=True):
        transfer = link.start(size) if left else None
        started = time.perf_counter()
        compute(piece)
        ended = time.perf_counter()
        computed.append(ended - started)
        if transfer is not None:
            transfer.result()
            waited += time.perf_counter() - ended
    return Pace(time.perf_counter() - begun, tuple(computed), waited)
