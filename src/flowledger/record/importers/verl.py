"""verl's `file` logger: one `{"step": 12, "data": {"actor/pg_loss": …}}` a line."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from flowledger.ledger.rows import MetricRow
from flowledger.record.importers import figures, jsons
from flowledger.record.importers.names import Names
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source

LINE = re.compile(rb'\s*\{\s*"step"\s*:\s*\d+\s*,\s*"data"\s*:\s*\{')


class Line(msgspec.Struct):
    """What a line holds."""

    step: int
    data: dict[str, Any]


def fits(source: Source) -> bool:
    return LINE.match(source.head) is not None


def read(source: Source, notes: Notes) -> Iterator[MetricRow]:
    """One row a number; null is what the logger makes of nan."""
    notes.of("verl")
    decode, names = msgspec.json.Decoder(Line).decode, Names("verl")
    for number, text in source.lines(notes):
        try:
            line = decode(text)
        except jsons.FAULTS:
            found = _lenient(text)
            if found is None:
                notes.skip("a line that is none of verl's file logger", f"{source.path.name}:{number}")
                continue
            line = found
        if (step := figures.step(line.step)) is None:
            notes.skip("a line whose step is none", f"{source.path.name}:{number}")
            continue
        for key, value in line.data.items():
            if type(value) is not float:
                value = math.nan if value is None else figures.finite(value)
                if value is None:
                    if figures.too_large(line.data[key]):
                        notes.skip(figures.TOO_LARGE, f"{source.path.name}:{number}: {key}")
                    continue
            yield MetricRow(name=names[key], raw_name=key, value=value, step=step)


def _lenient(text: str) -> Line | None:
    """A line with the NaN that Python writes."""
    try:
        found = json.loads(text)
        return msgspec.convert(found, Line)
    except jsons.FAULTS:
        return None
