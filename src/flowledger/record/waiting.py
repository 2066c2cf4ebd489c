"""What does not end is written before it ends, for the end may never come: where each rank stands, and for whom it waits.

A thread writes the begin of a collective that has lasted a second, and again every so often: it is open still. Of the
innermost call it does so once. Where a collective lasts longer than a limit somebody must look at what the other ranks
have written: who is not in it, and where that rank is instead.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowledger.ledger.rows import FindingRow, Row, SpanRow
from flowledger.record.position import Frame

clock = time.monotonic_ns
LOOK_S = 1.0  # between two looks
SLOW_NS = 1_000_000_000  # what is open longer is written before it ends
AGAIN_NS = 5_000_000_000  # between two begins of one collective, and two looks for a hang
_LASTING = ("process", "step", "stage")  # scopes whose begin is written at once


class Host(Protocol):
    """What this needs of a recorder."""

    latest: Frame

    def put(self, row: Row, frame: Frame, now: int, write: bool = True) -> None: ...
    def guard(self, work: Callable[..., Any], *args: Any) -> Any: ...


class Opened(Protocol):
    """A collective that has not ended."""

    row: SpanRow
    frame: Frame


@dataclass(frozen=True, slots=True)
class Alarm:
    """What to do once a collective has been open for `after_s` seconds: `look` whether ranks hang, and `tell` of it.

    It is not told where the collective has ended meanwhile.
    """

    after_s: float
    look: Callable[[], FindingRow | None]
    tell: Callable[[FindingRow], None]


class Waiting:
    """Watches the collectives of one recorder that are open, from the first one on."""

    def __init__(self, host: Host, opened: Mapping[int, Opened], alarm: Alarm | None = None) -> None:
        self._host, self._opened, self._alarm = host, opened, alarm
        self._told: dict[int, int] = {}  # span -> when its begin was written last
        self._looked = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch, if nobody does so yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flowledger-waiting", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching. A look that has begun is finished."""
        self._closed.set()

    def begins(self) -> list[SpanRow]:
        """The begin of every collective that is open now, the oldest first."""
        return [self._begin_of(opened) for opened in list(self._opened.values())]

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._host.guard(self._look, clock())
            if self._alarm is not None:
                self._host.guard(self._raise, self._alarm, clock())

    def _look(self, now: int) -> None:
        open_now = list(self._opened.values())
        frame = self._host.latest
        self._told = {key: at for key, at in self._told.items() if key in self._opened or key == frame.id}
        for opened in open_now:
            row = opened.row
            if now - row.start_ns > SLOW_NS and now - self._told.get(row.id, 0) >= AGAIN_NS:
                begin, row.event = self._begin_of(opened), "end"
                self._told[row.id] = now
                self._host.put(begin, opened.frame, now)
        if frame.scope not in _LASTING and frame.id not in self._told and 0 < frame.start_ns < now - SLOW_NS:
            self._told[frame.id] = now
            self._host.put(_call(frame), frame, now)

    def _raise(self, alarm: Alarm, now: int) -> None:
        oldest = next(iter(self.begins()), None)
        if oldest is None or now - oldest.start_ns < alarm.after_s * 1e9 or now - self._looked < AGAIN_NS:
            return
        self._looked = now
        found = alarm.look()
        if found is not None and oldest.id in self._opened:
            alarm.tell(found)

    def _begin_of(self, opened: Opened) -> SpanRow:
        row: SpanRow = opened.row.__copy__()  # type: ignore[attr-defined]  # twice as quick as copy.copy
        row.event, row.end_ns, row.latency_ms = "begin", None, None
        self._host.put(row, opened.frame, row.start_ns, False)
        return row


def _call(frame: Frame) -> SpanRow:
    """The begin of a call of which otherwise only the whole is written."""
    parent = frame.parent.id if frame.parent is not None else 0
    return SpanRow(
        id=frame.id, parent=parent or None, event="begin", name=frame.name, span_kind="compute", start_ns=frame.start_ns
    )
