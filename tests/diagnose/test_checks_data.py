"""What prompts, responses and rewards may be, from rows written by hand."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from flowledger.diagnose.checks import incentives, responses, supply
from flowledger.ledger.rows import Row, SampleRow, TokenRow
from tests.diagnose.by_hand import told


def sample(
    number: int, prompt: Sequence[int], response: Sequence[int], log_prob: float = -1.0, *, step: int = 0, group: int | None = None
) -> Iterable[Row]:  # fmt: skip
    """One sample as rollout leaves it: tokens of its prompt, then its own, each with this log-prob."""
    yield SampleRow(
        sample_id=str(number), group_id=str(number // 4 if group is None else group), step=step, prompt_length=len(prompt),
        response_length=len(response), stage="rollout",
    )  # fmt: skip
    for position, token in enumerate([*prompt, *response]):
        own = position >= len(prompt)
        yield TokenRow(
            sample_id=str(number), position=position, step=step, stage="rollout", token_id=token, attention_mask=1,
            response_mask=1 if own else None, rollout_log_prob=log_prob if own else None,
        )  # fmt: skip


def step_of(texts: Sequence[Sequence[int]], log_prob: float, step: int = 0) -> list[Row]:
    """Four responses to each prompt."""
    first = step * len(texts)
    return [row for k, text in enumerate(texts) for row in sample(first + k, [k // 4, step], text, log_prob, step=step)]


# 8 samples make 28 pairs: two equal texts are rarer than a millionth where exp(log_prob) < 1e-6/28.
RARE = math.log(1e-6 / 28)
DIFFERENT = [[k, 1, 2, 3] for k in range(6)]


def test_copies_are_equal_responses_that_chance_does_not_explain(tmp_path: Path) -> None:
    texts = [*DIFFERENT, [9, 9, 9, 9], [9, 9, 9, 9]]
    rows = [*step_of(texts, (RARE + 0.1) / 4), *step_of(texts, (RARE - 0.1) / 4, step=1)]
    found = told(responses.check, tmp_path / "run", rows)
    assert (found["responses_copied"].verdict, found["responses_copied"].step) == ("fail", 1)
    assert "samples 14, 15 of one prompt are the same 4 tokens" in found["responses_copied"].message
    assert found["responses_collapsed"].verdict == "pass"


def test_an_engine_at_a_low_temperature_may_say_the_same(tmp_path: Path) -> None:
    rows, cold = step_of([[9, 9, 9, 9]] * 8, -10.0), {"rollout": {"temperature": 0.1}}
    found = told(responses.check, tmp_path / "run", rows, cold, framework="verl")
    assert found["responses_copied"].verdict == "skipped"
    assert found["responses_collapsed"].verdict == "fail"  # four tokens, to two prompts


def test_the_same_short_answer_to_two_prompts_is_no_collapse_and_eight_ends_are_no_words(tmp_path: Path) -> None:
    rows = [*step_of([[7, 0]] * 8, -0.01), *step_of([[0]] * 8, -0.01, step=1)]
    found = told(responses.check, tmp_path / "run", rows)
    assert found["responses_collapsed"].verdict == found["responses_copied"].verdict == "pass"
    assert (found["responses_empty"].verdict, found["responses_empty"].step) == ("warn", 1)


def prompts(*steps: str) -> list[Row]:
    """Two groups a step, a letter a prompt."""
    return [
        row
        for step, letters in enumerate(steps)
        for k, letter in enumerate(letters)
        for row in sample(10 * step + k, [ord(letter), 1], [step, k], step=step, group=10 * step + k)
    ]


PASSES = {
    ("ab", "cd", "ab", "ab"): 3,  # a and b for the third time, c and d once
    (
        "ab",
        "cd",
        "dc",
        "ab",
        "ef",
        "ef",
        "ef",
    ): None,  # passes over four prompts in any order; then the data has changed
}


@pytest.mark.parametrize("steps", list(PASSES))
def test_prompts_may_come_again_when_the_others_have_come(tmp_path: Path, steps: tuple[str, ...]) -> None:
    config = {"data": {"too_long": "truncate_left", "max_prompt_tokens": 2 if PASSES[steps] else 3}}
    found = told(supply.check, tmp_path / "run", prompts(*steps), config)
    assert found["prompts_repeated"].step == PASSES[steps]
    assert found["prompts_repeated"].verdict == ("pass" if PASSES[steps] is None else "fail")
    # Two of two prompts end exactly at the limit of 2, none at 3.
    assert found["prompts_truncated"].verdict == ("pass" if PASSES[steps] is None else "warn")


SICK = ("ab", "cd", "ab", "ab")


def test_of_prompts_that_were_recorded_in_part_nobody_can_say_how_often_each_was_there(tmp_path: Path) -> None:
    unseen = [
        SampleRow(sample_id=str(10 * step + 9), group_id=str(10 * step + 9), step=step, stage="rollout", prompt_length=2, response_length=2)
        for step in range(len(SICK))
    ]  # fmt: skip
    found = told(supply.check, tmp_path / "run", [*prompts(*SICK), *unseen])
    assert found["prompts_repeated"].verdict == "skipped"


def test_what_an_environment_writes_into_a_response_is_no_prompt(tmp_path: Path) -> None:
    answers = [  # another token each time, behind the response of each sample
        TokenRow(sample_id=str(10 * step + k), position=4, step=step, stage="rollout", token_id=100 * step + k, attention_mask=1, response_mask=0)
        for step, letters in enumerate(SICK) for k in range(len(letters))
    ]  # fmt: skip
    found = told(supply.check, tmp_path / "run", [*prompts(*SICK), *answers])
    assert (found["prompts_repeated"].verdict, found["prompts_repeated"].step) == ("fail", 3)


def rewards(*steps: Sequence[tuple[int, float]]) -> list[Row]:
    """(length, reward) of the samples of each step."""
    return [
        SampleRow(sample_id=f"{step}-{k}", step=step, stage="reward", response_length=length, reward=reward)
        for step, samples in enumerate(steps)
        for k, (length, reward) in enumerate(samples)
    ]


LINE = [(n, 0.1 * n) for n in (1, 2, 3, 4, 5, 6, 7, 8)]  # r² = 1
NO_LINE = [(n, float(n % 2)) for n in (1, 2, 3, 4, 5, 6, 7, 8)]  # r² = 1/21
REWARDS = {
    "a line in both steps": ([LINE, LINE], "warn", "pass"),
    "a line in one of them": ([NO_LINE, LINE], "pass", "pass"),
    "too few samples": ([LINE[:7], LINE[:7]], "pass", "pass"),
    "two lengths are no line": ([[(1, 0.0), (2, 1.0)] * 4] * 2, "pass", "pass"),
    "21 times as large": ([NO_LINE, NO_LINE, [(3, 21.0), (4, 0.5)]], "pass", "warn"),
    "20 times as large": ([NO_LINE, NO_LINE, [(3, -20.0), (4, 0.5)]], "pass", "pass"),
    "not enough were seen before": ([NO_LINE, [(3, 500.0)]], "pass", "pass"),
}


@pytest.mark.parametrize("name", list(REWARDS))
def test_rewards_by_hand(name: str) -> None:
    steps, length, scale = REWARDS[name]
    rows = [(step, [{"length": n, "reward": x} for n, x in samples]) for step, samples in enumerate(steps)]
    for ask, verdict in ((incentives.lengths, length), (incentives.scales, scale)):
        assert (not ask(rows).breaches) == (verdict == "pass") and not ask(rows).needs


def test_rewards_are_read_from_samples(tmp_path: Path) -> None:
    found = told(incentives.check, tmp_path / "run", rewards(NO_LINE, LINE, [(n, 50 * x) for n, x in LINE]))
    assert (found["reward_is_length"].step, found["reward_scale_jumps"].step) == (2, 2)
    assert "explains 100% of the variance of the reward" in found["reward_is_length"].message


def test_without_rows_each_question_says_what_it_lacks(tmp_path: Path) -> None:
    found = told(
        lambda ledger: [*responses.check(ledger), *supply.check(ledger), *incentives.check(ledger)],
        tmp_path / "run",
        [],
    )
    assert len(found) == 7 and all(one.verdict == "skipped" and one.needs for one in found.values())
