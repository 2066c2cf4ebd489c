import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flowledger.config.schema import Component, Data, Model, Reward
from flowledger.flow.errors import BadInput
from flowledger.run import models
from flowledger.run.batches import Rewards
from flowledger.run.problems import Problem
from flowledger.run.reward_process import RewardProcess
from flowledger.run.rewards import Scorer

DATA = Data(path="p.jsonl")

SOURCE = """
import os, sys, time

def length(response): return float(len(response))
def per_token(response_ids): return [float(i) for i in response_ids]
def slow(response):
    if response == "slow": time.sleep(60)
    return 1.0
def picky(response):
    if response == "bad": raise ValueError("no good")
    if response == "die": os._exit(7)
    return 1.0
def loud(response):
    print("x" * 100000); sys.stdout.flush(); os.write(1, b"raw"); return 2.0
def nan(response): return float("nan")
def verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"]}
def own_share(response_ids, response_mask): return sum(response_mask) / len(response_ids)
def torch_loaded(response): return float("torch" in sys.modules)
def pid(response): return float(os.getpid())
def short(response_ids): return [1.0]
def word(response): return "good"
def huge(response): return 1e300
def endless(response): return 10**400
def listed(response_ids): return ["1"] * len(response_ids)
class Speechless(Exception):
    def __str__(self): raise RuntimeError
def speechless(response): raise Speechless
def surrogate(response): raise ValueError("\\ud800")
def extra(extra): return 1.0
def wants(response, index, **more): return 1.0
"""


@pytest.fixture
def scored(tmp_path: Path) -> Any:
    """Scores of responses by the functions of SOURCE named; ids of a response are 1..len, S_prompt is 2."""
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)

    def run(responses: list[str], *names: str, settings: dict[str, Any] | None = None, **problem: Any) -> Rewards:
        components = tuple(
            Component(name=name, kind="function", path=f"{file}:{name}", weight=10.0**k) for k, name in enumerate(names)
        )
        with Scorer(Reward(components=components, **(settings or {})), DATA, seed=0) as scorer:
            return score(scorer, responses, **problem)

    return run


def score(scorer: Scorer, responses: list[str], **problem: Any) -> Rewards:
    width = max(len(response) for response in responses) + 1
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in responses])
    ids = torch.arange(1, width + 1).expand(len(responses), width) * mask
    prompt = torch.ones(len(responses), 2, dtype=torch.long)
    given = Problem(**{"text": "p", "answer": None, "index": 0, **problem})
    return scorer.score(
        problems=[given] * len(responses),
        responses=responses,
        response_ids=ids,
        response_mask=mask,
        full_sequence=torch.cat([prompt, ids], 1),
        attention_mask=torch.cat([prompt, mask], 1),
        sample_id=torch.arange(40, 40 + len(responses)),
        step=5,
    )


def test_the_reward_is_the_weighted_sum_and_lies_on_the_last_token_or_where_it_belongs(scored: Any) -> None:
    scores = scored(["ab", "abc"], "length", "per_token")
    assert scores.component_names == ("length", "per_token")
    assert scores.reward_components.tolist() == [[2, 1 + 2], [3, 1 + 2 + 3]]
    assert scores.reward.tolist() == [2 + 10 * 3, 3 + 10 * 6]
    assert scores.token_level_reward.tolist() == [[10, 20 + 2, 0, 0], [10, 20, 30 + 3, 0]]
    assert scores.failed == (None, None)


def test_rewards_of_a_conversation_lie_on_what_the_policy_sampled(tmp_path: Path) -> None:
    """Two tokens of the policy, two of an environment, one of the policy; then one that ends in the environment's."""
    (tmp_path / "mine.py").write_text(SOURCE)
    components = tuple(
        Component(name=name, kind="function", path=f"{tmp_path / 'mine.py'}:{name}", weight=weight)
        for name, weight in (("length", 1.0), ("per_token", 100.0), ("own_share", 0.5))
    )
    written = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
    sampled = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]])
    ids, prompt = torch.arange(1, 7).expand(2, 6) * written, torch.ones(2, 2, dtype=torch.long)
    with Scorer(Reward(components=components), DATA, seed=0) as scorer:
        scores = scorer.score(
            problems=[Problem(text="p", answer=None, index=0)] * 2, responses=["abcde", "abc"], response_ids=ids,
            response_mask=sampled, full_sequence=torch.cat([prompt, ids], 1),
            attention_mask=torch.cat([prompt, written], 1), sample_id=torch.arange(2), step=0,
        )  # fmt: skip
    assert scores.failed == (None, None)
    assert torch.allclose(scores.reward_components, torch.tensor([[5, 1 + 2 + 5, 3 / 5], [3, 1, 1 / 3]]))
    expected = [[100, 200, 0, 0, 500 + 5 + 0.3, 0], [100 + 3 + 0.5 / 3, 0, 0, 0, 0, 0]]
    assert torch.allclose(scores.token_level_reward, torch.tensor(expected))
    assert torch.allclose(scores.reward, scores.token_level_reward.sum(1))


