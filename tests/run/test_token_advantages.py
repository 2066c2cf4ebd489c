"""Estimators whose advantage differs along the tokens: by hand, by a plain second form, by laws and by bad input."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.flow.errors import BadInput
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.estimate import AdvantageInputs
from flowledger.run.algorithms.groups import groups_of

PER_TOKEN = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
WHITENED = ("gae", "reinforce_plus_plus")


def inputs(rewards: list[list[float]], *, mask: list[list[int]] | None = None, **more: Any) -> AdvantageInputs:
    """One group of responses with a reward on each token, unless `group_id` says otherwise."""
    token_level = torch.tensor(rewards, dtype=torch.float64)
    group_id = more.pop("group_id", torch.zeros(len(rewards), dtype=torch.int64))
    return AdvantageInputs(
        token_level_reward=token_level,
        mask=torch.ones_like(token_level) if mask is None else torch.tensor(mask, dtype=torch.float64),
        groups=groups_of(group_id=group_id, kept=torch.ones(len(rewards), dtype=torch.bool)),
        **{"settings": Algorithm(), **more},
    )


def random_inputs(seed: int, *, full: bool = False) -> AdvantageInputs:
    """Two or three groups of two to four responses of up to nine tokens, with gaps unless `full`; all inputs given."""
    made = torch.Generator().manual_seed(seed)
    group_id = torch.arange(2 + seed % 2).repeat_interleave(2 + seed % 3)
    shape = (len(group_id), 9)

    def noise() -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    lengths = torch.randint(2, 10, (len(group_id), 1), generator=made)
    mask = (torch.arange(9) < lengths).double()
    gaps = torch.rand(shape, generator=made) < 0.3
    gaps[:, 0] = False
    return AdvantageInputs(
        token_level_reward=noise(),
        mask=mask if full else mask * ~gaps,
        groups=groups_of(group_id=group_id, kept=torch.ones(len(group_id), dtype=torch.bool)),
        settings=Algorithm(gamma=0.97, lam=0.9),
        old_log_prob=-noise().abs(),
        values=noise(),
        sum_pi_squared=noise().sigmoid(),
        rollout_is_weights=noise().exp() if seed % 2 else None,
        baseline_reward=noise()[:, 0],
    )


def whitened(rows: list[list[float]]) -> Tensor:
    tokens = torch.tensor(rows, dtype=torch.float64)
    return (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()


def test_gae_by_hand() -> None:
    # γ = 0.5, λ = 0.5. δ = 0 + 0.5*2 - 1 = 0 at the first token, 4 - 2 = 2 at the second; A = 0 + 0.25*2 = 0.5, 2.
    settings_ = Algorithm(gamma=0.5, lam=0.5)
    values = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    made = ADVANTAGES["gae"](inputs([[0.0, 4.0]], values=values, settings=settings_))
    torch.testing.assert_close(made.returns, torch.tensor([[1.5, 4.0]], dtype=torch.float64))
    torch.testing.assert_close(made.advantages, whitened([[0.5, 2.0]]))
    assert float(made.advantage[0]) == pytest.approx(0, abs=1e-7)


def test_gae_passes_over_the_environments_tokens_by_hand() -> None:
    values = torch.tensor([[1.0, 100.0, 2.0]], dtype=torch.float64)
    settings_ = Algorithm(gamma=0.5, lam=0.5)
    made = ADVANTAGES["gae"](inputs([[0.0, 100.0, 4.0]], mask=[[1, 0, 1]], values=values, settings=settings_))
    torch.testing.assert_close(made.returns[:, [0, 2]], torch.tensor([[1.5, 4.0]], dtype=torch.float64))
    torch.testing.assert_close(made.advantages[:, [0, 2]], whitened([[0.5, 2.0]]))
    assert float(made.advantages[0, 1]) != 0.0, "masked tokens are whitened too: verl's behaviour"


def test_reinforce_plus_plus_by_hand() -> None:
    made = ADVANTAGES["reinforce_plus_plus"](inputs([[0.0, 0.0, 4.0]], settings=Algorithm(gamma=0.5)))
    assert made.returns.tolist() == [[1.0, 2.0, 4.0]]
    torch.testing.assert_close(made.advantages, whitened([[1.0, 2.0, 4.0]]))


def test_remax_by_hand() -> None:
    baseline = torch.tensor([0.5, 2.0], dtype=torch.float64)
    made = ADVANTAGES["remax"](inputs([[1.0, 2.0], [1.0, 9.0]], mask=[[1, 1], [1, 0]], baseline_reward=baseline))
    assert made.returns.tolist() == [[3.0, 2.0], [1.0, 0.0]]
    assert made.advantages.tolist() == [[2.5, 1.5], [-1.0, 0.0]]
    assert made.advantage.tolist() == [2.0, -1.0]


def half(rows: int, length: int) -> dict[str, Tensor]:
    """π = 0.5 and Σπ² = 0.5 everywhere: each token weighs 1 - 1 + 0.5 = 0.5, W_t = 0.5 * t."""
    full = torch.full((rows, length), 0.5, dtype=torch.float64)
    return {"old_log_prob": full.log(), "sum_pi_squared": full}


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline_by_hand(name: str) -> None:
    # Returns 2, 2 and 4. At the first token the baseline is (2*0.5 + 4*0.5) / 1 = 3; at the second one is left alone.
    given_inputs = inputs([[0.0, 2.0], [4.0, 0.0]], mask=[[1, 1], [1, 0]], **half(2, 2))
    made = ADVANTAGES[name](given_inputs)
    torch.testing.assert_close(made.advantages, torch.tensor([[-1.0, 2.0], [1.0, 0.0]], dtype=torch.float64))
    assert made.returns.tolist() == [[2.0, 2.0], [4.0, 0.0]]
    kept = ADVANTAGES[name](replace(given_inputs, settings=Algorithm(zero_tail=False)))
    torch.testing.assert_close(kept.advantages, torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    # A rollout weight of 3 counts nine times: (9*2 + 4) / 10 = 2.2.
    weights = torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    made = ADVANTAGES[name](replace(given_inputs, rollout_is_weights=weights))
    torch.testing.assert_close(made.advantages[:, 0], torch.tensor([-0.2, 1.8], dtype=torch.float64))


def test_the_baseline_for_several_turns_compares_what_the_policy_wrote_by_hand() -> None:
    # The second response had a token of the environment first; its first own token still meets the other's first.
    given_inputs = inputs([[2.0, 0.0], [0.0, 4.0]], mask=[[1, 0], [0, 1]], **half(2, 2))
    by_turn = ADVANTAGES["tir_optimal_token_baseline"](given_inputs).advantages
    torch.testing.assert_close(by_turn, torch.tensor([[-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    # By position each is alone where it stands, so its baseline is its own return.
    by_position = ADVANTAGES["optimal_token_baseline"](given_inputs).advantages
    torch.testing.assert_close(by_position, torch.zeros(2, 2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_response_without_tokens_is_no_company_for_the_turns_baseline() -> None:
    given_inputs = inputs(
        [[1.0, 2.0], [0.0, 0.0]], mask=[[1, 1], [0, 0]], settings=Algorithm(zero_tail=False), **half(2, 2)
    )
    assert ADVANTAGES["tir_optimal_token_baseline"](given_inputs).advantages.tolist() == [[3.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_group_of_one_has_no_optimal_baseline(name: str) -> None:
    made = ADVANTAGES[name](inputs([[1.0, 2.0]], **half(1, 2)))
    assert made.advantages.tolist() == [[3.0, 2.0]]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_optimal_baseline_is_the_weighted_mean_of_returns_at_each_position(seed: int) -> None:
    given_inputs = replace(random_inputs(seed), settings=Algorithm(zero_tail=False))
    made = ADVANTAGES["optimal_token_baseline"](given_inputs)
    g, mask, weights = made.returns, given_inputs.mask, given_inputs.rollout_is_weights
    w = 1 - 2 * given_inputs.old_log_prob.exp() + given_inputs.sum_pi_squared
    w = (w if weights is None else w * weights**2) * mask
    for rows in given_inputs.groups.members.tolist():
        for t in range(g.shape[1]):
            here = [i for i in rows if mask[i, t]]
            total = [float(w[i, : t + 1].sum()) for i in here]
            if here and abs(sum(total)) > 1e-3:
                baseline = sum(a * float(g[i, t]) for a, i in zip(total, here, strict=True)) / sum(total)
                for i in here:
                    assert float(made.advantages[i, t]) == pytest.approx(float(g[i, t]) - baseline, rel=1e-3, abs=1e-3)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_gae_without_discount_and_critic_is_the_whitened_reward_to_go(seed: int) -> None:
    given_inputs = random_inputs(seed)
    plain = replace(given_inputs, values=torch.zeros_like(given_inputs.mask), settings=Algorithm())
    to_go = (plain.token_level_reward * plain.mask).flip(-1).cumsum(-1).flip(-1)
    made, unmasked = ADVANTAGES["gae"](plain), plain.mask.bool()
    torch.testing.assert_close(made.advantages[unmasked], whitened([to_go[unmasked].tolist()])[0], rtol=1e-6, atol=1e-6)
    also = ADVANTAGES["reinforce_plus_plus"](plain)
    torch.testing.assert_close(also.advantages, made.advantages * plain.mask)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_gae_that_trusts_the_critic_is_the_one_step_error(seed: int) -> None:
    given_inputs = replace(random_inputs(seed, full=True), settings=Algorithm(gamma=0.9, lam=0.0))
    made, mask = ADVANTAGES["gae"](given_inputs), given_inputs.mask
    after = torch.nn.functional.pad((given_inputs.values * mask)[:, 1:], (0, 1))
    # returns = δ + V = r + γ*V_{t+1}
    torch.testing.assert_close(made.returns * mask, (given_inputs.token_level_reward + 0.9 * after) * mask)


@pytest.mark.parametrize("name", PER_TOKEN)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), random=st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(name: str, seed: int, random: Any) -> None:
    given_inputs = random_inputs(seed)
    order = torch.tensor(random.sample(range(len(given_inputs.mask)), len(given_inputs.mask)))
    _, size = given_inputs.groups.members.shape
    tensors = {
        key: value[order] for key in ("token_level_reward", "mask", "old_log_prob", "values", "sum_pi_squared",
        "rollout_is_weights", "baseline_reward") if (value := getattr(given_inputs, key)) is not None
    }  # fmt: skip
    moved = groups_of(group_id=order // size, kept=torch.ones(len(order), dtype=torch.bool))
    made = ADVANTAGES[name](replace(given_inputs, groups=moved, **tensors))
    want = ADVANTAGES[name](given_inputs)
    torch.testing.assert_close(made.advantages, want.advantages[order])
    torch.testing.assert_close(made.advantage, want.advantage[order])


@pytest.mark.parametrize("name", sorted(set(PER_TOKEN) - {"optimal_token_baseline"}))
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), random=st.randoms(use_true_random=False))
def test_tokens_of_the_environment_change_nothing(name: str, seed: int, random: Any) -> None:
    given_inputs = random_inputs(seed)
    places = torch.tensor(sorted(random.sample(range(14), 9)))

    def apart(
        tokens: Tensor | None, between: float
    ) -> Tensor | None:  # five tokens of the environment between the nine
        if tokens is None:
            return None
        return torch.full((len(tokens), 14), between, dtype=torch.float64).index_copy(1, places, tokens)

    longer = replace(
        given_inputs, mask=apart(given_inputs.mask, 0.0),
        **{key: apart(getattr(given_inputs, key), 55.0)
           for key in ("token_level_reward", "values", "sum_pi_squared", "rollout_is_weights")},
        old_log_prob=apart(given_inputs.old_log_prob, -3.0),
    )  # fmt: skip
    made, want = ADVANTAGES[name](longer), ADVANTAGES[name](given_inputs)
    unmasked = given_inputs.mask.bool()
    torch.testing.assert_close(made.advantages[:, places][unmasked], want.advantages[unmasked])
    torch.testing.assert_close(made.returns[:, places][unmasked], want.returns[unmasked])
    torch.testing.assert_close(made.advantage, want.advantage)


@pytest.mark.parametrize("name", PER_TOKEN)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_a_samples_advantage_is_the_mean_of_its_tokens(name: str, seed: int) -> None:
    given_inputs = random_inputs(seed)
    made = ADVANTAGES[name](given_inputs)
    for row, mask, mean in zip(made.advantages, given_inputs.mask.bool(), made.advantage.tolist(), strict=True):
        assert mean == pytest.approx(float(row[mask].mean()), abs=1e-9)


@pytest.mark.parametrize("name", WHITENED)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_whitened_advantages_have_mean_0_and_variance_1(name: str, seed: int) -> None:
    given_inputs = random_inputs(seed)
    tokens = ADVANTAGES[name](given_inputs).advantages[given_inputs.mask.bool()]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.var()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("unmasked", [0, 1])
def test_next_to_no_tokens_give_a_number(name: str, unmasked: int) -> None:
    given_inputs = random_inputs(3)
    mask = torch.zeros_like(given_inputs.mask)
    mask[0, :unmasked] = 1
    made = ADVANTAGES[name](replace(given_inputs, mask=mask))
    for column in (made.advantage, made.advantages, made.returns):
        assert column.isfinite().all()
    assert float(made.advantage[1:].abs().max()) == 0.0
    if name in WHITENED:
        assert float(made.advantages.abs().max()) == 0.0  # one token has no variance


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32])
def test_the_dtype_is_the_rewards(name: str, dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    given_inputs = random_inputs(4)
    tensors = {
        key: getattr(given_inputs, key).to(dtype)
        for key in ("token_level_reward", "old_log_prob", "values", "sum_pi_squared", "baseline_reward")
    }
    made = ADVANTAGES[name](replace(given_inputs, mask=given_inputs.mask.to(mask_dtype), **tensors))
    assert made.advantage.dtype == made.advantages.dtype == made.returns.dtype == dtype


@pytest.mark.parametrize(
    ("name", "missing", "way"),
    [
        ("gae", "values", "add a `critic:` section"),
        ("remax", "baseline_reward", "give the reward of the greedy response"),
        ("optimal_token_baseline", "old_log_prob", r"set actor\.old_log_prob to true"),
        ("tir_optimal_token_baseline", "sum_pi_squared", r"set actor\.old_log_prob to true"),
    ],
)
def test_an_estimator_without_what_it_needs_says_how_to_get_it(name: str, missing: str, way: str) -> None:
    with pytest.raises(BadInput, match=rf"algorithm\.advantage = {name} needs {missing}.*{way}"):
        ADVANTAGES[name](replace(random_inputs(0), **{missing: None}))
