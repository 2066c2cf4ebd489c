"""Every algorithm by name, chosen in a configuration, through whole steps of the loop: it moves the policy, on finite numbers."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from flowledger.config.algorithm import AGGREGATIONS, REJECTIONS
from flowledger.flow.errors import BadInput
from flowledger.run import loop, stages
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")
CRITIC = {"gae"}


def two_steps(**changes: Any) -> tuple[list[Mapping[str, float]], float]:
    """The metrics of two steps, and how far the farthest weight of the policy moved."""
    with loop.prepared(config(**changes)) as world:
        before = [p.detach().clone() for p in world.policy.model.parameters()]
        metrics = [loop.rl_step(step=step, world=world).metrics for step in range(2)]
        after = list(world.policy.model.parameters())
    moved = max(float((new.detach() - old).abs().max()) for new, old in zip(after, before, strict=True))
    return metrics, moved


def finite(metrics: list[Mapping[str, float]]) -> bool:
    return all(math.isfinite(value) for step in metrics for value in step.values())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_estimator_trains(name: str) -> None:
    critic = {"critic": {"path": "start"}} if name in CRITIC else {}
    metrics, moved = two_steps(algorithm={"advantage": name}, seed=3, **critic)
    assert finite(metrics)
    assert moved > 0
    assert ("value_loss" in metrics[0]) == (name in CRITIC)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_trains_on_and_off_policy(name: str) -> None:
    metrics, moved = two_steps(algorithm={"policy_loss": name}, actor={"mini_batch_prompts": 1, "epochs": 2}, seed=3)
    assert finite(metrics)
    assert moved > 0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_trains(mode: str) -> None:
    metrics, moved = two_steps(algorithm={"loss_aggregation": mode}, seed=3)
    assert finite(metrics)
    assert moved > 0


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("form", ["k1", "abs", "k2", "k3", "k3+"])  # the others are these by another name
def test_every_kl_form_holds_the_policy_in_loss_and_in_reward(form: str, where: str) -> None:
    made = {"kl_coef": 0.1, "kl_form": form, "kl_in": where, "kl_control": "adaptive", "kl_horizon": 100}
    metrics, moved = two_steps(algorithm=made, ref={"path": "start"}, seed=3)
    assert finite(metrics)
    assert moved > 0
    assert ("reward_kl" in metrics[0]) == (where == "reward")
    # The policy is still the reference in the first step: its KL is below any target, so the coefficient falls.
    assert metrics[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 6 / 100), rel=1e-4) if form != "k1" else True


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bypass", [False, True])
def test_rollout_corrected_by_weights_is_rollout_where_both_sides_agree(level: str, bypass: bool) -> None:
    loss = {"policy_loss": "bypass_mode"} if bypass else {}
    correction = {"rollout_correction": {"importance": level, "high": 2.0, "loss": "reinforce"}}
    metrics, moved = two_steps(algorithm={**loss, **correction}, seed=3)
    assert finite(metrics)
    assert moved > 0
    if not bypass:  # float32 on both sides: every weight is 1
        assert metrics[0]["rollout_correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics[0]["rollout_correction/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("kind", REJECTIONS)
def test_every_rejection_keeps_what_agrees(kind: str) -> None:
    metrics, moved = two_steps(algorithm={"rollout_correction": {"rejections": [{"kind": kind, "high": 1.5}]}}, seed=3)
    assert finite(metrics)
    assert moved > 0
    assert metrics[0]["rollout_correction/rejected_tokens"] == 0.0


def test_what_rollout_and_trainer_disagree_on_is_rejected_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rollout claims log-probs that are 1 nat too low on the first sample: its ratio is e, above 1.5.
    made: list[Any] = []
    honest, judged = stages.rollout, stages.advantage

    def lying(**arguments: Any) -> Any:
        result = honest(**arguments)
        result.rollout_log_prob[0] -= result.response_mask[0]
        return result

    def watched(**arguments: Any) -> Any:
        made.append(judged(**arguments))
        return made[-1]

    monkeypatch.setattr(stages, "rollout", lying)
    monkeypatch.setattr(stages, "advantage", watched)
    two_steps(algorithm={"rollout_correction": {"rejections": [{"kind": "seq_mean_k1", "high": 1.5}]}}, seed=3)
    assert made[0].dropped_reason == ("rejected", None, None, None, None, None)
    assert not made[0].loss_mask[0].any()
    assert made[0].loss_mask[1:].any(-1).all()


def test_a_step_of_which_every_token_is_rejected_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stages.rollout

    def lying(**arguments: Any) -> Any:
        result = honest(**arguments)
        result.rollout_log_prob.sub_(result.response_mask)
        return result

    monkeypatch.setattr(stages, "rollout", lying)
    with pytest.raises(BadInput, match=r"rejections rejected every token of this step: token_k1 \(high = 1.5\); raise"):
        two_steps(algorithm={"rollout_correction": {"rejections": [{"kind": "token_k1", "high": 1.5}]}})


def test_old_log_probs_without_a_pass_of_their_own_train_the_same_policy() -> None:
    weights = []
    for own_pass in (True, None):
        with loop.prepared(config(actor={"old_log_prob": own_pass, "micro_batch": {"samples": 6}}, seed=3)) as world:
            report = loop.rl_step(step=0, world=world)
            weights.append([p.detach().clone() for p in world.policy.model.parameters()])
        assert report.metrics["rollout_gap/max"] < 1e-4
    assert all(torch.equal(old, new) for old, new in zip(*weights, strict=True))


@pytest.mark.parametrize(
    "changes",
    [{"actor": {"mini_batch_prompts": 1}}, {"algorithm": {"kl_in": "reward"}, "ref": {"path": "start"}}],
    ids=["two updates", "kl in reward"],
)
def test_old_log_probs_get_a_pass_where_something_else_needs_them(changes: dict[str, Any]) -> None:
    assert config(**changes).old_log_prob_pass
    assert not config().old_log_prob_pass
