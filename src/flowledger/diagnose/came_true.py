"""Whether what a plan has warned of came true in the run: failed where it said, or went through it."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

TRUE, REFUTED, NOT_REACHED, OPEN = "came true", "did not come true", "not reached", "cannot be told"

UPDATE = ("balance", "old_log_prob", "ref_log_prob", "values", "advantage", "update_critic", "update_actor")
# When a rule fires -> the stages in which that shows; the last of them, ended, has gone through it.
MOMENTS = {"first_rollout": ("prompt", "rollout"), "first_update": UPDATE}
BEFORE_STEPS = ("launch", "worker_start")
# Finding of a plan -> the metric that shows it where it is above 0.
SIGNS = {"memory.kv_pool": "rollout/waiting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How far a run came, and what ended it."""

    ended: frozenset[str]  # stages that some process went through
    failed: FindingRow | None
    metrics: dict[str, float]  # name -> its largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A check that fired, and what became of it."""

    check: FindingRow
    outcome: str
    why: str


def course(ledger: Ledger) -> Course:
    """What of a run speaks for or against a check."""
    ended = ledger.rows(
        "SELECT DISTINCT stage FROM spans_view WHERE span_kind = 'stage' AND end_ns IS NOT NULL AND source <> 'plan'"
    )
    values = ledger.rows(
        "SELECT name, max(value) AS value FROM metrics_by_step WHERE source <> 'plan' AND value IS NOT NULL GROUP BY name"
    )
    failed = ledger.rows(
        "SELECT id, verdict, stage, message FROM findings WHERE source <> 'plan' AND verdict = 'fail' "
        "AND coalesce(\"order\", '') NOT IN ('laws', 'checks', 'alarms') ORDER BY id NOT IN ('call_failed', 'rank_died', 'hang'), t_ns LIMIT 1"
    )
    return Course(
        ended=frozenset(row["stage"] for row in ended if row["stage"]),
        failed=FindingRow(**failed[0]) if failed else None,
        metrics={row["name"]: row["value"] for row in values},
    )


def outcomes(checks: Sequence[FindingRow], run: Course) -> list[Outcome]:
    """Every check that failed or warned, failures first."""
    fired = sorted((one for one in checks if one.verdict in ("fail", "warn")), key=lambda one: one.verdict)
    return [Outcome(check=one, outcome=outcome, why=why) for one in fired for outcome, why in [_became(one, run)]]


def _became(check: FindingRow, run: Course) -> tuple[str, str]:
    sign = SIGNS.get(check.id)
    if sign is not None and sign in run.metrics:
        most = run.metrics[sign]
        return (TRUE, f"{sign} was up to {most:g}") if most > 0 else (REFUTED, f"{sign} was never above 0")
    if check.verdict == "warn":
        return OPEN, "a warning, which no stage shows by failing"
    if check.fires_at in BEFORE_STEPS:
        return REFUTED, "the run came to its steps"
    return _failed(MOMENTS.get(check.fires_at or "", ()), run)


def _failed(stages: Sequence[str], run: Course) -> tuple[str, str]:
    """A check that says where the run fails; without stages: at any time, once the data are such."""
    if stages and stages[-1] in run.ended:
        return REFUTED, f"the run went through {stages[-1]}"
    if run.failed is None:
        return (NOT_REACHED, f"the run has not ended {stages[-1]}") if stages else (OPEN, "no sign of it so far")
    where = run.failed.stage
    if not stages:
        return OPEN, f"the run failed in {where or 'no stage'}: {run.failed.message}"
    if where is None or where in stages:
        return TRUE, run.failed.message
    return NOT_REACHED, f"the run failed before, in {where}: {run.failed.message}"
