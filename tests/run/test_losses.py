"""Every policy loss against verl's vectors, by hand, and by laws that its formula implies."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from flowledger.config.algorithm import AGGREGATIONS, Algorithm, RolloutCorrection
from flowledger.run.algorithms.aggregation import Totals, totals_of
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES
from flowledger.run.algorithms.token_loss import LossInputs, TokenLoss, aggregate

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "verl_golden.npz")
USED = json.loads((DATA / "verl_golden.json").read_text())["pg_config"]
SETTINGS = {
    "clip_low": USED["clip_ratio_low"], "clip_high": USED["clip_ratio_high"], "clip_dual": USED["clip_ratio_c"],
    "clip_cov_ratio": USED["clip_cov_ratio"], "clip_cov_low": USED["clip_cov_lb"], "clip_cov_high": USED["clip_cov_ub"],
    "kl_cov_ratio": USED["kl_cov_ratio"], "kl_cov_coef": USED["ppo_kl_coef"], "dro_beta": USED["dro_beta"],
    "sapo_tau_positive": USED["tau_pos"], "sapo_tau_negative": USED["tau_neg"],
}  # fmt: skip
OF_THE_MICRO_BATCH = {"clip_cov", "kl_cov"}  # their statistics depend on its split
ALL = sorted(POLICY_LOSSES)
FROM_VERL = sorted(POLICY_LOSSES.keys() - {"bypass_mode"})  # its vectors carry settings of their own


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def token_loss(name: str, new: Tensor, old: Tensor, a: Tensor, mask: Tensor | None = None, **changes: Any) -> TokenLoss:
    """A policy loss of [B, S] tensors; clip_cov draws the same tokens each time."""
    inputs = loss_inputs(new, old, a, mask, **changes)
    torch.manual_seed(USED["seed_before_call"])
    return POLICY_LOSSES[name](inputs)


def loss_inputs(new: Tensor, old: Tensor, a: Tensor, mask: Tensor | None = None, **changes: Any) -> LossInputs:
    weights = changes.pop("rollout_is_weights", None)
    return LossInputs(
        new_log_prob=new, old_log_prob=old, advantages=a, mask=torch.ones_like(a) if mask is None else mask,
        rollout_is_weights=weights, settings=Algorithm(**{**SETTINGS, **changes}),
    )  # fmt: skip


def loss_of(name: str, inputs: LossInputs, totals: Totals | None = None) -> Tensor:
    torch.manual_seed(USED["seed_before_call"])
    horizon = inputs.mask.shape[1]
    return aggregate(POLICY_LOSSES[name](inputs), inputs, totals or totals_of(inputs.mask, horizon=horizon)).loss


def drawn(seed: int, rows: int = 4, width: int = 5, spread: float = 0.3) -> dict[str, Tensor]:
    """A random batch in float64: log-probs, advantages [B, S] and a mask without an empty row."""
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=draw, dtype=torch.float64) * 3 - 0.1
    new = (old + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)).clamp(max=-0.01)
    a = torch.randn(rows, 1, generator=draw, dtype=torch.float64).expand(rows, width)
    mask = (torch.rand(rows, width, generator=draw) < 0.7) | (torch.arange(width) == 0)
    return {"new": new, "old": old, "a": a, "mask": mask}


def vectors() -> list[str]:
    """Every policy-loss vector of the file but bypass_mode's, as <case>/pg/<loss>/<aggregation>/<whose>/isw=<0|1>."""
    return sorted(
        name.removesuffix("/loss")
        for name in GOLDEN.files
        if name.split("/")[1] == "pg" and name.endswith("/loss") and name.split("/")[2] != "bypass_mode"
    )


