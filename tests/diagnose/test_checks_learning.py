"""What updates do, from rows written by hand."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from flowledger.diagnose.checks.learning import check
from flowledger.ledger.rows import MetricRow, Row, TensorRow, TokenRow
from tests.diagnose.by_hand import told

CONFIG = {"optim": {"lr": 0.4, "warmup_steps": 1}, "critic": {"warmup_steps": 1}}


def metrics(step: int, **numbers: float) -> list[Row]:
    return [MetricRow(name=name, raw_name=name, value=value, step=step) for name, value in numbers.items()]


def state(step: int, access: str) -> TensorRow:
    """The optimizer's moments, read or written by its step."""
    return TensorRow(
        tensor_name="optimizer_state", stage="update_actor", phase="step", access=access, step=step, epoch=0, mini_batch=0,
        local_shape=[2], numel=2, bytes=8, dtype="float32",
    )  # fmt: skip


def token(position: int, **said: float) -> TokenRow:
    return TokenRow(
        sample_id="0",
        position=position,
        step=0,
        response_mask=1,
        **{"return_" if n == "return" else n: v for n, v in said.items()},
    )  # type: ignore[arg-type]


# The rate warms up from the step in which the policy starts: 0.2, then 0.4. Two rewards of 0.5 and a value of 0.25 make 1.25.
WELL = [
    *metrics(0, lr=0.2), *metrics(1, lr=0.2, update_ratio=1e-9, grad_norm=1.0), *metrics(2, lr=0.4, update_ratio=0.0, grad_norm=0.0),
    state(1, "write"), state(2, "read"), state(2, "write"),
    token(4, reward=0.5, value=-0.25, **{"return": 1.25}), token(5, reward=0.5, value=0.1, **{"return": -1.25}),
]  # fmt: skip
SICK: Mapping[str, list[Row]] = {
    "learning_rate_off": metrics(3, lr=0.39),
    "weights_still": metrics(3, lr=0.4, update_ratio=0.0, grad_norm=0.1),
    "optimizer_forgets": [state(3, "write")],
    "returns_too_large": [token(6, **{"return": 1.26})],
}


def test_a_run_that_learns_as_asked_passes(tmp_path: Path) -> None:
    found = told(check, tmp_path / "run", WELL, CONFIG)
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(SICK, "pass")


@pytest.mark.parametrize("rule", list(SICK))
def test_each_rule_is_broken_by_its_fault_and_no_other(tmp_path: Path, rule: str) -> None:
    found = told(check, tmp_path / "run", [*WELL, *SICK[rule]], CONFIG)
    assert [name for name, one in found.items() if one.verdict == "fail"] == [rule]
    assert found[rule].step == (0 if rule == "returns_too_large" else 3)


def test_without_rows_and_in_other_frameworks_it_says_what_it_lacks(tmp_path: Path) -> None:
    rows = [*metrics(0, lr=7.0), state(0, "write"), state(1, "write")]  # what its steps begin with it never says
    found = told(check, tmp_path / "run", rows, CONFIG, framework="trl")
    assert all(one.verdict == "skipped" and one.needs for one in found.values())
