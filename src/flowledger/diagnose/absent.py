"""Why a tensor is only planned, or only recorded, as far as a run can tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowledger.diagnose.shape_pairs import SUMS
from flowledger.diagnose.sizes import Seen
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import TensorRow

WATCHED = frozenset({"hidden_states", "activations"})  # no function hands them on: operators are watched for them

NOT_IN_USE = {"kl_loss": "written as 0 where no KL is in the loss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How far a recording reaches."""

    level: str
    framework: str
    came_to: frozenset[str]  # stages
    cut_off: bool  # the run did not end by itself, or is still open
    watched: bool  # operator by operator, in some step
    forms: Mapping[tuple[str, str], Sequence[str]]  # (stage, tensor) -> its forms in words
    stages: Mapping[str, Sequence[str]]  # tensor -> stages that have it


def coverage(ledger: Ledger, recorded: Sequence[Seen], *, named: bool) -> Coverage:
    """What was recorded where; `named`: the names of its dimensions are no guesses."""
    forms: dict[tuple[str, str], list[str]] = {}
    stages: dict[str, list[str]] = {}
    for one in recorded:
        form = f"[{one.dims}]" if named and one.dims is not None else human(one.largest)
        forms.setdefault((one.stage, one.tensor_name), []).append(form)
        stages.setdefault(one.tensor_name, []).append(one.stage)
    spans = ledger.rows("SELECT DISTINCT stage FROM spans WHERE stage IS NOT NULL AND source <> 'plan'")
    (peaks,) = ledger.rows("SELECT count(*) AS n FROM memory WHERE instant = 'peak' AND source <> 'plan'")
    manifest = ledger.directory.manifest
    return Coverage(
        level=manifest.level, framework=manifest.framework, watched=peaks["n"] > 0,
        came_to=frozenset(row["stage"] for row in spans) | {one.stage for one in recorded},
        cut_off=ledger.directory.state != "closed",
        forms=forms, stages={name: list(dict.fromkeys(found)) for name, found in stages.items()},
    )  # fmt: skip


def human(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def only_planned(row: TensorRow, run: Coverage) -> str:
    """Why a run has not what its plan has."""
    stage, name = row.stage or "", row.tensor_name
    if run.level in ("off", "steps"):
        return f"tensors are not recorded at level {run.level}"
    if stage not in run.came_to:
        return (
            "the run did not come to this stage"
            if run.cut_off
            else f"{run.framework} has no such stage that is watched"
        )
    if name in WATCHED and not run.watched:
        return "seen only in steps that are watched operator by operator"
    if name in SUMS:
        return "recorded as sums of storages, which have no shape"
    if met := sorted(set(run.forms.get((stage, name), ()))):
        return f"met there in another form, {' and '.join(met)}"
    if (row.phase, row.access) == ("backward", "read"):
        return "backward reads what forward has saved, and calls no function to be watched"
    if elsewhere := run.stages.get(name):
        return f"no watched function takes or returns it there; it was seen in {', '.join(elsewhere)}"
    return f"no function of {run.framework} that is watched takes or returns it"


def only_recorded(one: Seen, planned: Sequence[TensorRow]) -> str:
    """Why a plan has not what its run has."""
    forms = {(row.dims or "[]") for row in planned if (row.stage, row.tensor_name) == (one.stage, one.tensor_name)}
    if forms:
        return f"planned there in another form, {' and '.join(sorted(forms))}"
    stages = dict.fromkeys(row.stage for row in planned if row.tensor_name == one.tensor_name)
    if stages:
        return f"planned in {', '.join(filter(None, stages))}, not there"
    return NOT_IN_USE.get(one.tensor_name, "no part of this plan")
