"""Why samples are dropped: each reason by hand, and a greedy response that is no baseline takes its prompt with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowledger.flow.errors import BadInput
from flowledger.flow.words import DROPPED_REASONS
from flowledger.run import dropped, loop, stages
from flowledger.run.batches import Filtered
from tests.run.worlds import config

# Samples 0 to 5, three to a prompt; the greedy responses are -1 and -2.
SOURCE = """
def fine(sample_id): return float(sample_id % 2)
def no_second(sample_id):
    if sample_id == -2: raise RuntimeError("no greedy")
    return float(sample_id % 2)
def no_greedy(sample_id):
    if sample_id < 0: raise RuntimeError("no greedy")
    return float(sample_id % 2)
def first(sample_id, response): return sample_id == -1 and len(response) == 2
"""


def test_every_reason_by_hand_and_the_first_that_a_step_meets_counts() -> None:
    failed = (None, "reward_error", None, "reward_timeout", "reward_error", "reward_error", None, None)
    made = dropped.reasons(
        response_mask=torch.tensor([[1], [1], [1], [1], [0], [1], [0], [1]]),
        finish_reason=torch.tensor([0, 2, 3, 1, 0, 0, 0, 0]),
        environment_errors=(None, "e", "e", None, None, "e", None, None),
        failed=failed, no_baseline=(None, None, "greedy", None),
    )  # fmt: skip
    assert made == (
        None, "abort", "timeout", "reward_timeout", "empty", "environment_error", "empty", None,
    )  # fmt: skip
    lone = dropped.reasons(
        response_mask=torch.ones(4, 1), finish_reason=torch.zeros(4, dtype=torch.long),
        environment_errors=(None,) * 4, failed=(None, None, None, "reward_error"), no_baseline=(None, "greedy"),
    )  # fmt: skip
    assert lone == (None, None, "no_baseline", "reward_error")


def test_there_is_a_way_out_of_every_reason_that_a_step_can_end_with() -> None:
    assert set(dropped.WAYS_OUT) == set(DROPPED_REASONS) - {"rejected"}  # a rejection has a message of its own


def filtered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, *, on_error: str = "drop", **changes: Any
) -> Filtered:
    """What the filter of one step with remax kept."""
    original, kept = stages.filter, []

    def caught(**arguments: Any) -> Filtered:
        kept.append(original(**arguments))
        return kept[-1]

    monkeypatch.setattr(stages, "filter", caught)
    (tmp_path / "mine.py").write_text(SOURCE)
    component = {"name": "mine", "kind": "function", "path": f"{tmp_path / 'mine.py'}:{function}"}
    scored = {"components": [component], "on_error": on_error}
    with loop.prepared(config(algorithm={"advantage": "remax"}, reward=scored, **changes)) as world:
        loop.rl_step(step=0, world=world)
    return kept[0]


@pytest.mark.parametrize(
    ("reward", "aborts", "left"),
    [("fine", False, "111111"), ("no_second", False, "111000"), ("fine", True, "000111")],
)
def test_a_greedy_response_without_a_reward_takes_its_prompt_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, aborts: bool, left: str
) -> None:
    ends = {"rollout": {"abort_function": f"{tmp_path / 'mine.py'}:first"}} if aborts else {}
    made = filtered(tmp_path, monkeypatch, reward, **ends)
    assert made.dropped_reason == tuple(None if one == "1" else "no_baseline" for one in left)
    assert made.loss_mask.any(1).tolist() == [one == "1" for one in left]


def test_where_a_failed_reward_counts_as_zero_so_does_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filtered(tmp_path, monkeypatch, "no_second", on_error="zero")
    assert made.dropped_reason == (None,) * 6


def test_a_step_without_any_baseline_says_what_happened_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = r"\(no_baseline 6\).*; sample 0: its greedy response: reward_error \(mine: RuntimeError: no greedy\); "
    with pytest.raises(BadInput, match=says):
        filtered(tmp_path, monkeypatch, "no_greedy")
