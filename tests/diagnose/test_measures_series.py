"""Metrics over time: one number a step of the whole job, one a rank, and what is not finite stays so."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowledger.diagnose.measures import missing, series_of
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MetricRow, Row, SampleRow
from flowledger.tables.metrics import over_ranks
from tests.diagnose.measured import book, step_span


def told(step: int | None, name: str, value: float, weight: float | None = None, t_ns: int = 0) -> MetricRow:
    return MetricRow(step=step, name=name, raw_name=name, value=value, weight=weight, t_ns=t_ns)


ONE: list[Row] = [
    told(0, "grad_norm", 1.0, 3.0), told(0, "grad_norm", 5.0, 1.0), told(0, "rollout/preemptions", 2.0),
    told(0, "rollout/preemptions", 1.0), told(0, "ratio/max", 1.5), told(0, "somebody/said", 1.0),
    told(1, "grad_norm", math.nan),
]  # fmt: skip
TWO: list[Row] = [
    told(0, "grad_norm", 2.0, 4.0), told(0, "rollout/preemptions", 4.0), told(0, "ratio/max", 1.25),
    told(0, "somebody/said", 4.0), told(1, "grad_norm", math.inf), told(2, "grad_norm", -math.inf),
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with book(tmp_path_factory.mktemp("two") / "run", ONE, TWO) as ledger:
        yield ledger


def test_ranks_are_joined_by_weight_or_by_what_the_metric_is(two: Ledger) -> None:
    series = series_of(two)
    assert series.by_step("grad_norm")[0] == (3 + 5 + 8) / 8
    assert series.by_step("rollout/preemptions") == {0: 7.0}  # counted
    assert series.by_step("ratio/max") == {0: 1.5}  # the largest
    assert series.by_step("somebody/said") == {0: 2.5}  # unknown: the mean
    assert series.by_step("nobody/said") == {} == series.by_rank("nobody/said")
    assert series.by_rank("grad_norm")[0] == {0: 2.0, 1: 2.0}
    assert series.by_rank("rollout/preemptions") == {0: {0: 3.0, 1: 4.0}}
    assert {"grad_norm", "somebody/said"} <= set(series.names)


def test_what_is_not_finite_is_kept(two: Ledger) -> None:
    series = series_of(two)
    found = series.by_step("grad_norm")
    assert list(found) == [0, 1, 2]
    assert math.isnan(found[1]) and found[2] == -math.inf
    assert math.isnan(series.by_rank("grad_norm")[1][0]) and series.by_rank("grad_norm")[1][1] == math.inf


def test_steps_that_were_cut_off_are_left_out_and_an_engine_has_that_which_began_last(tmp_path: Path) -> None:
    numbers = [told(step, "grad_norm", float(step)) for step in range(4)]
    spans = [step_span(step, seconds=0.5, id=step + 1, ended=step != 3) for step in range(4)]  # the last never ends
    failed = FindingRow(id="call_failed", verdict="fail", message="", step=1)
    engine = [told(None, "rollout/running", 4.0, 2.0, t_ns=int(2.2e9)), told(None, "loss", 1.0)]  # told of no step
    with book(tmp_path / "run", [*numbers, *spans, *engine, failed]) as ledger:
        series = series_of(ledger)
        assert series.by_step("grad_norm") == {0: 0.0, 2: 2.0}
        assert series.by_step("rollout/running") == {2: 4.0}
        assert series.by_step("loss") == {}


def test_what_each_rank_has_for_itself_is_summed_as_the_view_sums_it(tmp_path: Path) -> None:
    def running(counts: list[int]) -> list[Row]:
        return [told(0, "rollout/running", float(n)) for n in counts]

    with book(tmp_path / "run", running([3, 2, 2, 2]), running([3, 2, 1])) as ledger:
        (row,) = ledger.rows("FROM metrics_by_step")
        assert series_of(ledger).by_step("rollout/running") == {0: 15 / 4} == {0: row["value"]}


def test_the_table_joins_as_the_view_does(two: Ledger) -> None:
    names = [
        "rollout/running", "rollout/waiting", "recorder/rows", "recorder/ns_per_row", "rollout/engine_steps",
        "rollout/decode_tokens", "rollout/finished/stop", "grad_norm", "lr",
    ]  # fmt: skip
    for name in names:
        (row,) = two.rows("SELECT is_share(?) AS share, is_count(?) AS counted", [name, name])
        assert over_ranks(name) == ("sum" if row["share"] else "count" if row["counted"] else "mean"), name


def test_a_recomputed_number_stands_before_a_recorded_one(tmp_path: Path) -> None:
    samples = [SampleRow(step=0, sample_id=str(n), reward=float(n)) for n in range(3)]
    with book(tmp_path / "run", [*samples, told(0, "reward/mean", 9.0), told(1, "reward/mean", 7.0)]) as ledger:
        series = series_of(ledger)
        assert series.by_step("reward/mean") == {0: 1.0, 1: 7.0}
        assert series.recorded("reward/mean") == {0: 9.0, 1: 7.0}
        assert series_of(ledger, recompute=False).by_step("reward/mean") == {0: 9.0, 1: 7.0}
        assert "reward/mean" in series.recomputed and "reward/mean" in series.told
        assert series_of(ledger) is series  # made once


def test_what_is_missing_is_named_with_what_it_needs(tmp_path: Path) -> None:
    with book(tmp_path / "run", [SampleRow(step=0, sample_id="0", reward=1.0, group_id="0")]) as ledger:
        found = dict(missing(ledger))
    assert "reward/mean" not in found and "zero_variance_groups" not in found
    assert "record.level = tokens" in found["clip_ratio"]
    assert "NVML GPM or DCGM" in found["sma"]
    assert "sizes of the model" in found["mfu"]
    assert "recorded or imported" in found["grad_norm"]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    rows = [[told(s, f"m/{m}", s + rank / 8) for s in range(100) for m in range(60)] for rank in range(8)]
    return book(tmp_path_factory.mktemp("long") / "run", *rows)


def test_many_numbers_are_read_in_a_moment(long_run: Ledger) -> None:
    """A twentieth of 2,000 steps, 60 metrics and 8 ranks, which may take a second."""
    began = time.process_time()
    series = series_of(long_run, recompute=False)
    assert len(series.names) == 60 and series.by_step("m/7")[99] == 99 + 3.5 / 8
    assert time.process_time() - began < 0.3
    assert series.by_rank("m/7")[99][7] == 99 + 7 / 8
