"""Peaks as lines of evidence: the fullest moment of each stage, what it was made of, and what was planned beside it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.shortage import Said
from flowledger.diagnose.planned import Peak
from flowledger.flow.kinds import KINDS

MOST = 10
ABOVE = 1.1  # times the planned peak that a crash must have needed before it is said that the plan is lower
FAR = 1.5  # and before its parts by kind are not taken for those of the crash
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


class Gap(NamedTuple):
    """What a crash needed beside the planned peak of its stage, both counted alike."""

    stage: str
    planned: int  # as it is printed elsewhere
    alike: int  # of it what the crash's figure counts too
    needed: int

    @property
    def times(self) -> float:
        return self.needed / max(1, self.alike)

    def sentence(self) -> str:
        whole = f" ({size(self.planned)} with its residue)" if self.alike < self.planned else ""
        return (
            f"the plan has {size(self.alike)} at the peak of {self.stage}{whole}, and {size(self.needed)} were needed here, "
            f"{self.times:.1f} times as much: the plan is lower by {size(self.needed - self.alike)}"
        )


def above_plan(evidence: Evidence, short: Said) -> list[str]:
    """That a crash needed more than was planned, by how much, and what a plan does not count; nothing where it did not."""
    gap = _gap(evidence, short)
    if gap is None or gap.times < ABOVE:
        return []
    outside = 0
    if short.process and short.allocated:
        outside = short.process.bytes - short.allocated.bytes - (short.unused.bytes if short.unused else 0)
    beside = f" ({size(outside)} outside of PyTorch here)" if outside > OUTSIDE else ""
    unknown = f"an engine that was awake, another process on the device{beside}, what the job's own code keeps, settings that were not given"
    if gap.times < FAR:
        return [f"{gap.sentence()}, which does not count what it cannot know: {unknown}"]
    return [
        f"{gap.sentence()}, and its parts by kind are not those of this crash",
        f"what a plan cannot know: {unknown}",
    ]


def is_far(evidence: Evidence, short: Said) -> bool:
    """Whether the crash needed so much more that what the plan is made of says nothing of it."""
    gap = _gap(evidence, short)
    return gap is not None and gap.times >= FAR


def _gap(evidence: Evidence, short: Said) -> Gap | None:
    """PyTorch's own figures stand beside the plan without its residue, those of the process or device beside all of it."""
    worst, stage = _worst_planned(evidence), evidence.end.stage if evidence.end else None
    if worst is None or short.asked is None or (stage is not None and worst.stage != stage):
        return None
    if short.allocated:
        alike = worst.allocated - worst.residue
        return Gap(worst.stage, worst.allocated, alike, short.allocated.bytes + short.asked.bytes)
    taken = short.process.bytes if short.process else None
    if taken is None and short.total and short.free:
        taken = short.total.bytes - short.free.bytes
    return None if taken is None else Gap(worst.stage, worst.allocated, worst.allocated, taken + short.asked.bytes)


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
