"""What the operators of a layer send under each scheme, with the numbers of one configuration, and whether it hides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.flow.comm import wire_bytes
from flowledger.plan.arithmetic import evaluate, integer
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware, Link, Ring, failing
from flowledger.plan.sequence import Cut, asked, names
from flowledger.tables.operators import Communication, Operator, communications, operators

CHUNKS = tuple(2**power for power in range(7, 18))  # tokens of a piece, for the sweep


@dataclass(frozen=True)
class Exchange:
    """One message of the table in one configuration."""

    row: Communication
    by: Operator  # whose work hides it
    bound: Mapping[str, Any]  # names of the expressions
    axis: str
    ranks: int
    hardware: Hardware | None
    stride: int

    @property
    def bytes(self) -> int:
        return integer(self.row.bytes, self.bound)

    @property
    def wire(self) -> int:
        """Bytes on the wire of one rank."""
        return wire_bytes(self.row.comm_type, self.bytes, self.ranks)

    @property
    def cut(self) -> bool:
        """Whether it goes in pieces."""
        return bool(self.row.chunk)

    @property
    def chunk(self) -> int | None:
        """Tokens of a piece here."""
        return integer(self.row.chunk, self.bound) if self.cut else None

    def link(self) -> Link | None:
        return self.hardware.link(self.stride, self.ranks) if self.hardware else None

    def whole_s(self) -> float | None:
        """Seconds of the message in forward, in one piece: a ring of ranks - 1 hops."""
        link = self.link()
        return link.seconds(self.wire, self.ranks - 1) if link else None

    def work_s(self) -> float | None:
        """Seconds of the operator that could hide it, forward."""
        return seconds_of(self.by, self.bound, self.hardware)

    def ring(self, *, backward: bool) -> Ring | None:
        """Its pieces, where it can be cut and the device is known."""
        link, hardware = self.link(), self.hardware
        if link is None or hardware is None or not self.cut:
            return None
        times, factor = (self.row.backward, self.by.backward) if backward else (1, 1.0)

        def compute_s(chunk: int) -> float:
            return factor * hardware.seconds(self.by.rate, self._at(self.row.chunk_work, chunk))

        def comm_s(chunk: int) -> float:
            return times * link.seconds(self._at(self.row.chunk_bytes, chunk))

        steps = integer(self.row.steps, self.bound)
        return Ring(compute_s=compute_s, comm_s=comm_s, steps=steps, waits=self.row.waits)

    def _at(self, expression: str, chunk: int) -> float:
        value = evaluate(expression, {**self.bound, "c": chunk})
        assert isinstance(value, (int, float))
        return value


def seconds_of(operator: Operator, bound: Mapping[str, Any], hardware: Hardware | None) -> float | None:
    """Seconds of an operator on one rank, forward; None where no device is named."""
    return hardware.seconds(operator.rate, _work(operator, bound)) if hardware else None


def exchanges(job: Job, cut: Cut, hardware: Hardware | None) -> list[Exchange]:
    """Every message of one scheme, and those that any scheme has, in the order of the operators."""
    by_name = {one.name: one for one in operators()}
    bound, found = names(job, cut.degrees), []
    for row in communications():
        axis = row.group or cut.scheme.axis
        ranks = bound[axis]
        if row.scheme in (cut.scheme.name, "any") and asked(by_name[row.operator].needs, job) and ranks > 1:
            by = by_name[row.hidden_by or row.operator]
            found.append(Exchange(row, by, bound, axis, ranks, hardware, _stride(axis, cut.degrees, job)))
    return found


def _stride(axis: str, degrees: Mapping[str, int], job: Job) -> int:
    """How far apart neighbours on an axis are: tp varies fastest, then sp, cp, and what is left of dp."""
    inner = {"tp": (), "sp": ("tp",), "cp": ("tp", "sp"), "ep": ("tp", "sp", "cp")}[axis]
    if axis == "ep" and job.engine.strategy == "megatron":  # folded: experts lie over dp and cp, inside them etp
        return job.mesh.etp or job.mesh.tp
    stride = 1
    for one in inner:
        stride *= degrees[one]
    return stride


def operator_rows(job: Job, cut: Cut, hardware: Hardware | None) -> Iterator[dict[str, Any]]:
    """One row an operator, or one a message of it: local, or what it sends to whom."""
    bound, sent = names(job, cut.degrees), exchanges(job, cut, hardware)
    for operator in operators():
        if not asked(operator.needs, job):
            continue
        mine = [one for one in sent if one.row.operator == operator.name]
        common = {
            "operator": operator.name, "operator_zh": operator.zh, "scheme": cut.scheme.name, "used": cut.used,
            "per": operator.per, "work": _work(operator, bound), "unit": "bytes" if operator.rate == "memory" else "FLOP",
            "compute_s": seconds_of(operator, bound, hardware), "work_formula": operator.work,
        }  # fmt: skip
        for one in mine or (None,):
            yield common | (_message(one) if one else _local(operator))


def _work(operator: Operator, bound: Mapping[str, Any]) -> float:
    value = evaluate(operator.work, bound)
    assert isinstance(value, (int, float))
    return float(value)


def _local(operator: Operator) -> dict[str, Any]:
    return {
        "runs": "local", "when": None, "comm_type": None, "group": None, "ranks": 1, "bytes": 0, "bytes_backward": 0,
        "wire_bytes": 0, "comm_s": None, "splits_by_chunk": operator.chunks, "global_context": operator.context,
        "pipelined": True, "bytes_formula": None, "why": None, "why_zh": None, "done_by": None,
    }  # fmt: skip


def _message(one: Exchange) -> dict[str, Any]:
    row = one.row
    return {
        "runs": "communicates", "when": row.when, "comm_type": row.comm_type, "group": one.axis, "ranks": one.ranks,
        "bytes": one.bytes, "bytes_backward": one.bytes * row.backward, "wire_bytes": one.wire, "comm_s": one.whole_s(),
        "splits_by_chunk": row.chunks, "global_context": row.context, "pipelined": row.pipelined,
        "bytes_formula": row.bytes, "why": row.why, "why_zh": row.why_zh, "done_by": row.done_by or None,
    }  # fmt: skip


def hiding_rows(job: Job, cut: Cut, hardware: Hardware | None) -> Iterator[dict[str, Any]]:
    """One row a message and direction: the criterion, part by part, and the seconds that stay exposed."""
    for one in exchanges(job, cut, hardware):
        for direction in ("forward", "backward") if one.row.backward else ("forward",):
            ring = one.ring(backward=direction == "backward")
            numbers = _in_pieces(one, ring) if ring else _in_one(one, backward=direction == "backward")
            row = one.row
            unmet = failing(chunks=row.chunks, context=row.context, pipelined=row.pipelined, holds=numbers["holds"])
            yield {
                "scheme": row.scheme, "used": cut.used, "operator": row.operator, "when": row.when,
                "direction": direction, "comm_type": row.comm_type, "group": one.axis, "ranks": one.ranks,
                "link": getattr(one.link(), "name", None), **numbers, "splits_by_chunk": row.chunks,
                "global_context": row.context, "pipelined": row.pipelined, "failing": unmet,
                "verdict": _verdict(one, unmet),
                "hidden_by": one.by.name, "per": one.by.per, "done_by": row.done_by or None,
            }  # fmt: skip


def _verdict(one: Exchange, unmet: Sequence[str]) -> str | None:
    """hidden, exposed, or mostly hidden where a first piece has to wait; None where only a device could tell."""
    if unmet:
        return "exposed"
    return None if one.hardware is None else "mostly hidden" if one.row.waits else "hidden"


def _in_pieces(one: Exchange, ring: Ring) -> dict[str, Any]:
    """Figures of a message that is cut: of the piece that this configuration gives."""
    chunk, link = one.chunk or 1, one.link()
    assert link is not None
    compute, comm = ring.compute_s(chunk), ring.comm_s(chunk)
    messages = ring.comm_s(0) / link.latency_s()
    spare = compute - messages * link.latency_s()
    size = (comm - ring.comm_s(0)) * link.bytes_per_s
    return {
        "chunk": chunk, "steps": ring.steps, "waits": ring.waits, "compute_s": compute, "comm_s": comm,
        "holds": ring.hides(chunk), "break_even_chunk": ring.break_even(), "exposed_s": ring.exposed_s(chunk),
        "needs_bytes_per_s": size / spare if spare > 0 else None,
    }  # fmt: skip


def _in_one(one: Exchange, *, backward: bool) -> dict[str, Any]:
    """Figures of a message that is not cut, beside the operator's own work; nothing of it hides."""
    comm, work = one.whole_s(), one.work_s()
    times, factor = (one.row.backward, one.by.backward) if backward else (1, 1.0)
    return {
        "chunk": one.chunk, "steps": 0, "waits": 1, "compute_s": None if work is None else factor * work,
        "comm_s": None if comm is None else times * comm, "holds": None, "break_even_chunk": None,
        "exposed_s": None if comm is None else times * comm, "needs_bytes_per_s": None,
    }  # fmt: skip


