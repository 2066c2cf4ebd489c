"""Numbers for the samples of a framework that has no names for them, and how one is found again in a shuffled batch.

All ranks generate at once, each as many rows. Row i of rank r in generation g is sample g*B + r*B/ranks + i; G rows in
succession, across ranks, are a group. A later batch holds the same rows in another order: what a row says tells which
sample it is. Samples that say the same are taken in turn, each once a pass: to swap them would change nothing.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.record.position import Frame

FACTS = ("new_samples", "samples", "samples_made", "samples_among")  # of calls, as `record.watch` says


class Numbering:
    """The samples of the newest generation, as one rank of `ranks` sees them."""

    def __init__(self, rank: int, ranks: int, *, level: str) -> None:
        self._rank, self._ranks, self._level = rank, ranks, level
        self._generations = self._rows = 0  # begun so far; rows of the newest on each rank
        self._first, self._group_size = 0, 1  # number of its first sample; how many of them are a group
        self._waiting: dict[bytes, deque[int]] = {}  # what a row says -> the samples that say it, the next in front

    def take(self, frame: Frame, fact: str, value: Any, group_size: int) -> None:
        """What a call says of its rows: `new_samples`, `samples`, `samples_made:KEY,…` or `samples_among:KEY,…`."""
        name, _, keys = fact.partition(":")
        if name == "new_samples":
            self._begin(len(value), group_size)
        if name in ("new_samples", "samples"):
            self._are(frame, self._in_order(len(value)))
        elif (parts := self._parts(value, keys.split(","))) is not None:
            if name == "samples_made":
                self._keep(parts)
            else:
                self._are(frame, self._found(parts))

    def _begin(self, rows: int, group_size: int) -> None:
        """A batch of `rows` is about to be generated here, `group_size` in succession to the same prompt."""
        self._first = self._generations * rows * self._ranks
        self._generations, self._rows, self._group_size = self._generations + 1, rows, group_size
        self._waiting.clear()

    def _are(self, frame: Frame, samples: Sequence[int]) -> None:
        """The rows of a call are these samples; none: nobody knows."""
        frame.sample_ids = [str(one) for one in samples] or None
        frame.groups = [str(one // self._group_size) for one in samples] or None
        if frame.scope == "stage" and frame.groups:
            frame.columns = {"group_id": list(frame.groups)}

    def _in_order(self, rows: int) -> Sequence[int]:
        """A batch in the order of its generation: that of this rank, or of all ranks; none of another size."""
        if rows == self._rows:
            start = self._first + self._rank * rows
        elif rows == self._rows * self._ranks:
            start = self._first
        else:
            return ()
        return range(start, start + rows)

    def _keep(self, parts: Sequence[Any]) -> None:
        """What this rank's rows say: parts [rows, width]."""
        self._waiting.clear()
        for one, said in zip(self._in_order(self._rows), _said(parts), strict=False):
            self._waiting.setdefault(said, deque()).append(one)

    def _found(self, parts: Sequence[Any]) -> Sequence[int]:
        """The samples that say this, in the order of the rows; none where a row is not of the newest generation."""
        found = []
        for said in _said(parts):
            waiting = self._waiting.get(said)
            if waiting is None:
                return ()
            found.append(waiting[0])
            waiting.rotate(-1)
        return found

    def _parts(self, batch: Mapping[str, Any], keys: Sequence[str]) -> list[Any] | None:
        """The entries by which rows are known again; None where to read them would wait for a device."""
        parts = [batch[key] for key in keys if batch.get(key) is not None]
        if len(parts) < len(keys) or not all(part.is_cpu or self._level == "tokens" for part in parts):
            return None
        return parts


def _said(parts: Sequence[Any]) -> list[bytes]:
    """Each row of all parts [rows, width] as bytes."""
    arrays = [part.detach().cpu().contiguous().numpy() for part in parts]
    return [b"|".join(row.tobytes() for row in rows) for rows in zip(*arrays, strict=True)]
