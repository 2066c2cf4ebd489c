"""Passports of recorded runs of the loop: what stands under each heading is what its name says."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowledger.ledger.reader import Ledger
from flowledger.show.passport import draw, passport
from flowledger.show.token_columns import LEGEND, legend
from tests.diagnose.test_laws import record
from tests.run.worlds import config


def recorded(path: Path, **changes: Any) -> Ledger:
    return Ledger(record(path / "run", config(**changes)))


def text(ledger: Ledger, sample: str) -> str:
    screen = Console(width=200, record=True, file=io.StringIO(), highlight=False)
    draw(passport(ledger, sample), screen)
    return screen.export_text()


def test_a_sample_that_was_not_updated_has_no_new_log_prob(tmp_path: Path) -> None:
    """The passes for old and reference log-probs compute the same tensor; the column is that of the update."""
    with recorded(
        tmp_path, steps=2, ref={"path": "start"}, actor={"epochs": 2, "micro_batch": {"samples": 2}},
        algorithm={"advantage": "gae", "kl_coef": 0.1}, critic={"warmup_steps": 1, "lr": 1e-3},
    ) as ledger:  # fmt: skip
        warmup, trained = passport(ledger, "0"), passport(ledger, "6")
        shown = text(ledger, "0")
    assert {row["new_log_prob"] for row in warmup.tokens} == {None}
    assert any(row["old_log_prob"] is not None for row in warmup.tokens)
    assert all(row["new_log_prob"] is not None for row in trained.tokens if row["loss_mask"])
    assert "rollout, old, ref: log-prob" in shown and "value: the critic" in shown and "kl:" not in shown
    written = {
        (hop["stage"], tensor["tensor_name"])
        for hop in trained.hops
        for tensor in hop["tensors"]
        if tensor["access"] == "write"
    }
    assert ("update_actor", "new_log_prob") in written
    assert not written & {
        ("old_log_prob", "new_log_prob"),
        ("ref_log_prob", "new_log_prob"),
        ("ref_log_prob", "entropy"),
    }


def test_kl_in_the_reward_and_weights_of_the_rollout_stand_on_each_token(tmp_path: Path) -> None:
    """k1 is verl's form there: log π_old - log π_ref, taken off the token's reward with its coefficient."""
    with recorded(
        tmp_path, steps=2, ref={"path": "start"}, optim={"lr": 0.1},
        algorithm={"kl_coef": 0.5, "kl_in": "reward", "rollout_correction": {"importance": "token"}},
    ) as ledger:  # fmt: skip
        tokens = [row for row in passport(ledger, "6").tokens if row["loss_mask"]]
        names = {row["name"] for row in ledger.rows("SELECT DISTINCT name FROM metrics")}
    assert max(abs(row["kl"]) for row in tokens) > 1e-3
    for row in tokens:
        assert row["kl"] == pytest.approx(row["old_log_prob"] - row["ref_log_prob"], abs=1e-5)
        assert row["weight"] == pytest.approx(1.0, abs=1e-3)
    for row in tokens[:-1]:
        assert row["reward"] == pytest.approx(-0.5 * row["kl"], abs=1e-6)
    assert "reward_kl" in names and not names & {"ref_kl", "kl_loss"}


def test_the_legend_speaks_of_what_is_shown_only() -> None:
    assert legend(["old", "new"]).startswith("old, new: log-prob of this token. A R L:")
    headings = [heading for shared, _ in LEGEND for heading in shared]
    assert all(f"{heading}" in legend(headings) for heading in headings)
