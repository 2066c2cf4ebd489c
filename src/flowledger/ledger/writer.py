"""The writer: rows of one process go to append-only JSONL files, behind the host's back and never in its way.

`put` only appends to a queue. A background thread numbers, encodes and writes the rows before they are a second old,
so that a process killed at any moment lacks no more than that. A write error stops the writing and nothing else: what is
on disk stays readable, and the host never sees an exception.
"""

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowledger.ledger import failures
from flowledger.ledger.rows import MetricRow, Row

FLUSH_S = 0.85
FLUSH_S_AT_STEPS = 1.9  # where rows are few, what costs is to wake
ROTATE_BYTES = 64 << 20
CHUNK_ROWS = 512  # encoded in one call: the interpreter lock is held for half a millisecond at most


@dataclass(frozen=True, slots=True)
class WriterStats:
    """What the writer did so far. `dropped` rows reached no disk: queue full, closed, failed, or not encodable."""

    rows: int
    bytes: int
    dropped: int
    cpu_ns: int  # of the writer's own thread
    by_table: dict[str, int]  # rows written

    @property
    def figures(self) -> dict[str, int]:
        """What a run's manifest keeps of it."""
        return {"rows": self.rows, "bytes": self.bytes, "dropped": self.dropped}


class Writer:
    """Appends rows to `part/<table>-<n>.jsonl`. A row belongs to the writer once it is put."""

    def __init__(
        self, part: Path, *, capacity: int = 100_000, flush_s: float = FLUSH_S, rotate_bytes: int = ROTATE_BYTES
    ):
        self.failure: OSError | None = None
        self._part = part
        self._queue: deque[Row | Callable[[], Row]] = deque()
        self._room = capacity  # 0 once nothing more is taken
        self._dropped = 0
        self._flush_s = flush_s
        self._files = _Files(part, rotate_bytes)
        self._encoder = msgspec.json.Encoder()
        self._seq = 0
        self._rows: dict[str, int] = {}
        self._cpu_ns = 0
        self._ended = False
        self._gate = threading.Lock()  # held but to hurry; waiting at it costs a tenth of what an Event's wait does
        self._gate.acquire()
        self._thread = threading.Thread(target=self._run, name="flowledger-writer", daemon=True)
        self._thread.start()
        _alive.add(self)
        atexit.register(self.close)

    def put(self, row: Row) -> None:
        """Take one row. Never blocks and never raises; a row that finds no room is counted.

        Safe from any thread, from a finaliser and from a signal handler, for it takes no lock: both lines of the body
        are atomic under the interpreter lock.
        """
        if len(self._queue) < self._room:
            self._queue.append(row)
        else:
            self._dropped += 1

    def late(self, make: Callable[[], Row]) -> None:
        """Take a row that the writing thread is to make, many of them in one go: by then what it is made of must not change any more."""
        if len(self._queue) < self._room:
            self._queue.append(make)
        else:
            self._dropped += 1

    def stats(self) -> WriterStats:
        rows = dict(self._rows)
        return WriterStats(sum(rows.values()), self._files.bytes, self._dropped, self._cpu_ns, rows)

    def close(self) -> None:
        """Write what is queued and stop; rows put later are counted as dropped. Safe twice, and in a forked child."""
        self._room = 0
        self._end()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)
        _alive.discard(self)

    def hurry(self) -> None:
        """Write what is queued at once, and not within a second: for a process that others may kill without a word."""
        with suppress(RuntimeError):  # it is on its way already
            self._gate.release()

    def _end(self) -> None:
        """Let the writing thread go; a second time there is nothing to let go."""
        self._ended = True
        self.hurry()

    def _run(self) -> None:
        while not self._ended:
            self._gate.acquire(timeout=self._flush_s)
            if self._queue:
                self._drain()
        self._drain()
        self._files.close()

    def _drain(self) -> None:
        """Write all that is queued now, in chunks."""
        while self._queue:
            self._write(self._take())
            self._cpu_ns = time.thread_time_ns()
        self._cpu_ns = time.thread_time_ns()

    def _take(self) -> dict[str, list[Row]]:
        """The next rows by table, numbered in the order in which they were put."""
        chunk: dict[str, list[Row]] = {}
        for _ in range(min(CHUNK_ROWS, len(self._queue))):
            row = self._made(self._queue.popleft())
            if row is None:
                continue
            row.seq = self._seq
            self._seq += 1
            if type(row) is MetricRow and isinstance(row.value, float) and not math.isfinite(row.value):
                row.special, row.value = _special(row.value), None
            chunk.setdefault(row.table, []).append(row)
        return chunk

    def _made(self, put: Row | Callable[[], Row]) -> Row | None:
        if isinstance(put, Row):
            return put
        with suppress(Exception):  # whatever it is made of, what others have put is written
            return put()
        self._dropped += 1
        return None

    def _write(self, chunk: dict[str, list[Row]]) -> None:
        for table, rows in chunk.items():
            lines, count = self._encode(rows) if self.failure is None else (b"", 0)
            try:
                self._files.append(table, lines)
            except OSError as error:
                self._fail(error)
                count = 0
            self._rows[table] = self._rows.get(table, 0) + count
            self._dropped += len(rows) - count

    def _fail(self, error: OSError) -> None:
        """Take no more, and leave the first error where a reader finds it."""
        if self.failure is None:
            self.failure = error
            failures.keep(self._part, error)
        self._room = 0

    def _encode(self, rows: list[Row]) -> tuple[bytes, int]:
        """One line a row, and how many; a row that JSON cannot hold (a foreign object, a lone surrogate) is left out."""
        with suppress(TypeError, ValueError, OverflowError):
            return self._encoder.encode_lines(rows), len(rows)
        lines = []
        for row in rows:
            try:
                lines.append(self._encoder.encode(row) + b"\n")
            except (TypeError, ValueError, OverflowError):
                continue
        return b"".join(lines), len(lines)

    def _forget(self) -> None:
        """In a forked child: the files are the parent's, and so are the rows still queued."""
        self._room = 0
        self._queue.clear()
        self._end()
        self._files.close()


class _Files:
    """The open file of each table, appended without a buffer and rotated by size."""

    def __init__(self, part: Path, rotate_bytes: int):
        self.bytes = 0
        self._part = part
        self._rotate_bytes = rotate_bytes
        self._open: dict[str, tuple[int, int]] = {}  # table -> (descriptor, bytes so far)
        self._number: dict[str, int] = {}

    def append(self, table: str, lines: bytes) -> None:
        """Raises OSError (full disk, size limit, no permission)."""
        if not lines:
            return
        if table not in self._open:
            self._open[table] = (self._next(table), 0)
        descriptor, size = self._open[table]
        rest = memoryview(lines)
        while rest:
            written = os.write(descriptor, rest)
            self.bytes += written
            rest = rest[written:]
        self._open[table] = (descriptor, size + len(lines))
        if size + len(lines) >= self._rotate_bytes:
            os.close(self._open.pop(table)[0])

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _next(self, table: str) -> int:
        number = self._number.get(table, -1) + 1
        self._number[table] = number
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._part / f"{table}-{number}.jsonl", flags, 0o644)


def _special(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _after_fork_in_child() -> None:
    for writer in list(_alive):
        writer._forget()


_alive: weakref.WeakSet[Writer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork_in_child)
