"""One step of the loop, recorded or not, and what it cost: the recorder's CPU time taken from outside.

The same seam is replaced three times: around the recorder's wrapper and within it by a meter that notes who computes.
What the recorder does between two probes (hooks, finalisers) is metered where it is entered.
"""

import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowledger.flow.seams import Function, Probe, replaced

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "tiny.yaml"
SIZES = (
    "model.tiny.hidden_size=768", "model.tiny.heads=12", "model.tiny.kv_heads=4", "model.tiny.ffn_size=2048",
    "rollout.samples_per_prompt=8", "rollout.max_response_tokens=16", "rollout.max_running=32", "threads=1",
    "actor.micro_batch.samples=16", "optim.lr=0",
)  # fmt: skip
LAYERS, STEP_S = 2, 1.0  # layers to begin with; more where a step takes less than a second
BURN_NS = 5_000_000
INSIDE = (  # what the job calls of the recorder between two probes
    "flowledger.record.recorder:Recorder.guard_hook",
    "flowledger.record.hooks:ModelHooks._count",
    "flowledger.record.storages:Lives._died",
)
Change = tuple[str, Callable[[Function], Function]]


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
    """One step, or the mean of several in one book. `cpu_s`: all threads, opening and closing of the book included."""

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
        self.blank_s = 0.0  # what the meter itself adds to the recorder's time in one step

    def plain(self) -> Taken:
        with _clocks() as clocks:
            self._step()
        return Taken(**clocks)

    def recorded(self, level: str, *, ops_every: int = 0, slow: bool = False, steps: int = 1) -> Taken:
        """Attached as `flowledger run` does it, the meter's wrappers around and within the recorder's.

        What the meter itself adds to the recorder's time (`blank`) is taken off again.
        """
        from flowledger.ledger.writer import Writer
        from flowledger.record.adapters.loop import PROBES
        from flowledger.record.attach import attach, wants
        from flowledger.record.recorder import Recorder

        meter = Meter()
        with _clocks() as clocks:
            ink = Writer(self._part())
            recorder = Recorder(
                SlowSink(ink) if slow else ink, level=level, bindings=self._world.bindings, ops_every=ops_every
            )
            inner, outer = _metered(meter, [probe for probe in PROBES if wants(level, probe)])
            with replaced(inner), attach(PROBES, recorder), replaced(outer):
                for _ in range(steps):
                    self._step()
            ink.close()
        stats, said = ink.stats(), recorder.cost()
        if ink.failure or said["errors"]:
            raise RuntimeError(f"the recorder failed: {ink.failure or said}")
        own_s = (meter.spent["recorder"] + stats.cpu_ns) / 1e9 - steps * self.blank_s
        return Taken(
            cpu_s=clocks["cpu_s"] / steps, wall_s=clocks["wall_s"] / steps, own_s=own_s / steps,
            said_s=said["cpu_s"] / steps, writer_s=stats.cpu_ns / 1e9 / steps, rows=round(stats.rows / steps),
            bytes=round(stats.bytes / steps), dropped=stats.dropped,
        )  # fmt: skip

    def blank(self) -> float:
        """CPU seconds of a step, which makes the optimizer's state; `blank_s` is what the meter took for a recorder."""
        from flowledger.record.adapters.loop import PROBES

        meter = Meter()
        inner, outer = _metered(meter, PROBES)
        with _clocks() as clocks, replaced(inner), replaced(outer):
            self._step()
        self.blank_s = meter.spent["recorder"] / 1e9
        return clocks["cpu_s"]

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


def _metered(meter: Meter, probes: Sequence[Probe]) -> tuple[list[Change], list[Change]]:
    """Wrappers for within the recorder's (the job computes) and for around them (the recorder does)."""
    inner = [(probe.target, meter.on_behalf_of("job")) for probe in probes]
    outer = [(target, meter.on_behalf_of("recorder")) for target in (*(probe.target for probe in probes), *INSIDE)]
    return inner, outer


@contextmanager
def _clocks() -> Iterator[dict[str, float]]:
    taken: dict[str, float] = {}
    gc.collect()
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    yield taken
    taken["cpu_s"], taken["wall_s"] = (time.process_time_ns() - cpu) / 1e9, (time.perf_counter_ns() - wall) / 1e9


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
            took = bench.blank()
            if took >= least_s:
                yield bench
                return
        layers = math.ceil(layers * 1.15 * least_s / took)
