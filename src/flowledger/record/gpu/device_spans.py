"""How long the device took for a span: an event in its stream at the begin and at the end, read when both have passed.

The host is usually ahead of its device, so the time between two calls says little of it. Events cost some microseconds and
no waiting; what they say is asked for later, at the ends of other spans, and at the very end for a moment at most. The time
is that between the two marks in the streams that were current then, with whatever the device did or lacked meanwhile.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from flowledger.ledger.rows import Row, SpanRow
from flowledger.record.gpu.cuda import Event, Gpu, InUse
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
MOST = 4096  # spans that may wait for the device; more get no time of it
AT_ONCE = 64  # read at one occasion, at most
WAIT_S = 0.5  # for the device, when the recording ends


class Begun(NamedTuple):
    """A span that is open, and the event at its begin."""

    device: int
    event: Event


class Passed(NamedTuple):
    """A span that has ended for the host."""

    device: int
    began: Event
    ended: Event
    row: SpanRow
    frame: Frame
    t_ns: int


class DeviceSpans:
    """The spans of one recorder. After an error of CUDA, which stays, nothing more is timed."""

    def __init__(self, put: Put, in_use: InUse) -> None:
        self._put, self._in_use = put, in_use
        self._open: dict[int, Begun] = {}  # by span
        self._passed: deque[Passed] = deque()  # in the order in which they ended
        self._spare: dict[int, list[Event]] = {}  # by device, to which an event belongs from its first use on
        self._reading = threading.Lock()
        self._off = False

    def begin(self, frame: Frame) -> None:
        """A span begins, in the stream that is current."""
        if self._off or len(self._passed) + len(self._open) >= MOST:
            return
        here = self._in_use.here()
        if here is not None:
            with self._once():
                self._open[frame.id] = Begun(here[1], self._mark(*here))

    def end(self, frame: Frame, name: str, span_kind: str, now: int) -> None:
        """It ends: in the stream that is current now, unless that is another device's or is being captured."""
        begun = self._open.pop(frame.id, None)
        if begun is None or self._off:
            return
        here = self._in_use.here()
        if here is None or here[1] != begun.device:
            self._spare.setdefault(begun.device, []).append(begun.event)
            return
        with self._once():
            ended = self._mark(*here)
            row = SpanRow(id=frame.id, event="device", name=name, span_kind=span_kind, start_ns=frame.start_ns)
            self._passed.append(Passed(begun.device, begun.event, ended, row, frame, now))
            self._settle()

    def close(self) -> None:
        """Wait a moment for the device, and leave it at that."""
        until = time.monotonic() + WAIT_S
        with self._once():
            while self._passed and time.monotonic() < until and self._in_use.here() is not None:
                self._settle()
                if self._passed:
                    time.sleep(0.002)
        self._stop()

    def _mark(self, gpu: Gpu, device: int) -> Event:
        """An event in the current stream."""
        spare = self._spare.get(device)
        event = spare.pop() if spare else gpu.event()
        event.record()
        return event

    def _settle(self) -> None:
        """Write the times of what has passed on the device, the oldest first."""
        if not self._reading.acquire(blocking=False):
            return  # another thread does
        try:
            for _ in range(min(AT_ONCE, len(self._passed))):
                one = self._passed[0]
                if not one.ended.query():
                    return
                self._passed.popleft()
                one.row.device_ms = one.began.elapsed_time(one.ended)
                self._spare.setdefault(one.device, []).extend((one.began, one.ended))
                self._put(one.row, one.frame, one.t_ns)
        finally:
            self._reading.release()

    @contextmanager
    def _once(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._stop()
            raise

    def _stop(self) -> None:
        self._off = True
        for kept in (self._open, self._passed, self._spare):
            kept.clear()
