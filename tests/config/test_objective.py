"""What the loop refuses of an algorithm before anything is loaded, each with the way out; and which passes it makes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config import passes
from flowledger.config.read import read
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.tables.algorithms import names, needs_of

TWO_STEPS = ("data.prompts_per_step=4", "actor.mini_batch_prompts=2")
PATH = "critic.path=start"


def made(*settings: str) -> RunConfig:
    return read(None, ("data.task=chain_sum", *settings))


def fault(*settings: str) -> str:
    with pytest.raises(BadInput) as caught:
        made(*settings)
    (line,) = str(caught.value).splitlines()
    return line.removeprefix("command line: ")


# (settings, what the message says, settings that mend it)
REFUSED: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    (
        ("algorithm.advantage=grop",),
        "algorithm.advantage = 'grop' is not one of gae, grpo",
        ("algorithm.advantage=grpo",),
    ),
    (("algorithm.advantage=ppo",), "; use gae", ("algorithm.advantage=gae", PATH)),
    (("algorithm.advantage=PPO",), "; use gae", ("algorithm.advantage=gae", PATH)),
    (("algorithm.advantage=Reinforce-Plus-Plus",), "; use reinforce_plus_plus", ("algorithm.advantage=rloo",)),
    (("algorithm.advantage=RLO",), "; did you mean rloo?", ("algorithm.advantage=rloo",)),
    (
        ("algorithm.rollout_correction.importance=TIS",),
        "should be 'none', 'token' or 'sequence'; use token",
        ("algorithm.rollout_correction.importance=token",),
    ),
    (
        ("actor.micro_batch.samples=4", "rollout.samples_per_prompt=1", "data.prompts_per_step=2"),
        "actor.micro_batch.samples = 4 exceeds the mini-batch of 2*1",
        ("actor.micro_batch.samples=2",),
    ),
    (("algorithm.policy_loss=gsp",), "; did you mean gspo?", ("algorithm.policy_loss=gspo",)),
    (("algorithm.advantage=GRPO",), "; ", ("algorithm.advantage=grpo",)),
    (("algorithm.policy_loss=ppo",), "; use vanilla", ("algorithm.policy_loss=vanilla",)),
    (("algorithm.policy_loss=reinforce",), "; use gpg", ("algorithm.policy_loss=gpg",)),
    (("algorithm.kl_form=k4",), "algorithm.kl_form = 'k4' is not one of k1", ("algorithm.kl_form=low_var_kl+",)),
    (("algorithm.advantage=gae",), "needs a critic, and there is none; add `critic: {path: start}`", (PATH,)),
    (
        (PATH,),
        "algorithm.advantage = 'grpo' uses no critic; remove it, or set algorithm.advantage = gae",
        ("critic=null",),
    ),
    (
        ("algorithm.advantage=gae", "critic.mini_batch_prompts=3"),
        "critic.mini_batch_prompts = 3 does not divide data.prompts_per_step = 4; use 2",
        ("critic.mini_batch_prompts=2",),
    ),
    (
        ("algorithm.advantage=grpo_passk", "rollout.samples_per_prompt=1"),
        "rollout.samples_per_prompt = 1: algorithm.advantage = 'grpo_passk' compares the best sample",
        ("rollout.samples_per_prompt=2",),
    ),
    (
        ("actor.old_log_prob=false", *TWO_STEPS),
        "a step has 2 optimizer steps, and the policy has moved before the second; leave it out",
        ("actor.old_log_prob=null",),
    ),
    (
        ("algorithm.advantage=gdpo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "ref.path=start"),
        "algorithm.advantage = 'gdpo' reads the reward's components, where the KL does not enter",
        ("algorithm.kl_in=loss",),
    ),
    (("actor.old_log_prob=false", "actor.epochs=3"), "a step has 3 optimizer steps", ("actor.epochs=1",)),
    (
        ("actor.old_log_prob=false", "algorithm.advantage=optimal_token_baseline"),
        "algorithm.advantage = 'optimal_token_baseline' reads old log-probs before the update; leave it out",
        ("actor.old_log_prob=null",),
    ),
    (
        ("actor.old_log_prob=false", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "ref.path=start"),
        "algorithm.kl_in = 'reward' reads old log-probs",
        ("algorithm.kl_in=loss",),
    ),
    (
        ("actor.old_log_prob=false", "algorithm.rollout_correction.importance=token"),
        "algorithm.rollout_correction reads old log-probs",
        ("actor.old_log_prob=true",),
    ),
    (
        ("actor.old_log_prob=true", "algorithm.policy_loss=bypass_mode"),
        "takes the rollout's log-probs for old ones; leave it out",
        ("actor.old_log_prob=false",),
    ),
    (
        ("algorithm.policy_loss=bypass_mode", "algorithm.advantage=optimal_token_baseline"),
        "'bypass_mode' makes none; set algorithm.policy_loss = vanilla",
        ("algorithm.policy_loss=vanilla",),
    ),
    (
        ("rollout.log_probs=false", "algorithm.policy_loss=bypass_mode"),
        "rollout.log_probs = false: algorithm.policy_loss = 'bypass_mode' needs the rollout's log-probs; set it to true",
        ("rollout.log_probs=true",),
    ),
    (
        ("rollout.log_probs=false", "algorithm.rollout_correction.rejections=[{kind: token_k1}]"),
        "algorithm.rollout_correction needs the rollout's log-probs",
        ("algorithm.rollout_correction.rejections=[]",),
    ),
    (
        ("algorithm.kl_control=adaptive",),
        "scales algorithm.kl_coef = 0.0, which stays 0; use 0.001",
        ("algorithm.kl_coef=0.001", "ref.path=start"),
    ),
    (("algorithm.kl_control=adaptive", "algorithm.kl_coef=0.1"), "needs a reference policy", ("ref.path=start",)),
    (
        ("algorithm.clip_cov_low=5",),
        "algorithm.clip_cov_low = 5.0 is not below algorithm.clip_cov_high = 5.0; use 4.0",
        ("algorithm.clip_cov_low=4",),
    ),
    (("rollout.max_turns=3",), "nobody answers a turn without rollout.environment", ("rollout.environment=m:f",)),
    (
        ("rollout.environment=m:f",),
        "is never asked with rollout.max_turns = 1; use 2 or more",
        ("rollout.max_turns=2",),
    ),
]


@pytest.mark.parametrize(("settings", "message", "way"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_what_cannot_be_is_refused_with_a_way_out_that_works(
    settings: tuple[str, ...], message: str, way: tuple[str, ...]
) -> None:
    assert message in fault(*settings)
    made(*settings, *way)


def test_a_fault_of_a_file_says_its_line(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {task: chain_sum}\nalgorithm:\n  kl_coef: 0.1\n  advantage: gae\n")
    with pytest.raises(BadInput, match=r"run\.yaml:4: algorithm\.advantage = 'gae' needs a critic"):
        read(file)


@pytest.mark.parametrize("estimator", names("advantage"))
@pytest.mark.parametrize("loss", names("policy_loss"))
def test_every_pair_of_the_table_is_accepted_with_what_it_needs(estimator: str, loss: str) -> None:
    needed = needs_of("advantage", estimator)
    settings = [f"algorithm.advantage={estimator}", f"algorithm.policy_loss={loss}"]
    settings += [PATH] if "critic" in needed else []
    if loss == passes.BYPASS and "sum_pi_squared" in needed:
        assert "bypass_mode" in fault(*settings)
    else:
        assert made(*settings).needs("critic") == ("critic" in needed)


def test_a_group_of_one_is_defined_for_all_but_pass_at_k() -> None:
    for estimator in names("advantage"):
        settings = [f"algorithm.advantage={estimator}", "rollout.samples_per_prompt=1"]
        settings += [PATH] if "critic" in needs_of("advantage", estimator) else []
        if estimator == "grpo_passk":
            assert "compares the best sample" in fault(*settings)
        else:
            made(*settings)


def test_a_foreign_framework_answers_for_its_own_settings() -> None:
    """Names and combinations that the loop refuses are read as they are: `flowledger check` has the framework's rules."""
    found = made(
        "framework=verl", "algorithm.advantage=mine", "algorithm.kl_form=full", "actor.old_log_prob=false", PATH
    )
    assert (found.algorithm.advantage, found.old_log_prob_pass) == ("mine", False)
    assert not found.needs("critic")
    assert made("framework=verl", "algorithm.advantage=remax").needs("baseline")
    assert made("framework=verl", "algorithm.policy_loss=mine").old_log_prob_pass


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), False),  # one optimizer step: the update's own log-probs are those of the policy that sampled
        (TWO_STEPS, True),
        (("actor.epochs=2",), True),
        (("actor.old_log_prob=true",), True),
        (("algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "ref.path=start"), True),
        (("algorithm.kl_coef=0.1", "ref.path=start"), False),
        (("algorithm.rollout_correction.importance=sequence",), True),
        (("algorithm.rollout_correction.rejections=[{kind: seq_max_k3}]",), True),
        (("algorithm.advantage=tir_optimal_token_baseline",), True),
        (("algorithm.policy_loss=bypass_mode", *TWO_STEPS), False),
        (
            ("algorithm.policy_loss=bypass_mode", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "ref.path=start"),
            False,
        ),
    ],
)
def test_old_log_probs_have_a_pass_only_where_nothing_else_gives_them(
    settings: tuple[str, ...], expected: bool
) -> None:
    assert made(*settings).old_log_prob_pass is expected


