"""What the operators of a layer send under each scheme, with the numbers of one configuration, and whether it hides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.flow.comm import wire_bytes
from flowledger.plan.arithmetic import evaluate, integer
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware, Ring, Route, failing
from flowledger.plan.sequence import Cut, Degrees, asked, maker, names
from flowledger.tables.gpus import Gpu
from flowledger.tables.operators import WAYS, Communication, Message, Operator, Way, communications, operators

CHUNKS = tuple(2**power for power in range(7, 18))  # tokens of a piece, for the sweep
JOINT = {"heads": ("cpa", "sp"), "tokens": ("cp", "sp")}  # group of the table -> the degrees that make it
PARTS = {"core_attn": "attention core", "mlp": "MLP", "moe": "MoE"}  # what Megatron calls them -> how operators begin
PASSED_ON = ("all_gather", "reduce_scatter")  # pieces of these go from neighbour to neighbour


@dataclass(frozen=True)
class Exchange:
    """One row of the table in one configuration: what an operator sends, forward and backward."""

    row: Communication
    operator: Operator
    behind: tuple[Operator, ...]  # whose work hides it
    bound: Mapping[str, Any]  # names of the expressions
    group: str
    ranks: int
    hardware: Hardware | None
    stride: int
    code: str  # whose it is: megatron, torch, flowledger
    pipelined: bool
    passes: int  # forward passes: 2 where it is computed again in backward

    @property
    def always(self) -> bool:
        """Whether this code cuts it without being asked, in the directions of the row."""
        return self.code in (self.row.always_by or (self.code,))

    def messages(self, way: Way) -> tuple[Message, ...]:
        return self.row.forward if way == "forward" else self.row.backward

    def each(self, way: Way) -> list[dict[str, Any]]:
        """Kind, bytes and number of the collectives of one direction."""
        return [
            {"comm_type": one.kind, "bytes": self._int(one.bytes), "messages": self._int(one.count)}
            for one in self.messages(way)
        ]

    def bytes(self, way: Way) -> int:
        return sum(self._int(one.bytes) for one in self.messages(way))

    @property
    def total_bytes(self) -> int:
        """Of both directions, forward's once more where it is computed again."""
        return self.passes * self.bytes("forward") + self.bytes("backward")

    def wire(self, way: Way) -> int:
        """Bytes on the wire of one rank."""
        return sum(wire_bytes(one.kind, self._int(one.bytes), self.ranks) for one in self.messages(way))

    def kinds(self, way: Way) -> str:
        """`all_gather`, or `all_gather + reduce_scatter`."""
        return " + ".join(dict.fromkeys(one.kind for one in self.messages(way)))

    def cut(self, way: Way) -> bool:
        """Whether it can go in pieces."""
        return self.pipelined and bool(self.row.chunk) and any(one.piece for one in self.messages(way))

    @property
    def chunk(self) -> int | None:
        """Tokens of a piece here."""
        return self._int(self.row.chunk) if self.row.chunk else None

    def route(self) -> Route | None:
        return self.hardware.route(self.stride, self.ranks) if self.hardware else None

    def whole_s(self, way: Way) -> float | None:
        """Seconds of all messages of a direction, none of them in pieces."""
        route = self.route()
        return None if route is None else sum(self._whole_s(one, route) for one in self.messages(way))

    def _whole_s(self, one: Message, route: Route) -> float:
        size = wire_bytes(one.kind, self._int(one.bytes), self.ranks)
        return self._int(one.count) * route.latency_s(one.kind) + size / route.bytes_per_s(one.kind)

    def work_s(self, way: Way) -> float | None:
        """Seconds of what could hide it."""
        if self.hardware is None:
            return None
        times = [self._factor(one, way) * self.hardware.seconds(one.rate, work(one, self.bound)) for one in self.behind]
        return sum(times)

    def _factor(self, operator: Operator, way: Way) -> float:
        """Work in that direction in units of forward's; of another micro-batch in the other direction."""
        if (way == "forward") != self.row.crossed:
            return 1.0
        return operator.backward if self.row.backward_work is None else self.row.backward_work

    def ring(self, way: Way) -> Ring | None:
        """Its pieces, where it can be cut and the device is known."""
        route, whole = self.route(), self.work_s(way)
        if route is None or whole is None or not self.cut(way):
            return None
        sent = self.messages(way)
        return Ring(
            compute_s=lambda chunk: whole * self.at(self.row.share, chunk),
            comm_s=lambda chunk: sum(self.piece_s(one, chunk, route) for one in sent),
            steps=self._int(self.row.steps),
            wait_s=lambda chunk: sum(one.waits * self.piece_s(one, chunk, route) for one in sent),
        )

    def piece_s(self, one: Message, chunk: int, route: Route) -> float:
        """Seconds of one piece of so many tokens."""
        kind = "send" if one.kind in PASSED_ON else one.kind
        return route.seconds(kind, self.at(one.piece, chunk))

    def at(self, expression: str, chunk: int) -> float:
        """The value of an expression for a piece of so many tokens."""
        value = evaluate(expression, {**self.bound, "c": chunk})
        assert isinstance(value, (int, float))
        return value

    def _int(self, expression: str) -> int:
        return integer(expression, self.bound)


