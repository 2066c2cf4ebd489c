"""One file that is imported: unpacked while it is read, and never held as a whole."""

import codecs
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
UTF8_MARK = codecs.BOM_UTF8
LOOKED = 4 << 10  # bytes that tell an encoding


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
        """The first 64 KiB, unpacked, UTF-16 as UTF-8, without a mark; less where the file ends or is damaged before.

        Raises BadInput if unreadable.
        """
        text = self._head if self.encoding is None else self._head.decode(self.encoding, "replace").encode()
        return text.removeprefix(UTF8_MARK)

    @cached_property
    def encoding(self) -> str | None:
        """The UTF-16 that the file is written in; None for anything else."""
        return _wide(self._head)

    @cached_property
    def _head(self) -> bytes:
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
        """The unpacked bytes, a piece at a time, UTF-16 as UTF-8; where the packing is damaged they end, and the notes say so."""
        pieces = self._pieces(notes)
        if self.encoding is None:
            yield from pieces
            return
        decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        for piece in pieces:
            yield decoder.decode(piece).encode("utf-8", "replace")
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")

    def _pieces(self, notes: Notes) -> Iterator[bytes]:
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
        """(bytes, lines): whole lines, as UTF-8 and as text without their ends; a carriage return ends one too.

        A line longer than LONGEST_LINE is left out, with a note. Bytes that are no UTF-8 become U+FFFD.
        """
        rest, skipping, first = b"", False, True
        for piece in self.chunks(notes):
            if first:
                piece, first = piece.removeprefix(UTF8_MARK), False
            whole = rest + piece
            cut = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
            if not cut:
                skipping = skipping or len(whole) > LONGEST_LINE
                rest = b"" if skipping else whole
                continue
            text, rest = whole[:cut], whole[cut:]
            lines = text.decode("utf-8", "replace").replace("\r", "\n").split("\n")
            lines.pop()  # what is behind the last end is empty
            if skipping:
                notes.skip(f"a line longer than {LONGEST_LINE >> 20} MiB", self.path.name)
                lines, skipping = lines[1:], False
            yield text, lines
        if skipping:
            notes.skip(f"a line longer than {LONGEST_LINE >> 20} MiB", self.path.name)
        elif rest:
            yield rest, rest.decode("utf-8", "replace").replace("\r", "\n").split("\n")

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


def _wide(head: bytes) -> str | None:
    """Which UTF-16 a text is in: by its mark, else by where its zero bytes are; None where it is not."""
    if head.startswith(codecs.BOM_UTF16_LE + b"\0\0"):  # UTF-32
        return None
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if head.startswith(mark):
            return name
    first = head[:LOOKED]
    zeros = first[0::2].count(0), first[1::2].count(0)
    few, many = sorted(zeros)
    if len(first) < 4 or many < 0.25 * len(first) or few:  # of the two bytes of a plain letter one is zero
        return None
    return "utf-16-le" if zeros[1] == many else "utf-16-be"
