"""Peaks as lines of evidence: the fullest moment of each stage, what it was made of, and what was planned beside it."""

from collections.abc import Mapping
from typing import Any

from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.shortage import Said
from flowledger.diagnose.planned import Peak
from flowledger.flow.kinds import KINDS

MOST = 10
FAR = 1.5  # times the planned peak that a crash must have needed before the plan is called far below
OUTSIDE = 1 << 30  # bytes outside of PyTorch that are worth a word

# The fullest moment of each stage and rank, by kind where kinds are known, else as the allocator counts. Of a process on the
# host the allocator counts everything, so only what tensors take is looked at.
FULLEST = """
SELECT step, stage, phase, micro_batch, memory_readings.rank, instant, param, grad, optimizer, activation, kv_cache, comm_buffer,
    temporary, batch, known, reserved, reserved_peak_since_stage, "limit", fragmentation,
    CASE WHEN device <> 'cpu' THEN greatest(coalesce(peak_since_stage, 0), coalesce(allocated, 0), coalesce(known, 0)) ELSE known END AS peak
FROM memory_readings JOIN processes USING (process) WHERE memory_readings.source <> 'plan' AND (stage IS NOT NULL OR instant = 'oom')
    AND instant <> 'made' AND peak IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY stage, memory_readings.rank ORDER BY peak DESC, known DESC NULLS LAST, t_ns) = 1
ORDER BY peak DESC
"""

Row = Mapping[str, Any]


def size(count: float) -> str:
    """`58.15 GiB`, as allocators print it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} bytes"


def kinds_of(row: Row, planned: Peak | None) -> list[str]:
    """One line a kind, the largest first, after a line that says of which moment."""
    parts = {kind: row[kind] or 0 for kind in KINDS if kind != "residue"}
    beside = {kind: f" (planned {size(getattr(planned, kind))})" if planned else "" for kind in parts}
    lines = [
        f"{kind} {size(count)}{beside[kind]}" for kind, count in sorted(parts.items(), key=lambda one: -one[1]) if count
    ]
    return [f"{size(row['known'])} at the peak of {place(row)}", *lines]


# A run that goes on from a checkpoint begins with the state that others have only from their second step on.
FIRST_STEP = """
SELECT min(step) AS step FROM spans WHERE source <> 'plan' AND NOT EXISTS (FROM metrics WHERE name = 'checkpoint/restored_bytes')
"""


def planned_for(evidence: Evidence, row: Row) -> Peak | None:
    """The plan's peak of the same stage, rank and kind of step: steps are counted from 0 or 1, and from anywhere after a resume."""
    firsts = {first["step"] for first in evidence.rows(FIRST_STEP)}
    rank, step = row["rank"] or 0, "first" if row["step"] in firsts else "later"
    there = [
        peak for peak in (evidence.planned.rows if evidence.planned else ())
        if peak.stage == row["stage"] and peak.step == step and peak.rank <= rank < peak.rank + peak.rank_count
    ]  # fmt: skip
    return there[0] if there else None


def _worst_planned(evidence: Evidence) -> Peak | None:
    """The fullest planned stage; of a run that ran out in one, that one."""
    rows = evidence.planned.rows if evidence.planned else []
    stage = evidence.end.stage if evidence.end else None
    there = [row for row in rows if row.stage == stage] or rows
    return max(there, key=lambda row: row.allocated, default=None)


def planned_kinds(evidence: Evidence) -> list[str]:
    worst = _worst_planned(evidence)
    if worst is None:
        return []
    parts = sorted(((kind, getattr(worst, kind)) for kind in KINDS), key=lambda one: -one[1])
    return [
        f"{size(worst.allocated)} planned at the peak of {worst.stage}",
        *(f"{kind} {size(count)}" for kind, count in parts if count),
    ]


def far_below(evidence: Evidence, short: Said) -> list[str]:
    """That the plan has far less than the crash needed, by which factor, and what a plan cannot know; nothing where it has not."""
    worst, needed = _worst_planned(evidence), _needed(short)
    if worst is None or needed is None or needed < FAR * worst.allocated:
        return []
    outside = 0
    if short.process and short.allocated:
        outside = short.process.bytes - short.allocated.bytes - (short.unused.bytes if short.unused else 0)
    beside = f" ({size(outside)} outside of PyTorch here)" if outside > OUTSIDE else ""
    times = needed / max(1, worst.allocated)
    return [
        f"the plan has {size(worst.allocated)} at the peak of {worst.stage}, and {size(needed)} were needed here, {times:.1f} times as much: "
        "its parts by kind are not those of this crash",
        f"what a plan cannot know: an engine that was awake, another process on the device{beside}, what the job's own code keeps, settings that "
        "were not given",
    ]  # fmt: skip


def _needed(short: Said) -> int | None:
    """Bytes that would have been in use with the allocation that failed; of the device where only that is told."""
    if short.asked is None:
        return None
    taken = short.allocated or short.process
    if taken is None and short.total and short.free:
        return short.total.bytes - short.free.bytes + short.asked.bytes
    return taken.bytes + short.asked.bytes if taken else None


def planned_peaks(evidence: Evidence) -> list[str]:
    fullest: dict[str, Peak] = {}
    for row in evidence.planned.rows if evidence.planned else ():
        if row.stage not in fullest or row.allocated > fullest[row.stage].allocated:
            fullest[row.stage] = row
    ordered = sorted(fullest.values(), key=lambda row: -row.allocated)
    return [f"{row.stage}: planned peak {size(row.allocated)} (ranks {row.ranks})" for row in ordered[:MOST]]


def largest(row: Row) -> tuple[str, int]:
    return max(((kind, row[kind] or 0) for kind in KINDS if kind != "residue"), key=lambda one: one[1])


def largest_planned(evidence: Evidence) -> tuple[str, int]:
    worst = _worst_planned(evidence)
    return (
        max(((kind, getattr(worst, kind)) for kind in KINDS), key=lambda one: one[1]) if worst else ("nothing known", 0)
    )


def largest_kind(evidence: Evidence) -> str:
    split = [row for row in evidence.rows(FULLEST) if row["known"]]
    return (largest(split[0]) if split else largest_planned(evidence))[0]


def place(row: Row) -> str:
    place = "/".join(filter(None, (row["stage"], row["phase"]))) or "no stage"
    step = f", step {row['step']}" if row["step"] is not None else ""
    return f"{place}{step}{on_rank(row['rank'])}"


def on_rank(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def of_limit(row: Row) -> str:
    return f" of {size(row['limit'])}" if row["limit"] else ""
