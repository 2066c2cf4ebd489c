"""What recording costs, and a comparison that would notice if it cost more.

    python benchmarks/recorder.py [--pairs 12] [--set key=value …] [--json] [--quick]

*Overhead* is the recorder's own CPU time, its writer's thread included, over the CPU time of an unrecorded step of at
least a second on one thread. Both are CPU times, so that a busy machine neither hides nor adds cost. The recorder's
time on the job's thread is taken from outside (`Meter`), not from what it says of itself. For a step that is watched
operator by operator, much of the cost is torch's own dispatch, which no meter around the recorder sees: there it is
the whole extra CPU time of the process.

*Alternation*: the same step (same weights, prompts and random numbers) recorded and not, in pairs of random order;
each recorded one opens and closes its book, so the interval of the extra CPU time is a bound from above.

*Control*: the same measures on a recorder whose sink burns 5 ms a row.
"""

import argparse
import gc
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowledger.flow.seams import Function, Probe, replaced

STARTED = time.monotonic()
CONFIG = Path(__file__).resolve().parent.parent / "examples" / "tiny.yaml"
SIZES = (
    "model.tiny.hidden_size=768", "model.tiny.heads=12", "model.tiny.kv_heads=4", "model.tiny.ffn_size=2048",
    "rollout.samples_per_prompt=8", "rollout.max_response_tokens=16", "rollout.max_running=32", "threads=1",
    "actor.micro_batch.samples=16", "optim.lr=0",
)  # fmt: skip
LAYERS, STEP_S = 2, 1.0  # layers to begin with; more where a step takes less than a second
TARGETS = {"steps": 0.002, "tensors": 0.01}
CADENCE = 50  # one step in so many is watched operator by operator
BURN_NS = 5_000_000
QUICK_S = 26.0  # after this no further pair is begun
T_975 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)
INSIDE = (  # what the job calls of the recorder between two probes
    "flowledger.record.recorder:Recorder.guard_hook",
    "flowledger.record.hooks:ModelHooks._count",
    "flowledger.record.storages:Lives._died",
)


class Meter:
    """CPU time of this thread, split between the job and its recorder: each change of hands reads the clock once."""

    def __init__(self) -> None:
        self.spent = {"job": 0, "recorder": 0}
        self._who, self._since = "job", time.thread_time_ns()

    def turn(self, who: str) -> str:
        """From now on `who` computes; returns who did until now."""
        now = time.thread_time_ns()
        self.spent[self._who] += now - self._since
        before, self._who, self._since = self._who, who, now
        return before

    def on_behalf_of(self, who: str) -> Callable[[Function], Function]:
        """Makes wrappers: what runs in the function is `who`'s time, what comes after it is again the caller's."""

        def make(original: Function) -> Function:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                before = self.turn(who)
                try:
                    return original(*args, **kwargs)
                finally:
                    self.turn(before)

            return wrapper

        return make