def hardware_of(job: Job, gpu: Gpu) -> Hardware:
    """The device of a job, in the dtype in which it multiplies."""
    dtype = job.engine.compute_dtype or job.engine.param_dtype
    return Hardware(gpu=gpu, gpus_per_node=job.gpus_per_node, world=job.world, dtype=dtype)


def exchanges(job: Job, cut: Cut, hardware: Hardware | None) -> list[Exchange]:
    """Every exchange of one scheme, and those that any scheme has, in the order of the operators."""
    by_name = {one.name: one for one in operators()}
    bound, code = names(job, cut.degrees), maker(job)
    found = []
    for row in communications():
        group, ranks = _group(row.group or cut.scheme.axis, bound)
        mine = row.scheme in (cut.scheme.name, "any") and code in (row.by or (code,))
        if not mine or ranks == 1 or not asked(by_name[row.operator].needs, job):
            continue
        behind = tuple(by_name[name] for name in row.hidden_by or (row.operator,))
        stride, operator = _stride(group, cut.degrees, job), by_name[row.operator]
        pipelined = row.pipelined and (job.micro_batches > 1 or not row.crossed)  # there has to be another one
        passes = 1 + (code in (row.again or (code,)) and _again(operator, job))
        one = Exchange(row, operator, behind, bound, group, ranks, hardware, stride, code, pipelined, passes)
        if one.bytes("forward") + one.bytes("backward"):
            found.append(one)
    return found


def _again(operator: Operator, job: Job) -> bool:
    """Whether an operator is computed again in backward, with all that it sends."""
    recompute = job.engine.recompute
    if operator.per != "layer" or recompute.granularity == "none":
        return False
    parts = recompute.modules or ("core_attn",)
    return recompute.granularity == "full" or any(operator.name.startswith(PARTS.get(one, "-")) for one in parts)


def _group(name: str, bound: Mapping[str, Any]) -> tuple[str, int]:
    """The name of a group as a recording has it, and its ranks: of several axes, `tokens` where more than one is cut."""
    axes = JOINT.get(name, (name,))
    several = [axis for axis in axes if bound[axis] > 1]
    ranks = 1
    for axis in several:
        ranks *= bound[axis]
    return ("tokens" if len(several) > 1 else "cp" if several == ["cpa"] else several[0] if several else name), ranks


def _stride(group: str, degrees: Degrees, job: Job) -> int:
    """How far apart neighbours in a group are: tp varies fastest, then sp, cp, and what is left of dp."""
    if group == "ep" and job.engine.strategy == "megatron":  # folded: experts lie over dp and cp, inside them etp
        return degrees["etp"]
    inner = {"tp": (), "etp": (), "sp": ("tp",), "tokens": ("tp",), "cp": ("tp", "sp"), "ep": ("tp", "sp", "cp")}[group]
    stride = 1
    for one in inner:
        stride *= degrees[one]
    return stride


