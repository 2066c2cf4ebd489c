"""What a ledger keeps for the orders: findings that were written while it was recorded or imported, and planned rows."""

from collections.abc import Sequence

from flowledger.diagnose.planned import Peak, Planned, Summary
from flowledger.flow.kinds import KINDS
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, TensorRow

FINDINGS = (
    "id", "scope", "order", "position", "verdict", "severity", "message", "evidence", "needs", "versions", "fires_at", "fix",
    "next_step", "confidence", "step", "stage", "phase", "rank", "epoch", "mini_batch", "micro_batch",
)  # fmt: skip
TENSORS = (
    "role", "stage", "phase", "rank", "rank_count", "tensor_name", "layer", "dims", "logical_shape", "local_shape", "placement",
    "padding", "dtype", "numel", "bytes", "kind", "mask", "mask_shape", "broadcast", "owner_rank", "owner", "lifetime", "access",
)  # fmt: skip


def kept(ledger: Ledger, fresh: Sequence[FindingRow]) -> list[FindingRow]:
    """Findings in the ledger that no detector has made anew: how it ended, what the recorder says, checks of its plan."""
    known = {one.id for one in fresh}
    listed = ", ".join(f'"{name}"' for name in FINDINGS)
    rows = ledger.rows(f"SELECT DISTINCT {listed} FROM findings ORDER BY id")
    return [FindingRow(**row) for row in rows if row["id"] not in known]


def planned_of(ledger: Ledger) -> Planned | None:
    """The plan that lies in a run's directory; None where none does."""
    rows = ledger.rows(f"SELECT {', '.join(TENSORS)} FROM tensors WHERE source = 'plan' AND stage IS NOT NULL")
    if not rows:
        return None
    manifest = ledger.directory.manifest
    peaks = ledger.rows(
        "SELECT CASE step WHEN 0 THEN 'first' ELSE 'later' END AS step, stage, coalesce(rank, 0) AS rank, known, allocated, phase, "
        f"{', '.join(KINDS)} FROM memory_readings WHERE source = 'plan' AND instant = 'peak' AND stage IS NOT NULL"
    )
    world = max((row["rank"] or 0) + (row["rank_count"] or 1) for row in rows)
    return Planned(
        run=manifest.run, chain=[], checks=[one for one in kept(ledger, ()) if one.scope == "plan"],
        summary=Summary(framework=manifest.framework, framework_version=manifest.framework_version, model="", world=world,
                        mesh=dict(manifest.mesh)),
        rows=[_peak(row, world) for row in peaks], shapes=[TensorRow(**row) for row in rows],
    )  # fmt: skip


def _peak(row: dict[str, object], world: int) -> Peak:
    kinds = {kind: row[kind] or 0 for kind in KINDS}
    return Peak(
        step=str(row["step"]), stage=str(row["stage"]), ranks="all", rank=int(str(row["rank"])), rank_count=world, instant="peak",
        allocated=row["allocated"] or row["known"] or 0, **kinds,  # type: ignore[arg-type]  # a row of a query
    )  # fmt: skip