class SlowSink:
    """The control: a sink that computes for a while over every row."""

    def __init__(self, writer: Any) -> None:
        self.put_through, self.stats = writer.put, writer.stats

    def put(self, row: Any) -> None:
        until = time.thread_time_ns() + BURN_NS
        while time.thread_time_ns() < until:
            pass
        self.put_through(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One or more equal steps. `cpu_s`: all threads, opening and closing of the book included."""

    cpu_s: float
    wall_s: float
    own_s: float = 0.0  # the recorder's: on the job's thread as metered, and on the writer's
    said_s: float = 0.0  # what the recorder says of itself
    writer_s: float = 0.0
    rows: int = 0
    bytes: int = 0
    dropped: int = 0


class Bench:
    """One world whose step is always the same, taken with and without a recorder."""

    def __init__(self, world: Any, folder: Path) -> None:
        self._world, self.folder, self._parts = world, folder, 0

    def plain(self) -> Taken:
        with _clocks() as clocks:
            self._step()
        return Taken(**clocks)

    def recorded(self, level: str, *, ops_every: int = 0, slow: bool = False, steps: int = 1) -> Taken:
        """Attached as `flowledger run` does it, the meter's wrappers around and within the recorder's."""
        from flowledger.ledger.writer import Writer
        from flowledger.record.adapters.loop import PROBES
        from flowledger.record.attach import attach
        from flowledger.record.recorder import Recorder

        meter = Meter()
        with _clocks() as clocks:
            ink = Writer(self._part())
            recorder = Recorder(
                SlowSink(ink) if slow else ink, level=level, bindings=self._world.bindings, ops_every=ops_every
            )
            watched: list[Probe] = [probe for probe in PROBES if recorder.wants(probe)]
            inner = [(probe.target, meter.on_behalf_of("job")) for probe in watched]
            outer = [(target, meter.on_behalf_of("recorder")) for target in (*(p.target for p in watched), *INSIDE)]
            with replaced(inner), attach(PROBES, recorder), replaced(outer):
                for _ in range(steps):
                    self._step()
            ink.close()
        stats, said = ink.stats(), recorder.cost()
        if ink.failure or said["errors"]:
            raise RuntimeError(f"the recorder failed: {ink.failure or said}")
        return Taken(
            **clocks, own_s=(meter.spent["recorder"] + stats.cpu_ns) / 1e9, said_s=said["cpu_s"],
            writer_s=stats.cpu_ns / 1e9, rows=stats.rows, bytes=stats.bytes, dropped=stats.dropped,
        )  # fmt: skip

    def newest_rows(self) -> list[dict[str, Any]]:
        """The rows of the last recording, in the order of their tables."""
        files = sorted((self.folder / str(self._parts)).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def _step(self) -> None:
        from flowledger.run import loop

        self._world.generator.manual_seed(0)  # the same numbers are drawn, the weights never change (lr 0)
        loop.rl_step(step=1, world=self._world)

    def _part(self) -> Path:
        self._parts += 1
        part = self.folder / str(self._parts)
        part.mkdir()
        return part


@contextmanager
def _clocks() -> Iterator[dict[str, float]]:
    taken: dict[str, float] = {}
    gc.collect()
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    yield taken
    taken["cpu_s"], taken["wall_s"] = (time.process_time_ns() - cpu) / 1e9, (time.perf_counter_ns() - wall) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Relative extra time of the recorded half of each pair, and both halves."""

    plain: list[Taken]
    recorded: list[Taken]

    def extra(self, clock: str = "cpu_s") -> list[float]:
        pairs = zip(self.plain, self.recorded, strict=True)
        return [getattr(recorded, clock) / getattr(plain, clock) - 1 for plain, recorded in pairs]


def alternate(bench: Bench, level: str, pairs: int, *, quick: bool = False, **how: Any) -> Pairs:
    """Pairs of the same step, recorded and not, in an order drawn by lot; `quick` stops when time is up, never below 2."""
    lot, halves = random.Random(0), Pairs(plain=[], recorded=[])
    for done in range(pairs):
        if quick and done >= 2 and time.monotonic() - STARTED > QUICK_S:
            break
        if lot.random() < 0.5:
            halves.plain.append(bench.plain())
            halves.recorded.append(bench.recorded(level, **how))
        else:
            halves.recorded.append(bench.recorded(level, **how))
            halves.plain.append(bench.plain())
    return halves


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean by Student's t; unbounded for a single value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = T_975[min(len(values) - 2, len(T_975) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def peer_ns_per_row(rows: Sequence[dict[str, Any]], folder: Path) -> float:
    """CPU of writing the same records with Python's logging, one JSON object a line."""
    log, handler = logging.Logger("peer"), logging.FileHandler(folder / "peer.log")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    began = time.thread_time_ns()
    for row in rows:
        log.info(json.dumps(row))
    spent = time.thread_time_ns() - began
    handler.close()
    return spent / max(1, len(rows))


@contextmanager
def prepared(overrides: Sequence[str], *, least_s: float = STEP_S) -> Iterator[Any]:
    """A world whose plain step takes at least `least_s` of CPU time on one thread: layers are added until it does."""
    from flowledger.config.read import read
    from flowledger.run import loop

    layers = LAYERS
    while True:
        config = read(CONFIG, [*SIZES, f"model.tiny.layers={layers}", *overrides])
        with loop.prepared(config) as world, tempfile.TemporaryDirectory() as folder:
            bench = Bench(world, Path(folder))
            bench.plain()  # the first step makes the optimizer's state
            took = bench.plain().cpu_s
            if took >= least_s:
                yield bench
                return
        layers = math.ceil(layers * 1.15 * least_s / took)


def measure(bench: Bench, *, pairs: int, quick: bool) -> dict[str, Any]:
    """All figures; shares of an unrecorded step's CPU time."""
    alternating = alternate(bench, "tensors", pairs, quick=quick)
    tensors, rows = alternating.recorded, bench.newest_rows()
    peer = peer_ns_per_row(rows, bench.folder)
    more = 1 if quick else max(3, pairs // 3)
    steps = [bench.recorded("steps") for _ in range(more)]
    sampled = alternate(bench, "tensors", more, ops_every=1)
    control = alternate(bench, "steps", 1 if quick else 3, slow=True)
    step_s = statistics.median(taken.cpu_s for taken in (*alternating.plain, *sampled.plain, *control.plain))
    measured = {"steps": steps, "tensors": tensors, "control": control.recorded}
    share = {name: statistics.median(t.own_s for t in several) / step_s for name, several in measured.items()}
    watched = max(0.0, statistics.median(sampled.extra()))
    (low, high), (wall_low, wall_high) = interval(alternating.extra()), interval(alternating.extra("wall_s"))
    total_rows = sum(taken.rows for taken in tensors)
    own_row = sum(taken.own_s for taken in tensors) / total_rows * 1e9
    write_row = sum(taken.writer_s for taken in tensors) / total_rows * 1e9
    return {
        "overhead_steps": share["steps"],
        "overhead_tensors": ((CADENCE - 1) * share["tensors"] + watched) / CADENCE,
        "overhead_tensors_plain": share["tensors"], "overhead_tensors_sampled": watched,
        "ab_low": low, "ab_high": high, "ab_pairs": len(tensors), "ab_wall_low": wall_low, "ab_wall_high": wall_high,
        "control_caught": share["control"] > TARGETS["steps"] and min(control.extra()) > high,
        "control_overhead": share["control"], "control_ab": statistics.median(control.extra()),
        "ns_per_row": own_row, "write_ns_per_row": write_row, "peer_ns_per_row": peer, "peer_ratio": own_row / peer,
        "rows_per_step": total_rows / len(tensors), "bytes_per_step": sum(t.bytes for t in tensors) / len(tensors),
        "rows_per_step_at_steps": steps[0].rows, "dropped": sum(taken.dropped for taken in (*tensors, *steps)),
        "step_s": step_s, "step_wall_s": statistics.median(taken.wall_s for taken in alternating.plain),
        "said_of_itself": statistics.median(taken.said_s for taken in tensors) / step_s,
    }  # fmt: skip


def told(figures: dict[str, Any]) -> str:
    """The figures as a person reads them."""
    f = figures
    kept = {level: "kept" if f[f"overhead_{level}"] < target else "MISSED" for level, target in TARGETS.items()}
    half = (f["ab_high"] - f["ab_low"]) / 2
    return "\n".join((
        f"step: {f['step_s']:.2f} s CPU on one thread, {f['step_wall_s']:.2f} s by the clock on the wall",
        f"overhead at steps: {f['overhead_steps']:.3%} ({f['rows_per_step_at_steps']} rows); "
        f"target {TARGETS['steps']:.1%} {kept['steps']}",
        f"overhead at tensors: {f['overhead_tensors']:.3%}; target {TARGETS['tensors']:.0%} {kept['tensors']}",
        f"  plain step {f['overhead_tensors_plain']:.3%}, step watched operator by operator "
        f"{f['overhead_tensors_sampled']:.2%}, one in {CADENCE} is",
        f"  {f['rows_per_step']:.0f} rows, {f['bytes_per_step']:.0f} bytes, {f['dropped']} dropped; "
        f"the recorder itself says {f['said_of_itself']:.3%} (by the wall's clock)",
        f"recorded against not, {f['ab_pairs']} pairs: extra CPU {f['ab_low']:+.2%} to {f['ab_high']:+.2%} "
        f"(resolves ±{half:.2%}); on the wall {f['ab_wall_low']:+.1%} to {f['ab_wall_high']:+.1%}",
        f"control, {BURN_NS / 1e6:.0f} ms a row: metered {f['control_overhead']:.1%}, compared {f['control_ab']:+.1%}: "
        f"{'caught' if f['control_caught'] else 'NOT CAUGHT'}",
        f"a row: {f['ns_per_row']:.0f} ns with all that is looked at for it, {f['write_ns_per_row']:.0f} ns of it to write "
        f"it; json + logging.FileHandler {f['peer_ns_per_row']:.0f} ns only to write it (ratio {f['peer_ratio']:.2f})",
    ))  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and end with the key figures. 0 when the targets are kept and the control is caught."""
    asked = _asked(arguments)
    with prepared(asked.set, least_s=asked.least_s) as bench:
        figures = measure(bench, pairs=asked.pairs, quick=asked.quick)
    print(told(figures))
    if asked.json:
        print(json.dumps({name: _rounded(value) for name, value in figures.items()}))
    missed = any(figures[f"overhead_{level}"] >= target for level, target in TARGETS.items())
    return int(missed or not figures["control_caught"])


def _rounded(value: Any) -> Any:
    """Five significant digits are more than is known; JSON has no infinity."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="recorded and unrecorded steps to compare")
    parser.add_argument(
        "--least-s", type=float, default=STEP_S, help="the least that a step must take, in seconds of CPU"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the configuration")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="as many pairs as fit into half a minute, at least two")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
