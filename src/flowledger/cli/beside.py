"""The plan beside the run, for the page: what `diff` says of them row by row, and in one finding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.diagnose.diff import Diff
    from flowledger.ledger.reader import Ledger

Rows = list[dict[str, Any]]

SHOWN = 20  # lines of evidence


def fits(ledger: "Ledger", planned: "Ledger") -> None:
    """Raises BadInput for a plan of another job: another framework, or another model."""
    from flowledger.diagnose.common_ground import of_one_job
    from flowledger.diagnose.orders.kept import planned_of

    told = planned_of(planned)
    if told is not None and ledger.directory.manifest.level != "plan":  # else `beside` says more
        of_one_job(told, ledger)


def beside(ledger: "Ledger", planned: "Ledger | None") -> tuple[Rows, Rows]:
    """(rows of plan and run, findings). Both are empty where there is only one of the two.

    Where they cannot be compared the finding says why. Raises BadInput for a plan that was named and is none.
    """
    from flowledger.diagnose import diff as comparison
    from flowledger.diagnose.orders.kept import planned_of

    told = planned_of(planned or ledger)
    if planned is not None and told is None:
        path = planned.directory.path
        raise BadInput(f"{path} has no planned rows; `flowledger plan CONFIG -o DIR` writes a plan that --plan takes")
    is_plan = ledger.directory.manifest.level == "plan"
    if planned is not None and is_plan:
        raise BadInput(f"{ledger.directory.path} is a plan itself: --plan puts one beside a run; leave it out")
    if told is None or is_plan:
        return [], []
    try:
        found = comparison.diff(told, ledger)
    except BadInput as error:
        return [], [_finding("skipped", "plan and run are not compared", needs=[str(error)])]
    document = comparison.document(found)
    only = [
        {**row, "outcome": outcome, "why": [row["why"]]}
        for outcome in ("only_planned", "only_recorded")
        for row in document[outcome]
    ]
    return [*document["rows"], *only], [_verdict(found, document)]


def _verdict(found: "Diff", document: Mapping[str, Any]) -> dict[str, Any]:
    summary = document["summary"]
    verdict = "pass" if found.agrees else "fail" if summary["unequal"] else "warn"
    apart = [f"{one['name']}: {one['planned']} planned, {one['recorded']} in the run" for one in document["settings"]]
    apart += [
        f"{row['tensor_name']} in {row['stage']}: {'; '.join(row['why'])}" for row in document["rows"] if row["outcome"] == "unequal"
    ]  # fmt: skip
    return _finding(verdict, summary["verdict"], evidence=apart[:SHOWN] or None)


def _finding(verdict: str, message: str, **more: Any) -> dict[str, Any]:
    from flowledger.ledger.rows import FindingRow

    severity = {"fail": "error", "warn": "warning"}.get(verdict, "info")
    names = dict.fromkeys(FindingRow.__struct_fields__)
    told = {"id": "plan_agrees", "scope": "diff", "verdict": verdict, "severity": severity, "message": message}
    return {**names, "source": "record", **told, **more}
