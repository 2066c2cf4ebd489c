"""One RL step from end to end: its identities, what it must not depend on, and how it ends on bad input."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.run import loop, stages, update
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")


def one_step(**changes: object) -> tuple[loop.StepReport, dict[str, torch.Tensor]]:
    """The report of the first step and the weights after it."""
    with loop.prepared(config(**changes)) as world:
        report = loop.rl_step(step=0, world=world)
        return report, {name: p.detach().clone() for name, p in world.policy.model.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return one_step()[1]


def test_a_step_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    (first, weights), (again, same), (other, _) = one_step(), one_step(), one_step(seed=1)
    figures = [
        {k: v for k, v in r.metrics.items() if k not in ("step_time_s", "tokens_per_s")} for r in (first, again, other)
    ]
    assert figures[0] == figures[1] != figures[2]
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor": {"micro_batch": {"samples": 1}}},
        {"actor": {"micro_batch": {"samples": None, "max_tokens": 40}}},
        {"actor": {"packed": False}},
        {"actor": {"log_prob_chunk_tokens": 3}},
        {"actor": {"activation_checkpointing": True}},
        {"rollout": {"max_running": 2}},
        {"rollout": {"weights": "shared"}},
    ],
    ids=str,
)
def test_how_the_work_is_split_changes_no_weight(changes: dict[str, object], plain: dict[str, torch.Tensor]) -> None:
    _, split = one_step(**changes)
    # Adam divides by the gradient's size, so tiny differences may grow to a share of lr (1e-3), never to a step of it.
    assert max(float((split[name] - plain[name]).abs().max()) for name in plain) <= 1e-2 * 1e-3


@settings(max_examples=6, deadline=None)
@given(
    prompts=st.integers(1, 3), group=st.integers(2, 4), response=st.integers(1, 6), packed=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_identities_of_the_first_step_hold_for_any_configuration(
    prompts, group, response, packed, temperature, seed
) -> None:
    made = config(
        seed=seed, data={"prompts_per_step": prompts}, ref={"path": "start"}, algorithm={"kl_coef": 0.1},
        rollout={"samples_per_prompt": group, "max_response_tokens": response, "temperature": temperature},
        actor={"packed": packed, "micro_batch": {"samples": 1}},
    )  # fmt: skip
    with loop.prepared(made) as world:
        report = loop.rl_step(step=0, world=world)
    assert report.metrics["rollout_gap/max"] < 1e-4  # rollout and trainer agree within float32 noise
    assert report.metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)  # one mini-batch: nothing was updated before
    assert report.metrics["policy_kl"] == pytest.approx(0.0, abs=1e-5)
    assert report.metrics["ref_kl"] == pytest.approx(0.0, abs=1e-5)  # the reference is the start model
    assert report.metrics["clip_ratio"] == 0.0


def test_lora_trains_only_adapters_and_refers_to_the_base_model() -> None:
    with loop.prepared(config(model={"lora": {"rank": 2}}, ref={"path": "start"}, algorithm={"kl_coef": 0.1})) as world:
        before = {name: p.detach().clone() for name, p in world.policy.model.named_parameters()}
        reports = [loop.rl_step(step=step, world=world) for step in range(2)]
        moved = {name for name, p in world.policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert reports[0].metrics["ref_kl"] == pytest.approx(0.0, abs=1e-5)
    assert reports[1].metrics["ref_kl"] > 0


def test_epochs_and_mini_batches_make_that_many_optimizer_steps() -> None:
    with loop.prepared(config(actor={"epochs": 3, "mini_batch_prompts": 1})) as world:
        loop.rl_step(step=0, world=world)
        state = next(iter(world.optimizer.state.values()))
    assert int(state["step"]) == 3 * 2  # epochs * (2 prompts / 1)


def test_passes_without_gradients_have_micro_batches_of_their_own_and_change_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six samples: by 4 make passes of 4 and 2, by 5 of 5 and 1; the update's two mini-batches of 3 stay as they are."""
    sizes: list[int] = []
    forward = update.log_prob_micro_batch

    def seen(**given: Any) -> Any:
        sizes.append(len(given["sample_id"]))
        return forward(**given)

    monkeypatch.setattr(update, "log_prob_micro_batch", seen)
    parts: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}, "rollout": {"samples_per_prompt": 3}}
    usual = {"mini_batch_prompts": 1, "micro_batch": {"samples": 2}, "old_log_prob": True}
    first, weights = one_step(**parts, actor=usual, ref={"path": "start"})
    assert sizes == [2, 1, 2, 1] * 2
    sizes.clear()
    own = {**usual, "log_prob_micro_batch": {"samples": 4}}
    second, same = one_step(**parts, actor=own, ref={"path": "start", "micro_batch": {"samples": 5}})
    assert sizes == [4, 2, 5, 1]
    sizes.clear()
    one_step(**parts, actor=own, ref={"path": "start"})
    assert sizes == [4, 2] * 2  # the reference's are those of the policy's pass where it has none
    assert first.metrics["ref_kl"] == pytest.approx(second.metrics["ref_kl"], abs=1e-6)
    assert all(torch.allclose(weights[name], same[name], atol=1e-5) for name in weights)


