"""One file that is imported: unpacked while it is read, and never held as a whole."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

from flowledger.flow.errors import BadInput
from flowledger.record.importers.notes import Notes

HEAD = 64 << 10  # what a format is recognised by
CHUNK = 1 << 20
LONGEST_LINE = 8 << 20  # a longer one is left out and counted; nobody writes numbers that way
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
TORN = (EOFError, zlib.error, gzip.BadGzipFile)
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


@dataclass(frozen=True)
class Source:
    """A file by its path. `inside` is where it lies in the directory that the user named, for messages."""

    path: Path
    inside: Path = field(default=Path())

    @property
    def name(self) -> str:
        """The file's name without the ending of its packing."""
        return self.path.name[:-3] if self.packed and self.path.name.endswith(".gz") else self.path.name

    @cached_property
    def packed(self) -> bool:
        """Whether it is gzipped, by its first bytes."""
        return self._first(2) == GZIP

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB, unpacked; less where the file ends or is damaged before. Raises BadInput if unreadable."""
        got = b""
        with self.open() as file:
            try:
                while len(got) < HEAD and (more := file.read1(HEAD - len(got))):  # type: ignore[attr-defined]  # both have it
                    got += more
            except TORN:
                pass
        return got

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The unpacked bytes. Raises BadInput for a file that cannot be opened, or is packed in a way not known."""
        if self._first(4) == ZSTD:
            raise BadInput(f"{self.path} is packed with zstd; unpack it first: zstd -d {self.path}")
        try:
            with gzip.open(self.path, "rb") if self.packed else self.path.open("rb") as file:
                yield file  # type: ignore[misc]  # GzipFile reads like any binary file
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise
            raise BadInput(f"cannot read {self.path}: {error.strerror or error}") from None

    def chunks(self, notes: Notes) -> Iterator[bytes]:
        """The unpacked bytes, a piece at a time; where the packing is damaged they end, and the notes say so."""
        done = 0
        with self.open() as file:
            while True:
                try:
                    piece = file.read1(CHUNK)  # type: ignore[attr-defined]  # both have it
                except TORN:
                    notes.skip(f"damaged gzip: what follows the first {done:,} unpacked bytes is lost", self.path.name)
                    return
                if not piece:
                    return
                done += len(piece)
                yield piece

    def blocks(self, notes: Notes) -> Iterator[tuple[bytes, list[str]]]:
        """(bytes, lines): whole lines, as they stand and as text without their ends; a carriage return ends one too.

        A line longer than LONGEST_LINE is left out, with a note. Bytes that are no UTF-8 become U+FFFD.
        """
        mark, encoding = next(((mark, name) for mark, name in MARKS if self.head.startswith(mark)), (b"", "utf-8"))
        rest, skipping, first = b"", False, True
        newline = "\n".encode(encoding)
        for piece in self.chunks(notes):
            if first:
                piece, first = piece[len(mark) :], False
            whole = rest + piece
            cut = _last_end(whole, newline)
            if not cut:
                skipping = skipping or len(whole) > LONGEST_LINE
                rest = (
                    whole[-(len(whole) % len(newline)) :]
                    if skipping and len(whole) % len(newline)
                    else b""
                    if skipping
                    else whole
                )
                continue
            text, rest = whole[:cut], whole[cut:]
            lines = text.decode(encoding, "replace").replace("\r", "\n").split("\n")
            lines.pop()  # what is behind the last end is empty
            if skipping:
                notes.skip(f"a line longer than {LONGEST_LINE >> 20} MiB", self.path.name)
                lines, skipping = lines[1:], False
            yield text, lines
        if skipping:
            notes.skip(f"a line longer than {LONGEST_LINE >> 20} MiB", self.path.name)
        elif rest:
            yield rest, rest.decode(encoding, "replace").replace("\r", "\n").split("\n")

    def lines(self, notes: Notes) -> Iterator[tuple[int, str]]:
        """(number from 1, text) of every line that is not empty."""
        number = 0
        for _, block in self.blocks(notes):
            for line in block:
                number += 1
                if line:
                    yield number, line

    def _first(self, count: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                return file.read(count)
        except OSError as error:
            raise BadInput(f"cannot read {self.path}: {error.strerror or error}") from None


def _last_end(text: bytes, newline: bytes) -> int:
    """Where the last whole line ends; 0 where none does."""
    width = len(newline)
    if width == 1:
        return max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    at = text.rfind(newline)
    while at > 0 and at % width:
        at = text.rfind(newline, 0, at)
    return at + width if at >= 0 else 0
