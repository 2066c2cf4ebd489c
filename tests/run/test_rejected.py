"""What a rejection takes out, before the loss or in it: it is not trained, it is counted, and nothing else is touched."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.algorithm import Rejection, RolloutCorrection
from flowledger.config.schema import MicroBatch, RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import advantage, batching, loop, stages, update
from flowledger.run.algorithms import rollout_correction
from flowledger.run.correction import corrected
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")

MEAN = {"rollout_correction": {"rejections": [{"kind": "seq_mean_k1", "high": 1.5}]}}


def liars(monkeypatch: pytest.MonkeyPatch, *samples: int) -> None:
    """The rollout claims log-probs that are 1 nat too low on these samples: their ratio to the trainer is e."""
    honest: Callable[..., Any] = stages.rollout

    def lying(**arguments: Any) -> Any:
        made = honest(**arguments)
        for sample in samples:
            made.rollout_log_prob[sample] -= made.response_mask[sample]
        return made

    monkeypatch.setattr(stages, "rollout", lying)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 6), st.sets(st.integers(0, 19)))
def test_rejected_samples_leave_the_micro_batches_and_nothing_else(lengths, mini, rejected) -> None:
    split = batching.split(
        lengths=lengths, kept=[True] * len(lengths), mini_batch_samples=mini, limits=MicroBatch(max_tokens=60),
        bytes_per_token=1,
    )  # fmt: skip
    made = batching.without(split, rejected)
    assert [one.samples for one in made.mini_batches] == [one.samples for one in split.mini_batches]
    assert [one.sequences for one in made.mini_batches] == [len(one.samples) for one in split.mini_batches]
    left = [i for micro in split.micro_batches for i in micro if i not in rejected]
    assert [i for micro in made.micro_batches for i in micro] == left and all(made.micro_batches)


def test_a_rejected_sample_is_not_computed_and_still_divides_the_mean_over_sequences(monkeypatch) -> None:
    seen: list[list[int]] = []
    norms: list[float] = []
    honest = update.micro_batch

    def watched(**arguments: Any) -> Any:
        seen.append(arguments["sample_id"].tolist())
        return honest(**arguments)

    monkeypatch.setattr(update, "micro_batch", watched)
    for rejects in (False, True):
        with monkeypatch.context() as patch:
            liars(patch, 0)
            if not rejects:  # the same loss mask, by a sample that was dropped when the mini-batch was cut
                drop(patch, 0)
            settings = {**(MEAN if rejects else {}), "loss_aggregation": "seq-mean-token-mean", "advantage": "gpg"}
            frozen(patch)
            with loop.prepared(config(algorithm=settings, seed=3)) as world:
                metrics = loop.rl_step(step=0, world=world).metrics
            assert metrics["dropped_ratio"] == pytest.approx(1 / 6)
            norms.append(metrics["grad_norm"])
    assert all(0 not in samples for samples in seen)
    assert norms[1] / norms[0] == pytest.approx(5 / 6, rel=1e-4)


def drop(patch: pytest.MonkeyPatch, sample: int) -> None:
    honest = stages.filter

    def filtered(**arguments: Any) -> Any:
        failed = list(arguments.pop("failed"))
        failed[sample] = "reward_error"
        return honest(failed=failed, **arguments)

    patch.setattr(stages, "filter", filtered)


def frozen(patch: pytest.MonkeyPatch) -> None:
    """Advantages of 1, whoever is in the group."""
    honest = stages.advantage

    def ones(**arguments: Any) -> Any:
        made = honest(**arguments)
        made.advantages.fill_(1.0)
        return made

    patch.setattr(stages, "advantage", ones)


def test_figures_and_kl_are_those_of_kept_samples(monkeypatch) -> None:
    random = torch.Generator().manual_seed(0)
    old, rollout = -torch.rand(4, 5, generator=random), -torch.rand(4, 5, generator=random)
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[2] = 0  # dropped
    settings = RolloutCorrection(
        importance="token", high=1.1, rejections=(Rejection(kind="token_k1", high=1.3),), normalize=True
    )
    kept = [0, 1, 3]
    made = corrected(old_log_prob=old, rollout_log_prob=rollout, loss_mask=mask, settings=settings)
    alone = rollout_correction.correct(
        old_log_prob=old[kept], rollout_log_prob=rollout[kept], loss_mask=mask[kept], settings=settings
    )
    assert made.metrics == alone.metrics
    assert made.rollout_is_weights is not None and alone.rollout_is_weights is not None
    assert torch.equal(made.rollout_is_weights[kept], alone.rollout_is_weights)
    assert torch.equal(made.loss_mask[kept], alone.loss_mask)
    assert not made.rollout_is_weights[2].any() and not made.loss_mask[2].any()
    # two tokens of 3 nats in one sample, one of 1 nat in another; the dropped one is in no mean
    kl = torch.tensor([[3.0, 3.0], [1.0, 0.0], [0.0, 0.0]])
    monkeypatch.setattr(advantage, "token_kl", lambda **_: kl)
    assert reward_kl() == pytest.approx((3.0 + 1.0) / 2)


def reward_kl() -> float:
    settings = config(algorithm={"kl_in": "reward", "kl_coef": 0.1}, ref={"path": "start"}).algorithm
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    made = advantage.advantages(
        algorithm=settings, kl_coef=0.1, component_weights=(1.0,), token_level_reward=torch.zeros(3, 2),
        reward_components=torch.zeros(3, 1), loss_mask=mask, dropped_reason=(None, None, "abort"),
        rollout_log_prob=torch.zeros(3, 2), old_log_prob=torch.zeros(3, 2), ref_log_prob=torch.zeros(3, 2), values=None,
        sum_pi_squared=None, baseline_reward=None, group_id=torch.zeros(3, dtype=torch.long),
    )  # fmt: skip
    return made.metrics["reward_kl"]


def test_explained_variance_and_the_gap_leave_rejected_tokens_out(monkeypatch) -> None:
    liars(monkeypatch, 0, 1)
    seen: list[Any] = []
    honest = stages.advantage

    def watched(**arguments: Any) -> Any:
        seen.append((honest(**arguments), arguments["values"]))
        return seen[-1][0]

    monkeypatch.setattr(stages, "advantage", watched)
    with loop.prepared(config(algorithm={**MEAN, "advantage": "gae"}, critic={"path": "start"}, seed=3)) as world:
        metrics = loop.rl_step(step=0, world=world).metrics
    made, values = seen[0]
    kept = made.loss_mask.bool()
    left, whole = (made.returns - values)[kept].var(correction=0), made.returns[kept].var(correction=0)
    assert metrics["explained_variance"] == pytest.approx(float(1 - left / whole), rel=1e-5)
    assert metrics["dropped_ratio"] == pytest.approx(2 / 6) and metrics["rollout_gap/max"] < 1e-4
    assert not made.advantage[:2].any() and made.advantage[2:].any()


def test_in_bypass_mode_a_rejection_is_counted_and_its_mini_batch_makes_no_step(monkeypatch) -> None:
    liars(monkeypatch, 0, 1, 2)  # the whole first mini-batch
    shares: list[torch.Tensor] = []
    honest = update.losses.micro_batch_loss

    def watched(**arguments: Any) -> Any:
        made = honest(**arguments)
        shares.append(made.loss_share)
        return made

    monkeypatch.setattr(update.losses, "micro_batch_loss", watched)
    settings = {**MEAN, "policy_loss": "bypass_mode"}
    made: list[Any] = []
    train = stages.update_actor
    monkeypatch.setattr(stages, "update_actor", lambda **words: made.append(train(**words)) or made[-1])
    with loop.prepared(config(algorithm=settings, actor={"mini_batch_prompts": 1}, seed=3)) as world:
        metrics = loop.rl_step(step=0, world=world).metrics
    assert len(made[0].grad_norm) == 1
    assert not made[0].loss_mask[:3].any() and made[0].loss_mask[3:].any(-1).all()
    assert metrics["rollout_correction/rejected_samples"] == 0.5
    assert 0 < metrics["rollout_correction/rejected_tokens"] < 1
    assert metrics["rollout_gap/max"] < 1e-4  # of what is left; 1 on what was rejected
    assert metrics["rollout_correction/kl"] < -0.3
    assert not shares[0].any() and metrics["entropy"] > 1


def test_a_mini_batch_rejected_in_the_loss_moves_no_weight_by_momentum_or_decay(monkeypatch) -> None:
    settings = {**MEAN, "policy_loss": "bypass_mode"}
    with loop.prepared(config(algorithm=settings, optim={"lr": 0.01, "weight_decay": 0.5}, seed=3)) as world:
        loop.rl_step(step=0, world=world)
        before = [p.detach().clone() for p in world.policy.model.parameters()]
        liars(monkeypatch, *range(6))
        with pytest.raises(BadInput, match=r"rejections rejected every token of this step: seq_mean_k1 \(high = 1.5\)"):
            loop.rl_step(step=1, world=world)
        assert all(torch.equal(a, b) for a, b in zip(before, world.policy.model.parameters(), strict=True))


def _critic_steps(settings: RunConfig) -> int:
    """Optimizer steps of the critic where the rollout lies about the samples of the second prompt."""
    with loop.prepared(settings) as world, pytest.MonkeyPatch.context() as patch:
        honest, train, made = stages.rollout, stages.update_critic, list[Any]()

        def lying(**arguments: Any) -> Any:
            rolled = honest(**arguments)
            second = (arguments["sample_id"] >= 2)[:, None]
            rolled.rollout_log_prob.copy_(rolled.rollout_log_prob - second * rolled.response_mask)
            return rolled

        patch.setattr(stages, "rollout", lying)
        patch.setattr(stages, "update_critic", lambda **words: made.append(train(**words)) or made[-1])
        loop.rl_step(step=0, world=world)
    return len(made[0].grad_norm)


def test_a_mini_batch_of_which_nothing_is_left_is_no_step_of_the_critic_either(forked: ModuleType) -> None:
    asked: dict[str, Any] = {
        "algorithm": {**MEAN, "advantage": "gae"}, "critic": {"path": "start"}, "rollout": {"samples_per_prompt": 2},
        "actor": {"mini_batch_prompts": 1, "old_log_prob": True},
    }  # fmt: skip
    assert _critic_steps(config(**asked)) == 1
    assert forked.ranks(2, _critic_steps, config(**asked, mesh={"dp": 2})) == [1, 1]


@pytest.mark.parametrize("bypass", [{}, {"policy_loss": "bypass_mode"}])
def test_weights_that_are_all_0_are_an_error(bypass: dict[str, str]) -> None:
    correction = {"importance": "token", "low": 1.5, "loss": "reinforce"}
    with (
        loop.prepared(config(algorithm={"rollout_correction": correction, **bypass})) as world,
        pytest.raises(BadInput, match=r"gives every token of this step the weight 0 \(low = 1.5, high = 2.0\)"),
    ):
        loop.rl_step(step=0, world=world)


def test_weights_that_bypass_mode_does_not_use_may_all_be_0() -> None:
    correction = {"importance": "token", "low": 1.5, "loss": "ppo_clip"}
    settings = {"rollout_correction": correction, "policy_loss": "bypass_mode"}
    with loop.prepared(config(algorithm=settings, seed=3)) as world:
        assert loop.rl_step(step=0, world=world).metrics["rollout_correction/weight_mean"] == 0.0