def test_update_ratio_is_the_distance_that_the_weights_moved() -> None:
    with loop.prepared(config()) as world:
        before = torch.cat([p.detach().flatten().clone() for p in world.policy.model.parameters()])
        report = loop.rl_step(step=0, world=world)
        after = torch.cat([p.detach().flatten() for p in world.policy.model.parameters()])
        held = torch.cat([p.flatten() for p in world.weights.model.parameters()])
    assert report.metrics["update_ratio"] == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-4)
    assert torch.equal(held, after)
    assert report.policy_version == 1


def test_a_dropped_sample_is_in_no_micro_batch_and_the_rest_still_trains() -> None:
    made = stages.filter(
        response_mask=torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]), finish_reason=torch.tensor([0, 2, 3, 1]),
        environment_errors=(None,) * 4,
        failed=(None, None, None, "reward_timeout"), errors=(None,) * 4, no_baseline=(), sample_id=torch.arange(4),
    )  # fmt: skip
    assert made.dropped_reason == (None, "abort", "timeout", "reward_timeout")
    assert made.loss_mask.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_a_step_of_which_nothing_is_left_says_why_and_what_to_change() -> None:
    with pytest.raises(BadInput, match=r"all 6 samples of this step were dropped \(timeout 6\).*rollout.timeout_s"):
        one_step(rollout={"timeout_s": 0.0})


def test_a_step_whose_rewards_all_failed_quotes_the_first_and_speaks_of_no_time_limit(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(response): raise ValueError('no good')\n")
    component = {"name": "mine", "kind": "function", "path": f"{tmp_path / 'mine.py'}:f"}
    with pytest.raises(BadInput, match=r"\(.*reward_error \d.*; sample \d: mine: ValueError: no good; ") as caught:
        one_step(reward={"components": [component]})
    assert "timeout" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"stop_token_ids": [264]}}, "stop_token_ids holds 264.*has 264 tokens; use ids from 0 to 263"),
        ({"rollout": {"abort_function": "builtins:input"}}, "cannot be called as"),
        ({"checkpoint": {"path": "/proc/nowhere"}}, "checkpoint.path = '/proc/nowhere'.*cannot be written"),
        ({"mesh": {"tp": 2}}, "mesh.tp = 2 and there is 1 process; use --nproc 2"),
    ],
)
def test_what_no_function_bears_is_refused_before_anything_is_loaded(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message), loop.prepared(config(**changes)):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": {"advantage": "grop"}},
            "algorithm.advantage = 'grop'.* is not one of gae, grpo, .*did you mean grpo",
        ),
        ({"algorithm": {"policy_loss": "vanila"}}, "did you mean vanilla"),
        ({"critic": {}}, "uses no critic"),
    ],
)
def test_a_name_that_no_algorithm_bears_makes_no_configuration(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_checkpoints_are_written_without_a_word_and_never_over_others(tmp_path: Path, capfd: Any) -> None:
    made = config(steps=2, checkpoint={"path": str(tmp_path), "every_steps": 2})
    (tmp_path / "step-1.writing").mkdir()  # left by a run that was killed
    with loop.prepared(made) as world:
        list(loop.train(world))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (tmp_path / "step-1" / "config.json").is_file()
    assert capfd.readouterr().err == ""
    with pytest.raises(BadInput, match="already holds step-1; remove it"), loop.prepared(made):
        pass


def test_a_place_taken_by_a_file_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        made = config(checkpoint={"path": str(tmp_path / path)})
        with pytest.raises(BadInput, match="cannot be written"), loop.prepared(made):
            pass