def test_a_reward_that_raises_marks_its_sample_and_keeps_the_text(scored: Any) -> None:
    scores = scored(["ok", "bad", "ok"], "picky", "length")
    assert scores.failed == (None, "reward_error", None)
    assert scores.errors[1] == "picky: ValueError: no good"
    assert scores.reward.tolist() == [1 + 20, 0, 1 + 20]


def test_a_failed_reward_counts_as_zero_where_that_is_asked_for(scored: Any) -> None:
    scores = scored(["ok", "bad"], "picky", settings={"on_error": "zero"})
    assert scores.failed == (None, None)
    assert scores.errors[1] == "picky: ValueError: no good"
    assert scores.reward.tolist() == [1, 0]


def test_a_reward_over_its_time_limit_marks_its_sample_and_the_others_are_scored(scored: Any) -> None:
    started = time.monotonic()
    scores = scored(["a", "slow", "c"], "slow", settings={"timeout_s": 0.3})
    assert time.monotonic() - started < 15
    assert scores.failed == (None, "reward_timeout", None)
    assert scores.errors[1] == "slow: no reward within 0.3 s (reward.timeout_s)"
    assert scores.reward.tolist() == [1, 0, 1]


def test_a_reward_that_ends_its_process_marks_its_sample_and_the_others_are_scored(scored: Any) -> None:
    scores = scored(["a", "die", "c"], "picky")
    assert scores.failed == (None, "reward_error", None)
    assert scores.errors[1] == "picky: the reward ended its process (exit code 7)"
    assert scores.reward.tolist() == [1, 0, 1]


def test_what_a_reward_prints_does_not_end_up_between_frames(scored: Any) -> None:
    assert scored(["a", "b"], "loud").reward.tolist() == [2, 2]


def test_nan_ends_the_run_with_the_component_the_sample_and_the_step(scored: Any) -> None:
    with pytest.raises(
        BadInput, match=r"^step 5: reward component 'nan' gave nan for sample 40; a reward must be finite$"
    ):
        scored(["a"], "nan")


def test_the_names_that_verl_uses_are_understood(scored: Any) -> None:
    scores = scored(["4", "5"], "verl", answer="4", extra={"extra_info": {"bonus": 0.5}})
    assert scores.reward.tolist() == [1.5, 0.5]


def test_what_is_neither_a_number_nor_one_per_token_marks_the_sample(scored: Any) -> None:
    scores = scored(["abc"], "short")
    assert scores.errors == ("short: ValueError: it returned 1 rewards for 3 response tokens",)
    assert scored(["abc"], "word").failed == ("reward_error",)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("huge", "ValueError: it returned 1e+300; a reward must lie within ±1e+15"),
        ("endless", "OverflowError: int too large to convert to float"),
        ("listed", "TypeError: it returned '1', must be a number or one number per response token"),
        ("speechless", "Speechless: (its own message raised RuntimeError)"),
        ("surrogate", "ValueError: ?"),
    ],
)
def test_what_no_float_or_frame_can_hold_marks_the_sample(scored: Any, name: str, says: str) -> None:
    scores = scored(["abc"], name)
    assert scores.failed == ("reward_error",)
    assert scores.errors == (f"{name}: {says}",)


@pytest.mark.parametrize(
    ("response", "weight", "fails"),
    [("x" * 9, 1e5, False), ("x" * 11, 1e5, True), ("x" * 11, -1e5, True), ("huge", 1e-6, True), ("x", 0.0, False)],
)
def test_a_reward_is_bounded_with_its_weight_too(tmp_path: Path, response: str, weight: float, fails: bool) -> None:
    """Beyond 1e15 the squares of rewards leave float32, and advantages would be 0 without a word."""
    (tmp_path / "mine.py").write_text("def size(response): return 2e15 if response == 'huge' else 1e9 * len(response)")
    path = f"{tmp_path / 'mine.py'}:size"
    parts = (
        Component(name="size", kind="function", path=path, weight=weight),
        Component(name="fine", kind="function", path=path),
    )
    with Scorer(Reward(components=parts), DATA, seed=0) as scorer:
        scores = score(scorer, ["abc", response])
    assert scores.failed == (None, "reward_error" if fails else None)
    if fails:
        assert scores.errors[1].startswith("size: ") and "within ±1e+15" in scores.errors[1]
        assert scores.reward.tolist()[1] == 0.0