def operator_rows(job: Job, cut: Cut, hardware: Hardware | None) -> Iterator[dict[str, Any]]:
    """One row an operator, or one an exchange of it: local, or what it sends to whom."""
    bound, sent = names(job, cut.degrees), exchanges(job, cut, hardware)
    for operator in operators():
        if not asked(operator.needs, job):
            continue
        mine = [one for one in sent if one.row.operator == operator.name]
        common = {
            "operator": operator.name, "operator_zh": operator.zh, "scheme": cut.scheme.name, "used": cut.used,
            "per": operator.per, "work": work(operator, bound), "unit": "bytes" if operator.rate == "memory" else "FLOP",
            "compute_s": _seconds(operator, bound, hardware), "work_formula": operator.work,
        }  # fmt: skip
        for one in mine or (None,):
            yield common | (_exchange(one) if one else _local(operator))


def work(operator: Operator, bound: Mapping[str, Any]) -> float:
    """FLOP, or bytes, of an operator on one rank, forward."""
    value = evaluate(operator.work, bound)
    assert isinstance(value, (int, float))
    return float(value)


def _seconds(operator: Operator, bound: Mapping[str, Any], hardware: Hardware | None) -> float | None:
    return hardware.seconds(operator.rate, work(operator, bound)) if hardware else None


def _local(operator: Operator) -> dict[str, Any]:
    return {
        "runs": "local", "when": None, "comm_type": None, "group": None, "ranks": 1, "bytes": 0, "bytes_backward": 0, "bytes_again": 0,
        "forward": [], "backward": [], "wire_bytes": 0, "comm_s": None, "comm_backward_s": None,
        "splits_by_chunk": operator.chunks, "global_context": operator.context, "pipelined": True, "bytes_formula": None, "why": None, "why_zh": None, "done_by": None,
    }  # fmt: skip


def _exchange(one: Exchange) -> dict[str, Any]:
    """`bytes` and the like are those of forward, 0 where only backward sends; so is `comm_type` where forward sends at all."""
    row = one.row
    forward = " + ".join(message.bytes for message in row.forward)
    here = {"used": True} if row.scheme == "any" else {}  # experts are dealt under every scheme
    return here | {
        "runs": "communicates", "when": row.when, "comm_type": one.kinds("forward") or one.kinds("backward"),
        "group": one.group, "ranks": one.ranks,
        "bytes": one.bytes("forward"), "bytes_backward": one.bytes("backward"),
        "bytes_again": one.bytes("forward") * (one.passes - 1), "forward": one.each("forward"),
        "backward": one.each("backward"), "wire_bytes": one.wire("forward"), "comm_s": one.whole_s("forward"),
        "comm_backward_s": one.whole_s("backward"), "splits_by_chunk": row.chunks, "global_context": row.context,
        "pipelined": one.pipelined, "bytes_formula": forward or None, "why": row.why, "why_zh": row.why_zh,
        "done_by": row.done_by or None,
    }  # fmt: skip


def hiding_rows(job: Job, cut: Cut, hardware: Hardware | None) -> Iterator[dict[str, Any]]:
    """One row an exchange and direction: the criterion, part by part, and the seconds that stay exposed."""
    for one in exchanges(job, cut, hardware):
        for way in WAYS:
            if one.bytes(way):
                yield _hiding(one, way, cut)


def _hiding(one: Exchange, way: Way, cut: Cut) -> dict[str, Any]:
    row, ring, route = one.row, one.ring(way), one.route()
    numbers = _in_pieces(one, ring, way) if ring else _in_one(one, way)
    unmet = failing(chunks=row.chunks, context=row.context, pipelined=one.pipelined, holds=numbers["holds"])
    switched_on = one.cut(way) and one.always and way in row.always
    return {
        "scheme": row.scheme, "used": cut.used or row.scheme == "any", "operator": row.operator, "when": row.when,
        "direction": way, "passes": one.passes if way == "forward" else 1, "comm_type": one.kinds(way), "group": one.group, "ranks": one.ranks,
        "link": route.name if route else None, **numbers, "splits_by_chunk": row.chunks,
        "global_context": row.context, "pipelined": one.pipelined, "failing": unmet, "verdict": _verdict(one, way, unmet),
        "hidden_by": [operator.name for operator in one.behind], "per": one.operator.per,
        "done_by": row.done_by or None, "switched_on": switched_on,
        "can_be_switched_on": one.cut(way) and one.code in row.asked_of,
        "exposed_here_s": numbers["exposed_s"] if switched_on else one.whole_s(way),
    }  # fmt: skip


