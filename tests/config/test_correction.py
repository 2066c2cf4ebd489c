"""Corrections of rollout log-probs, critics and turns as frameworks spell them, and what of a RunConfig they become.

Expected values are worked out by hand from each framework's loss: trl 1.16 grpo_trainer.py, openrlhf 0.11.2 models/loss.py,
slime megatron_utils/loss.py, areal 1.0.4 cli_args.py, nemo_rl loss_functions.py. verl's are in test_verl_correction.py.
"""

from pathlib import Path
from typing import Any

import pytest

from flowledger.config.algorithm import RolloutCorrection
from flowledger.config.correction import NO_HIGH, NO_LOW
from flowledger.config.trl import read as trl
from tests.config import test_areal as areal
from tests.config import test_nemo_rl as nemo_rl
from tests.config import test_openrlhf as openrlhf
from tests.config import test_slime as slime

Row = tuple[str, float, float | None]


def rows(correction: RolloutCorrection) -> list[Row]:
    return [(one.kind, one.high, one.low) for one in correction.rejections]


def weights(correction: RolloutCorrection) -> tuple[Any, ...]:
    return correction.importance, correction.high, correction.low


# --- TRL -------------------------------------------------------------------------------------------------------------
def of_trl(*overrides: str) -> Any:
    base = ("use_vllm=true", "max_completion_length=64", "vllm_max_model_length=128")
    return trl.read(None, (*base, *overrides), assume={"model.path": "tiny"}, version=None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), ("sequence", 3.0, NO_LOW)),  # the default: sequence_mask at 3
        (("vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_clip_max=2"), ("token", 2.0, None)),
        (("vllm_importance_sampling_mode=token_mask", "vllm_importance_sampling_clip_min=0.5"), ("token", 3.0, 0.5)),
        (("vllm_importance_sampling_cap=5",), ("sequence", 5.0, NO_LOW)),
        (("vllm_importance_sampling_correction=false",), ("none", 2.0, None)),
        (("use_vllm=false",), ("none", 2.0, None)),
    ],
)
def test_trls_correction_of_vllm(settings: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    assert weights(of_trl(*settings).config.algorithm.rollout_correction) == expected


def test_trls_cispo_bounds_the_weight_itself_and_sapo_has_two_temperatures() -> None:
    cispo = of_trl("loss_type=cispo", "epsilon_high=5.0").config.algorithm
    assert (cispo.policy_loss, 1 - cispo.clip_low, 1 + cispo.clip_high) == ("cispo", 0.0, 5.0)
    tight = of_trl("loss_type=cispo")  # epsilon_high follows epsilon = 0.2
    assert any("cuts every weight off at 0.2" in note for note in tight.notes)
    sapo = of_trl("loss_type=sapo", "sapo_temperature_pos=0.9").config.algorithm
    assert (sapo.sapo_tau_positive, sapo.sapo_tau_negative) == (0.9, 1.05)


def test_trls_tool_calls_make_one_turn_more() -> None:
    assert of_trl("max_tool_calling_iterations=3").config.rollout.max_turns == 4
    assert of_trl().config.rollout.max_turns == 1


# --- OpenRLHF --------------------------------------------------------------------------------------------------------
IS = "--algo.advantage.is_correction"
BASE = "--actor.model_name_or_path m --data.prompt_dataset d"


@pytest.mark.parametrize(
    ("flags", "version", "expected", "rejections"),
    [
        ("", None, ("none", 2.0, None), []),
        (f"{IS}_level token", None, ("token", 5.0, 0.5), []),  # its defaults: mask outside 0.5 and 5
        (f"{IS}_level token {IS}_threshold 3", None, ("token", 3.0, NO_LOW), []),
        (f"{IS}_level token {IS}_mode clip {IS}_threshold 0 4", None, ("token", 4.0, None), []),
        (f"{IS}_level seq {IS}_threshold 0.9 1.1", None, ("token", NO_HIGH, None), [("seq_mean_k1", 1.1, 0.9)]),
        (f"{IS}_level token {IS}_gating tv {IS}_threshold 0.1", None, ("token", NO_HIGH, None), []),
        (f"{IS}_level token --actor.policy_loss_type gspo", None, ("none", 2.0, None), []),
    ],
)
def test_openrlhfs_correction(
    flags: str, version: str | None, expected: tuple[Any, ...], rejections: list[Row], tmp_path: Path
) -> None:
    found = openrlhf.line(f"{BASE} {flags}", tmp_path, version).config.algorithm.rollout_correction
    assert (weights(found), rows(found)) == (expected, rejections)


def test_openrlhfs_truncation_from_below_and_other_gates_are_said_not_to_be_taken_over(tmp_path: Path) -> None:
    told = openrlhf.line(f"{BASE} {IS}_level token {IS}_mode clip {IS}_threshold 0.5 4", tmp_path)
    assert any("cut off at 0.5 from below" in note for note in told.notes)
    told = openrlhf.line(f"{BASE} {IS}_level seq {IS}_gating binary_kl {IS}_threshold 0.1", tmp_path)
    assert any("binary_kl: this rejection is not taken over" in note for note in told.notes)


def test_openrlhfs_critic_discount_and_adaptive_kl(tmp_path: Path) -> None:
    flags = "--algo.advantage.estimator gae --algo.advantage.gamma 0.9 --algo.advantage.lambd 0.8 --algo.kl.target 0.2"
    flags += " --critic.value_clip 0.3 --critic.max_norm 2 --critic.freezing_steps 4 --critic.model_name_or_path c"
    found = openrlhf.line(f"{BASE} {flags}", tmp_path).config
    assert (found.algorithm.gamma, found.algorithm.lam) == (0.9, 0.8)
    assert (found.algorithm.kl_control, found.algorithm.kl_target, found.algorithm.kl_horizon) == (
        "adaptive",
        0.2,
        10000,
    )
    assert found.critic is not None and (found.critic.clip_value, found.critic.grad_clip) == (0.3, 2.0)
    assert found.policy_starts == 5  # `global_steps > freezing_steps`, counted from 0


# --- slime -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ("none", 2.0, None)), ("--use-tis", ("token", 2.0, None)), ("--use-tis --tis-clip 3", ("token", 3.0, None)),
        ("--use-tis --tis-clip 4 --tis-clip-low 0.25 --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function",
         ("token", 4.0, 0.25)),
    ],
)  # fmt: skip
def test_slimes_truncated_weights(flags: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    assert weights(slime.line(f"{slime.SIZES} {flags}", tmp_path).config.algorithm.rollout_correction) == expected


def test_slimes_critic(tmp_path: Path) -> None:
    flags = "--advantage-estimator ppo --gamma 0.9 --lambd 0.8 --num-critic-only-steps 7"
    found = slime.line(f"{slime.SIZES} {flags}", tmp_path).config
    assert (found.algorithm.gamma, found.algorithm.lam, found.policy_starts) == (0.9, 0.8, 7)
    assert found.critic is not None and found.critic.clip_value == 0.2


# --- AReaL and NeMo-RL -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "expected", "rejections"),
    [
        ((), ("token", NO_HIGH, None), []),
        (("level=token", "action=clamp", "upper=3"), ("token", 3.0, None), []),
        (("level=token", "action=mask", "upper=4", "lower=0.25"), ("token", NO_HIGH, None), [("token_k1", 4.0, 0.25)]),
        (("metric=kl_k3", "upper=0.7"), ("token", NO_HIGH, None), [("token_k3", 0.7, None)]),
        (("level=sequence", "agg=max", "metric=kl_k2", "upper=2"), ("token", NO_HIGH, None), [("seq_max_k2", 2.0, None)]),
        (("level=sequence", "action=clamp", "upper=2"), ("token", NO_HIGH, None), []),  # no counterpart; a note says so
    ],
)  # fmt: skip
def test_areals_decoupled_loss_weights_tokens(
    settings: tuple[str, ...], expected: tuple[Any, ...], rejections: list[Row]
) -> None:
    overrides = ["actor.use_decoupled_loss=true", *(f"+actor.rejection_sampling.{text}" for text in settings)]
    told = areal.read("fsdp", *overrides)
    found = told.config.algorithm.rollout_correction
    assert (weights(found), rows(found)) == (expected, rejections)
    assert any("not taken over" in note for note in told.notes) == ("action=clamp" in settings and found.high != 3.0)
    assert not areal.read("fsdp", "actor.use_decoupled_loss=false").config.algorithm.rollout_correction.active