@pytest.mark.parametrize("name", FROM_VERL)
def test_loss_and_gradient_equal_verls(name: str) -> None:
    mine = [vector for vector in vectors() if vector.split("/")[2] == name]
    assert len(mine) == 50
    for vector in mine:
        case, _, _, mode, whose, weighted = vector.split("/")
        new = golden(f"{case}/in/log_prob").clone().requires_grad_()
        mask = golden(f"{case}/in/response_mask")
        inputs = loss_inputs(
            new, golden(f"{case}/in/old_log_prob"), golden(f"{case}/in/advantages"), mask, loss_aggregation=mode,
            rollout_is_weights=golden(f"{case}/in/rollout_is_weights") if weighted == "isw=1" else None,
        )  # fmt: skip
        loss = loss_of(name, inputs, totals(mask, USED["global_batch_info"][whose]))
        loss.backward()
        want, gradient = golden(f"{vector}/loss"), golden(f"{vector}/grad")
        assert float((loss.detach() - want).abs()) <= 1e-6 * float(want.abs()), vector
        assert float((new.grad - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), vector


def totals(mask: Tensor, over_ranks: dict[str, int]) -> Totals:
    """verl's totals: those of two ranks where given, else the batch's own."""
    if not over_ranks:
        return totals_of(mask, horizon=mask.shape[1])
    return Totals(
        tokens=over_ranks["batch_num_tokens"], sequences=over_ranks["global_batch_size"], rows=len(mask),
        horizon=over_ranks.get("loss_scale_factor", mask.shape[1]), ranks=over_ranks["dp_size"],
    )  # fmt: skip


def test_the_vectors_hold_every_loss_and_every_aggregation() -> None:
    assert {vector.split("/")[2] for vector in vectors()} == set(FROM_VERL)
    assert {vector.split("/")[3] for vector in vectors()} == set(AGGREGATIONS)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# Ratios 1.5, 1.5, 0.5, 5 with A = 1, -1, 1, -1 and log π = -1; ε = 0.2, 0.28, c = 3. Worked out by hand.
BY_HAND: dict[str, tuple[Tensor, list[bool]]] = {
    "vanilla": (row(-1.28, 1.5, -0.5, 3.0), [True, False, False, True]),
    "cispo": (row(1.28, -1.28, 0.8, -1.28), [True, True, True, True]),
    # 4/τ·sigmoid(τ(ρ-1)): τ = 1: σ(0.5) = 0.622459, σ(-0.5) = 0.377541; τ = 1.05: σ(0.525) = 0.628317, σ(4.2) = 0.985226
    "sapo": (row(-2.489837, 2.393588, -1.510163, 3.753243), [False] * 4),
    "gpg": (row(1.0, -1.0, 1.0, -1.0), [False] * 4),
    # log ρ = 0.405465, 0.405465, -0.693147, 1.609438; ½·0.1·(log ρ)² = 0.008220, 0.008220, 0.024023, 0.129515
    "dro": (row(1.008220, -0.991780, 1.024023, -0.870485), [False] * 4),
    # π = 0.367879, π_old = 0.245253, 0.245253, 0.735759, 0.073576: moved by 0.123, 0.123, -0.368, 0.294; none too far up.
    "dppo_tv": (row(1.5, -1.5, 0.5, -3.0), [False, False, False, True]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_four_tokens_by_hand(name: str) -> None:
    want, clipped = BY_HAND[name]
    ratio = row(1.5, 1.5, 0.5, 5.0)
    made = token_loss(name, row(-1, -1, -1, -1), -1 - ratio.log(), row(1, -1, 1, -1))
    torch.testing.assert_close(made.loss_mat, want, rtol=1e-5, atol=1e-6)
    assert made.clipped.tolist() == [clipped]
    torch.testing.assert_close(made.ratio, ratio)


def test_dual_clip_is_told_apart_and_ends_the_gradient() -> None:
    new = row(0.0, 0.0, 0.0).requires_grad_()
    made = token_loss("vanilla", new, -row(1.5, 0.5, 5.0).log(), row(1, -1, -1))
    made.loss_mat.sum().backward()
    assert made.clipped.tolist() == [[True, True, True]]
    assert made.dual_clipped is not None
    assert made.dual_clipped.tolist() == [[False, False, True]]
    assert new.grad.abs().sum() == 0.0


def test_dppo_takes_a_token_out_where_the_probability_has_moved_too_far_the_way_of_the_advantage() -> None:
    # π_old 0.5 -> 0.9, 0.5 -> 0.9, 0.5 -> 0.1, 0.5 -> 0.1 with A = 1, -1, 1, -1: out are the first and the last.
    # KL of two coins = ½ log(0.5/0.9) + ½ log(0.5/0.1) = 0.5108 nats, above both bounds.
    new, a = row(0.9, 0.9, 0.1, 0.1).log(), row(1, -1, 1, -1)
    for name in ("dppo_tv", "dppo_kl"):
        made = token_loss(name, new, row(0.5, 0.5, 0.5, 0.5).log(), a)
        assert made.clipped.tolist() == [[True, False, False, True]]
        assert made.loss_mat[0, [0, 3]].abs().sum() == 0.0
        assert float(made.loss_mat[0, 1]) == pytest.approx(1.8 * np.log(0.9))
    # Below its bounds the KL lets all of them stay, whatever the way.
    assert not token_loss("dppo_kl", new, row(0.5, 0.5, 0.5, 0.5).log(), a, clip_low=0.52, clip_high=0.52).clipped.any()
    assert token_loss("dppo_kl", new, row(0.5, 0.5, 0.5, 0.5).log(), a, clip_low=0.5, clip_high=0.5).clipped.any()


def test_gspo_judges_a_sequence_by_the_geometric_mean_of_its_ratios() -> None:
    # log ρ = 0.6 and 0.2, the third token masked: s = exp(0.4) = 1.4918 on every token, clipped at 1.28 where A > 0.
    made = token_loss("gspo", row(0.6, 0.2, 9.0), row(0, 0, 0), row(1, 1, 1), torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(made.ratio[:, :2], row(1.491825, 1.491825), rtol=1e-6, atol=0)
    torch.testing.assert_close(made.loss_mat[:, :2], row(-1.28, -1.28))
    assert made.clipped[0, :2].all()


def test_geo_mean_by_hand_counts_a_sequence_without_a_token() -> None:
    # log ρ = 0.6 -> 0.28, -0.6 stays against A > 0: exp(-0.16); two rows, one of them masked: -2·exp(-0.16) / 2.
    new, a, mask = torch.tensor([[0.6, -0.6], [5, 5.0]]), torch.full((2, 2), 2.0), torch.tensor([[1, 1], [0, 0]])
    inputs = loss_inputs(new, torch.zeros(2, 2), a, mask, loss_aggregation="token-sum")
    assert float(loss_of("geo_mean", inputs)) == pytest.approx(-float(np.exp(-0.16)))
    assert POLICY_LOSSES["geo_mean"](inputs).clipped[0].tolist() == [True, False]


def test_clip_cov_takes_out_as_many_tokens_as_asked_and_only_from_between_its_bounds() -> None:
    data = drawn(3, rows=10, width=10)
    mask = torch.ones(10, 10)
    free = token_loss("clip_cov", data["new"], data["old"], data["a"], mask, clip_cov_low=90.0, clip_cov_high=99.0)
    made = token_loss("clip_cov", data["new"], data["old"], data["a"], mask, clip_cov_ratio=0.07, clip_cov_low=0.0)
    out = made.clipped & ~free.clipped
    assert int(out.sum()) == 7
    assert made.loss_mat[out].abs().sum() == 0.0
    torch.testing.assert_close(made.loss_mat[~out], free.loss_mat[~out])
    covariance = (data["a"] - data["a"].mean()) * (data["new"] - data["new"].mean())
    assert bool((covariance[out] > 0).all())


def test_kl_cov_holds_back_the_tokens_of_highest_covariance() -> None:
    # A is 1 and -1, log π ranks the tokens: the highest product is at the ends.
    new, old, a = row(-1.0, -2.0, -3.0, -5.0), row(-1.5, -2.0, -3.0, -4.0), row(1, 1, -1, -1)
    made = token_loss("kl_cov", new, old, a, kl_cov_ratio=0.5, kl_cov_coef=0.1)
    assert made.clipped.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(made.loss_mat - -a * made.ratio, row(0.05, 0, 0, 0.1))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), name=st.sampled_from(ALL), stray=st.sampled_from([torch.nan, torch.inf, -torch.inf])
)  # fmt: skip
def test_what_is_masked_reaches_neither_loss_nor_gradient(seed: int, name: str, stray: float) -> None:
    data = drawn(seed)
    mask = data["mask"].clone()
    mask[1] = False  # and a row of which nothing is left
    results = []
    for filling in (0.0, stray):
        new, old, a, weights = (
            x.masked_fill(~mask, filling) for x in (data["new"], data["old"], data["a"], data["new"].exp())
        )
        new.requires_grad_()
        inputs = loss_inputs(new, old, a, mask, rollout_is_weights=weights)
        loss = loss_of(name, inputs)
        loss.backward()
        results.append((loss.detach(), new.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(dirty).all()
        assert torch.equal(clean, dirty)
    assert results[1][1][~mask].abs().sum() == 0.0


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_a_token_has_the_loss_0_and_no_gradient(name: str) -> None:
    new = torch.full((2, 3), -1.0, requires_grad=True)
    loss = loss_of(name, loss_inputs(new, torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert new.grad.abs().sum() == 0.0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(AGGREGATIONS), cut=st.integers(1, 3),
    name=st.sampled_from([name for name in ALL if name not in OF_THE_MICRO_BATCH]),
)  # fmt: skip
def test_micro_batches_with_the_totals_of_all_add_up_to_the_whole(seed: int, mode: str, cut: int, name: str) -> None:
    data = drawn(seed)
    whole = totals_of(data["mask"], horizon=5)

    def loss_and_gradient(rows: slice) -> tuple[Tensor, Tensor]:
        part = {key: values[rows].clone() for key, values in data.items()}
        part["new"].requires_grad_()
        loss = loss_of(name, loss_inputs(*part.values(), loss_aggregation=mode), whole)
        loss.backward()
        return loss.detach(), part["new"].grad

    loss, gradient = loss_and_gradient(slice(None))
    (one, first), (two, second) = loss_and_gradient(slice(cut)), loss_and_gradient(slice(cut, None))
    torch.testing.assert_close(one + two, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([first, second]), gradient, rtol=1e-10, atol=1e-12)


# What the loss differentiates where parts of it are held fixed: -A times this, by hand, per token away from its clips.
SLOPES = {
    "gspo": lambda made, data: made.ratio * ~made.clipped,
    "cispo": lambda made, data: made.ratio.clamp(1 - SETTINGS["clip_low"], 1 + SETTINGS["clip_high"]),
    "dppo_tv": lambda made, data: made.ratio.clamp(max=SETTINGS["clip_dual"]) * (~made.clipped | made.dual_clipped),
    "dppo_kl": lambda made, data: made.ratio.clamp(max=SETTINGS["clip_dual"]) * (~made.clipped | made.dual_clipped),
}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(SLOPES)))
def test_where_parts_are_held_fixed_the_gradient_is_the_stated_weight_times_minus_a(seed: int, name: str) -> None:
    data = drawn(seed, spread=1.0)
    new = data["new"].clone().requires_grad_()
    made = token_loss(name, new, data["old"], data["a"], data["mask"])
    (made.loss_mat * data["mask"]).sum().backward()
    torch.testing.assert_close(new.grad, -data["a"] * SLOPES[name](made, data) * data["mask"], rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(set(FROM_VERL) - SLOPES.keys())))
def test_the_gradient_equals_finite_differences_of_the_loss(seed: int, name: str) -> None:
    data = drawn(seed, rows=2, width=3, spread=0.5)
    step = 1e-6

    def loss(new: Tensor) -> Tensor:
        return loss_of(name, loss_inputs(new, data["old"], data["a"], data["mask"]))

    new = data["new"].clone().requires_grad_()
    loss(new).backward()
    for place in range(new.numel()):
        move = torch.zeros(new.numel(), dtype=new.dtype)
        move[place] = step
        up, middle, down = (loss(new.detach() + sign * move.view_as(new)) for sign in (1, 0, -1))
        if (
            float((up - 2 * middle + down).abs()) > 1e-9
        ):  # a kink of the clip lies between them, or tokens change places
            continue
        assert float(new.grad.flatten()[place]) == pytest.approx(float(up - down) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", sorted(set(FROM_VERL) - {"geo_mean", "clip_cov"}))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_where_nothing_has_moved_every_loss_has_reinforces_gradient(name: str, mode: str) -> None:
    data = drawn(7)
    new = data["old"].clone().requires_grad_()
    inputs = loss_inputs(new, data["old"], data["a"], data["mask"], loss_aggregation=mode)
    made = POLICY_LOSSES[name](inputs)
    whole = aggregate(made, inputs, totals_of(data["mask"], horizon=5))
    whole.loss.backward()
    torch.testing.assert_close(new.grad, -data["a"] * whole.weight)
    assert torch.equal(made.ratio, torch.ones_like(made.ratio))
    if name != "kl_cov":
        assert not made.clipped.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_keeps_the_dtype_of_its_inputs_and_gives_no_gradient_to_what_it_only_shows(
    name: str, dtype: torch.dtype
) -> None:
    data = {key: values.to(dtype) if values.is_floating_point() else values for key, values in drawn(5).items()}
    inputs = loss_inputs(data["new"].requires_grad_(), data["old"], data["a"], data["mask"])
    made = POLICY_LOSSES[name](inputs)
    assert made.loss_mat.dtype == made.ratio.dtype == loss_of(name, inputs).dtype == dtype
    assert made.clipped.dtype == torch.bool
    assert made.loss_mat.shape == made.ratio.shape == made.clipped.shape == data["new"].shape
    assert not made.ratio.requires_grad


@pytest.mark.parametrize("name", sorted(set(FROM_VERL) - {"clip_cov", "kl_cov", "geo_mean"}))
@pytest.mark.parametrize("moved", [-1e3, 1e3])
def test_a_log_ratio_that_has_run_away_leaves_loss_and_gradient_finite(name: str, moved: float) -> None:
    new = torch.full((1, 2), -1.0, requires_grad=True)
    loss = loss_of(name, loss_inputs(new, torch.full((1, 2), -1.0 - moved), torch.tensor([[1.0, -1.0]])))
    loss.backward()
    assert torch.isfinite(loss.detach())
    assert torch.isfinite(new.grad).all()


def test_log_ratios_are_clamped_at_20_and_gspos_at_10() -> None:
    new, old, a = row(1e3, 1e3), row(0, 0), row(-1, -1)
    assert token_loss("gspo", new, old, a).loss_mat.tolist() == row(10, 10).exp().tolist()
    for name in ("vanilla", "cispo", "gpg", "dro", "dppo_tv"):
        assert token_loss(name, new, old, a).ratio.tolist() == row(20, 20).exp().tolist()


def test_bypass_mode_is_in_the_table_and_follows_its_settings() -> None:
    data = drawn(1)
    correction = RolloutCorrection(importance="token", high=2.0, loss="reinforce")
    made = token_loss(
        "bypass_mode", data["new"], data["old"], data["a"], data["mask"], rollout_correction=correction
    )  # fmt: skip
    want = token_loss("gpg", data["new"], data["old"], data["a"], data["mask"]).loss_mat
    weight = (data["new"] - data["old"]).exp().clamp(max=2.0)
    torch.testing.assert_close(made.loss_mat[data["mask"]], (want * weight)[data["mask"]])
