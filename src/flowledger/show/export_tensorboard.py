"""A run as TensorBoard event files: every number under its canonical name and its framework's, and how samples spread.

A file is a row of records, each with its length and two checks (TFRecord), and each record an Event. Numbers are float32, which is
what a scalar has there. Format: tensorflow/core/util/event.proto, core/framework/summary.proto, core/lib/io/record_writer.cc; crc32c:
RFC 3720, B.4, masked as in core/lib/hash/crc32c.h.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import MANIFEST
from flowledger.ledger.reader import Ledger
from flowledger.show.export_files import directory, mark, refused
from flowledger.show.export_rows import Numbers, Steps, check_steps, has_numbers, kept, metrics, paged

VERSION = b"brain.Event:2"
BARS = 30  # of a histogram
SPREADS = ("prompt_length", "response_length", "reward", "advantage")  # of samples, as histograms
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
POLYNOMIAL = 0x82F6_3B78


def write(ledger: Ledger, out: Path | None, steps: Steps, more: Numbers) -> list[str]:
    """Write one event file into a directory; what is left out of it and why, a line each. Raises BadInput where there are no numbers.

    more: numbers that are no rows of the ledger.
    """
    check_steps(ledger, steps)
    if not more and not has_numbers(ledger):
        raise BadInput(
            f"{ledger.run} has no numbers of steps, so TensorBoard has nothing to draw; --to parquet and csv write what there is"
        )
    place = directory(out, "tensorboard")
    created = _created(ledger)
    events = _Events(ledger, steps, more, created)
    name = f"events.out.tfevents.{int(created):010d}.flowledger"
    try:
        mark(place, "tensorboard", ledger.run, [name])
        with (place / name).open("wb") as file:
            record(file, double(1, created) + lengthy(3, VERSION))
            for event in events.made():
                record(file, event)
    except BaseException as error:
        (place / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refused(place, error) from None
        raise
    return events.left_out()


def _created(ledger: Ledger) -> float:
    """When the run was made, in seconds since 1970; where its manifest says no such time, when that was written."""
    try:
        return max(0.0, datetime.fromisoformat(ledger.directory.manifest.created).timestamp())
    except (ValueError, OverflowError):
        return (ledger.directory.path / MANIFEST).stat().st_mtime


class _Events:
    """The events of one run, numbers first. `created`: the time of numbers that have none."""

    def __init__(self, ledger: Ledger, steps: Steps, more: Numbers, created: float) -> None:
        self._ledger, self._steps, self._more, self._created = ledger, steps, more, created
        self._wall: dict[int, float] = {}  # step -> time
        self._timeless: set[int] = set()
        self._unmade: dict[str, str] = {}  # what -> why

    def made(self) -> Iterator[bytes]:
        """One event a step for its numbers, one for its samples."""
        numbers = kept("recorded metrics", metrics(self._ledger, self._steps, self._more), self._unmade)
        for step, rows in groupby(numbers, lambda row: row["step"]):
            told = list(rows)
            self._wall[step] = self._time(told[0])
            yield self._event(step, (lengthy(1, value) for row in told for value in _scalars(row)))
        first, last = self._steps.bounds
        listed = ", ".join(f"list({name}) FILTER ({name} IS NOT NULL) AS {name}" for name in SPREADS)
        spread = f"SELECT step, {listed} FROM samples_merged WHERE source <> 'plan' AND step BETWEEN {first} AND {last} GROUP BY step ORDER BY step"
        for row in kept("how samples spread", paged(self._ledger, spread), self._unmade):
            values = [(name, row[name]) for name in SPREADS if row[name]]
            yield self._event(row["step"], (lengthy(1, _spread(f"samples/{name}", found)) for name, found in values))

    def left_out(self) -> list[str]:
        said = [f"{what} of {self._ledger.run} cannot be made, {why}: left out" for what, why in self._unmade.items()]
        if self._timeless:
            said.append(
                f"{len(self._timeless)} steps of {self._ledger.run} have no times: their points have the time at which the run was made"
            )
        (row,) = self._ledger.rows(
            "SELECT count(DISTINCT name) AS n FROM metrics WHERE source <> 'plan' AND step IS NULL"
        )
        if row["n"]:
            said.append(
                f"{row['n']} metrics of {self._ledger.run} belong to no step: TensorBoard has no place for them"
            )
        return said

    def _time(self, row: dict[str, Any]) -> float:
        """Seconds since 1970: when the step's last number was told, else when the step began."""
        known = row["told_ns"] if row["told_ns"] is not None else row["began_ns"]
        if known is None:
            self._timeless.add(row["step"])
            return self._created
        return float(known / 1e9)

    def _event(self, step: int, values: Iterable[bytes]) -> bytes:
        return double(1, self._wall.get(step, self._created)) + number(2, step) + lengthy(5, b"".join(values))


def _scalars(row: dict[str, Any]) -> Iterator[bytes]:
    """One number under each of its names."""
    value = float(row["special"]) if row["special"] is not None else row["value"]
    if value is None:
        return
    for tag in dict.fromkeys((row["name"], row["raw_name"] or row["name"])):
        yield lengthy(1, tag.encode()) + single(2, value)


def _spread(tag: str, values: Sequence[float]) -> bytes:
    """A histogram of finite numbers, bars of equal width."""
    finite = sorted(float(value) for value in values if math.isfinite(value))
    if not finite:
        return lengthy(1, tag.encode())
    low, high = finite[0], finite[-1]
    bars = BARS if high > low else 1
    limits = [low + (high - low) * (at + 1) / bars for at in range(bars - 1)] + [high]
    counts, at = [0.0] * bars, 0
    for value in finite:
        while value > limits[at]:
            at += 1
        counts[at] += 1
    told = (
        double(1, low)
        + double(2, high)
        + double(3, len(finite))
        + double(4, sum(finite))
        + double(5, sum(x * x for x in finite))
    )
    packed = [struct.pack(f"<{bars}d", *column) for column in (limits, counts)]
    return lengthy(1, tag.encode()) + lengthy(5, told + lengthy(6, packed[0]) + lengthy(7, packed[1]))


# ------------------------------------------------------------------------------------------- protocol buffers, TFRecord


def record(file: BinaryIO, content: bytes) -> None:
    """Write one record with its length and both checks."""
    size = struct.pack("<Q", len(content))
    file.write(size + struct.pack("<I", masked(size)) + content + struct.pack("<I", masked(content)))


def varint(value: int) -> bytes:
    """A whole number, 7 bits a byte, the lowest first; a negative one as 64 bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def lengthy(field: int, content: bytes) -> bytes:
    """Bytes, a text or a message."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def single(field: int, value: float) -> bytes:
    """float32; what is larger than any becomes infinite."""
    if math.isfinite(value) and abs(value) > LARGEST:
        value = math.copysign(math.inf, value)
    return varint(field << 3 | 5) + struct.pack("<f", value)


def masked(content: bytes) -> int:
    """The check of a record."""
    crc = 0xFFFF_FFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_remainder(byte) for byte in range(256))