def sweep(job: Job, cut: Cut, hardware: Hardware, chunks: Sequence[int] = CHUNKS) -> Iterator[dict[str, Any]]:
    """The inequality at other sizes of a piece, as longer or shorter rows would give them."""
    for one in exchanges(job, cut, hardware):
        ring = one.ring(backward=False)
        if ring is None:
            continue
        for chunk in chunks:
            yield {
                "scheme": one.row.scheme, "operator": one.row.operator, "chunk": chunk, "compute_s": ring.compute_s(chunk),
                "comm_s": ring.comm_s(chunk), "holds": ring.hides(chunk), "exposed_s": ring.exposed_s(chunk),
            }  # fmt: skip


def totals(job: Job, cut: Cut, hardware: Hardware | None, layers: int) -> dict[str, Any]:
    """Bytes and seconds of one layer, forward and backward, and of a micro-batch through the layers of one rank.

    Of communication only the scheme's own: experts send under every scheme.
    """
    mine = [one for one in exchanges(job, cut, hardware) if one.by.per == "layer" and one.row.scheme != "any"]
    sent = {"layer_bytes": sum(one.bytes * (1 + one.row.backward) for one in mine)}
    if hardware is None:
        return {**sent, "layer_compute_s": None, "layer_exposed_s": None, "micro_batch_exposed_s": None}
    bound = names(job, cut.degrees)
    work = sum(_once(one, bound, hardware) for one in operators() if one.per == "layer" and asked(one.needs, job))
    hiding = [row for row in hiding_rows(job, cut, hardware) if row["per"] == "layer" and row["scheme"] != "any"]
    exposed = sum(row["exposed_s"] for row in hiding)
    return {**sent, "layer_compute_s": work, "layer_exposed_s": exposed, "micro_batch_exposed_s": exposed * layers}


def _once(operator: Operator, bound: Mapping[str, Any], hardware: Hardware) -> float:
    return (1 + operator.backward) * hardware.seconds(operator.rate, _work(operator, bound))
