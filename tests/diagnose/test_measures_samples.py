"""Metrics of samples by hand: how responses ended whatever is reported, rewards, groups, duplicates, staleness."""

from pathlib import Path

import numpy as np
import pytest

from flowledger.diagnose.measures import Series, series_of
from flowledger.ledger.rows import Row, SampleRow, TokenRow, Trained
from tests.diagnose.measured import book

CONFIG = {"rollout": {"max_response_tokens": 4}, "data": {"max_prompt_tokens": 6}}
REWARDS = (0.5, 1.0, 0.25, 0.25, 2.0, 3.0)
LENGTHS = (4, 4, 2, 4, 1, 3)
REASONS = ("stop", "length", "stop", None, "abort", "timeout")
PROMPTS = (3, 3, 6, 6, 2, 2)


def samples() -> list[Row]:
    """Six samples in three groups of two; the last one was dropped and has an advantage all the same."""
    rows: list[Row] = [
        SampleRow(
            step=0, sample_id=str(n), group_id=str(n // 2), reward=reward, rewards={"rule": reward, "judge": None},
            prompt_length=PROMPTS[n], response_length=LENGTHS[n], finish_reason=REASONS[n], advantage=reward - 1,
            versions=[3, 2], dropped_reason="timeout" if n == 5 else None,
        )
        for n, reward in enumerate(REWARDS)
    ]  # fmt: skip
    trained = [Trained(epoch=0, mini_batch=0, rank=0, micro_batch=0)]
    learnt = [SampleRow(step=0, sample_id=str(n), trained=trained, policy_version=3 + n // 4) for n in range(5)]
    return [*rows, *learnt]


def said(sample: int, *ids: int) -> list[TokenRow]:
    """The tokens of a response, after a prompt of one token that all have."""
    prompt = TokenRow(step=0, sample_id=str(sample), position=0, token_id=1, response_mask=0, stage="rollout")
    return [
        prompt,
        *(TokenRow(step=0, sample_id=str(sample), position=1 + at, token_id=one, response_mask=1, stage="rollout")
          for at, one in enumerate(ids)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """With the tokens of the first two groups; 9 ends a response."""
    other = TokenRow(step=0, sample_id="2", position=0, token_id=60, stage="update_actor")  # than it was sampled with
    tokens = [other, *said(0, 5, 6, 7, 8), *said(1, 5, 6, 7, 8), *said(2, 5, 9), *said(3, 4, 5, 6, 9)]
    return series_of(book(tmp_path_factory.mktemp("samples") / "run", [*samples(), *tokens], config=CONFIG))


def test_what_fills_the_limit_without_an_end_is_truncated_whatever_is_reported(series: Series) -> None:
    """0 says that it stopped and did not; 1 says so; 3 says nothing, and ends with the token that ended 2."""
    assert series.by_step("truncation_ratio") == {0: 2 / 6}
    assert series.by_step("eos_ratio") == {0: 2 / 5}  # of those that tell
    assert series.by_step("abort_ratio") == {0: 2 / 5}


def test_without_tokens_what_is_reported_counts_and_silence_at_the_limit_is_truncation(tmp_path: Path) -> None:
    with book(tmp_path / "run", samples(), config=CONFIG) as ledger:
        assert series_of(ledger).by_step("truncation_ratio") == {0: 2 / 6}  # 1, which says so, and 3
    with book(tmp_path / "other", samples()) as ledger:  # nobody knows the limit
        assert series_of(ledger).by_step("truncation_ratio") == {0: 1 / 5}


def test_lengths_are_those_of_numpy(series: Series) -> None:
    for part, lengths in (("prompt", PROMPTS), ("response", LENGTHS)):
        expected = {
            "mean": np.mean(lengths), "min": min(lengths), "max": max(lengths), "p50": np.percentile(lengths, 50),
            "p99": np.percentile(lengths, 99),
        }  # fmt: skip
        for name, value in expected.items():
            assert series.by_step(f"{part}_length/{name}")[0] == pytest.approx(value), (part, name)
    assert series.by_step("total_tokens") == {0: sum(LENGTHS) + sum(PROMPTS)}
    assert series.by_step("prompt_truncation_ratio") == {0: 2 / 6}


def test_rewards_and_advantages_are_those_of_what_was_kept(series: Series) -> None:
    kept = np.array(REWARDS[:5])
    for name, value in (("mean", kept.mean()), ("std", kept.std()), ("min", 0.25), ("max", 2.0)):
        assert series.by_step(f"reward/{name}")[0] == pytest.approx(value)
        assert series.by_step(f"advantage/{name}")[0] == pytest.approx(value - (name != "std"))
    assert series.by_step("reward/rule/std")[0] == pytest.approx(kept.std())
    assert series.by_step("reward/judge/mean") == {}  # it failed on every sample
    assert series.by_step("zero_variance_groups") == {0: 2 / 3}  # the second; and the third, of which one is left
    assert series.by_step("dropped_ratio") == {0: 1 / 6}


def test_the_same_words_in_one_group_are_duplicates(series: Series) -> None:
    assert series.by_step("duplicate_ratio") == {0: 2 / 4}


def test_a_token_that_changes_on_its_way_is_counted(series: Series) -> None:
    assert series.by_step("token_mismatches") == {0: 1}


def test_a_sample_is_as_stale_as_its_oldest_token(series: Series) -> None:
    assert series.by_step("staleness/mean") == {0: (1 + 1 + 1 + 1 + 2) / 5}
    assert series.by_step("staleness/max") == {0: 2.0}
