"""When communication hides: the plan's criterion beside a ring that computes while a link is busy.

    python benchmarks/overlap.py [--quick] [--json]

Real work on one thread (attention of two blocks for the ring of CP, a projection for Megatron SP), transfers that sleep for
latency + bytes / bandwidth in a thread of their own. The rate of the work is measured first, at one size of chunk, and how much
later than asked a sleeping thread wakes on this machine, which counts as latency; the plan's ring says for each chunk whether
its transfer hides and how many seconds stay exposed; then the ring runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flowledger.plan.overlap import Ring
from flowledger.run.parallel.link import Link, ring

STEPS = 5  # pieces that travel
HEADS, SIZE = 2, 64  # of the attention
HIDDEN, WIDTH = 256, 512  # of the projection
LATENCY_S = 1e-3
SMALL_WAIT = 0.25  # of all transfers: what a hidden one may leave, and an exposed one differ by


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: its FLOP and bytes for a chunk of c tokens, and the work itself."""

    name: str
    flop: Callable[[int], float]
    bytes: Callable[[int], float]
    make: Callable[[int], Callable[[object], object]]
    chunks: tuple[int, int]  # one below, one above break-even on the faster link


def _attention(chunk: int) -> Callable[[object], Tensor]:
    """Queries of one rank against the keys of another: [1, HEADS, c, SIZE]."""
    queries, keys, values = (torch.randn(1, HEADS, chunk, SIZE) for _ in range(3))
    return lambda _: functional.scaled_dot_product_attention(queries, keys, values)


def _projection(chunk: int) -> Callable[[object], Tensor]:
    """A shard of tokens by a weight: [c, HIDDEN] · [HIDDEN, WIDTH]."""
    tokens, weight = torch.randn(chunk, HIDDEN), torch.randn(HIDDEN, WIDTH)
    return lambda _: tokens @ weight


WORKS = (
    Work("cp_ring: attention core", lambda c: 4.0 * HEADS * SIZE * c * c, lambda c: 2.0 * c * HEADS * SIZE * 4, _attention, (512, 1536)),
    Work("megatron_sp: projection", lambda c: 2.0 * c * HIDDEN * WIDTH, lambda c: c * HIDDEN * 4.0, _projection, (512, 4096)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One chunk on one link: predicted beside measured, in seconds. `ratio`: measured total / predicted total."""

    work: str
    chunk: int
    bytes_per_s: float
    compute_s: float
    comm_s: float
    break_even_chunk: int | None
    hides: bool
    predicted_exposed_s: float
    measured_exposed_s: float
    predicted_s: float
    measured_s: float
    ratio: float
    agrees: bool


def flops(work: Work, chunk: int, tries: int = 7) -> float:
    """FLOP/s that the work reaches at a chunk: the median of some tries."""
    compute = work.make(chunk)
    compute(None)
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        compute(None)
        times.append(time.perf_counter() - started)
    return work.flop(chunk) / statistics.median(times)


def late_s(tries: int = 9) -> float:
    """How much later than it should a transfer is there, while the other thread works: the median."""
    compute, late = _projection(1024), []
    with Link(latency_s=0.01, bytes_per_s=1.0) as link:
        for _ in range(tries):
            started = time.perf_counter()
            transfer = link.start(0)
            compute(None)
            transfer.result()
            late.append(time.perf_counter() - started - link.latency_s)
    return max(0.0, statistics.median(late))


def case(work: Work, chunk: int, wire: tuple[float, float], speed: float, late: float, tries: int) -> Case:
    """Run one chunk on one link (latency, bandwidth), the fastest of some tries: neighbours on the machine only add."""
    with Link(latency_s=wire[0], bytes_per_s=wire[1]) as link:
        plan = Ring(
            compute_s=lambda c: work.flop(c) / speed, comm_s=lambda c: late + link.seconds(work.bytes(c)), steps=STEPS
        )
        compute = work.make(chunk)
        compute(None)
        paces = [ring(range(STEPS + 1), work.bytes(chunk), compute, link) for _ in range(tries)]
    best = min(paces, key=lambda pace: pace.total)
    compute_s, comm_s = plan.compute_s(chunk), plan.comm_s(chunk)
    exposed, whole = plan.exposed_s(chunk), STEPS * comm_s
    predicted = (STEPS + 1) * compute_s + exposed
    return Case(
        work=work.name, chunk=chunk, bytes_per_s=wire[1], compute_s=compute_s, comm_s=comm_s,
        break_even_chunk=plan.break_even(), hides=plan.hides(chunk), predicted_exposed_s=exposed,
        measured_exposed_s=best.waited, predicted_s=predicted, measured_s=best.total, ratio=best.total / predicted,
        agrees=abs(best.waited - exposed) <= SMALL_WAIT * whole,
    )  # fmt: skip


def links(work: Work, speed: float) -> list[tuple[float, float]]:
    """Latency and bandwidth of a link on which the smaller chunk is exposed and the greater hides, and of one four times slower.

    Break-even lies at twice the smaller chunk: there half of the time is latency where work is linear, little where it is not.
    """
    even = 2 * work.chunks[0]
    seconds = work.flop(even) / speed
    latency = seconds / 2 if work.make is _projection else min(LATENCY_S, seconds / 4)
    speed_of_link = work.bytes(even) / (seconds - latency)
    return [(latency, speed_of_link), (latency, speed_of_link / 4)]


def cases(*, quick: bool) -> list[Case]:
    """Two chunks of each kind of work on two links."""
    found, late = [], late_s()
    for work in WORKS:
        speed = flops(work, work.chunks[1])
        wires = links(work, speed)
        found += [case(work, chunk, wire, speed, late, 1 if quick else 5) for wire in wires for chunk in work.chunks]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tries")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = cases(quick=given.quick)
    if given.json:
        print(json.dumps({"cases": [asdict(one) for one in found], "disagree": sum(not one.agrees for one in found)}))
        return
    print(f"{'work':26}{'chunk':>7}{'T_compute':>11}{'T_comm':>9}{'even at':>9}  {'':8}{'exposed ms':>12}{'measured':>10}{'total':>8}{'measured':>10}{'ratio':>7}")  # fmt: skip
    for one in found:
        even = "never" if one.break_even_chunk is None else f"{one.break_even_chunk:,}"
        print(
            f"{one.work:26}{one.chunk:>7}{one.compute_s * 1e3:>11.2f}{one.comm_s * 1e3:>9.2f}{even:>9}  "
            f"{'hidden' if one.hides else 'exposed':8}{one.predicted_exposed_s * 1e3:>12.1f}{one.measured_exposed_s * 1e3:>10.1f}"
            f"{one.predicted_s * 1e3:>8.1f}{one.measured_s * 1e3:>10.1f}{one.ratio:>7.2f}{'' if one.agrees else '  disagrees'}"
        )


if __name__ == "__main__":
    main()
