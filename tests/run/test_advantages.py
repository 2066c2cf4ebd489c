"""Every estimator against verl's vectors; those that compare samples of a group by hand, by laws and by bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.flow.errors import BadInput
from flowledger.run.algorithms import estimate, groups
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.estimate import AdvantageInputs, Estimate

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "verl_golden.npz")
FACTS = json.loads((DATA / "verl_golden.json").read_text())
PER_SAMPLE = (
    "grpo", "dr_grpo", "grpo_vectorized", "gdpo", "grpo_passk", "rloo", "rloo_vectorized",
    "reinforce_plus_plus_baseline", "opo", "gpg",
)  # fmt: skip
WHITENED = ("gdpo", "reinforce_plus_plus_baseline")


def verl_inputs(key: str) -> AdvantageInputs:
    """What verl got for one vector; its file leaves the group of one out where verl refuses it."""
    facts, case = FACTS["adv"][key], key.split("/")[0]
    samples = len(GOLDEN[f"{case}/in/score"]) - (facts["estimator"] == "grpo_passk")
    given = {name: torch.from_numpy(GOLDEN[f"{case}/in/{name}"])[:samples] for name in (
        facts.get("rew", "token_level_rewards"), "response_mask", "old_log_prob", "values", "sum_pi_squared",
        "reward_baselines", "rollout_is_weights",
    )}  # fmt: skip
    _, group_id = np.unique(FACTS["inputs"][case]["index"][:samples], return_inverse=True)
    components = facts.get("rewards")
    return AdvantageInputs(
        token_level_reward=given[facts.get("rew", "token_level_rewards")],
        mask=given["response_mask"],
        groups=groups.groups_of(group_id=torch.from_numpy(group_id), kept=torch.ones(samples, dtype=torch.bool)),
        settings=Algorithm(
            norm_by_std=facts.get("norm", "True") == "True", gamma=float(facts.get("gamma", 1)),
            lam=float(facts.get("lam", 1)), zero_tail=facts.get("tail", "True") == "True",
        ),
        old_log_prob=given["old_log_prob"], values=given["values"], sum_pi_squared=given["sum_pi_squared"],
        baseline_reward=given["reward_baselines"],
        rollout_is_weights=given["rollout_is_weights"] if facts.get("isw") == "True" else None,
        reward_components=None if components is None else torch.tensor(list(components.values())).T,
        component_weights=tuple(facts["weights"]) if facts.get("weights") else None,
    )  # fmt: skip


@pytest.mark.parametrize("key", FACTS["adv"])
def test_every_estimator_equals_verls(key: str) -> None:
    made = ADVANTAGES[FACTS["adv"][key]["estimator"]](verl_inputs(key))
    wanted = [name for name in ("advantages", "returns") if f"{key}/{name}" in GOLDEN.files]
    assert "advantages" in wanted
    for name in wanted:
        want = torch.from_numpy(GOLDEN[f"{key}/{name}"])
        gap = float((getattr(made, name) - want).abs().max() / want.abs().max())
        assert gap <= 1e-5, f"{name} is off by {gap:.1e}"


NOT_IN_VERL = {"dr_grpo"}  # whose numbers come from elsewhere


def test_the_vectors_know_every_estimator_of_verl() -> None:
    assert {facts["estimator"] for facts in FACTS["adv"].values()} == ADVANTAGES.keys() - NOT_IN_VERL


def outcome(
    reward: list[float] | Tensor, group_id: list[int], *, mask: Tensor | None = None, kept: list[bool] | None = None,
    **more: Any,
) -> AdvantageInputs:  # fmt: skip
    """Samples with their reward on the first of two tokens, or of as many as `mask` has."""
    rewards = torch.as_tensor(reward, dtype=torch.float64)
    mask = torch.ones(len(group_id), 2) if mask is None else mask
    token_level = torch.zeros(mask.shape, dtype=torch.float64)
    token_level[:, 0] = rewards
    present = torch.ones(len(group_id), dtype=torch.bool) if kept is None else torch.tensor(kept)
    return AdvantageInputs(
        token_level_reward=token_level,
        mask=mask,
        groups=groups.groups_of(group_id=torch.tensor(group_id), kept=present),
        **{"settings": Algorithm(), **more},
    )


def advantage(name: str, reward: list[float], group_id: list[int], **more: Any) -> list[float]:
    return ADVANTAGES[name](outcome(reward, group_id, **more)).advantage.tolist()


STD = (1 / 3) ** 0.5  # of 1, 0, 0, 1: sqrt(4 * 0.25 / 3)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("grpo", [0.5 / (STD + 1e-6), -0.5 / (STD + 1e-6), -0.5 / (STD + 1e-6), 0.5 / (STD + 1e-6)]),
        ("grpo_vectorized", [0.5 / (STD + 1e-6), -0.5 / (STD + 1e-6), -0.5 / (STD + 1e-6), 0.5 / (STD + 1e-6)]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),  # 1 - mean(0, 0, 1)
        ("rloo_vectorized", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("gpg", [1.0, -1.0, -1.0, 1.0]),  # half of the rewards are not 0: α = 2
        ("opo", [0.5, -0.5, -0.5, 0.5]),  # equal lengths: the mean
        ("grpo_passk", [0.0, 0.0, 0.0, 0.0]),  # two are the best
        # whitening over 8 tokens: variance 0.25 * 8/7
        ("reinforce_plus_plus_baseline", [sign * (7 / 8) ** 0.5 for sign in (1, -1, -1, 1)]),
        ("gdpo", [sign * (7 / 8) ** 0.5 for sign in (1, -1, -1, 1)]),
    ],
)
def test_two_right_and_two_wrong_by_hand(name: str, want: list[float]) -> None:
    made = ADVANTAGES[name](outcome([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0]))
    torch.testing.assert_close(made.advantage, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(made.advantages, made.advantage[:, None].expand(4, 2))
    assert torch.equal(made.returns, made.advantages)


def test_passk_rewards_the_best_by_its_lead_by_hand() -> None:
    std = float(np.std([5.0, 1.0, 3.0], ddof=1))  # 2
    assert advantage("grpo_passk", [1.0, 5.0, 3.0], [0, 0, 0]) == pytest.approx([0.0, 2 / (std + 1e-6), 0.0])
    plain = Algorithm(norm_by_std=False)
    assert advantage("grpo_passk", [1.0, 5.0, 3.0], [0, 0, 0], settings=plain) == [0.0, 2.0, 0.0]


def test_opo_weighs_long_responses_more_by_hand() -> None:
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert advantage("opo", [1.0, 0.0], [0, 0], mask=mask) == [0.75, -0.25]  # baseline (1*1 + 3*0) / 4


def test_gdpo_lets_no_component_drown_another_by_hand() -> None:
    # Component 2 is a hundred times larger, but each is ±1/sqrt(2) after normalisation: they cancel or add up.
    components = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]])
    inputs = outcome([0.0] * 4, [0, 0, 1, 1], reward_components=components)
    made = ADVANTAGES["gdpo"](inputs).advantage
    # Scores 0, 0, √2, -√2 on two tokens each: variance 1 * 8/7.
    want = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) * 2**0.5 * (7 / 8) ** 0.5
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-6)
    lone = outcome([0.0] * 4, [0, 0, 1, 1], reward_components=components, component_weights=(1.0, 0.0))
    assert [value > 0 for value in ADVANTAGES["gdpo"](lone).advantage.tolist()] == [True, False, True, False]


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo"])
def test_a_group_of_one_keeps_its_raw_reward(name: str) -> None:
    assert advantage(name, [1.0, 0.0, 0.75], [0, 0, 1])[2] == 0.75


def test_a_group_of_one_where_the_name_says_otherwise() -> None:
    assert advantage("grpo", [1.0, 0.0, 0.75], [0, 0, 1])[2] == pytest.approx(0.75 / (1 + 1e-6))
    assert advantage("gpg", [1.0, 0.0, 0.75], [0, 0, 1])[2] == pytest.approx(0.75 * 3 / 2)
    assert advantage("rloo_vectorized", [1.0, 0.0, 0.75], [0, 0, 1])[2] == 0.0


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_equal_rewards_teach_nothing(name: str) -> None:
    assert advantage(name, [0.25] * 4, [0, 0, 0, 0]) == [0.0] * 4


@pytest.mark.parametrize("constant", [0.1, 0.3, 0.7, 10000.1])
def test_equal_rewards_round_as_mean_and_std_of_one_tensor_do(constant: float) -> None:
    # 0.1 has no exact mean in float32; the small rest over the small std is what verl's loop over groups gives too.
    for n in range(2, 40):
        rewards = torch.full((n,), constant)
        want = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        inputs = AdvantageInputs(
            token_level_reward=rewards.repeat(3)[:, None],
            mask=torch.ones(3 * n, 1),
            groups=groups.groups_of(group_id=torch.arange(3).repeat_interleave(n), kept=torch.ones(3 * n).bool()),
            settings=Algorithm(),
        )
        torch.testing.assert_close(ADVANTAGES["grpo"](inputs).advantage, want.repeat(3), rtol=1e-5, atol=1e-9)


def test_grpo_vectorized_has_the_mean_of_float32() -> None:
    made = ADVANTAGES["grpo_vectorized"](outcome([0.1, 0.1], [0, 0], settings=Algorithm(norm_by_std=False)))
    assert made.advantages.dtype == torch.float64
    assert made.advantage[0] == 0.1 - float(torch.tensor(0.1, dtype=torch.float32)) != 0.0


# Laws. Rewards are small whole numbers, so that sums are exact and only division rounds.
batches = st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4), st.integers(1, 5)), min_size=4, max_size=14).filter(
    lambda rows: all([group for group, _, _ in rows].count(number) != 1 for number in range(4))
)


def batch(rows: list[tuple[int, int, int]], **more: Any) -> AdvantageInputs:
    """Samples (group, reward, length), one token a step of the length, five at most."""
    lengths = torch.tensor([length for _, _, length in rows])
    mask = (torch.arange(5) < lengths[:, None]).double()
    return outcome([float(reward) for _, reward, _ in rows], [group for group, _, _ in rows], mask=mask, **more)


def close(made: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(made, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(deadline=None, max_examples=15)
@given(rows=batches, random=st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(name: str, rows: list[tuple[int, int, int]], random: Any) -> None:
    order = random.sample(range(len(rows)), len(rows))
    made = ADVANTAGES[name](batch(rows)).advantages
    close(ADVANTAGES[name](batch([rows[i] for i in order])).advantages, made[torch.tensor(order)])


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(deadline=None, max_examples=15)
@given(rows=batches, stray=st.sampled_from([-1e3, 0.0, 7.0]), where=st.integers(0, 3))
def test_a_dropped_sample_is_as_if_it_were_not_there(
    name: str, rows: list[tuple[int, int, int]], stray: float, where: int
) -> None:
    without = ADVANTAGES[name](batch(rows)).advantages
    inputs = batch([*rows, (where, 0, 3)], kept=[True] * len(rows) + [False])
    inputs.token_level_reward[-1, 0] = stray
    inputs.mask[-1] = 0
    made = ADVANTAGES[name](inputs).advantages
    assert float(made[-1].abs().max()) == 0.0
    close(made[:-1], without)


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(deadline=None, max_examples=15)
@given(rows=batches, random=st.randoms(use_true_random=False))
def test_tokens_of_the_environment_change_nothing(name: str, rows: list[tuple[int, int, int]], random: Any) -> None:
    inputs = batch(rows)
    places = torch.tensor(
        sorted(random.sample(range(8), 5))
    )  # the same five tokens with three of the environment between
    mask = torch.zeros(len(rows), 8, dtype=torch.float64).index_copy(1, places, inputs.mask)
    longer = outcome(inputs.token_level_reward.sum(-1), [group for group, _, _ in rows], mask=mask)
    made, want = ADVANTAGES[name](longer), ADVANTAGES[name](inputs)
    close(made.advantages[:, places], want.advantages)
    close(made.advantage, want.advantage)


@pytest.mark.parametrize("name", WHITENED)
@settings(deadline=None, max_examples=15)
@given(rows=batches)
def test_whitened_advantages_have_mean_0_and_variance_1(name: str, rows: list[tuple[int, int, int]]) -> None:
    inputs = batch(rows)
    tokens = ADVANTAGES[name](inputs).advantages[inputs.mask.bool()]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.var()) == pytest.approx(1, rel=1e-5) or float(tokens.abs().max()) < 1e-6


@settings(deadline=None, max_examples=50)
@given(rows=batches)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1_and_subtracts_the_mean_of_the_others(
    rows: list[tuple[int, int, int]],
) -> None:
    inputs = batch(rows)
    made, centred = ADVANTAGES["rloo"](inputs).advantage, ADVANTAGES["dr_grpo"](inputs).advantage
    for index, (group, reward, _) in enumerate(rows):
        others = [value for i, (number, value, _) in enumerate(rows) if number == group and i != index]
        n = len(others) + 1
        assert float(made[index]) == pytest.approx(reward - sum(others) / len(others), abs=1e-12)
        assert float(made[index]) == pytest.approx(float(centred[index]) * n / (n - 1), abs=1e-12)
    close(ADVANTAGES["rloo_vectorized"](inputs).advantage, made)


@pytest.mark.parametrize("name", PER_SAMPLE)
@pytest.mark.parametrize("unmasked", [0, 1])
def test_next_to_no_tokens_give_a_number(name: str, unmasked: int) -> None:
    mask = torch.zeros(4, 3)
    mask[0, :unmasked] = 1
    made: Estimate = ADVANTAGES[name](outcome([1.0, 0.0, 2.0, 1.0], [0, 0, 1, 1], mask=mask))
    assert made.advantages.isfinite().all() and made.advantage.isfinite().all()
    assert float(made.advantages[mask == 0].abs().max()) == 0.0
    if name in WHITENED:
        assert float(made.advantages.abs().max()) == 0.0  # one token has no variance


def test_the_reshapes_are_called_by_keyword_where_they_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    by_group, spread = groups.by_group, estimate.spread
    monkeypatch.setattr(groups, "by_group", lambda **given: seen.append(sorted(given)) or by_group(**given))
    monkeypatch.setattr(estimate, "spread", lambda **given: seen.append(sorted(given)) or spread(**given))
    for name in PER_SAMPLE:
        seen.clear()
        ADVANTAGES[name](outcome([1.0, 0.0], [0, 0]))
        assert seen == [["groups", "reward"], ["advantage", "mask"]], name


def test_passk_refuses_a_group_of_one_and_says_what_to_set() -> None:
    with pytest.raises(BadInput, match=r"grpo_passk .* a group here has 1; set rollout\.samples_per_prompt to 2"):
        ADVANTAGES["grpo_passk"](outcome([1.0, 0.0, 1.0], [0, 0, 1]))


def test_gdpo_refuses_weights_that_are_not_one_a_component() -> None:
    inputs = outcome([1.0, 0.0], [0, 0], reward_components=torch.ones(2, 3), component_weights=(1.0, 2.0))
    with pytest.raises(BadInput, match=r"gdpo has 3 reward components and 2 weights"):
        ADVANTAGES["gdpo"](inputs)
