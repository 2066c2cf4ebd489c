"""JSON as people have it: a value a line, or one document with a list in it, read piece by piece and never as a whole."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source

LARGEST = 16 << 20  # bytes of one element of a list; a larger one is left out and counted
HEAD_LOOKED = 64 << 10
FAULTS = (msgspec.MsgspecError, ValueError, RecursionError)
TOKEN = re.compile(rb'["{}\[\]]')
QUOTE = 0x22
LOOK_BACK = 1 << 10  # bytes of a string that are kept, for its escapes and for a key
KEY = re.compile(rb'"((?:[^"\\]|\\.){1,200})"\s*:')
_decode = msgspec.json.Decoder().decode


def value(text: bytes | str) -> Any:
    """One JSON value; NaN and Infinity, which JSON does not have and Python writes, are taken. Raises one of FAULTS."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        if (
            (b"NaN" in text or b"Infinity" in text)
            if isinstance(text, bytes)
            else ("NaN" in text or "Infinity" in text)
        ):
            return json.loads(text)
        raise


def objects(source: Source, notes: Notes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of every line that holds one; the others are counted."""
    for number, line in source.lines(notes):
        try:
            found = value(line)
        except FAULTS:
            if line.strip():
                notes.skip("a line that is no JSON", f"{source.path.name}:{number}")
            continue
        if isinstance(found, dict):
            yield number, found
        else:
            notes.skip("a line whose JSON is no object", f"{source.path.name}:{number}")


def first_keys(head: bytes) -> set[str]:
    """The keys of the first object of a file; where its line is longer than the head, those that are in the head."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n[")
    line = start.split(b"\n", 1)[0]
    try:
        found = value(line.rstrip().rstrip(b","))
        return set(found) if isinstance(found, dict) else set()
    except FAULTS:
        return (
            {key.decode("utf-8", "replace") for key in KEY.findall(start[:HEAD_LOOKED])} if start[:1] == b"{" else set()
        )


def is_lines(head: bytes) -> bool:
    """Whether a file has a JSON object a line: its first line is a whole one, or longer than what is looked at."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"{"):
        return False
    line, end, _ = start.partition(b"\n")
    if not end and len(head) >= HEAD_LOOKED:
        return True
    try:
        return isinstance(value(line), dict)
    except FAULTS:
        return False


def elements(source: Source, notes: Notes, key: str | None = None) -> Iterator[bytes]:
    """The objects of a document's list, as text: of the list under a top key, else of the document that is a list.

    The document may be of any size; one object may have LARGEST bytes.
    """
    scan = _Scan(key.encode() if key is not None else None)
    for piece in source.chunks(notes):
        yield from scan.feed(piece)
        if scan.over:
            break
    if scan.lost:
        notes.skip(f"an element of more than {LARGEST >> 20} MiB", source.path.name, scan.lost)
    if not scan.over:
        notes.skip("a JSON document that ends before its list does", source.path.name)


class _Scan:
    """Brackets counted over pieces of a document; strings are stepped over, and no byte is looked at twice."""

    def __init__(self, key: bytes | None):
        self.over = False  # the list has ended
        self.lost = 0  # elements that were too large
        self._key = key
        self._text = b""  # what is still needed: of the element that is read, or of a string that is not whole
        self._at = 0  # how far it was looked at
        self._depth = 0
        self._list: int | None = None  # the depth inside of the list
        self._start: int | None = None  # where the element that is read begins; below 0 where it is not kept
        self._string: int | None = None  # where a string that is not whole begins
        self._named = b""  # the last string at depth 1

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self._forget()
        text = self._text = self._text + piece
        while self._string is None or self._closed():
            token = TOKEN.search(text, self._at)
            if token is None:
                self._at = len(text)
                return
            self._at = token.end()
            sign = text[token.start()]
            if sign == QUOTE:
                self._string = token.start()
            elif sign in b"{[":
                self._open(sign, token.start())
            else:
                self._depth -= 1
                if self._list is not None and self._depth < self._list:
                    self.over = True
                    return
                if self._depth == self._list and self._start is not None:
                    if self._start >= 0:
                        yield text[self._start : token.end()]
                    self._start = None

    def _closed(self) -> bool:
        """Step to the end of the string that is read; whether it is there."""
        assert self._string is not None
        text, at = self._text, self._at
        while (at := text.find(b'"', at)) >= 0:
            slashes = at - len(text[max(at - LOOK_BACK, 0) : at].rstrip(b"\\")) - max(at - LOOK_BACK, 0)
            if slashes % 2 == 0:
                if self._depth == 1 and self._list is None:
                    self._named = text[self._string + 1 : at]
                self._at, self._string = at + 1, None
                return True
            at += 1
        self._at = len(text)
        return False

    def _open(self, sign: int, at: int) -> None:
        if self._list is None and sign == 0x5B and self._depth == (0 if self._key is None else 1):
            if self._key is None or self._named == self._key:
                self._list = self._depth + 1
        elif self._list is not None and self._depth == self._list:
            self._start = at
        self._depth += 1

    def _forget(self) -> None:
        """Let go of what is done with: all but the element that is read, or the last bytes of a string."""
        if self._start is not None and self._start >= 0 and len(self._text) - self._start > LARGEST:
            self._start = -1
            self.lost += 1
        done = self._at - LOOK_BACK if self._string is not None else self._at
        if self._start is not None and self._start >= 0:
            done = self._start
        done = max(done, 0)
        self._text = self._text[done:]
        self._at -= done
        if self._start is not None and self._start >= 0:
            self._start -= done
        if self._string is not None:
            self._string -= done  # below 0 once its begin is let go of: a key is never so long


def rows_of(pieces: Iterable[bytes], notes: Notes, where: str) -> Iterator[dict[str, Any]]:
    """The objects that the pieces hold."""
    for number, piece in enumerate(pieces):
        try:
            found = value(piece)
        except FAULTS:
            notes.skip("an element that is no JSON", f"{where}[{number}]")
            continue
        if isinstance(found, dict):
            yield found
