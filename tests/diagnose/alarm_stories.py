"""Runs told to alarms: as numbers, without a ledger, and as rows that the real writer writes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowledger.diagnose.alarms import rules
from flowledger.diagnose.alarms.evaluation import Evaluation
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.numbers import Numbers
from flowledger.ledger import directory, writer
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.rows import MetricRow, Row, SpanRow

MS = 1_000_000

# A run in which all is well: numbers that a real one of a 7B model could have.
HEALTHY: Mapping[str, float] = {
    "step_time_s": 60.0, "tokens_per_s": 20_000.0, "total_tokens": 1.2e6, "policy_loss": 0.01, "grad_norm": 0.4,
    "value_loss": 0.3, "critic_grad_norm": 4.0, "explained_variance": 0.5, "entropy": 0.8, "ref_kl": 0.02, "policy_kl": 0.001,
    "kl_loss": 0.02, "clip_ratio": 0.02, "clip_ratio/dual": 0.0, "ratio/max": 2.0, "update_ratio": 1e-4, "lr": 1e-6,
    "reward/mean": 0.4, "reward/std": 0.4, "advantage/std": 0.9, "advantage/mean": 0.0, "zero_variance_groups": 0.3,
    "response_length/mean": 900.0, "response_length/max": 2048.0, "truncation_ratio": 0.05, "abort_ratio": 0.0,
    "dropped_ratio": 0.0, "rollout_gap/mean": 0.005, "rollout_correction/effective_sample_size": 0.9,
    "rollout_correction/rejected_samples": 0.05, "rollout/waiting": 4.0, "rollout/kv_blocks_used": 700.0,
    "rollout/kv_blocks": 1000.0, "rollout/preemptions": 0.0, "memory_allocated": 40e9, "memory_reserved": 50e9,
    "memory_limit": 80e9, "memory_fragmentation": 0.1, "memory_kept": 30e9, "memory_kept_per_micro_batch": 0.02,
    "host_memory": 100e9, "policy_lag": 0.0, "reward_by_length": 0.1, "metrics_not_finite": 0.0, "shape_checksums_differ": 0.0,
    **{f"stage_time_s/{stage}": seconds for stage, seconds in
       (("rollout", 30.0), ("reward", 2.0), ("old_log_prob", 5.0), ("ref_log_prob", 5.0), ("values", 4.0), ("advantage", 0.1),
        ("update_critic", 6.0), ("update_actor", 12.0), ("weight_sync", 3.0))},
}  # fmt: skip
OF_RANKS: Mapping[str, Sequence[float]] = {
    "grad_norm": (0.4, 0.4, 0.4, 0.4), "lr": (1e-6,) * 4, "trained_tokens": (1000.0, 1050.0, 980.0, 1010.0),
    "busy_time_s": (50.0, 51.0, 49.0, 50.0), "silent_s": (0.0, 0.1, 0.2, 0.1),
}  # fmt: skip

Course = float | Sequence[float | None] | Mapping[int, float]


def numbers(
    steps: int, changes: Mapping[str, Course] | None = None, of_ranks: Mapping[str, Any] | None = None
) -> Numbers:
    """A healthy run of so many steps with changes: a number, one a step (None: absent), or step -> number from there on.

    of_ranks: name -> one number a rank, or step -> one a rank from there on.
    """
    found = Numbers()
    for name, value in {**HEALTHY, **(changes or {})}.items():
        found.job[name] = {
            step: one for step in range(steps) if (one := _at(value, step, HEALTHY.get(name))) is not None
        }
    for name, ranks in {**OF_RANKS, **(of_ranks or {})}.items():
        found.ranks[name] = {}
        for step in range(steps):
            told = _at(ranks, step, OF_RANKS.get(name)) if isinstance(ranks, Mapping) else ranks
            found.ranks[name][step] = dict(enumerate(told))
    return found


def _at(value: Any, step: int, before: Any) -> Any:
    if isinstance(value, Mapping):
        since = max((start for start in value if start <= step), default=None)
        return before if since is None else value[since]
    if isinstance(value, Sequence):
        return value[step] if step < len(value) else value[-1]
    return value


def judged(told: Numbers, facts: Facts | None = None, chosen: Iterable[rules.Rule] | None = None) -> Evaluation:
    """All alarms (or those chosen) over these numbers."""
    evaluation = Evaluation(tuple(chosen or rules.built_in()), facts or Facts())
    evaluation.advance(told)
    return evaluation


def fired(evaluation: Evaluation) -> dict[str, int]:
    """Alarm -> the step at which it fired first."""
    return {course.rule.id: course.firings[0].step for course in evaluation.courses if course.firings}


def rule(when: str, **more: Any) -> rules.Rule:
    """A row of one's own."""
    row = {"id": "mine", "goal": "data", "when": when, "severity": "warning", "message": "m", "next_step": "n", **more}
    return rules.Rule.model_validate(row)


def written(
    path: Path, rows: Iterable[tuple[int, Row]], *, config: Mapping[str, Any] | None = None, ranks: int = 1, state: str = "closed",
    bindings: Mapping[str, int] | None = None,
) -> Path:  # fmt: skip
    """A run of these (rank, row), each rank in a part of its own, with a span around each of its steps."""
    rows = list(rows)
    book = directory.create(
        path, Manifest(run=path.name, config=dict(config or {}), bindings=dict(bindings or {}), mesh={"dp": ranks})
    )
    for rank in range(ranks):
        ink = writer.Writer(book.part("actor", rank))
        mine = [row for who, row in rows if who == rank]
        for row in mine:
            row.rank = rank
            ink.put(row)
        for step in sorted({row.step for row in mine if row.step is not None}):
            ink.put(step_span(step, rank))
        ink.close()
    if state != "open":
        book.close(state)
    return path


def step_span(step: int, rank: int, name: str = "step") -> SpanRow:
    begin, end = step * 1000 * MS, (step + 1) * 1000 * MS - 1
    return SpanRow(
        id=1_000_000 + step, step=step, rank=rank, t_ns=end, event="whole", name=name, span_kind="host",
        start_ns=begin, end_ns=end, latency_ms=1000.0,
    )  # fmt: skip


def metric(step: int, name: str, value: float) -> MetricRow:
    return MetricRow(step=step, t_ns=step * 1000 * MS + 1, name=name, raw_name=name, value=value)
