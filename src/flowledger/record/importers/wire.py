"""Protocol buffers without their schema: the fields of a message by number. And the checks that logs put around them.

Only what is asked for is decoded, so that a file of any version reads. Encoding: protobuf.dev/programming-guides/encoding;
crc32c: RFC 3720, B.4, and how TFRecord masks it: tensorflow/core/lib/hash/crc32c.h.
"""

from collections.abc import Iterator
from struct import Struct

Value = int | bytes  # of a varint its bits without a sign; else the bytes

LONGEST_VARINT = 10
_FIXED = {1: 8, 5: 4}  # wire type -> bytes
DOUBLE, FLOAT = Struct("<d"), Struct("<f")


class Malformed(ValueError):  # noqa: N818  (it is what the bytes are)
    """The bytes are no message."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of every field in its order. Raises Malformed."""
    at, end = 0, len(message)
    while at < end:
        tag, at = (message[at], at + 1) if message[at] < 0x80 else varint(message, at)
        kind = tag & 7
        if kind == 2:
            size, at = (message[at], at + 1) if at < end and message[at] < 0x80 else varint(message, at)
        elif kind == 0:
            value, at = varint(message, at)
            yield tag >> 3, value
            continue
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise Malformed(f"wire type {kind}")
        if size > end - at:
            raise Malformed(f"field {tag >> 3} is longer than its message")
        yield tag >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """(the number, where the next thing begins). Raises Malformed."""
    value = 0
    for index, byte in enumerate(message[at : at + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    raise Malformed("a number without an end")


def inside(value: Value) -> Iterator[tuple[int, Value]]:
    """The fields of a message in a field. Raises Malformed."""
    if isinstance(value, int):
        raise Malformed("a number where a message was expected")
    return fields(value)


def text(value: Value) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def signed(value: Value) -> int | None:
    """A whole number; negative ones have all upper bits set."""
    if not isinstance(value, int):
        return None
    return value - (1 << 64) if value >> 63 else value


def real(value: Value) -> float | None:
    """A number of 4 or 8 bytes."""
    if isinstance(value, bytes) and len(value) in (4, 8):
        (found,) = (FLOAT if len(value) == 4 else DOUBLE).unpack(value)
        return float(found)
    return None


def masked_crc32c(data: bytes) -> int:
    """The check that TFRecord writes."""
    crc, table = 0xFFFF_FFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def _row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F6_3B78 if value & 1 else 0)
    return value


_TABLE = tuple(_row(value) for value in range(256))


class Window:
    """Bytes that come in pieces, taken in the sizes that a format asks for."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held, self._at = pieces, b"", 0
        self.place = 0  # bytes taken so far

    def take(self, size: int) -> bytes:
        """The next bytes; fewer where there are no more."""
        if size > len(self._held) - self._at:
            parts, have = [self._held[self._at :]], len(self._held) - self._at
            while have < size and (piece := next(self._pieces, None)) is not None:
                parts.append(piece)
                have += len(piece)
            self._held, self._at = b"".join(parts), 0
        found = self._held[self._at : self._at + size]
        self._at += len(found)
        self.place += len(found)
        return found

    def skip(self, size: int) -> None:
        """Pass over bytes without holding them."""
        while size > 0 and (passed := self.take(min(size, 1 << 20))):
            size -= len(passed)
