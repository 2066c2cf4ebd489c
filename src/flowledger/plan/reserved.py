"""From what is allocated to what the caching allocator is expected to reserve: a replay of the first step and of a later one."""

from collections.abc import Iterator

from flowledger.plan.allocator import Block, Pool
from flowledger.plan.job import Job
from flowledger.plan.timeline import BLOCK, Live, Timeline
from flowledger.tables.constants import constant

STREAMS = {
    "output of the gather": "gather",
    "gathered ahead": "gather",
    "input of the reduce-scatter": "reduce",
    "output of the reduce-scatter": "reduce",
}
PIECES = 2**28  # a tensor of the plan that stands for many (all moments, all parameters) is replayed in pieces


def reserved(timeline: Timeline, job: Job | None = None, *, expandable: bool | None = None) -> int:
    """Bytes that the process is expected to have taken from the device at its fullest.

    Without a GPU there is no caching allocator, and with expandable segments none of its fragmentation: both give the
    allocated peak. `job` says which of them holds; None: a GPU without expandable segments.
    """
    peak = timeline.peak(block=BLOCK).bytes
    grows = job.engine.expandable_segments if job is not None and expandable is None else bool(expandable)
    if (job is not None and job.device is None) or grows:
        return peak
    return peak + int(constant("replayed_fragmentation") * max(0, replay(timeline) - peak))


def replay(timeline: Timeline) -> int:
    """Reserved bytes after two steps: moments are made at the end of the first."""
    pools: dict[str, Pool] = {}
    instants = len(timeline.instants)
    resident = [live for live in timeline.lives if not live.host and live.born == 0 and live.dies >= instants - 1]
    late = [live for live in resident if live.name == "optimizer_state" and live.persistent]
    there = {id(live) for live in resident}
    passing = [live for live in timeline.lives if not live.host and id(live) not in there]
    unit = _unit(passing)
    for live in resident:
        if live.name != "optimizer_state" or not live.persistent:
            _take(pools, live, unit)
    born, dies = _by_instant(passing, instants)
    _step(pools, born, dies, unit)
    for live in late:
        _take(pools, live, unit)
    _step(pools, born, dies, unit)
    return sum(pool.reserved for pool in pools.values())


def _unit(lives: list[Live]) -> int:
    """Bytes of the tensors that temporaries are about as large as: the largest that layers save."""
    return max((live.bytes for live in lives if live.kind == "activation"), default=PIECES)


def _by_instant(lives: list[Live], instants: int) -> tuple[list[list[Live]], list[list[Live]]]:
    born: list[list[Live]] = [[] for _ in range(instants)]
    dies: list[list[Live]] = [[] for _ in range(instants)]
    for live in lives:
        if live.born < instants and live.bytes:
            born[max(0, live.born)].append(live)
            dies[min(live.dies, instants - 1)].append(live)
    return born, dies


def _step(pools: dict[str, Pool], born: list[list[Live]], dies: list[list[Live]], unit: int) -> None:
    """One step: at each instant everything that is born, then everything that dies."""
    held: dict[int, tuple[Pool, list[Block]]] = {}
    for at in range(len(born)):
        for live in born[at]:
            held[id(live)] = _take(pools, live, unit)
        for live in dies[at]:
            pool, blocks = held.pop(id(live))
            for block in blocks:
                pool.give(block)


def _take(pools: dict[str, Pool], live: Live, unit: int) -> tuple[Pool, list[Block]]:
    pool = pools.setdefault(_stream(live), Pool())
    return pool, [pool.take(size) for size in _pieces(live, unit)]


def _pieces(live: Live, unit: int) -> Iterator[int]:
    """The tensors that one row of the plan stands for: all moments, the several temporaries of one step."""
    largest = PIECES if live.persistent else unit if live.kind == "temporary" and live.name != "logits" else live.bytes
    number = max(1, -(-live.bytes // max(1, largest)))
    yield from [live.bytes // number] * number * live.count


def _stream(live: Live) -> str:
    return next((stream for ending, stream in STREAMS.items() if live.label.endswith(ending)), "compute")
