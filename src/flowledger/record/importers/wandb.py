"""What Weights & Biases writes offline, `run-*.wandb`: the history of numbers and the configuration of a run.

The file is a log of LevelDB (blocks of 32 KiB; records in one piece or in several) with a header and zlib's crc32 in place of
crc32c; each record is a protobuf `Record`. Formats: leveldb/doc/log_format.md; wandb/proto/wandb_internal.proto.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import Row
from flowledger.record.importers.names import Names
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.tables import OWN, STEPS, names_of
from flowledger.record.importers.wire import Malformed, Value, Window, inside, signed, text

HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1)
VERSION = 0
BLOCK = 32 << 10
LONGEST = 64 << 20
_PIECE = struct.Struct("<IHB")  # check, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
HISTORY, CONFIG, OUTPUT, RUN, EXIT = 2, 5, 13, 17, 18  # of Record
KEY, NESTED_KEY, VALUE_JSON = 1, 2, 16  # of an item


def fits(source: Source) -> bool:
    return source.head.startswith(MAGIC[0])


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """A row a number of the history. Raises BadInput where the file is none of W&B's."""
    names = names_of(_first_names(source), "", str(source.path), notes)
    config: dict[str, Any] = {}
    lines = 0
    for record in _records(Window(source.chunks(notes)), source, notes):
        try:
            for field, value in inside(record):
                if field == HISTORY:
                    yield from _numbers(*_history(value), names)
                elif field == CONFIG:
                    _configure(config, value)
                elif field == RUN:
                    _learn(value, config, notes)
                elif field == EXIT:
                    _ended(value, notes)
                elif field == OUTPUT:
                    lines += 1
        except Malformed as error:
            notes.skip(f"a record that is no record of W&B ({error})", source.path.name)
    config.pop("_wandb", None)
    notes.configured(config)
    if lines:
        notes.remark(
            f"{source.path.name} holds {lines:,} pieces of console output; import files/output.log beside it for these"
        )


def _first_names(source: Source) -> set[str]:
    """What the beginning of the history calls its numbers."""
    found: set[str] = set()
    with suppress(Malformed):
        for record in _records(Window(iter((source.head,))), source, Notes()):
            for field, value in inside(record):
                found |= _history(value)[0].keys() if field == HISTORY else set()
    return found


def _records(window: Window, source: Source, notes: Notes) -> Iterator[bytes]:
    """Records put together from their pieces; of one with a damaged piece nothing."""
    head = window.take(HEADER.size)
    if len(head) < HEADER.size or HEADER.unpack(head)[:2] != MAGIC:
        raise BadInput(f"{source.path} is no .wandb file: it does not begin with {MAGIC[0].decode()!r} and its number")
    if (version := HEADER.unpack(head)[2]) != VERSION:
        raise BadInput(f"{source.path} is a .wandb file of version {version}, and version {VERSION} is read")
    parts: list[bytes] = []
    for kind, data in _pieces(window, source, notes):
        if kind in (_WHOLE, _FIRST):
            parts = []
        elif not parts or sum(map(len, parts)) > LONGEST:
            parts = []
            continue  # its beginning was damaged
        parts.append(data)
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []


def _pieces(window: Window, source: Source, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """(type, content) of each piece whose check is right."""
    while True:
        room = BLOCK - window.place % BLOCK
        if room < _PIECE.size:  # a block's last bytes are empty
            window.skip(room)
            continue
        head, start = window.take(_PIECE.size), window.place
        if not head:
            return
        if len(head) == _PIECE.size:
            check, size, kind = _PIECE.unpack(head)
            if not kind and not size:  # nothing more in this block
                window.skip(room - _PIECE.size)
                continue
            whole = size <= room - _PIECE.size
            data = window.take(size if whole else room - _PIECE.size)
            if whole and len(data) == size:
                if check == zlib.crc32(data, zlib.crc32(head[-1:])) and _WHOLE <= kind <= _LAST:
                    yield kind, data
                else:
                    notes.skip("a record whose check is wrong", f"{source.path.name}: byte {start:,}")
                    yield _FIRST, b""
                continue
            if not whole:
                notes.skip("a record longer than its block", f"{source.path.name}: byte {start:,}")
                continue
        notes.skip("the last record is cut off", f"{source.path.name}: byte {start:,}")
        return


def _history(value: Value) -> tuple[dict[str, Any], int | None]:
    """(what was logged at once, W&B's own count of such calls)."""
    found, count = {}, None
    for field, content in inside(value):
        if field == 1:
            path, item = _item(content)
            found[".".join(path)] = item
        elif field == 2:
            count = next((signed(number) for at, number in inside(content) if at == 1), 0)
    return found, count


def _numbers(history: dict[str, Any], count: int | None, names: Names) -> Iterator[Row]:
    counted = [one for name in STEPS if isinstance(one := history.get(name), int | float) and abs(one) < 1 << 53]
    step = int(counted[0]) if counted else count
    wall = history.get("_timestamp")
    for name, value in history.items():
        if type(value) in (int, float) and name not in STEPS and not OWN.match(name):
            row = names.row(name, _float(value), step)
            row.t_ns = round(wall * 1e9) if type(wall) is float and 0 < wall < 1e10 else -1
            yield row


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _item(value: Value) -> tuple[list[str], Any]:
    """(the key and those within it, the value)."""
    path, item = [], None
    for field, content in inside(value):
        if field in (KEY, NESTED_KEY):
            path.append(text(content)[:1000])
        elif field == VALUE_JSON:
            try:
                item = json.loads(text(content))
            except (ValueError, RecursionError):
                item = None
    return path or [""], item


def _configure(config: dict[str, Any], value: Value) -> None:
    for field, content in inside(value):
        if field == 1:
            path, item = _item(content)
            place = config
            for key in path[:-1]:
                inner = place.setdefault(key, {})
                if not isinstance(inner, dict):
                    inner = place[key] = {}
                place = inner
            place[path[-1]] = item


def _learn(value: Value, config: dict[str, Any], notes: Notes) -> None:
    """The run's name, and how it was configured when it began."""
    said: dict[int, str] = {}
    for field, content in inside(value):
        if field == 4:
            _configure(config, content)
        elif field in (1, 3, 8):  # id, project, name
            said[field] = text(content)[:200]
    notes.remark(f"W&B run {said.get(8) or said.get(1, '')} of project {said.get(3, '')}")


def _ended(value: Value, notes: Notes) -> None:
    code = next((signed(number) for field, number in inside(value) if field == 1), 0)
    if code:
        notes.remark(f"W&B says that the run ended with exit code {code}")