def test_a_token_reward_is_bounded_by_its_sum_over_the_response(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def each(response_ids): return [3e14] * len(response_ids)")
    parts = (Component(name="each", kind="function", path=f"{tmp_path / 'mine.py'}:each"),)
    with Scorer(Reward(components=parts), DATA, seed=0) as scorer:
        scores = score(scorer, ["abc", "abcd"])
    assert scores.failed == (None, "reward_error")
    assert scores.errors[1].startswith("each: a reward of 1.2e+15 and its weight 1: ")


def endless() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize("held", [2**70, "\ud800", endless()], ids=["integer", "surrogate", "circle"])
def test_a_sample_that_cannot_be_sent_is_marked_and_the_others_are_scored(tmp_path: Path, held: Any) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    process = RewardProcess(
        {"components": [{"name": "extra", "kind": "function", "path": f"{tmp_path / 'mine.py'}:extra"}]}, timeout_s=9.0
    )
    job = {"component": "extra", "prompt": "", "response": "", "answer": None, "response_ids": [1], "sample_id": 1}
    said = process.ask([{**job, "extra": {}}, {**job, "extra": {"held": held}}, {**job, "extra": {}}])
    process.close()
    assert [verdict.failed for verdict in said] == [None, "reward_error", None]
    assert (said[1].error or "").startswith("the sample cannot be sent to the reward: ")


def test_rules_run_elsewhere_and_without_torch(scored: Any) -> None:
    scores = scored(["a"], "torch_loaded", "pid")
    assert scores.reward_components[0, 0] == 0
    assert scores.reward_components[0, 1] != os.getpid()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere:f", r"path = 'nowhere:f': importing nowhere raised ModuleNotFoundError"),
        ("nowhere.py:f", r"there is no file nowhere\.py"),
        ("{file_that_exits}:f", r"raised SystemExit: 3"),
        ("builtins:max", r"what it can be called with is not known.*wrap it in a def"),
        ("{file}:wants", r"cannot be called with prompt, response, answer.*extra_info by name: it asks for 'index'"),
        ("nowhere", r"is no import path; write module:name"),
        ("{file}:lenght", r"has no function lenght; did you mean length\?"),
    ],
)
def test_a_bad_import_fails_at_the_start_in_one_line(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    given = path.format(file=tmp_path / "mine.py", file_that_exits=tmp_path / "exits.py")
    component = Component(name="c", kind="function", path=given)
    policy = models.load_policy(Model(), seed=0)
    with Scorer(Reward(components=(component,)), DATA, seed=0) as scorer, pytest.raises(BadInput, match=says) as caught:
        scorer.load_models(policy, seed=0)
    assert str(caught.value).startswith("reward component 'c': path")
    assert "\n" not in str(caught.value)


def test_closing_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    component = Component(name="pid", kind="function", path=f"{tmp_path / 'mine.py'}:pid")
    with Scorer(Reward(components=(component,)), DATA, seed=0) as scorer:
        pid = int(score(scorer, ["a"]).reward[0])
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_reasoning_gym_task_scores_with_its_own_scorer_the_problem_of_that_index() -> None:
    data = Data(task="spell_backward", task_options={"min_word_len": 3})
    from flowledger.run import prompts

    problem = prompts.open_source(data, seed=11).batch(300, 2)[1]  # beyond the first chunk
    with Scorer(Reward(), data, seed=11) as scorer:
        scores = score(scorer, [problem.answer, "?"], text=problem.text, index=problem.index, answer=problem.answer)
    assert scores.component_names == ("task",)
    assert scores.reward[0] == 1
    assert scores.reward[1] < 0.5


def test_math_verify_knows_equal_from_alike() -> None:
    component = Component(name="math", kind="math_verify")
    with Scorer(Reward(components=(component,)), DATA, seed=0) as scorer:
        scores = score(scorer, ["it is $\\boxed{0.5}$", "$\\frac{2}{4}$", "2", "none"], answer="1/2")
    assert scores.reward.tolist() == [1, 1, 0, 0]


def test_reward_models_give_one_number_per_sample_or_per_token() -> None:
    components = (Component(name="m", kind="model", path="tiny"), Component(name="t", kind="token_model", path="tiny"))
    policy = models.load_policy(Model(), seed=0)
    with Scorer(Reward(components=components), DATA, seed=0) as scorer:
        scorer.load_models(policy, seed=0)
        scores = score(scorer, ["ab", "abc"])
    assert torch.allclose(scores.reward, scores.reward_components.sum(1))
    assert torch.allclose(scores.reward, scores.token_level_reward.sum(1))
    assert (scores.token_level_reward[0, 2:] == 0).all()
    assert (scores.token_level_reward[0, :2] != 0).all()


def test_thirty_two_cheap_rewards_take_less_than_fifty_milliseconds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    component = Component(name="length", kind="function", path=f"{tmp_path / 'mine.py'}:length")
    with Scorer(Reward(components=(component,)), DATA, seed=0) as scorer:
        score(scorer, ["warm"])
        times = []
        for _ in range(5):
            started = time.perf_counter()
            score(scorer, ["abcdef"] * 32)
            times.append(time.perf_counter() - started)
    assert min(times) < 0.05, times
