"""A real run: what the loop says of its own step is what its samples and tokens come to."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from flowledger.cli import look
from flowledger.diagnose import agreement
from flowledger.diagnose.measures import Series, series_of
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, SampleRow
from flowledger.show import metric_lines
from flowledger.show.columns import Table
from flowledger.show.tables import beside
from tests.diagnose.measured import book
from tests.diagnose.test_laws import record
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")
TIMES = {"step_time_s", "tokens_per_s"}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    made = config(
        steps=2, rollout={"max_response_tokens": 6}, actor={"epochs": 2, "mini_batch_prompts": 1}, optim={"lr": 0.02},
        algorithm={"kl_coef": 0.1, "kl_form": "k3"}, ref={"path": "start"},
    )  # fmt: skip
    return series_of(Ledger(record(tmp_path_factory.mktemp("real") / "run", made, ops_every=0)))


def test_every_number_of_the_loop_is_that_of_its_rows(series: Series) -> None:
    both = {name for name in series.told if series.made.giving(name)} - TIMES
    assert {"clip_ratio", "clip_ratio/dual", "entropy", "ref_kl", "policy_kl", "rollout_gap/max", "ratio/max"} <= both
    assert {"reward/std", "advantage/std", "zero_variance_groups", "truncation_ratio", "total_tokens"} <= both
    for name in both:
        told, made = series.recorded(name), series.made.by_step(name)
        assert told.keys() == made.keys() == {0, 1}, name
        for step in told:
            assert math.isclose(told[step], made[step], rel_tol=1e-5, abs_tol=1e-6), (name, step, told, made)


def test_the_run_is_no_trivial_one(series: Series) -> None:
    assert all(0 < value < 1 for value in series.by_step("clip_ratio").values())
    assert all(0 < value < 1 for value in series.by_step("ratio/effective_sample_size").values())
    assert all(abs(value) > 1e-4 for value in series.by_step("ref_kl").values())


def test_two_clocks_round_one_step_are_near_each_other(series: Series) -> None:
    for name in TIMES:
        told, made = series.recorded(name), series.made.by_step(name)
        assert all(0.5 < made[step] / told[step] < 2 for step in told)


def test_agreement_compares_them_and_finds_them_equal(series: Series) -> None:
    pairs = list(agreement.compared(series.ledger))
    assert {pair.name for pair in pairs} >= {"clip_ratio", "entropy", "rollout_gap/mean", "truncation_ratio"}
    assert not agreement.differing(series.ledger)


def test_show_puts_what_was_told_and_what_the_rows_give_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [SampleRow(step=0, sample_id=str(n), reward=float(n)) for n in range(4)]
    told = [
        MetricRow(step=0, name=name, raw_name=name, value=value)
        for name, value in (("reward/mean", 1.5), ("reward/std", 1.29), ("lr", 0.5))
    ]
    book(tmp_path / "run", [*samples, *told]).close()
    look.show(tmp_path / "run", "metrics", json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name: (row["value"], row["recomputed_value"], row["differs"]) for name, row in rows.items() if row["value"]} == {
        "reward/mean": (1.5, 1.5, False), "reward/std": (1.29, pytest.approx(1.25**0.5), True), "lr": (0.5, None, False),
    }  # fmt: skip
    assert rows["reward/max"] == {
        "step": 0, "name": "reward/max", "value": None, "special": None, "recomputed_value": 3.0, "differs": False,
        "raw_name": None, "recomputed": None,
    }  # fmt: skip


def test_a_terminal_says_of_each_metric_whether_its_rows_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        {"step": 0, "name": name, "value": value, "special": None}
        for name, value in (("a", 1.5), ("b", 1.29), ("t", 4.0), ("u", 0.5))
    ]
    table = Table("metrics", "run", (), told)
    made = {"a": {0: 1.5}, "b": {0: 1.118}, "t": {0: 4.5}, "only": {0: 3.0}}
    metric_lines.draw(beside(table, made, {(0, "b")}), Console(width=100))
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["a"] == ["1.5", "="] and lines["b"][1:3] == ["≠", "1.118"] and lines["t"][1] == "4.5"
    assert lines["only"][:2] == ["3", "only"] and lines["u"][1] == "·"
