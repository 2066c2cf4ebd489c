"""GRPO's advantage against verl's, by hand, and by what must not matter."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flowledger.config.schema import Algorithm
from flowledger.run.advantages import ADVANTAGES, AdvantageInputs, by_group

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "verl_golden.npz")
GROUPS = (4, 4, 3, 1)  # sizes of the groups in the vectors


def full_groups(rows: torch.Tensor) -> torch.Tensor:
    """The vectors' uneven groups as groups of 4: what is missing becomes a sample without tokens."""
    parts = [torch.cat([part, part.new_zeros(4 - len(part), part.shape[1])]) for part in rows.split(GROUPS)]
    return torch.cat(parts)


@pytest.mark.parametrize("case", ["base_f32", "multiturn_f32"])
@pytest.mark.parametrize("norm", [True, False])
def test_grpo_equals_verls_with_uneven_groups_and_a_group_of_one(case: str, norm: bool) -> None:
    reward = torch.from_numpy(GOLDEN[f"{case}/in/token_level_rewards"])
    mask = torch.from_numpy(GOLDEN[f"{case}/in/response_mask"])
    made = ADVANTAGES["grpo"](
        AdvantageInputs(
            token_level_reward=full_groups(reward),
            mask=full_groups(mask),
            group_size=4,
            settings=Algorithm(norm_by_std=norm),
        )
    )
    want = full_groups(torch.from_numpy(GOLDEN[f"{case}/adv/grpo/norm={norm}"]))
    torch.testing.assert_close(made.advantages, want.to(made.advantages.dtype), rtol=1e-5, atol=1e-6)


def test_grpo_by_hand() -> None:
    # rewards 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735.
    reward = torch.zeros(4, 2)
    reward[0, 1] = reward[3, 1] = 1.0
    made = ADVANTAGES["grpo"](
        AdvantageInputs(token_level_reward=reward, mask=torch.ones(4, 2), group_size=4, settings=Algorithm())
    )
    torch.testing.assert_close(
        made.advantage, torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.5 / (0.57735 + 1e-6), rtol=1e-5, atol=0
    )
    assert torch.equal(made.advantages, made.advantage[:, None].expand(4, 2))


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    reward = torch.full((4, 3), 0.25)
    made = ADVANTAGES["grpo"](
        AdvantageInputs(token_level_reward=reward, mask=torch.ones(4, 3), group_size=4, settings=Algorithm())
    )
    assert float(made.advantages.abs().max()) == 0.0


def test_a_dropped_sample_changes_nothing_for_its_group_whatever_its_reward() -> None:
    mask = torch.ones(4, 2)
    mask[2] = 0
    results = []
    for stray in (0.0, 100.0):
        reward = torch.tensor([[1.0, 0.0], [0.0, 0.0], [stray, 0.0], [0.5, 0.0]])
        results.append(
            ADVANTAGES["grpo"](
                AdvantageInputs(token_level_reward=reward, mask=mask, group_size=4, settings=Algorithm())
            ).advantages
        )
    assert torch.equal(*results)
    assert float(results[0][2].abs().max()) == 0.0


def test_groups_are_rows_in_the_order_of_samples() -> None:
    assert by_group(reward=torch.arange(6.0), group_size=3).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
