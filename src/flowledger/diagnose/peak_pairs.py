"""The planned peak of each stage beside the recorded one, kind by kind.

Compared is what tensors take: of a plan without the residue (a process's own memory), of a run live tensors where operators
were watched, else what the allocator of an accelerator counts. A host's allocator counts the whole process: nothing is
compared with that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.diagnose.planned import Peak
from flowledger.flow.kinds import KINDS as ALL_KINDS
from flowledger.ledger.reader import Ledger

KINDS = tuple(kind for kind in ALL_KINDS if kind != "residue")
FIRST = 0  # the step before whose update no optimizer has states

Reading = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPair:
    """One stage on one kind of rank, in the first step or in later ones. Bytes of the fullest of its ranks."""

    step: str  # first, or later
    stage: str
    ranks: str
    rank: int  # the fullest
    planned: dict[str, int]
    recorded: dict[str, int]  # empty where only the sum is known
    planned_total: int
    recorded_total: int

    @property
    def difference(self) -> float | None:
        """What was planned above (negative: below) what was recorded, as a fraction of that."""
        return self.planned_total / self.recorded_total - 1 if self.recorded_total else None


def peak_pairs(planned: Sequence[Peak], ledger: Ledger) -> list[PeakPair]:
    """Those stages, kinds of ranks and steps that both have."""
    found = _by_kind(ledger) or _by_allocator(ledger)
    pairs = []
    for one in planned:
        there = [
            row for row in found
            if row["stage"] == one.stage and (row["step"] == FIRST) == (one.step == "first")
            and one.rank <= (row["rank"] or 0) < one.rank + one.rank_count
        ]  # fmt: skip
        if there:
            pairs.append(_pair(one, max(there, key=lambda row: row["total"])))
    return pairs


def why_none(ledger: Ledger) -> str:
    """What a run lacks whose memory can not be compared."""
    if ledger.directory.manifest.level in ("off", "steps"):
        return f"the run was recorded at level {ledger.directory.manifest.level}, without memory by kind"
    return "the run was recorded without memory by kind: no step was watched operator by operator (record.ops_every, --ops-every)"


def _pair(one: Peak, row: Reading) -> PeakPair:
    kinds = {kind: getattr(one, kind) for kind in KINDS}
    return PeakPair(
        step=one.step, stage=one.stage, ranks=one.ranks, rank=row["rank"] or 0, planned=kinds,
        recorded={kind: row[kind] or 0 for kind in KINDS} if row["by_kind"] else {},
        planned_total=sum(kinds.values()), recorded_total=row["total"],
    )  # fmt: skip


def _by_kind(ledger: Ledger) -> Sequence[Reading]:
    return ledger.rows(
        f"SELECT step, stage, rank, {', '.join(KINDS)}, known AS total, true AS by_kind FROM memory_readings "
        "WHERE source <> 'plan' AND instant = 'peak' AND stage IS NOT NULL AND known IS NOT NULL"
    )


def _by_allocator(ledger: Ledger) -> Sequence[Reading]:
    return ledger.rows(
        "SELECT step, stage, memory_readings.rank, max(greatest(peak_since_stage, allocated)) AS total, false AS by_kind "
        "FROM memory_readings JOIN processes USING (process) WHERE memory_readings.source <> 'plan' AND stage IS NOT NULL "
        "AND device <> 'cpu' GROUP BY step, stage, memory_readings.rank HAVING total IS NOT NULL"
    )
