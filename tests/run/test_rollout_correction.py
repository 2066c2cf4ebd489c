"""Importance weights and rejection by hand, by law, and against what verl computed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowledger.config.algorithm import REJECTIONS, Rejection, RolloutCorrection
from flowledger.run.algorithms.importance import importance_weights
from flowledger.run.algorithms.rejection import ESTIMATORS, LEVELS, keep
from flowledger.run.algorithms.rollout_correction import correct

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "verl_golden.npz")
FACTS = json.loads((DATA / "verl_golden.json").read_text(encoding="utf-8"))
LN2, LN3 = math.log(2), math.log(3)

# Ratios 2, 3 | ½, masked | masked, masked.
LOG_RATIO = torch.tensor([[LN2, LN3], [-LN2, 9.0], [7.0, -7.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]])

extreme = st.sampled_from([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4])
rows = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.tuples(st.floats(-3, 3) | extreme, st.booleans()), min_size=width, max_size=width),
        min_size=1, max_size=5,
    )
)  # fmt: skip
corrections = st.builds(
    RolloutCorrection,
    importance=st.sampled_from(["token", "sequence"]),
    high=st.floats(1, 10),
    low=st.none() | st.floats(0.01, 1),
    normalize=st.booleans(),
)


def batch(drawn: list[list[tuple[float, bool]]]) -> tuple[Tensor, Tensor]:
    """Log ratios, with NaN where masked, and the mask."""
    mask = torch.tensor([[bit for _, bit in row] for row in drawn])
    values = torch.tensor([[value for value, _ in row] for row in drawn], dtype=torch.float64)
    return torch.where(mask, values, torch.nan), mask.long()


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"importance": "token", "high": 10}, [[2, 3], [0.5, 0], [0, 0]]),
        ({"importance": "token", "high": 2.5}, [[2, 2.5], [0.5, 0], [0, 0]]),
        ({"importance": "token", "high": 2.5, "low": 1}, [[2, 0], [0, 0], [0, 0]]),
        # (2 + 3 + ½) / 3 tokens = 11/6
        ({"importance": "token", "high": 10, "normalize": True}, [[12 / 11, 18 / 11], [3 / 11, 0], [0, 0]]),
        ({"importance": "sequence", "high": 10}, [[6, 6], [0.5, 0], [0, 0]]),
        # (6 + ½) / 2 responses with tokens = 13/4: a response counts once, whatever its length
        ({"importance": "sequence", "high": 10, "normalize": True}, [[24 / 13, 24 / 13], [2 / 13, 0], [0, 0]]),
        ({"importance": "token", "high": 9, "low": 8, "normalize": True}, [[0, 0], [0, 0], [0, 0]]),
    ],
)
def test_weights_by_hand(settings: dict[str, object], want: list[list[float]]) -> None:
    made = importance_weights(LOG_RATIO, MASK, RolloutCorrection(**settings))
    torch.testing.assert_close(made, torch.tensor(want, dtype=torch.float64), rtol=1e-7, atol=1e-12)


@given(rows, corrections)
def test_weights_are_finite_bounded_and_0_where_masked_whatever_stands_there(drawn, settings) -> None:
    log_ratio, mask = batch(drawn)
    made = importance_weights(log_ratio, mask, settings)
    assert made.isfinite().all() and (made >= 0).all() and not made[mask == 0].any()
    if not settings.normalize:
        assert (made <= settings.high).all()
        inside = made[made > 0]
        assert settings.low is None or (inside >= settings.low).all()


@given(rows, st.sampled_from(["token", "sequence"]))
def test_normalized_weights_average_1_or_are_all_0(drawn, importance) -> None:
    log_ratio, mask = batch(drawn)
    settings = RolloutCorrection(importance=importance, high=5, normalize=True)
    plain = importance_weights(log_ratio, mask, settings.model_copy(update={"normalize": False}))
    made = importance_weights(log_ratio, mask, settings)
    per_row = made.sum(1)[mask.any(1)] / mask.sum(1)[mask.any(1)]
    mean = made[mask.bool()].mean() if importance == "token" else per_row.mean()
    if plain.max() > 1e-3:  # far below, the 1e-8 beside the count and the floor of the mean are seen
        assert float(mean) == pytest.approx(1, rel=1e-6)


# k2 is ½δ², k3 is e^δ - 1 - δ, k1 is -δ: of ln 2, ln 3, -ln 2.
K2, K3 = (LN2**2 / 2, LN3**2 / 2), (1 - LN2, 2 - LN3)


@pytest.mark.parametrize(
    ("kind", "high", "low", "want"),
    [
        ("token_k1", 2.5, None, [[1, 0], [1, 0], [0, 0]]),  # 1/2.5 ≤ π_rollout/π_old ≤ 2.5: ½, ⅓, 2
        ("token_k1", 1.5, 0.4, [[1, 0], [0, 0], [0, 0]]),
        ("token_k2", K2[0] + 1e-9, None, [[1, 0], [1, 0], [0, 0]]),
        ("token_k3", K3[0] + 1e-9, None, [[1, 0], [1, 0], [0, 0]]),
        ("seq_sum_k1", 5.9, None, [[0, 0], [1, 0], [0, 0]]),  # the product 1/6 of the first is below 1/5.9
        ("seq_sum_k1", 6.1, None, [[1, 1], [1, 0], [0, 0]]),
        ("seq_sum_k2", sum(K2) - 1e-9, None, [[0, 0], [1, 0], [0, 0]]),
        ("seq_sum_k3", sum(K3) + 1e-9, None, [[1, 1], [1, 0], [0, 0]]),
        ("seq_mean_k1", 2.4, None, [[0, 0], [1, 0], [0, 0]]),  # the geometric mean √6 = 2.449
        ("seq_mean_k1", 2.5, None, [[1, 1], [1, 0], [0, 0]]),
        ("seq_mean_k2", sum(K2) / 2 - 1e-6, None, [[0, 0], [1, 0], [0, 0]]),
        ("seq_mean_k3", sum(K3) / 2 + 1e-6, None, [[1, 1], [1, 0], [0, 0]]),
        ("seq_max_k2", K2[1] - 1e-9, None, [[0, 0], [1, 0], [0, 0]]),
        ("seq_max_k3", K3[1] + 1e-9, None, [[1, 1], [1, 0], [0, 0]]),
    ],
)
def test_rejection_by_hand(kind: str, high: float, low: float | None, want: list[list[int]]) -> None:
    made = keep(LOG_RATIO, MASK, [Rejection(kind=kind, high=high, low=low)])
    assert made.tolist() == want and made.dtype == MASK.dtype


def test_every_kind_that_a_user_can_write_has_a_level_and_an_estimator() -> None:
    assert {tuple(kind.rsplit("_", 1)) for kind in REJECTIONS} == {
        (level, estimator) for level in LEVELS for estimator in ESTIMATORS if (level, estimator) != ("seq_max", "k1")
    }


@given(rows, st.lists(st.tuples(st.sampled_from(REJECTIONS), st.floats(1, 30)), max_size=3))
def test_what_is_kept_is_what_every_rejection_keeps_and_comes_in_whole_responses_unless_by_token(drawn, chosen) -> None:
    log_ratio, mask = batch(drawn)
    rejections = [Rejection(kind=kind, high=high) for kind, high in chosen]
    made = keep(log_ratio, mask, rejections)
    alone = [keep(log_ratio, mask, [one]) for one in rejections]
    assert torch.equal(made, torch.stack([mask, *alone]).amin(0))
    for one, left in zip(rejections, alone, strict=True):
        if not one.kind.startswith("token"):
            assert all(torch.equal(row, before) or not row.any() for row, before in zip(left, mask, strict=True))


def test_an_unmasked_nan_is_rejected_and_bool_and_float_masks_keep_their_dtype() -> None:
    log_ratio = torch.tensor([[0.0, math.nan]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        made = keep(log_ratio, torch.ones(1, 2, dtype=dtype), [Rejection(kind="token_k3")])
        assert made.tolist() == [[1, 0]] and made.dtype == dtype


def test_figures_by_hand() -> None:
    # Ratios 2, ½; log-probs of the rollout are all ln ¼, so those of the trainer are ln ½ and ln ⅛.
    rollout = torch.full((1, 2), math.log(0.25), dtype=torch.float64)
    old = rollout + torch.tensor([[LN2, -LN2]])
    settings = RolloutCorrection(importance="token", high=1.5, rejections=(Rejection(kind="token_k3", high=0.2),))
    made = correct(old_log_prob=old, rollout_log_prob=rollout, loss_mask=torch.ones(1, 2), settings=settings)
    by_hand = {
        "training_ppl": 4, "rollout_ppl": 4, "kl": 0, "k3_kl": (2 + 0.5) / 2 - 1, "chi2_token": (4 + 0.25) / 2 - 1,
        "chi2_seq": 0, "weight_mean": (1.5 + 0.5) / 2, "weight_max": 1.5,
        "effective_sample_size": 1 / ((1.5**2 + 0.5**2) / 2), "rejected_tokens": 0.5, "rejected_samples": 1,
    }  # fmt: skip
    assert made.loss_mask.tolist() == [[0, 1]]  # k3 of 2 is 1 - ln 2 = 0.307, of ½ it is ln 2 - ½ = 0.193
    assert made.metrics == {f"rollout_correction/{name}": pytest.approx(x, abs=1e-7) for name, x in by_hand.items()}


def test_nothing_is_asked_for_nothing_is_changed() -> None:
    mask = torch.tensor([[1, 0]])
    log_prob = torch.tensor([[-1.0, math.nan]])
    made = correct(old_log_prob=log_prob, rollout_log_prob=log_prob, loss_mask=mask, settings=RolloutCorrection())
    assert made.rollout_is_weights is None and torch.equal(made.loss_mask, mask)
    assert made.metrics["rollout_correction/kl"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_extreme_log_probs_and_batches_without_a_token_give_finite_figures(importance: str, dtype: torch.dtype) -> None:
    settings = RolloutCorrection(importance=importance, normalize=True, rejections=(Rejection(kind="seq_max_k2"),))
    for old, rollout in ((-1e4, 0.0), (0.0, -1e4), (-90.0, -1.0), (-0.0, -800.0)):
        for bit in (0, 1):
            made = correct(
                old_log_prob=torch.full((3, 4), old, dtype=dtype), rollout_log_prob=torch.full((3, 4), rollout, dtype=dtype),
                loss_mask=torch.full((3, 4), bit), settings=settings,
            )  # fmt: skip
            assert made.rollout_is_weights is not None and made.rollout_is_weights.isfinite().all()
            assert all(map(math.isfinite, made.metrics.values()))
            assert not made.loss_mask.any()


@pytest.mark.parametrize("case", FACTS["inputs"])
def test_weights_and_masks_equal_verls(case: str) -> None:
    """All kinds one by one; combinations, figures and normalized weights are the benchmark's."""
    arrays = {name: torch.from_numpy(GOLDEN[f"{case}/in/{name}"]) for name in ("old_log_prob", "rollout_log_prob")}
    mask = torch.from_numpy(GOLDEN[f"{case}/in/response_mask"])
    for kind in REJECTIONS:
        bound = {"high": 2.0, "low": 0.5} if kind.endswith("k1") else {"high": 0.05}
        text = "0.5_2.0" if kind.endswith("k1") else "0.05"
        settings = RolloutCorrection(importance="token", rejections=(Rejection(kind=kind, **bound),))
        made = correct(**arrays, loss_mask=mask, settings=settings)
        key = f"{case}/rc/is=token/norm=0/rs={kind}/th={text}"
        assert torch.equal(made.loss_mask, torch.from_numpy(GOLDEN[f"{key}/mask"]))
        torch.testing.assert_close(
            made.rollout_is_weights, torch.from_numpy(GOLDEN[f"{key}/weights"]), rtol=1e-6, atol=0
        )
