"""Does a step on any mesh give the numbers of one process, and does each rank hold what the plan says?

    python benchmarks/parallel.py [--quick] [--only NAME …] [--json]

Each combination runs on forked gloo ranks: one RL step for its losses, gradients and weights, against the same step on one
process; the same step recorded, for the shapes that each rank held and the bytes that it sent, against the plan; and two
steps of a larger model with samples of one length, for the peak of live bytes of each stage, against the plan.
--quick takes the combinations of two processes. Exit code 1 where a combination misses a bar.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equality
import forked
import peaks_agree
import shapes_agree
import torch
from combinations import COMBINATIONS, LR, Combination, config, of_equal_lengths

from flowledger.config.schema import RunConfig

LOSS, GRAD, WEIGHT_OVER_LR, PEAK = 1e-5, 1e-5, 1e-2, 0.02  # bars
AT_ONCE = 5  # combinations that one group of ranks goes through before their lines are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one combination came to; the worst of its ranks."""

    name: str
    processes: int
    loss: float
    grad: float
    weight_over_lr: float
    step_s: float
    shapes: int  # recorded local shapes that were compared
    shapes_wrong: int
    bytes_wrong: int  # (rank, stage, phase, comm_type, group) whose bytes are not those planned
    peak: float  # |planned / recorded - 1| of peaks of live bytes: the worst stage on the worst rank
    peak_stage: str  # that stage
    peak_bytes: tuple[int, ...]  # recorded over the step, by rank
    planned_bytes: tuple[int, ...]

    @property
    def missed(self) -> list[str]:
        """What is beyond its bar."""
        bars = {
            "loss": LOSS,
            "grad": GRAD,
            "weight_over_lr": WEIGHT_OVER_LR,
            "shapes_wrong": 0,
            "bytes_wrong": 0,
            "peak": PEAK,
        }
        return [name for name, bar in bars.items() if not getattr(self, name) <= bar]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each combination and, last, the key figures."""
    asked = _asked(arguments)
    torch.set_num_threads(1)
    chosen = [
        one for one in COMBINATIONS
        if (one.name in asked.only if asked.only else not asked.quick or one.processes == 2)
    ]  # fmt: skip
    rows: list[Row] = []
    for processes in sorted({one.processes for one in chosen}):
        alike = [one for one in chosen if one.processes == processes]
        for start in range(0, len(alike), AT_ONCE):
            rows += measured(alike[start : start + AT_ONCE], processes)
    if asked.json:
        print(json.dumps(summary(rows)))
    return 1 if any(row.missed for row in rows) else 0


def measured(chosen: Sequence[Combination], processes: int) -> list[Row]:
    """The rows of combinations of equally many processes: one group of ranks goes through all of them."""
    with tempfile.TemporaryDirectory() as folder:
        asked = [Asked.of(one, Path(folder), index) for index, one in enumerate(chosen)]
        plain = {one.plain.model_dump_json(): one.plain for one in asked}
        alone = {text: equality.step(one) for text, one in plain.items()}
        ranks = forked.ranks(processes, _all, asked, timeout_s=900)
        rows = []
        for index, one in enumerate(asked):
            found = [rank[index] for rank in ranks]
            gaps = [equality.gap(alone[one.plain.model_dump_json()], rank.trace, LR) for rank in found]
            agreed = shapes_agree.compare(one.path)
            peaks = peaks_agree.pairs(one.level, [rank.peaks for rank in found])
            highest = [max((p for p in peaks if p.rank == rank), key=_recorded_bytes) for rank in range(processes)]
            worst = peaks_agree.worst(peaks)
            row = Row(
                name=chosen[index].name, processes=processes, loss=max(gap.loss for gap in gaps),
                grad=max(gap.grad for gap in gaps), weight_over_lr=max(gap.weight_over_lr for gap in gaps),
                step_s=max(rank.trace.metrics["step_time_s"] for rank in found), shapes=agreed.compared,
                shapes_wrong=len(agreed.wrong), bytes_wrong=len(agreed.bytes_wrong), peak=abs(worst.error),
                peak_stage=worst.stage, peak_bytes=tuple(peak.recorded for peak in highest),
                planned_bytes=tuple(peak.planned for peak in highest),
            )  # fmt: skip
            rows.append(row)
            print(_line(row), flush=True)
            for wrong in (*agreed.wrong[:3], *agreed.bytes_wrong[:3], *_beyond(peaks)[:3]):
                print(f"    {wrong}", flush=True)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One combination, as its ranks need it."""

    plain: RunConfig  # on one process
    meshed: RunConfig
    level: RunConfig  # with samples of one length, for peaks
    path: Path  # of the recorded run

    @classmethod
    def of(cls, one: Combination, folder: Path, index: int) -> "Asked":
        return cls(
            plain=config(one.changes), meshed=config(one.changes, one.mesh),
            level=of_equal_lengths(one.changes, one.mesh, folder), path=folder / f"run-{index}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank has of one combination."""

    trace: equality.Trace
    peaks: Mapping[str, int]


def _all(asked: Sequence[Asked]) -> list[Found]:
    """On one rank: each combination for its numbers, then recorded operator by operator, then for its peaks."""
    found = []
    for one in asked:
        trace = equality.step(one.meshed)
        shapes_agree.record(one.meshed, one.path)
        found.append(Found(trace=trace, peaks=peaks_agree.watched(one.level)))
    return found


def _recorded_bytes(peak: peaks_agree.Pair) -> int:
    return peak.recorded


def _beyond(peaks: Sequence[peaks_agree.Pair]) -> list[str]:
    """The stages whose peaks are beyond the bar, worst first."""
    off = sorted((one for one in peaks if abs(one.error) > PEAK), key=lambda one: -abs(one.error))
    return [
        f"rank {one.rank} {one.stage}: peak {one.recorded}, planned {one.planned} ({one.error:+.1%})" for one in off
    ]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The key figures."""
    return {
        "combinations": [asdict(row) | {"missed": row.missed} for row in rows],
        "worst_loss": max(row.loss for row in rows),
        "worst_grad": max(row.grad for row in rows),
        "worst_weight_over_lr": max(row.weight_over_lr for row in rows),
        "shapes_wrong": sum(row.shapes_wrong for row in rows),
        "bytes_wrong": sum(row.bytes_wrong for row in rows),
        "worst_peak": max(row.peak for row in rows),
    }


def _line(row: Row) -> str:
    peaks = ", ".join(
        f"{recorded / 2**20:.2f}/{planned / 2**20:.2f}"
        for recorded, planned in zip(row.peak_bytes, row.planned_bytes, strict=True)
    )
    return (
        f"{row.name:28} loss {row.loss:.1e}  grad {row.grad:.1e}  weights {row.weight_over_lr:.1e}·lr  "
        f"shapes {row.shapes - row.shapes_wrong}/{row.shapes}  bytes wrong {row.bytes_wrong}  step {row.step_s:.2f} s  "
        f"peak {100 * row.peak:.1f} % in {row.peak_stage} (recorded/planned MiB over the step: {peaks})"
        + (f"  MISSED {', '.join(row.missed)}" if row.missed else "")
    )


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the combinations of two processes")
    parser.add_argument("--only", nargs="*", default=[], choices=[one.name for one in COMBINATIONS], metavar="NAME")
    parser.add_argument("--json", action="store_true", help="the key figures as one last line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
