"""The events of a Chrome trace, a batch at a time: of a file of any size no more than a few MiB are held.

A piece of the file is cut where one event ends and the next begins, and decoded as a list. A wrong cut, within an event,
leaves brackets open and so never decodes; then, and where an event is no JSON, events are read one by one and what is
damaged is left out. Format: "Trace Event Format" of Chromium; Kineto, libkineto/src/output_json.cpp.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flowledger.flow.errors import BadInput
from flowledger.record.importers.notes import Notes

HEADER = 16 << 20  # bytes before the events, and behind them
LONGEST = 4 << 20  # bytes of one event
MOST_DAMAGED = 2_000  # events; a file with more is given up
TAIL = 64 << 10  # where a cut is looked for
TRIES = 8

START = re.compile(rb'"traceEvents"\s*:\s*\[')
_CUT = re.compile(rb"\}\s*,\s*(?=\{)")
_NEXT = re.compile(r'\{\s*"(?:ph|name|cat|ts|pid|tid|args)"\s*:')
_BETWEEN = re.compile(r"[\s,]*")


class TraceEvent(msgspec.Struct, gc=False):
    """What is used of one event. Times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Any = msgspec.Raw(b"{}")
    pid: Any = None

    @property
    def details(self) -> Mapping[str, Any]:
        """Its arguments, none where they are no object."""
        found = self.args
        if isinstance(found, msgspec.Raw):
            try:
                found = json.loads(bytes(found), strict=False)
            except (ValueError, RecursionError):
                return {}
        return found if isinstance(found, dict) else {}


class _Fast(TraceEvent, gc=False):
    args: msgspec.Raw = msgspec.Raw(b"{}")


class TraceEvents:
    """The events of one file. `about`: the keys beside them, complete once all events are read."""

    def __init__(self, pieces: Iterator[bytes], name: str, notes: Notes) -> None:
        self._pieces, self._name, self._notes = pieces, name, notes
        self._damaged = 0
        self.about: dict[str, Any] = {}

    def batches(self) -> Iterator[list[TraceEvent]]:
        """Every event once. Raises BadInput where there are none to be found."""
        buffer, plain_list = self._header()
        decode = msgspec.json.Decoder(list[_Fast]).decode
        ended = False
        while not ended:
            piece = next(self._pieces, None)
            buffer += piece or b""
            found, rest = _cut(buffer, decode) if piece is not None else (None, buffer)
            if found is None:
                found, rest, ended = self._one_by_one(buffer, last=piece is None)
            yield found
            buffer = rest
            if piece is None and not ended:
                ended = True
                if not plain_list:  # a plain list may stay open
                    self._notes.skip("the trace ends within its events", self._name)
        self._trailer(buffer)

    def _header(self) -> tuple[bytes, bool]:
        """What follows `[`, and whether the file is but a list."""
        buffer = b""
        for piece in self._pieces:
            buffer += piece
            start = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if start.startswith(b"["):
                return start[1:], True
            found = START.search(buffer)
            if found is not None:
                self._learn(buffer[: found.start()].rstrip(b" \t\r\n,") + b"}")
                return buffer[found.end() :], False
            if len(buffer) > HEADER:
                break
        raise BadInput(f"{self._name} is no trace: it has no list of traceEvents")

    def _trailer(self, rest: bytes) -> None:
        for piece in self._pieces:
            if len(rest) < HEADER:
                rest += piece
        rest = rest.lstrip(b" \t\r\n,")
        self._learn(rest if rest.startswith(b"{") else b"{" + rest)

    def _learn(self, text: bytes) -> None:
        """Keys beside the events; where they are damaged those that are not missed are few."""
        try:
            found = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict):
            self.about.update(found)

    def _one_by_one(self, buffer: bytes, *, last: bool) -> tuple[list[TraceEvent], bytes, bool]:
        """(events, what is not read yet, whether the list has ended)."""
        end = len(buffer) if last else buffer.rfind(b"}") + 1
        text, at = buffer[:end].decode("utf-8", "replace"), 0
        found: list[TraceEvent] = []
        read = json.JSONDecoder(strict=False).raw_decode
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if at >= len(text):
                return found, buffer[end:], False
            if text[at] == "]":
                return found, text[at + 1 :].encode() + buffer[end:], True
            try:
                event, at = read(text, at)
                found.append(_event(event))
            except (ValueError, RecursionError):
                if not last and len(text) - at < LONGEST:
                    return found, text[at:].encode() + buffer[end:], False
                at = self._skip(text, at)

    def _skip(self, text: str, at: int) -> int:
        """Where the next event may begin. Raises BadInput where too many were damaged."""
        self._damaged += 1
        if self._damaged > MOST_DAMAGED:
            raise BadInput(
                f"{self._name}: more than {MOST_DAMAGED:,} damaged events; it is no trace, or not worth reading"
            )
        self._notes.skip("damaged event of a trace", self._name)
        following = _NEXT.search(text, at + 1)
        return following.start() if following is not None else len(text)


def _cut(buffer: bytes, decode: Any) -> tuple[list[TraceEvent] | None, bytes]:
    """The whole events of a buffer and what is left; none where they do not decode."""
    begin = max(len(buffer) - TAIL, 0)
    cuts = list(_CUT.finditer(buffer, begin))
    for cut in cuts[: -TRIES - 1 : -1]:
        try:
            return decode(b"[" + buffer[: cut.start() + 1] + b"]"), buffer[cut.end() :]
        except msgspec.ValidationError:
            return None, buffer
        except (msgspec.DecodeError, RecursionError):
            continue
    return None, buffer


def _event(raw: Any) -> TraceEvent:
    """One event, whatever stands in it."""
    if not isinstance(raw, dict):
        return TraceEvent()
    phase, category, name = (str(raw.get(key) or "") for key in ("ph", "cat", "name"))
    return TraceEvent(
        phase, category, name, _number(raw.get("ts")), _number(raw.get("dur")), raw.get("args"), raw.get("pid")
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
