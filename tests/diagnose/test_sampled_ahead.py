"""Runs that sample while they train: what was sampled in one step is learnt of in a later one, and no law is broken by that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowledger.diagnose import agreement, laws
from flowledger.diagnose.measures import series_of
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MetricRow, Row, SampleRow, SpanRow, TokenRow, Trained
from tests.diagnose.by_hand import told

STEPS = range(1, 4)


def ahead(*, lost: int | None = None) -> Iterator[Row]:
    """Two batches before step 1, then one a step: each trained two steps' order later. `lost`: a sample that never is."""
    sampled = {1: [0, 1, 2, 3], 2: [4, 5], 3: [6, 7]}
    trained = {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    versions = {1: 0, 2: 1, 3: 2}
    for step in STEPS:
        yield SpanRow(id=step, event="whole", name="step", span_kind="host", start_ns=step, end_ns=step + 1, step=step)
        yield SpanRow(
            id=10 + step, event="whole", name="weight_sync", span_kind="stage", stage="weight_sync", start_ns=step,
            end_ns=step + 1, step=step,
        )  # fmt: skip
        for one in sampled[step]:
            yield SampleRow(
                step=step, stage="rollout", sample_id=str(one), group_id=str(one), versions=[versions[step]],
                prompt_length=2, response_length=one + 1, reward=float(one),
            )  # fmt: skip
        for one in trained[step]:
            if one == lost:
                continue
            place = Trained(epoch=0, mini_batch=0, rank=0, micro_batch=0, start=0, stop=3)
            yield SampleRow(
                step=step, stage="update_actor", sample_id=str(one), trained=[place], policy_version=step - 1
            )


def law(path: Path, name: str, rows: Iterator[Row] | list[Row]) -> FindingRow:
    return told(laws.check, path, rows, framework="verl")[name]


def test_what_waits_for_its_turn_at_the_end_is_not_lost(tmp_path: Path) -> None:
    found = law(tmp_path / "run", "tokens_conserved", ahead())
    assert (found.verdict, found.message.split("(")[1]) == ("pass", "6 rows)")  # 8 were sampled, the last 2 wait


def test_a_sample_that_others_have_overtaken_is_lost(tmp_path: Path) -> None:
    found = law(tmp_path / "run", "tokens_conserved", ahead(lost=2))
    assert found.verdict == "fail" and "sample 2 of step 1 was trained 0 times" in found.message


def test_a_run_that_does_not_sample_ahead_has_no_turn_to_wait_for(tmp_path: Path) -> None:
    rows = [row for row in ahead() if row.step == 1 and getattr(row, "sample_id", "0") not in ("2",)]
    found = law(tmp_path / "run", "tokens_conserved", rows)
    assert found.verdict == "fail" and "sample 3 of step 1 was trained 0 times" in found.message


def tokens(sample: str, step: int, apart: float) -> Iterator[Row]:
    for position in (2, 3):
        yield TokenRow(
            step=step, stage="update_actor", sample_id=sample, position=position, loss_mask=1, rollout_log_prob=-1.0 - apart,
            old_log_prob=-1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("sample", "step", "verdict"), [("2", 2, "pass"), ("0", 1, "fail")], ids=["sampled ahead", "sampled in its step"]
)
def test_rollout_is_old_only_where_both_are_of_one_policy(tmp_path: Path, sample: str, step: int, verdict: str) -> None:
    found = law(tmp_path / "run", "identities", [*ahead(), *tokens(sample, step, 0.5)])
    assert found.verdict == verdict


def test_staleness_is_counted_where_a_sample_is_trained_on(tmp_path: Path) -> None:
    """By hand: 2 and 3 are of version 0 and trained under 1; 4 and 5 are of version 1 and trained under 2."""
    told(laws.check, tmp_path / "run", ahead(), framework="verl")
    with Ledger(tmp_path / "run") as ledger:
        assert series_of(ledger).by_step("staleness/max") == {1: 0, 2: 1, 3: 1}


def test_a_framework_counts_the_samples_that_it_trains_on(tmp_path: Path) -> None:
    """Its mean of step 2 is that of samples 2 and 3, which were sampled in step 1: not compared with those sampled in 2."""
    numbers: list[Any] = [
        MetricRow(step=step, name="reward/mean", raw_name="critic/rewards/mean", value=value)
        for step, value in ((1, 0.5), (2, 2.5), (3, 4.5))
    ]
    assert told(agreement.check, tmp_path / "run", [*ahead(), *numbers], framework="verl") == {}
