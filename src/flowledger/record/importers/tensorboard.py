"""TensorBoard's event files: the scalars of every writer, of any version.

A file is a row of records, each with its length and two checks (TFRecord), and each record an Event. Scalars are
`simple_value`, or since TensorFlow 2 a tensor of one element. Everything else (texts, pictures, histograms) is passed over.
Format: tensorflow/core/util/event.proto, core/framework/{summary,tensor}.proto, core/lib/io/record_writer.cc.
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import Row
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.tables import names_of
from flowledger.record.importers.wire import (
    Malformed,
    Value,
    Window,
    fields,
    inside,
    masked_crc32c,
    real,
    signed,
    text,
    varint,
)

FIRST = b"brain.Event:"  # the first event says which version of them follows
LONGEST = 64 << 20  # bytes of a record that is read at all
CHECKED = 64 << 10  # bytes of one whose check is computed; a scalar is far below, and a check in Python takes its time
_LENGTH = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_check_of_length = lru_cache(maxsize=4096)(masked_crc32c)  # few lengths, again and again
# DataType of a tensor -> (how one element stands in tensor_content, which field holds it else)
_TYPES = {
    1: ("<f", 5),
    2: ("<d", 6),
    3: ("<i", 7),
    4: ("<B", 7),
    5: ("<h", 7),
    6: ("<b", 7),
    9: ("<q", 10),
    10: ("<?", 11),
    19: ("<e", 13),
}
_REALS, _HALF = (1, 2), 19


class Scalar(NamedTuple):
    """One number of one step."""

    tag: str
    value: float
    step: int
    wall_time: float


def fits(source: Source) -> bool:
    """The name that every writer gives, or the first event."""
    return "tfevents" in source.name or FIRST in source.head[:64]


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """A row a scalar. Raises BadInput where the file is none of events."""
    names = names_of({one.tag for one in _scalars(iter((source.head,)), source, Notes())}, "", str(source.path), notes)
    for one in _scalars(source.chunks(notes), source, notes):
        row = names.row(one.tag, one.value, one.step)
        row.t_ns = round(one.wall_time * 1e9) if 0 < one.wall_time < 1e10 else -1
        yield row


def _scalars(pieces: Iterator[bytes], source: Source, notes: Notes) -> Iterator[Scalar]:
    for record in _records(Window(pieces), source, notes):
        try:
            found = list(_of_event(record))
        except Malformed as error:
            notes.skip(f"a record that is no event ({error})", source.path.name)
            continue
        yield from found


def _records(window: Window, source: Source, notes: Notes) -> Iterator[bytes]:
    """The content of each record whose checks are right."""
    while head := window.take(_LENGTH.size):
        start = window.place - len(head)
        if len(head) < _LENGTH.size:
            notes.skip("the last record is cut off", f"{source.path.name}: byte {start:,}")
            return
        size, check = _LENGTH.unpack(head)
        if check != _check_of_length(head[:8]):
            if not start:
                raise BadInput(f"{source.path} is no event file: the check of its first record is wrong")
            notes.skip("a record's length is damaged: what follows is lost", f"{source.path.name}: byte {start:,}")
            return
        if size > LONGEST:
            notes.skip(f"a record of more than {LONGEST >> 20} MiB", f"{source.path.name}: byte {start:,}")
            window.skip(size + _CHECK.size)
            continue
        record, check_of = window.take(size), window.take(_CHECK.size)
        if len(check_of) < _CHECK.size:
            notes.skip("the last record is cut off", f"{source.path.name}: byte {start:,}")
            return
        if size <= CHECKED and _CHECK.unpack(check_of)[0] != masked_crc32c(record):
            notes.skip("a record whose check is wrong", f"{source.path.name}: byte {start:,}")
            continue
        yield record


def _of_event(record: bytes) -> Iterator[Scalar]:
    """The scalars of one event. Raises Malformed."""
    step, wall_time = 0, 0.0
    summaries: list[Value] = []
    for number, value in fields(record):
        if number == 1:
            wall_time = real(value) or 0.0
        elif number == 2:
            step = signed(value) or 0
        elif number == 5:
            summaries.append(value)
    for summary in summaries:
        for number, value in inside(summary):
            if number == 1 and (found := _of_value(value)) is not None:
                yield Scalar(*found, step, wall_time)


def _of_value(value: Value) -> tuple[str, float] | None:
    tag, number = "", None
    for field, content in inside(value):
        if field == 1:
            tag = text(content)
        elif field == 2:
            number = real(content)
        elif field == 8:
            number = _of_tensor(content)
    return (tag[:1000], number) if tag and number is not None else None


def _of_tensor(tensor: Value) -> float | None:
    """The number that a tensor of one element is."""
    kind, content, values = 0, b"", {}
    for field, value in inside(tensor):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field in (5, 6, 7, 10, 11, 13):
            values[field] = value
    if kind not in _TYPES:
        return None
    form, field = _TYPES[kind]
    if len(content) == struct.calcsize(form):
        return float(struct.unpack(form, content)[0])
    return _listed(values.get(field), kind) if not content else None


def _listed(value: Value | None, kind: int) -> float | None:
    """The only element of a repeated field; packed, it stands as bytes."""
    if value is None:
        return None
    if kind in _REALS:
        return real(value)
    if isinstance(value, bytes):
        value = varint(value, 0)[0]
    number = signed(value) or 0
    return float(struct.unpack("<e", struct.pack("<H", number & 0xFFFF))[0]) if kind == _HALF else float(number)
