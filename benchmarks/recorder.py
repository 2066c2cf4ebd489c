"""What recording costs, and a comparison that would notice if it cost more.

    python benchmarks/recorder.py [--pairs 12] [--set key=value …] [--json] [--quick]

*Overhead* is the recorder's own CPU time, its writer's thread included, over the CPU time of an unrecorded step of at
least a second on one thread. Both are CPU times, so that a busy machine neither hides nor adds cost. The recorder's
time on the job's thread is taken from outside (`Meter`), over several steps of one book, its opening and closing
included. In a step that is watched operator by operator no meter stands around each operator: there it is what the
recorder counts of itself, and the whole extra CPU time of the process is printed beside it, for torch's own dispatch
into Python comes on top.

*Alternation*: the same step (same weights, prompts and random numbers) recorded and not, in pairs of random order;
each recorded one opens and closes its book, so the interval of the extra CPU time is a bound from above.

*Control*: the same measures on a recorder whose sink burns 5 ms a row.
"""

import argparse
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meter import BURN_NS, STEP_S, Bench, Taken, prepared

STARTED = time.monotonic()
TARGETS = {"steps": 0.002, "tensors": 0.01}
CADENCE = 50  # one step in so many is watched operator by operator
QUICK_S = 14.0  # after this no further pair is begun
T_975 = (  # quantiles of Student's t for 1, 2, … degrees of freedom
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip


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


def measure(bench: Bench, *, pairs: int, quick: bool) -> dict[str, Any]:
    """All figures; shares are of an unrecorded step's CPU time."""
    alternating = alternate(bench, "tensors", pairs, quick=quick)
    rows = bench.newest_rows()
    more = 1 if quick else max(3, pairs // 3)
    book = 2 if quick else 5  # steps of one recording
    taken = {
        "tensors": [bench.recorded("tensors", steps=book) for _ in range(more)],
        "steps": [bench.recorded("steps", steps=book) for _ in range(more)],
        "watched": [bench.recorded("tensors", ops_every=1) for _ in range(more)],
        "control": [bench.recorded("steps", slow=True) for _ in range(more)],
    }
    step_s = statistics.median(plain.cpu_s for plain in alternating.plain)
    share = {name: _median(several, "own_s") / step_s for name, several in taken.items()}
    extra = {name: _median(several, "cpu_s") / step_s - 1 for name, several in taken.items()}
    watched = _median(taken["watched"], "said_s") / step_s
    tensors = taken["tensors"]
    total_rows = sum(one.rows for one in tensors)
    own_row, write_row = (
        sum(getattr(one, part) for one in tensors) / total_rows * 1e9 for part in ("own_s", "writer_s")
    )
    peer = peer_ns_per_row(rows, bench.folder)
    (low, high), (wall_low, wall_high) = interval(alternating.extra()), interval(alternating.extra("wall_s"))
    return {
        "overhead_steps": share["steps"],
        "overhead_tensors": ((CADENCE - 1) * share["tensors"] + watched) / CADENCE,
        "overhead_tensors_plain": share["tensors"], "overhead_tensors_sampled": watched,
        "overhead_tensors_sampled_whole": extra["watched"],
        "ab_low": low, "ab_high": high, "ab_pairs": len(alternating.plain), "ab_wall_low": wall_low, "ab_wall_high": wall_high,
        "control_caught": share["control"] > 10 * TARGETS["steps"] and extra["control"] > 0,
        "control_overhead": share["control"], "control_ab": extra["control"],
        "ns_per_row": own_row, "write_ns_per_row": write_row, "peer_ns_per_row": peer, "peer_ratio": own_row / peer,
        "rows_per_step": total_rows / len(tensors), "bytes_per_step": sum(one.bytes for one in tensors) / len(tensors),
        "rows_at_steps": taken["steps"][0].rows, "rows_watched": taken["watched"][0].rows,
        "dropped": sum(one.dropped for several in taken.values() for one in several),
        "step_s": step_s, "step_wall_s": _median(alternating.plain, "wall_s"),
        "meter_s": bench.blank_s, "said_of_itself": _median(tensors, "said_s") / step_s,
    }  # fmt: skip


def _median(several: Sequence[Taken], what: str) -> float:
    return statistics.median(getattr(one, what) for one in several)


def told(figures: dict[str, Any]) -> str:
    """The figures as a person reads them."""
    f = figures
    kept = {level: "kept" if f[f"overhead_{level}"] < target else "MISSED" for level, target in TARGETS.items()}
    half = (f["ab_high"] - f["ab_low"]) / 2
    return "\n".join((
        f"step: {f['step_s']:.2f} s CPU on one thread, {f['step_wall_s']:.2f} s by the clock on the wall",
        f"overhead at steps: {f['overhead_steps']:.3%} ({f['rows_at_steps']} rows); "
        f"target {TARGETS['steps']:.1%} {kept['steps']}",
        f"overhead at tensors: {f['overhead_tensors']:.3%}; target {TARGETS['tensors']:.0%} {kept['tensors']}",
        f"  plain step {f['overhead_tensors_plain']:.3%}, step watched operator by operator "
        f"{f['overhead_tensors_sampled']:.2%} (with torch's dispatch {f['overhead_tensors_sampled_whole']:.1%}), "
        f"one in {CADENCE} is",
        f"  {f['rows_per_step']:.0f} rows, {f['bytes_per_step']:.0f} bytes, {f['dropped']} dropped; "
        f"the recorder itself says {f['said_of_itself']:.3%} (by the wall's clock); "
        f"the meter adds {f['meter_s'] * 1e3:.1f} ms",
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
