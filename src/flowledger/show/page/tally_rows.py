"""What a tally takes of the rows of a run: the columns that it adds up, and no more."""

from typing import Any

import msgspec


class Span(msgspec.Struct, gc=False):
    """What is taken of a span."""

    event: str
    span_kind: str
    name: str
    start_ns: int
    step: int | None = None
    role: str | None = None
    stage: str | None = None
    end_ns: int | None = None
    latency_ms: float | None = None
    tokens_logical: int | None = None
    tokens_valid: int | None = None
    tokens_computed: int | None = None


class Reading(msgspec.Struct, gc=False):
    """What is taken of a reading of memory."""

    kind: str
    instant: str
    t_ns: int = -1
    step: int | None = None
    stage: str | None = None
    phase: str | None = None
    epoch: int | None = None
    mini_batch: int | None = None
    micro_batch: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak_since_stage: int | None = None
    reserved_peak_since_stage: int | None = None
    limit: int | None = None
    device_used: int | None = None
    host_used: int | None = None
    fragmentation: float | None = None


class Number(msgspec.Struct, gc=False):
    """What is taken of a metric."""

    name: str
    raw_name: str
    t_ns: int = -1
    step: int | None = None
    stage: str | None = None
    value: float | None = None
    special: str | None = None
    weight: float | None = None
    recomputed: bool = False


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "spans": msgspec.json.Decoder(Span), "memory": msgspec.json.Decoder(Reading), "metrics": msgspec.json.Decoder(Number),
}  # fmt: skip


def decoded(table: str, lines: bytes) -> list[Any]:
    """The rows of whole lines; torn ones are left out."""
    decoder = DECODERS[table]
    try:
        return decoder.decode_lines(lines)
    except msgspec.MsgspecError:
        rows = []
        for line in lines.splitlines():
            try:
                rows.append(decoder.decode(line))
            except msgspec.MsgspecError:
                continue
        return rows
