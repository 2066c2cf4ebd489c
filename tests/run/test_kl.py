"""KL forms and the coefficient against verl's vectors, by hand, and by the laws of the estimators."""

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from flowledger.config.algorithm import Algorithm
from flowledger.run.algorithms.kl import KL_FORMS, KlControl, penalised, token_kl

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "verl_golden.npz")
ADAPTIVE = json.loads((DATA / "verl_golden.json").read_text())["adaptive_kl"]
CASES = ("base_f32", "multiturn_f32", "fullymasked_f32")


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[name])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", KL_FORMS)
def test_value_and_gradient_equal_verls(case: str, form: str) -> None:
    log_prob = golden(f"{case}/in/log_prob").clone().requires_grad_()
    made = KL_FORMS[form](log_prob - golden(f"{case}/in/ref_log_prob"))
    made.sum().backward()
    # exp(d) - d - 1 of a small d: what is left of numbers near 1, whose last place (1.2e-7) processors round differently.
    torch.testing.assert_close(made.detach(), golden(f"{case}/kl/{form}/out"), rtol=1e-6, atol=2.5e-7)
    torch.testing.assert_close(log_prob.grad, golden(f"{case}/kl/{form}/grad"), rtol=1e-6, atol=2.5e-7)


def test_the_vectors_hold_every_form() -> None:
    assert {name.split("/")[2] for name in GOLDEN.files if "/kl/" in name and name.endswith("/out")} == set(KL_FORMS)


@pytest.mark.parametrize("case", CASES)
def test_the_penalty_inside_the_reward_equals_verls(case: str) -> None:
    kl = golden(f"{case}/in/old_log_prob") - golden(f"{case}/in/ref_log_prob")
    made = penalised(token_level_reward=golden(f"{case}/in/token_level_rewards"), kl=kl, coef=0.05)
    assert torch.equal(made, golden(f"{case}/kl/compute_rewards_0.05"))


def test_forms_by_hand() -> None:
    # δ = log 2: k2 = 0.24023, k3 = 1/2 - 1 + 0.69315; slopes: 1, sign δ, δ, 1 - exp(-δ).
    values = {"k1": 0.693147, "abs": 0.693147, "k2": 0.240227, "k3": 0.193147}
    slopes = {"k1": 1.0, "abs": 1.0, "k2": 0.693147, "k3": 0.5}
    for form, value in values.items():
        for name, slope in ((form, slopes[form]), (form + "+", slopes["k2"])):
            delta = torch.tensor(math.log(2), dtype=torch.float64, requires_grad=True)
            made = KL_FORMS[name](delta)
            made.backward()
            assert float(made.detach()) == pytest.approx(value, abs=1e-6)
            assert float(delta.grad) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("delta", [-1e30, -100.0, 100.0, 1e30])
@pytest.mark.parametrize("form", ["k3", "low_var_kl"])
def test_k3_stays_within_10_and_its_gradient_finite(form: str, delta: float) -> None:
    x = torch.tensor(delta, requires_grad=True)
    made = KL_FORMS[form](x)
    made.backward()
    assert float(made.detach()) == 10.0
    assert float(x.grad) == 0.0


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0.3, 1.0), min_size=4, max_size=4))
def test_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_kl(weights: list[float]) -> None:
    # Expectations over a vocabulary of four are sums here, not samples; weights small enough for no clamp to hold.
    logits = torch.tensor(weights, dtype=torch.float64).log().requires_grad_()
    policy = logits.log_softmax(0)
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    kl = (policy.exp() * (policy - ref)).sum()
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    p = policy.exp().detach()
    for form in ("k1", "k3", "k1+", "k3+"):
        assert float((p * KL_FORMS[form](policy - ref).detach()).sum()) == pytest.approx(float(kl.detach()), abs=1e-9)
    for form in ("k2", "k1+", "k3+", "abs+"):
        (slope,) = torch.autograd.grad((p * KL_FORMS[form](policy - ref)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(slope, want)


@pytest.mark.parametrize("form", KL_FORMS)
def test_a_masked_token_is_0_and_has_no_gradient_whatever_it_holds(form: str) -> None:
    mask = torch.tensor([[1.0, 0.0, 0.0]])
    new = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
    made = token_kl(new_log_prob=new, ref_log_prob=torch.tensor([[-2.0, -1.0, torch.inf]]), mask=mask, form=form)
    made.sum().backward()
    assert made[0, 1:].tolist() == [0.0, 0.0]
    assert made[0, 0] > 0
    assert new.grad[0, 1:].tolist() == [0.0, 0.0]


def test_the_adaptive_coefficient_equals_verls() -> None:
    control = KlControl(coef=ADAPTIVE["init"], target=ADAPTIVE["target"], horizon=ADAPTIVE["horizon"])
    for kl, want in zip(ADAPTIVE["kls"], ADAPTIVE["values"], strict=True):
        control.update(kl, ADAPTIVE["n_steps"])
        assert control.coef == pytest.approx(want, rel=1e-12)


def test_a_fixed_coefficient_stays_and_nan_moves_none() -> None:
    fixed = KlControl.of(Algorithm(kl_coef=0.3))
    fixed.update(50.0, 1000)
    assert fixed.coef == 0.3
    adaptive = KlControl.of(Algorithm(kl_coef=0.3, kl_control="adaptive", kl_target=2.0, kl_horizon=100))
    adaptive.update(math.nan, 10)
    assert adaptive.coef == 0.3
    adaptive.update(math.inf, 10)  # as far as a step goes: 1 + 0.2 * 10 / 100
    assert adaptive.coef == pytest.approx(0.3 * 1.02)
