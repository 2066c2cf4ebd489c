"""The backward sums against the plain loop that they stand for, one token after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowledger.run.algorithms import scans

FACTORS = (0.0, 0.5, 0.95 * 0.99, 0.99, 1.0)


def loop(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """The recurrence itself, in float64."""
    x = x.double()
    sums, carried = torch.zeros_like(x), x.new_zeros(len(x))
    for t in reversed(range(x.shape[1])):
        carried = torch.where(mask[:, t].bool(), x[:, t] + factor * carried, carried)
        sums[:, t] = carried
    return sums


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Numbers and a mask [B, S] with gaps, empty rows and lengths around the chunk's."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    length = draw(st.one_of(st.integers(1, 10), st.integers(scans.CHUNK - 1, 3 * scans.CHUNK + 2)))
    x = torch.randn(draw(st.integers(1, 4)), length, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape, generator=generator) < draw(st.sampled_from((0.0, 0.2, 0.8, 1.0)))
    return x, mask.long()


@settings(deadline=None, max_examples=60)
@given(given_rows=rows(), factor=st.one_of(st.sampled_from(FACTORS), st.floats(0, 1)))
def test_a_sum_is_what_the_loop_makes_and_passes_over_masked_tokens(given_rows: tuple[Tensor, Tensor], factor) -> None:
    x, mask = given_rows
    torch.testing.assert_close(scans.masked_suffix_sums(x, mask, factor), loop(x, mask, factor), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_long_responses_keep_the_precision_of_their_dtype(factor: float, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 8192, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape, generator=generator) < 0.9
    want = loop(x.to(dtype), mask, factor)
    made = scans.masked_suffix_sums(x.to(dtype), mask, factor)
    assert made.dtype == dtype
    assert float((made.double() - want).abs().max() / want.abs().max()) < bound


def test_a_masked_token_holds_the_sum_of_the_next_unmasked_one_by_hand() -> None:
    x = torch.tensor([[1.0, 50.0, 2.0, 4.0, 50.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    # 4, then 2 + 4/2, then 1 + 4/2; the 50s are the environment's.
    assert scans.masked_suffix_sums(x, mask, 0.5).tolist() == [[3.0, 4.0, 4.0, 4.0, 0.0]]


def test_what_follows_a_token_is_the_next_unmasked_one() -> None:
    x = torch.tensor([[1.0, 50.0, 2.0, 4.0, 50.0]])
    assert scans.following(x, torch.tensor([[1, 0, 1, 1, 0]])).tolist() == [[2.0, 2.0, 4.0, 0.0, 0.0]]
    assert scans.following(x, torch.zeros(1, 5)).tolist() == [[0.0] * 5]


def test_compact_moves_unmasked_tokens_to_the_front_whatever_the_masked_ones_hold() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), float("nan"), 3.0]])
    front = scans.compact(x, torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert front.tolist() == [[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]
    assert scans.expand(front, torch.tensor([[1, 0, 1], [0, 0, 1]])).tolist() == [[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]


def test_no_sum_of_a_row_reaches_into_another() -> None:
    x = torch.zeros(3, 2 * scans.CHUNK)
    x[1] = 1.0
    made = scans.suffix_sums(x, 0.99)
    assert float(made[0].abs().max()) == 0.0 == float(made[2].abs().max())
    assert float(made[1, 0]) == pytest.approx((1 - 0.99 ** (2 * scans.CHUNK)) / 0.01, rel=1e-5)
