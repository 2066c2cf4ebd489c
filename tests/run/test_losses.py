"""Policy loss, KL and aggregation against vectors that verl computed, and by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flowledger.config.schema import AGGREGATIONS, Algorithm
from flowledger.run.losses import AGGREGATION_WEIGHTS, KL_FORMS, POLICY_LOSSES, LossInputs, Totals

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "verl_golden.npz")
CASES = ("base_f32", "multiturn_f32")
# What the vectors were made with: clip bounds, and for `global_scale` the totals of two ranks.
SETTINGS = Algorithm(clip_low=0.2, clip_high=0.28, clip_dual=3.0)
DP, TOKENS, SEQUENCES, SCALE = 2, 150, 24, 100


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize(
    ("case", "totals_of"), [("base_f32", "local"), ("multiturn_f32", "local"), ("base_f32", "global_scale")]
)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_clipped_loss_and_its_gradient_equal_verls(case: str, totals_of: str, mode: str) -> None:
    mask = golden(f"{case}/in/response_mask")
    log_prob = golden(f"{case}/in/log_prob").clone().requires_grad_()
    made = POLICY_LOSSES["vanilla"](
        LossInputs(
            new_log_prob=log_prob, old_log_prob=golden(f"{case}/in/old_log_prob"),
            advantages=golden(f"{case}/in/advantages"), mask=mask, settings=SETTINGS,
        )
    )  # fmt: skip
    local = Totals(tokens=int(mask.sum()), sequences=int((mask.sum(-1) > 0).sum()), horizon=mask.shape[1])
    totals, ranks = (
        (local, 1) if totals_of == "local" else (Totals(tokens=TOKENS, sequences=SEQUENCES, horizon=SCALE), DP)
    )
    loss = ranks * (AGGREGATION_WEIGHTS[mode](mask, totals) * made.loss_mat).sum()
    loss.backward()
    want, gradient = (
        golden(f"{case}/vanilla/{mode}/{totals_of}/loss"),
        golden(f"{case}/vanilla/{mode}/{totals_of}/grad"),
    )
    torch.testing.assert_close(loss.detach(), want.reshape(()), rtol=1e-5, atol=1e-7)
    assert float((log_prob.grad - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["k1", "abs", "k2", "k3"])
def test_kl_forms_equal_verls(case: str, form: str) -> None:
    names = [name for name in GOLDEN.files if name.startswith(f"{case}/kl/{form}/") and not name.endswith("grad")]
    assert names
    delta = golden(f"{case}/in/log_prob") - golden(f"{case}/in/ref_log_prob")
    torch.testing.assert_close(KL_FORMS[form](delta), golden(names[0]), rtol=1e-5, atol=1e-6)


def test_aggregation_by_hand() -> None:
    # Two sequences of 1 and 3 tokens, losses 4 and 1, 2, 3; horizon 5.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss_mat = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    totals = Totals(tokens=4, sequences=2, horizon=5)
    by_hand = {
        "token-mean": 10 / 4, "token-sum": 10.0, "seq-mean-token-sum": 10 / 2, "seq-mean-token-sum-norm": 10 / 2 / 5,
        "seq-mean-token-mean": (4 / 1 + 6 / 3) / 2,
    }  # fmt: skip
    assert set(by_hand) == set(AGGREGATIONS) == set(AGGREGATION_WEIGHTS)
    for mode, want in by_hand.items():
        assert float((AGGREGATION_WEIGHTS[mode](mask, totals) * loss_mat).sum()) == pytest.approx(want)


def test_a_token_is_clipped_exactly_where_the_clip_decides_the_loss() -> None:
    # ratios 1.5, 1.5, 0.5, 5.0 with A = +1, -1, +1, -1: upper clip; none; none; dual clip (c = 3 < 5).
    ratio, advantages = torch.tensor([[1.5, 1.5, 0.5, 5.0]]), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    made = POLICY_LOSSES["vanilla"](
        LossInputs(
            new_log_prob=ratio.log(),
            old_log_prob=torch.zeros(1, 4),
            advantages=advantages,
            mask=torch.ones(1, 4),
            settings=SETTINGS,
        )
    )
    assert made.clipped.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(made.loss_mat, torch.tensor([[-1.28, 1.5, -0.5, 3.0]]))