@pytest.mark.parametrize(
    ("settings", "expected", "rejections"),
    [
        (("use_importance_sampling_correction=false",), ("none", 2.0, None), []),
        ((), ("token", NO_HIGH, None), []),
        (("truncated_importance_sampling_ratio=3",), ("token", 3.0, None), []),
        (("truncated_importance_sampling_ratio=3", "sequence_level_importance_ratios=true"), ("sequence", 3.0, None), []),
        (
            ("truncated_importance_sampling_ratio=5", "+truncated_importance_sampling_ratio_min=0.5",
             "+truncated_importance_sampling_type=icepop"), ("token", 5.0, 0.5), [],
        ),
        (
            ("truncated_importance_sampling_ratio=1.002", "+truncated_importance_sampling_ratio_min=0.999",
             "+truncated_importance_sampling_type=seq-mask-tis"), ("token", NO_HIGH, None), [("seq_mean_k1", 1.002, 0.999)],
        ),
    ],
)  # fmt: skip
def test_nemos_correction(settings: tuple[str, ...], expected: tuple[Any, ...], rejections: list[Row]) -> None:
    switch = "use_importance_sampling_correction=true"
    overrides = [f"{text[0] if text[0] == '+' else ''}loss_fn.{text.lstrip('+')}" for text in (switch, *settings)]
    found = nemo_rl.read("dense", *overrides).config.algorithm.rollout_correction
    assert (weights(found), rows(found)) == (expected, rejections)


def test_nemos_turns() -> None:
    assert nemo_rl.read("dense", "grpo.max_rollout_turns=6").config.rollout.max_turns == 6