def _verdict(one: Exchange, way: Way, unmet: Sequence[str]) -> str | None:
    """hidden, exposed, or mostly hidden where a piece has to wait; None where only a device could tell."""
    if unmet:
        return "exposed"
    waits = sum(message.waits for message in one.messages(way))
    return None if one.hardware is None else "mostly hidden" if waits else "hidden"


def _in_pieces(one: Exchange, ring: Ring, way: Way) -> dict[str, Any]:
    """Figures of what is cut: of the piece that this configuration gives."""
    chunk, route, sent = one.chunk or 1, one.route(), one.messages(way)
    assert route is not None
    compute, comm, latency = ring.compute_s(chunk), ring.comm_s(chunk), ring.comm_s(0)
    size, spare = sum(one.at(message.piece, chunk) for message in sent), compute - latency
    return {
        "chunk": chunk, "steps": ring.steps, "waits": sum(message.waits for message in sent), "compute_s": compute,
        "comm_s": comm, "holds": ring.hides(chunk), "break_even_chunk": ring.break_even(),
        "exposed_s": ring.exposed_s(chunk), "needs_bytes_per_s": size / spare if spare > 0 else None,
    }  # fmt: skip


def _in_one(one: Exchange, way: Way) -> dict[str, Any]:
    """Figures of what is not cut, beside the operator's own work; nothing of it hides."""
    comm = one.whole_s(way)
    return {
        "chunk": one.chunk if one.cut(way) else None, "steps": 0, "waits": 1, "compute_s": one.work_s(way), "comm_s": comm,
        "holds": None, "break_even_chunk": None, "exposed_s": comm, "needs_bytes_per_s": None,
    }  # fmt: skip


def sweep(job: Job, cut: Cut, hardware: Hardware, chunks: Sequence[int] = CHUNKS) -> Iterator[dict[str, Any]]:
    """The inequality in forward at other sizes of a piece, as longer or shorter rows would give them."""
    for one in exchanges(job, cut, hardware):
        ring = one.ring("forward")
        if ring is None:
            continue
        for chunk in chunks:
            yield {
                "scheme": one.row.scheme, "operator": one.row.operator, "chunk": chunk, "compute_s": ring.compute_s(chunk),
                "comm_s": ring.comm_s(chunk), "holds": ring.hides(chunk), "exposed_s": ring.exposed_s(chunk),
            }  # fmt: skip


def totals(job: Job, cut: Cut, hardware: Hardware | None, layers: int) -> dict[str, Any]:
    """Bytes and seconds of one layer, forward and backward, and of a micro-batch through the layers of one rank.

    Of communication only the scheme's own: experts send under every scheme. `exposed`: where everything is cut that can be;
    `exposed_here`: where only that is which the code cuts without being asked. What is computed again counts twice.
    """
    sent = [one for one in exchanges(job, cut, hardware) if one.operator.per == "layer" and one.row.scheme != "any"]
    found: dict[str, Any] = {"layer_bytes": sum(one.total_bytes for one in sent)}
    keys = ("exposed", "exposed_here")
    if hardware is None:
        unknown = [f"{part}_{key}_s" for part in ("layer", "micro_batch") for key in keys]
        return {**found, "layer_compute_s": None, **dict.fromkeys(unknown)}
    bound = names(job, cut.degrees)
    found["layer_compute_s"] = sum(
        (1 + _again(one, job) + one.backward) * hardware.seconds(one.rate, work(one, bound))
        for one in operators()
        if one.per == "layer" and asked(one.needs, job)
    )
    rows = [row for row in hiding_rows(job, cut, hardware) if row["per"] == "layer" and row["scheme"] != "any"]
    for key in keys:
        exposed = sum(row["passes"] * row[f"{key}_s"] for row in rows)
        found |= {f"layer_{key}_s": exposed, f"micro_batch_{key}_s": exposed * layers}
    return found