@given(prompts=st.integers(1, 12), mini=st.integers(1, 12), epochs=st.integers(1, 3))
def test_optimizer_steps_are_counted(prompts: int, mini: int, epochs: int) -> None:
    settings = (f"data.prompts_per_step={prompts}", f"actor.mini_batch_prompts={mini}", f"actor.epochs={epochs}")
    if prompts % mini:
        assert "does not divide" in fault(*settings, "actor.micro_batch.samples=1")
        return
    found = made(*settings, "actor.micro_batch.samples=1")
    steps = sum(1 for _ in range(epochs) for _ in range(0, prompts, mini))
    assert passes.updates_per_step(found) == steps
    assert found.old_log_prob_pass == (steps > 1)


def test_bounds_of_a_rejection_and_of_weights_are_in_order() -> None:
    correction = "algorithm.rollout_correction"
    assert "seq_max_k1" in fault(f"{correction}.rejections=[{{kind: seq_max_k1}}]")
    assert "has one bound" in fault(f"{correction}.rejections=[{{kind: token_k2, low: 0.5}}]")
    assert "use low = 0.5 or less" in fault(f"{correction}.rejections=[{{kind: token_k1, high: 0.5, low: 0.9}}]")
    assert "give `low` too" in fault(f"{correction}.rejections=[{{kind: token_k1, high: 0.5}}]")
    assert "use 2.0 or less" in fault(f"{correction}.low=3", f"{correction}.importance=token")


def test_a_default_micro_batch_takes_what_a_small_mini_batch_has() -> None:
    config = made("rollout.samples_per_prompt=1", "data.prompts_per_step=2")
    assert (config.actor.micro_batch.samples, config.mini_batch_samples) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "form"), [((), "k3"), (("kl_in=reward",), "k1"), (("kl_in=reward", "kl_form=k2"), "k2")]
)
def test_the_form_of_kl_is_verls_for_its_place_unless_it_is_given(settings: tuple[str, ...], form: str) -> None:
    assert made(*(f"algorithm.{one}" for one in settings)).algorithm.kl_estimator == form
