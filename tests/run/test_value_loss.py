"""The critic's loss against verl's vectors, by hand, and with anything behind the mask."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from flowledger.config.algorithm import AGGREGATIONS
from flowledger.run.algorithms.aggregation import aggregate_tokens, totals_of
from flowledger.run.algorithms.value_loss import value_loss

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "verl_golden.npz")
CLIP = 0.2  # of the vectors


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", ["base_f32", "multiturn_f32", "fullymasked_f32"])
def test_loss_gradient_and_clipped_share_equal_verls(case: str, mode: str) -> None:
    mask = golden(f"{case}/in/response_mask")
    new = golden(f"{case}/in/vpreds").clone().requires_grad_()
    made = value_loss(
        new_values=new, old_values=golden(f"{case}/in/values"), returns=golden(f"{case}/vf/returns_in"), mask=mask,
        clip=CLIP,
    )  # fmt: skip
    loss = aggregate_tokens(
        made.loss_mat, mask=mask, mode=mode, totals=totals_of(mask, horizon=mask.shape[1])
    ).loss  # fmt: skip
    loss.backward()
    name = f"{case}/vf/{mode}"
    torch.testing.assert_close(loss.detach(), golden(f"{name}/loss"), rtol=1e-6, atol=0)
    torch.testing.assert_close(new.grad, golden(f"{name}/grad"), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close((made.clipped * mask).sum() / mask.sum(), golden(f"{name}/clipfrac"))


def test_by_hand() -> None:
    # V_old = 0, clip 0.5. Inside: ½(0.2-1)². Moved to 2 with R = 1: ½ max(1, 0.25). Moved to 1 with R = 1: ½ max(0, 0.25).
    new = torch.tensor([[0.2, 2.0, 1.0]], requires_grad=True)
    made = value_loss(
        new_values=new, old_values=torch.zeros(1, 3), returns=torch.ones(1, 3), mask=torch.ones(1, 3), clip=0.5
    )
    torch.testing.assert_close(made.loss_mat.detach(), torch.tensor([[0.32, 0.5, 0.125]]))
    assert made.clipped.tolist() == [[False, False, True]]
    made.loss_mat.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-0.8, 1.0, 0.0]]))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stray=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
def test_what_is_masked_reaches_neither_loss_nor_gradient(seed: int, stray: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=draw) < 0.5
    inputs = torch.randn(3, 3, 4, generator=draw)
    results = []
    for filling in (0.0, stray):
        new, old, returns = (x.masked_fill(~mask, filling) for x in inputs)
        new.requires_grad_()
        made = value_loss(new_values=new, old_values=old, returns=returns, mask=mask, clip=0.3)
        made.loss_mat.sum().backward()
        results.append((made.loss_mat.detach(), new.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert float(results[1][1][~mask].abs().sum()) == 0.0
