"""The five aggregations against verl's vectors, by hand, and by what splitting a batch must not change."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from flowledger.config.algorithm import AGGREGATIONS
from flowledger.run.algorithms.aggregation import REDUCTIONS, Totals, aggregate_tokens, totals_of

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "verl_golden.npz")
CASES = ("base_f32", "multiturn_f32", "fullymasked_f32")
TWO_RANKS = {"global": None, "global_scale": 100}  # verl's loss_scale_factor; null: the width of the mask


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize("whose", ["local", "global", "global_scale"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_verls(case: str, mode: str, whose: str) -> None:
    mask = golden(f"{case}/in/response_mask")
    totals = totals_of(mask, horizon=mask.shape[1])
    if whose != "local":
        horizon = TWO_RANKS[whose] or mask.shape[1]
        totals = Totals(tokens=150, sequences=24, rows=len(mask), horizon=horizon, ranks=2)
    loss_mat = (golden(f"{case}/in/log_prob") * golden(f"{case}/in/advantages")).requires_grad_()
    made = aggregate_tokens(loss_mat, mask=mask, mode=mode, totals=totals)
    made.loss.backward()
    name = f"{case}/agg/{mode}/{whose}"
    torch.testing.assert_close(made.loss.detach(), golden(f"{name}/loss"), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss_mat.grad, golden(f"{name}/grad"), rtol=1e-6, atol=0)
    torch.testing.assert_close(made.weight, golden(f"{name}/grad"), rtol=1e-6, atol=0)


def test_by_hand() -> None:
    # Two sequences of 1 and 3 tokens and one without, losses 4 and 1, 2, 3; horizon 5.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    loss_mat = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])
    totals = totals_of(mask, horizon=5)
    assert totals == Totals(tokens=4, sequences=2, rows=3, horizon=5)
    by_hand = {
        "token-mean": 10 / 4, "token-sum": 10.0, "seq-mean-token-sum": 10 / 2, "seq-mean-token-sum-norm": 10 / 2 / 5,
        "seq-mean-token-mean": (4 / 1 + 6 / 3) / 2, "row-mean": (4 / 1 + 6 / 3) / 3,
    }  # fmt: skip
    assert set(by_hand) == set(REDUCTIONS) == {*AGGREGATIONS, "row-mean"}
    for mode, want in by_hand.items():
        made = aggregate_tokens(loss_mat, mask=mask, mode=mode, totals=totals)
        assert float(made.loss) == pytest.approx(want)
        assert float(made.share.sum()) == pytest.approx(want)
        torch.testing.assert_close(REDUCTIONS[mode].weight(mask, totals), made.weight)


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_what_is_masked_reaches_neither_loss_nor_gradient(mode: str) -> None:
    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    loss_mat = torch.tensor([[2.0, torch.nan], [torch.inf, -torch.inf]], requires_grad=True)
    made = aggregate_tokens(loss_mat, mask=mask, mode=mode, totals=totals_of(mask, horizon=1))
    made.loss.backward()
    assert float(made.loss.detach()) == {"row-mean": 1.0}.get(mode, 2.0)
    assert torch.isfinite(made.share).all()
    assert loss_mat.grad.tolist() == made.weight.tolist()


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_a_batch_without_a_token_has_the_loss_0(mode: str) -> None:
    mask = torch.zeros(2, 3)
    loss_mat = torch.full((2, 3), torch.nan, requires_grad=True)
    made = aggregate_tokens(loss_mat, mask=mask, mode=mode, totals=totals_of(mask, horizon=3))
    made.loss.backward()
    assert float(made.loss.detach()) == 0.0
    assert loss_mat.grad.abs().sum() == 0.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 5), mode=st.sampled_from(list(REDUCTIONS)))
def test_micro_batches_with_the_totals_of_all_add_up_to_the_whole(seed: int, cut: int, mode: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 4, generator=draw) < 0.6
    loss_mat = torch.randn(6, 4, generator=draw, dtype=torch.float64)
    totals = totals_of(mask, horizon=4)

    def loss(rows: slice) -> torch.Tensor:
        return aggregate_tokens(loss_mat[rows], mask=mask[rows], mode=mode, totals=totals).loss

    whole = loss(slice(None))
    assert whole.dtype == torch.float64
    torch.testing.assert_close(loss(slice(cut)) + loss(slice(cut, None)), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_mean_over_two_ranks_is_the_loss_of_one(mode: str) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]])
    loss_mat = torch.arange(12.0, dtype=torch.float64).view(4, 3) ** 2
    one = aggregate_tokens(loss_mat, mask=mask, mode=mode, totals=totals_of(mask, horizon=3)).loss
    both = Totals(tokens=8, sequences=4, rows=2, horizon=3, ranks=2)
    halves = [
        aggregate_tokens(loss_mat[rows], mask=mask[rows], mode=mode, totals=both).loss
        for rows in (slice(2), slice(2, None))
    ]
    torch.testing.assert_close(sum(halves) / 2, one)
