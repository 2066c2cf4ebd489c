"""A plan beside the run that was planned: shapes, memory, checks that came true, and the answer in one line.

Nothing is computed anew here: rows of a plan meet rows of a ledger.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from flowledger.diagnose import came_true, common_ground, peak_pairs
from flowledger.diagnose.absent import coverage, only_planned, only_recorded
from flowledger.diagnose.came_true import REFUTED, TRUE, Outcome
from flowledger.diagnose.common_ground import OWN_LOOPS, Setting
from flowledger.diagnose.peak_pairs import PeakPair
from flowledger.diagnose.planned import Planned
from flowledger.diagnose.shape_pairs import Pair, join, seen
from flowledger.diagnose.sizes import EQUAL, EXPLAINED, OUTCOMES, UNEQUAL, Leeway, Seen
from flowledger.flow.rank_classes import spans
from flowledger.ledger.layout import OWN_LOOP
from flowledger.ledger.reader import Ledger

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What a plan and a run say beside each other."""

    planned: Planned
    manifest: dict[str, Any]  # of the run: its framework, version, mesh, level, state
    settings: list[Setting]
    pairs: list[Pair]
    only_planned: Rows
    only_recorded: Rows
    peaks: list[PeakPair]
    no_peaks: str  # why there are none
    checks: list[Outcome]
    holding: int  # checks that held at plan time
    findings: Rows  # of the run, those that are not a pass

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> forms of tensors, on kinds of ranks."""
        return Counter(pair.outcome for pair in self.pairs)

    @property
    def refuted(self) -> list[Outcome]:
        """Failures that were announced and did not come."""
        return [one for one in self.checks if one.check.verdict == "fail" and one.outcome == REFUTED]

    @property
    def agrees(self) -> bool:
        """Whether every setting and shape that both have is equal or explained, and no announced failure stayed away."""
        return not (self.settings or self.counts[UNEQUAL] or self.refuted)


def diff(planned: Planned, ledger: Ledger) -> Diff:
    """Everything of a plan that a run can be held against. Raises BadInput where they are not of one job."""
    common_ground.check(planned, ledger)
    recorded, leeway = seen(ledger), _leeway(planned, ledger)
    joined, peaks = join(planned.shapes, recorded, leeway), peak_pairs.peak_pairs(planned.rows, ledger)
    reach = coverage(ledger, recorded, named=leeway.named)
    return Diff(
        planned=planned,
        manifest=_manifest(ledger, recorded),
        settings=common_ground.parted(planned, structs.replace(ledger.directory.manifest, mesh=ledger.mesh)),
        pairs=joined.pairs,
        only_planned=[
            {"stage": row.stage, "phase": row.phase, "tensor_name": row.tensor_name, "dims": (row.dims or "").strip("[] "),
             "planned_logical_shape": row.logical_shape, "why": only_planned(row, reach)}
            for row in joined.planned
        ],
        only_recorded=[
            {"stage": one.stage, "tensor_name": one.tensor_name, "dims": one.dims, "local_shape": list(one.largest),
             "why": only_recorded(one, planned.shapes)}
            for one in joined.recorded
        ],
        peaks=peaks,
        no_peaks="" if peaks else peak_pairs.why_none(ledger),
        checks=came_true.outcomes(planned.checks, came_true.course(ledger)),
        holding=sum(one.verdict == "pass" for one in planned.checks),
        findings=ledger.rows(
            "SELECT id, verdict, step, stage, message FROM findings_view WHERE source <> 'plan' AND verdict <> 'pass'"
        ),
    )  # fmt: skip


def _manifest(ledger: Ledger, recorded: Sequence[Seen]) -> dict[str, Any]:
    manifest = ledger.directory.manifest
    return {
        "framework": manifest.framework, "framework_version": manifest.framework_version, "mesh": ledger.mesh,
        "level": manifest.level, "state": ledger.directory.state,
        "ranks": spans(sorted({one.rank for one in recorded if one.rank is not None})),
    }  # fmt: skip


def _leeway(planned: Planned, ledger: Ledger) -> Leeway:
    manifest = ledger.directory.manifest
    (dropped,) = ledger.rows(
        "SELECT count(DISTINCT (step, sample_id)) AS n FROM samples WHERE dropped_reason IS NOT NULL"
    )
    return Leeway(
        named=manifest.framework in (OWN_LOOP, OWN_LOOPS) and {"B_prompt", "G"} <= manifest.bindings.keys(), pads=manifest.framework != OWN_LOOP, group=planned.group, dynamic=planned.dynamic, longest=planned.sizes.get("S_prompt + S_resp", 0),
        dropped=dropped["n"], limits=common_ground.limits_parted(planned, manifest),
    )  # fmt: skip


def verdict(found: Diff) -> str:
    """The answer in one line: whether they agree, and what speaks against it."""
    counts = found.counts
    total = sum(counts.values())
    if found.agrees and not total:
        said = "nothing that plan and run both have differs, and no shape is in both"
    elif found.agrees:
        said = f"plan and run agree: {counts[EQUAL]} shapes equal, {counts[EXPLAINED]} explained"
    else:
        said = f"plan and run differ: {'; '.join(_against(found, total))}"
    if found.peaks:
        most = max(found.peaks, key=lambda one: one.recorded_total)
        said += f"; peak in {most.stage} planned {(most.difference or 0):+.1%}"
    return said


def _against(found: Diff, total: int) -> Iterator[str]:
    """What speaks against agreement, the most telling first."""
    if found.settings:
        yield ", ".join(f"{one.name} {one.planned} planned and {one.recorded} in the run" for one in found.settings[:3])
    if unequal := [pair for pair in found.pairs if pair.outcome == UNEQUAL]:
        first = (
            ""
            if found.settings
            else f" (first {unequal[0].tensor_name} in {unequal[0].stage}: {'; '.join(unequal[0].why)})"
        )
        yield f"{len(unequal)} of {total} shapes unequal{first}"
    if found.refuted:
        yield f"{', '.join(one.check.id for one in found.refuted)} did not come true"


def document(found: Diff) -> dict[str, Any]:
    """The same as plain values, with keys that stay: what `--json` prints beside `rows`, which are the shapes."""
    summary, counts = found.planned.summary, found.counts
    return {
        "rows": [_shape(pair) for pair in found.pairs],
        "plan": {
            "run": found.planned.run, "framework": summary.framework, "framework_version": summary.framework_version,
            "model": summary.model, "mesh": summary.mesh,
        },
        "recorded": found.manifest,
        "settings": [one._asdict() for one in found.settings],
        "only_planned": found.only_planned,
        "only_recorded": found.only_recorded,
        "memory": [_peak(one) for one in found.peaks],
        "no_memory": found.no_peaks or None,
        "checks": [
            {"id": one.check.id, "verdict": one.check.verdict, "fires_at": one.check.fires_at,
             "message": one.check.message, "outcome": one.outcome, "why": one.why}
            for one in found.checks
        ],
        "findings": found.findings,
        "summary": {
            "agrees": found.agrees, **{outcome: counts[outcome] for outcome in OUTCOMES},
            "only_planned": len(found.only_planned), "only_recorded": len(found.only_recorded),
            "checks_held": found.holding, "checks_fired": len(found.checks),
            "checks_came_true": sum(one.outcome == TRUE for one in found.checks),
            "checks_refuted": len(found.refuted), "verdict": verdict(found),
        },
    }  # fmt: skip


def _shape(pair: Pair) -> dict[str, Any]:
    row = pair.planned
    return {
        "stage": pair.stage, "tensor_name": pair.tensor_name, "dims": pair.dims, "outcome": pair.outcome,
        "why": list(pair.why), "planned_logical_shape": row.logical_shape, "planned_local_shape": row.local_shape,
        "logical_shape": pair.logical and list(pair.logical), "local_shape": list(pair.largest),
        "local_shape_min": list(pair.smallest), "planned_dtype": row.dtype, "dtype": pair.dtype, "ranks": pair.ranks,
        "layers": pair.layers,
    }  # fmt: skip


def _peak(one: PeakPair) -> dict[str, Any]:
    return {
        "step": one.step, "stage": one.stage, "ranks": one.ranks, "rank": one.rank, "planned": one.planned,
        "recorded": one.recorded or None, "planned_total": one.planned_total, "recorded_total": one.recorded_total,
        "difference": one.difference,
    }  # fmt: skip
