"""The loss in bypass_mode: which weights and which mask it takes, by hand and against the losses it is made of."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowledger.config.algorithm import Algorithm, Rejection, RolloutCorrection
from flowledger.run.algorithms.aggregation import totals_of
from flowledger.run.algorithms.bypass import bypass_mode
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES
from flowledger.run.algorithms.token_loss import LossInputs, aggregate

RATIO = torch.tensor([[2.0, 0.5, 4.0]], dtype=torch.float64)
LOG_PROB = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)


def inputs(mask: list[int], **settings: object) -> LossInputs:
    """New log-probs LOG_PROB, at these ratios to the rollout's."""
    return LossInputs(
        new_log_prob=LOG_PROB.clone().requires_grad_(), old_log_prob=LOG_PROB - RATIO.log(), advantages=ADVANTAGES,
        mask=torch.tensor([mask]), settings=Algorithm(rollout_correction=RolloutCorrection(**settings)),
        rollout_is_weights=torch.full((1, 3), 7.0, dtype=torch.float64),
    )  # fmt: skip


def gradient(given: LossInputs) -> tuple[float, Tensor]:
    """Loss and gradient as token-sum."""
    given = replace(given, settings=given.settings.model_copy(update={"loss_aggregation": "token-sum"}))
    made = aggregate(bypass_mode(given), given, totals_of(given.mask, horizon=3))
    return float(made.loss.detach()), torch.autograd.grad(made.loss, given.new_log_prob)[0]


def test_reinforce_by_hand() -> None:
    # weights min(ρ, 2.5) = 2, ½, 2.5: loss -w·A·log π = 2, -2, 22.5, gradient -w·A, for weights carry none of it
    loss, slope = gradient(inputs([1, 1, 1], loss="reinforce", importance="token", high=2.5))
    assert loss == pytest.approx(2 - 2 + 22.5)
    torch.testing.assert_close(slope, torch.tensor([[-2.0, 1.0, -7.5]], dtype=torch.float64))


def test_reinforce_by_hand_with_the_weight_of_the_response() -> None:
    loss, slope = gradient(inputs([1, 1, 0], loss="reinforce", importance="sequence", high=10))  # 2 * ½ = 1
    assert loss == pytest.approx(1 - 4)
    torch.testing.assert_close(slope, torch.tensor([[-1.0, 2.0, 0.0]], dtype=torch.float64))


def test_reinforce_without_weights_is_plain_and_weights_from_outside_are_left_out() -> None:
    loss, slope = gradient(inputs([1, 1, 1], loss="reinforce"))
    assert loss == pytest.approx(1 - 4 + 9)
    torch.testing.assert_close(slope, -ADVANTAGES)


def test_ppo_clip_is_vanilla_without_weights() -> None:
    given = inputs([1, 1, 1], importance="token")
    made, plain = bypass_mode(given), POLICY_LOSSES["vanilla"](replace(given, rollout_is_weights=None))
    assert torch.equal(made.loss_mat, plain.loss_mat) and torch.equal(made.clipped, plain.clipped) and made.weighted


OUTSIDE = {"rejections": (Rejection(kind="token_k1", high=3, low=1 / 3),)}  # ratio 4 is outside [⅓, 3], 2 and ½ are not


def test_rejected_tokens_leave_the_clipped_loss() -> None:
    # clip to [0.8, 1.2]: -1.2·1, and max(½·2, 0.8·2); the third would have been -3.6
    loss, _ = gradient(inputs([1, 1, 1], **OUTSIDE))
    assert loss == pytest.approx(-1.2 + 1.6)


def test_rejected_tokens_leave_reinforce_but_count_in_the_weights_of_the_others() -> None:
    # sequence weight 2·½·4 = 4, of all three tokens
    loss, slope = gradient(inputs([1, 1, 1], loss="reinforce", importance="sequence", high=10, **OUTSIDE))
    assert loss == pytest.approx(4 * (1 - 4))
    torch.testing.assert_close(slope, torch.tensor([[-4.0, 8.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_where_everything_is_rejected_loss_and_gradient_are_0(loss: str) -> None:
    given = inputs([1, 1, 1], loss=loss, importance="token", rejections=(Rejection(kind="seq_max_k2", high=0.01),))
    made = bypass_mode(given)
    assert made.mask is not None and not made.mask.any()
    value = aggregate(made, given, totals_of(made.mask, horizon=3)).loss
    assert float(value.detach()) == 0 and not torch.autograd.grad(value, given.new_log_prob)[0].any()


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_a_masked_token_can_hold_nan(loss: str) -> None:
    given = inputs([1, 1, 0], loss=loss, importance="token", rejections=(Rejection(kind="seq_sum_k3", high=9),))
    spoilt = given.new_log_prob.detach().clone()
    spoilt[0, 2] = torch.nan
    spoilt_inputs = replace(given, new_log_prob=spoilt.requires_grad_())
    made = aggregate(bypass_mode(spoilt_inputs), spoilt_inputs, totals_of(given.mask, horizon=3)).loss
    slope = torch.autograd.grad(made, spoilt)[0]
    assert made.detach().isfinite() and slope.isfinite().all() and slope[0, 2] == 0
