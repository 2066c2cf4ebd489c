"""verl's rollout correction, bypass mode, losses, critic and turns, and what of a RunConfig they become.

Expected values are worked out by hand from verl 0.9.1: trainer/ppo/{rollout_corr_helper,core_algos,ray_trainer}.py,
trainer/ppo/v1/trainer_base.py, experimental/agent_loop/tool_agent_loop.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.algorithm import REJECTIONS, RolloutCorrection
from flowledger.flow.errors import BadInput
from flowledger.plan.checks import check
from tests.config.test_correction import Row, rows, weights
from tests.config.test_verl_read import ACTOR, FULLY, GRPO, NAME, ONE_STEP, ROLLOUT, config, reading

SECTION, LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss"
V0 = "trainer.use_v1=false"


def test_verl_corrects_nothing_by_default() -> None:
    found = config(*GRPO)
    assert found.algorithm.rollout_correction == RolloutCorrection() and not found.algorithm.rollout_correction.active
    assert found.old_log_prob_pass and found.algorithm.policy_loss == "vanilla"


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("2.0", (2.0, None)), ("3", (3.0, None)), ("'0.5_5.0'", (5.0, 0.5)), ("0.2_4.0", (4.0, 0.2)), ("'0.2_4'", (4.0, 0.2)),
        ("0.2_4", (0.24, None)),  # Hydra reads an underscore between digits as one number, and verl gets that
    ],
)  # fmt: skip
def test_verls_threshold_of_weights_is_a_number_or_a_band(bounds: str, expected: tuple[float, float | None]) -> None:
    found = config(*GRPO, f"{SECTION}.rollout_is=token", f"{SECTION}.rollout_is_threshold={bounds}")
    assert weights(found.algorithm.rollout_correction) == ("token", *expected)
    assert "rollout_is_threshold@run.sh:4" in found.source_of(f"{SECTION}.high")


def test_verls_weights_of_sequences_divided_by_their_mean() -> None:
    settings = (f"{SECTION}.rollout_is=sequence", f"{SECTION}.rollout_is_batch_normalize=true")
    found = config(*GRPO, *settings).algorithm.rollout_correction
    assert (*weights(found), found.normalize) == ("sequence", 2.0, None, True)


@pytest.mark.parametrize(
    ("kinds", "bounds", "expected"),
    [
        ("token_k1", "2.0", [("token_k1", 2.0, None)]),  # low is 1 / high
        ("seq_mean_k1", "0.999_1.001", [("seq_mean_k1", 1.001, 0.999)]),
        ("'token_k1,seq_max_k2'", "'0.6_1.6,2.5'", [("token_k1", 1.6, 0.6), ("seq_max_k2", 2.5, None)]),
        ("'token_k2,seq_sum_k3'", "0.01", [("token_k2", 0.01, None), ("seq_sum_k3", 0.01, None)]),  # one for both
        ("'token_k3, token_k3'", "1.5", [("token_k3", 1.5, None)]),  # named twice
    ],
)
def test_verls_rejections_have_one_bound_each_or_one_for_all(kinds: str, bounds: str, expected: list[Row]) -> None:
    found = config(*GRPO, f"{SECTION}.rollout_rs={kinds}", f"{SECTION}.rollout_rs_threshold={bounds}")
    assert rows(found.algorithm.rollout_correction) == expected
    assert found.algorithm.rollout_correction.importance == "none"


@given(st.lists(st.sampled_from(REJECTIONS), min_size=1, unique=True), st.floats(1, 100))
def test_each_of_verls_rejections_is_read_by_its_name(kinds: list[str], high: float) -> None:
    settings = (f"{SECTION}.rollout_rs='{','.join(kinds)}'", f"{SECTION}.rollout_rs_threshold={high!r}")
    assert rows(config(*GRPO, *settings).algorithm.rollout_correction) == [(kind, high, None) for kind in kinds]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("rollout_rs=seq_max_k1", "rollout_rs_threshold=2.0"), "seq_max_k1 is no rejection of verl"),
        (("rollout_rs=geometric", "rollout_rs_threshold=2.0"), "rollout_rs = geometric: geometric is no rejection"),
        (("rollout_rs='token_k1,token_k2,token_k3'", "rollout_rs_threshold='1,2'"), "one for each of the 3"),
        (("rollout_rs=token_k1", "rollout_rs_threshold=abc"), "'abc' should be a number, or two as `low_high`"),
        (("rollout_is=token", "rollout_is_threshold='5.0_0.5'"), "low = 5.0 is above high = 0.5"),
        (("rollout_is=word",), "importance = 'word' should be 'none', 'token' or 'sequence'"),
        (("rollout_rs=token_k2", "rollout_rs_threshold='0.5_2.0'"), "has one bound"),
    ],
)
def test_what_verl_would_refuse_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        config(*GRPO, *(f"{SECTION}.{text}" for text in settings))
    assert message in str(caught.value) and SECTION in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "module"), [((V0,), "verl.trainer.main_ppo"), ((), ONE_STEP), ((), FULLY)]
)  # fmt: skip
def test_verls_bypass_mode_changes_the_loss_in_v0_and_its_children(settings: tuple[str, ...], module: str) -> None:
    """The asynchronous recipes bypass by default."""
    asked = () if module in (ONE_STEP, FULLY) else (f"{SECTION}.bypass_mode=true",)
    told = (f"{SECTION}.loss_type=reinforce", f"{SECTION}.rollout_is=sequence")
    found = config(*GRPO, *settings, *asked, *told, module=module)
    assert (found.algorithm.policy_loss, found.old_log_prob_pass, found.bypasses) == ("bypass_mode", False, True)
    correction = found.algorithm.rollout_correction
    assert (correction.loss, correction.importance) == ("reinforce", "sequence")
    recomputed = config(*GRPO, *settings, f"{SECTION}.bypass_mode=false", module=module)
    assert (recomputed.algorithm.policy_loss, recomputed.old_log_prob_pass) == ("vanilla", True)


def test_verls_bypass_mode_leaves_the_loss_of_v1_as_it_is_and_says_so() -> None:
    told = reading(*GRPO, f"{SECTION}.bypass_mode=true", f"{SECTION}.rollout_is=token")
    found = told.config
    assert (found.algorithm.policy_loss, found.old_log_prob_pass) == ("vanilla", False)
    assert not found.algorithm.rollout_correction.active
    assert any("bypass_mode@run.sh:3" in note and "neither changes the policy loss" in note for note in told.notes)


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        ("sapo", (f"{ACTOR}.tau_pos=0.7", f"{ACTOR}.tau_neg=1.3"), {"sapo_tau_positive": 0.7, "sapo_tau_negative": 1.3}),
        (
            "clip_cov",
            (f"{LOSS}.clip_cov_ratio=0.01", f"{LOSS}.clip_cov_lb=0.5", f"{LOSS}.clip_cov_ub=7"),
            {"clip_cov_ratio": 0.01, "clip_cov_low": 0.5, "clip_cov_high": 7.0},
        ),
        ("kl_cov", (f"{LOSS}.kl_cov_ratio=0.03",), {"kl_cov_ratio": 0.03, "kl_cov_coef": 0.1}),
        ("dro", (f"+{LOSS}.dro_beta=0.4",), {"dro_beta": 0.4}),
    ],
)  # fmt: skip
def test_verls_losses_bring_their_own_settings_and_no_others(
    loss: str, settings: tuple[str, ...], expected: dict[str, float]
) -> None:
    found = config(*GRPO, f"{LOSS}.loss_mode={loss}", *settings).algorithm
    assert {key: getattr(found, key) for key in expected} == expected
    other = reading(*GRPO, *settings)
    assert all(getattr(other.config.algorithm, key) == getattr(type(found)(), key) for key in expected)
    assert len(other.ignored) == (
        0 if loss == "dro" else len(settings)
    )  # vanilla does not look at them; a check at dro's


def test_verls_discount_kl_control_and_critic() -> None:
    found = config(
        NAME, "algorithm.gamma=0.99", "algorithm.lam=0.95", "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.05", "algorithm.kl_ctrl.horizon=5000",
        "critic.cliprange_value=0.3", "critic.optim.clip_grad=0.7", "trainer.critic_warmup=10",
    )  # fmt: skip
    algorithm, critic = found.algorithm, found.critic
    assert (algorithm.gamma, algorithm.lam) == (0.99, 0.95)
    assert (algorithm.kl_control, algorithm.kl_target, algorithm.kl_horizon) == ("adaptive", 0.05, 5000)
    assert critic is not None and (critic.clip_value, critic.grad_clip) == (0.3, 0.7)
    assert found.policy_starts == 9  # verl counts from 1: in its steps 1 to 9 only the critic learns


def test_verls_kl_in_the_loss_has_a_fixed_coefficient() -> None:
    found = config(*GRPO, f"{ACTOR}.use_kl_loss=true", "algorithm.kl_ctrl.type=adaptive").algorithm
    assert (found.kl_in, found.kl_control) == ("loss", "fixed")


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (("max_assistant_turns=5",), 5), (("max_user_turns=3",), 4), (("max_assistant_turns=5", "max_user_turns=2"), 3),
        (("max_assistant_turns=0",), 1), ((), 1),
    ],
)  # fmt: skip
def test_verls_turns_end_at_the_first_limit(limits: tuple[str, ...], turns: int) -> None:
    section = f"{ROLLOUT}.multi_turn"
    told = reading(*GRPO, f"{section}.enable=true", *(f"{section}.{limit}" for limit in limits))
    assert told.config.rollout.max_turns == turns
    assert any("no limit of turns" in note for note in told.notes) == (turns == 1)
    assert config(*GRPO, *(f"{section}.{limit}" for limit in limits)).rollout.max_turns == 1  # not enabled


@pytest.mark.parametrize(
    ("rule", "broken", "mended"),
    [
        ("verl.K5", (f"{LOSS}.loss_mode=dro",), (f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.1")),
        ("verl.K6", (f"{SECTION}.rollout_rs=token_k1",), (f"{SECTION}.rollout_rs=token_k1", f"{SECTION}.rollout_rs_threshold=2.0")),
        ("verl.K7", ("algorithm.adv_estimator=grpo_passk",), ("algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n=2")),
        (
            "verl.K8",
            (f"{SECTION}.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"),
            (f"{SECTION}.rollout_is=token",),
        ),
        ("verl.K9", ("trainer.critic_warmup=1",), ("trainer.critic_warmup=2",)),
    ],
)  # fmt: skip
def test_verls_demands_are_findings(rule: str, broken: tuple[str, ...], mended: tuple[str, ...]) -> None:
    def verdict(settings: tuple[str, ...]) -> str:
        return next(row.verdict for row in check(config(*GRPO, *settings), None, None) if row.id == rule)

    assert verdict(broken) == ("warn" if rule == "verl.K9" else "fail")
    assert verdict(mended) == "pass"
