"""Settings that were changed and that nothing reads are warned of, and no others."""

from typing import Any

import pytest

from flowledger.config.read import read
from flowledger.plan.checks import check

LOOP = ("data.task=chain_sum", "data.prompts_per_step=2")
REF = ("ref.path=start", "algorithm.kl_coef=0.1")


def warned(*settings: str, language: str = "en") -> list[str]:
    rows = check(read(None, (*LOOP, *settings)), None, None, language=language)
    return [row.message for row in rows if row.id == "flowledger.unread"]


@pytest.mark.parametrize(
    ("settings", "message", "read_by"),
    [
        (("gamma=0.9",), "algorithm.gamma = 0.9 has no effect with algorithm.advantage = grpo: gae", ("advantage=reinforce_plus_plus",)),
        (("norm_by_std=false", "advantage=rloo"), "algorithm.norm_by_std = false has no effect", ("advantage=grpo",)),
        (("clip_high=0.28", "policy_loss=sapo"), "clip_high = 0.28 has no effect with algorithm.policy_loss = sapo", ("policy_loss=vanilla",)),
        (("rollout_correction.high=5",), "importance = none: token, sequence read it", ("rollout_correction.importance=token",)),
        (("loss_scale_factor=8",), "loss_aggregation = token-mean", ("loss_aggregation=seq-mean-token-sum-norm",)),
        (("kl_target=0.2", *REF), "kl_control = fixed: adaptive", ("kl_control=adaptive",)),
    ],
)  # fmt: skip
def test_a_setting_that_no_chosen_algorithm_reads_is_named(
    settings: tuple[str, ...], message: str, read_by: tuple[str, ...]
) -> None:
    given, chosen = ([one if "." in one.split("=")[0] and not one.startswith("rollout_c") else f"algorithm.{one}" for one in ones]
                     for ones in (settings, read_by))  # fmt: skip
    (found,) = warned(*given)
    assert message in found
    assert warned(*given, *chosen) == []


@pytest.mark.parametrize("setting", ["kl_form=k2", "kl_in=reward"])
def test_kl_without_a_reference_is_named(setting: str) -> None:
    (found,) = warned(f"algorithm.{setting}")
    assert "without a reference policy; add `ref: {path: start}`" in found
    assert warned(f"algorithm.{setting}", *REF) == []


def test_a_default_that_is_written_out_and_what_a_rule_warns_of_are_not_named() -> None:
    assert warned("algorithm.gamma=1.0") == []
    assert warned("algorithm.rollout_correction.loss=reinforce") == []
    rows: Any = check(read(None, (*LOOP, "algorithm.rollout_correction.loss=reinforce")), None, None)
    assert [row.id for row in rows if row.verdict == "warn"] == ["flowledger.bypass_loss"]


def test_it_is_said_in_chinese_too() -> None:
    assert warned("algorithm.gamma=0.9", language="zh")[0].startswith(
        "algorithm.gamma = 0.9 在 algorithm.advantage = grpo 时不起作用"
    )
