"""Rows of one process on their way to the writer: each is told when it was, on which rank and where in the step."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from flowledger.ledger.rows import Row
from flowledger.record.position import Frame
from flowledger.record.watch import Watch


class Sink(Protocol):
    """Takes rows; the ledger's Writer is one."""

    def put(self, row: Row, /) -> None: ...


class RowsOut:
    """`count`: of the rows so far. A sink that has `late` makes rows of ended calls itself, many in one go."""

    def __init__(self, sink: Sink, rank: int | None, rank_count: int | None) -> None:
        self.count = 0
        self._put, self._rank, self._rank_count = sink.put, rank, rank_count
        self._late: Callable[[Callable[[], Row]], None] = getattr(sink, "late", lambda make: sink.put(make()))

    def put(self, row: Row, frame: Frame, now: int, write: bool = True) -> None:
        """Write a row, unless it is only to be said when and where it was."""
        row.t_ns, row.rank, row.rank_count = now, self._rank, self._rank_count
        row.step, row.role, row.stage, row.phase = frame.step, frame.role, frame.stage or row.stage, frame.phase
        row.epoch, row.mini_batch, row.micro_batch = frame.epoch, frame.mini_batch, frame.micro_batch
        row.policy_version = frame.policy_version
        if write:
            self.count += 1
            self._put(row)

    def ended(self, watch: Watch, frame: Frame, event: str, now: int, computed: int | None) -> None:
        """Write that a call has ended. Nothing changes its frame after that, so that the row can be made later."""
        self.count += 1
        self._late(partial(self._made, watch, frame, event, now, computed))

    def _made(self, watch: Watch, frame: Frame, event: str, now: int, computed: int | None) -> Row:
        row = watch.span(frame, event, now)
        row.tokens_computed = computed
        self.put(row, frame, now, write=False)
        return row
