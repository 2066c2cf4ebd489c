"""Alarms fire on what they are there for, at the step it happens, and on nothing else."""

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.diagnose.alarms import rules
from flowledger.diagnose.alarms.evaluation import Evaluation
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.numbers import Numbers
from flowledger.diagnose.alarms.numbers import numbers as number_rows
from flowledger.flow.errors import BadInput
from tests.diagnose.alarm_stories import HEALTHY, fired, judged, numbers, rule

STEPS = 14
SICK = 8  # from this step on, unless a case says otherwise

RISING_REWARD = {step: 0.4 + 0.001 * step for step in range(STEPS)}


def from_(value: float, step: int = SICK) -> dict[int, float]:
    return {step: value}


# alarm -> (what changes, of ranks, facts, step at which it must fire)
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any], Facts, int]] = {
    "shape_checksum": ({"shape_checksums_differ": from_(2)}, {}, Facts(), 8),
    "loss_not_finite": ({"policy_loss": from_(math.nan)}, {}, Facts(), 8),
    "metric_not_finite": ({"metrics_not_finite": from_(1)}, {}, Facts(), 8),
    "rollout_gap_high": ({"rollout_gap/mean": from_(0.002)}, {}, Facts(config={"model": {"dtype": "float32"}}), 0),
    "stale_weights": ({"policy_lag": from_(2)}, {}, Facts(), 8),
    "ranks_disagree": ({}, {"grad_norm": {SICK: (0.4, 0.4, 0.41, 0.4)}}, Facts(), 8),
    "ref_kl_negative": ({"ref_kl": from_(-0.2)}, {}, Facts(), 9),
    "instability": ({"ref_kl": from_(0.09), "grad_norm": from_(0.9), "entropy": from_(1.7)}, {}, Facts(), 8),
    "kl_explosion": ({"ref_kl": from_(0.7)}, {}, Facts(), 8),
    "policy_kl_high": ({"policy_kl": from_(0.2)}, {}, Facts(), 8),
    "entropy_collapse": ({"entropy": from_(0.2)}, {}, Facts(), 9),
    "entropy_explosion": ({"entropy": from_(2.5)}, {}, Facts(), 9),
    "grad_norm_spike": ({"grad_norm": from_(4.0)}, {}, Facts(), 8),
    "critic_grad_norm_spike": ({"critic_grad_norm": from_(40.0)}, {}, Facts(), 8),
    "dead_gradient": ({"grad_norm": from_(0.0)}, {}, Facts(), 9),
    "value_loss_spike": ({"value_loss": from_(9.0)}, {}, Facts(), 8),
    "clip_ratio_high": ({"clip_ratio": from_(0.5)}, {}, Facts(), 9),
    "dual_clip_high": ({"clip_ratio/dual": from_(0.2)}, {}, Facts(), 10),
    "ratio_extreme": ({"ratio/max": from_(1e4)}, {}, Facts(), 9),
    "update_too_large": ({"update_ratio": from_(0.01)}, {}, Facts(), 8),
    "lr_jump": ({"lr": from_(1e-5)}, {}, Facts(config={"optim": {"lr": 1e-6}}), 8),
    "effective_sample_size_low": ({"rollout_correction/effective_sample_size": from_(0.1)}, {}, Facts(), 9),
    "rejected_high": ({"rollout_correction/rejected_samples": from_(0.95), "rollout_correction/rejected_tokens": from_(0.6)}, {}, Facts(), 9),
    "reward_stuck": ({"reward/std": from_(0.0)}, {}, Facts(), 9),
    "zero_variance_groups_high": ({"zero_variance_groups": from_(0.9)}, {}, Facts(), 9),
    "advantage_zero": ({"advantage/std": from_(0.0)}, {}, Facts(), 9),
    "reward_drop": ({"reward/mean": from_(-0.4)}, {}, Facts(), 10),
    "length_hacking": ({"reward/mean": from_(0.9), "response_length/mean": from_(1500)}, {}, Facts(), 8),
    "reward_follows_length": ({"reward_by_length": from_(0.97)}, {}, Facts(), 9),
    "truncation_high": ({"truncation_ratio": from_(0.7)}, {}, Facts(sizes={"V": 150_000}), 9),
    "abort_ratio_high": ({"abort_ratio": from_(0.2)}, {}, Facts(), 9),
    "dropped_high": ({"dropped_ratio": from_(0.8)}, {}, Facts(), 9),
    "no_samples_left": ({"dropped_ratio": from_(1.0)}, {}, Facts(), 8),
    "response_length_collapse": ({"response_length/mean": from_(100)}, {}, Facts(), 9),
    "response_length_explosion": ({"response_length/mean": from_(1900)}, {}, Facts(), 9),
    "one_long_sample": ({"response_length/max": from_(8000)}, {}, Facts(), 8),
    "slow_stage": ({"stage_time_s/reward": from_(40), "step_time_s": from_(98)}, {}, Facts(), 9),
    "throughput_drop": ({"tokens_per_s": from_(8000)}, {}, Facts(), 10),
    "queue_growing": ({"rollout/waiting": {step: 4 + 4 * (step - 7) for step in range(8, STEPS)}}, {}, Facts(), 12),
    "kv_cache_full": ({"rollout/kv_blocks_used": from_(990)}, {}, Facts(), 9),
    "preemptions_high": ({"rollout/preemptions": from_(60)}, {}, Facts(sizes={"B": 512}), 9),
    "rank_silent": ({}, {"silent_s": {SICK: (0.0, 0.0, 400.0, 0.0)}}, Facts(), 8),
    "load_imbalance_tokens": ({}, {"trained_tokens": {SICK: (1000.0, 3000.0, 900.0, 900.0)}}, Facts(), 9),
    "load_imbalance_time": ({}, {"busy_time_s": {SICK: (50.0, 51.0, 130.0, 50.0)}}, Facts(), 9),
    "oom_near": ({"memory_reserved": from_(77e9), "memory_fragmentation": from_(0.18)}, {}, Facts(), 8),
    "memory_nearly_full": ({"memory_allocated": from_(78e9)}, {}, Facts(), 9),
    "memory_above_plan": ({"memory_allocated": from_(60e9)}, {}, Facts(planned={"memory_allocated": 41e9}), 9),
    "memory_grows": ({"memory_kept": {s: 30e9 + 1e9 * (s - 7) for s in range(8, STEPS)}}, {}, Facts(), 10),
    "memory_grows_per_micro_batch": ({"memory_kept_per_micro_batch": from_(0.98)}, {}, Facts(), 9),
    "fragmentation_high": ({"memory_fragmentation": from_(0.35)}, {}, Facts(), 9),
}  # fmt: skip
LONG: Mapping[str, tuple[int, dict[str, Any], int]] = {  # alarms that need many steps
    "critic_does_harm": (60, {"explained_variance": from_(-0.5, 30)}, 49),
    "step_time_drift": (40, {"step_time_s": from_(120, 20)}, 26),  # the median of five is slow from step 22 on, and that for five
    "host_memory_grows": (40, {"host_memory": {step: 100e9 + 2e9 * (step - 20) for step in range(21, 40)}}, 30),
}  # fmt: skip


def test_every_alarm_has_a_case_here() -> None:
    assert {one.id for one in rules.built_in()} == CASES.keys() | LONG.keys()


@pytest.mark.parametrize("name", LONG)
def test_slow_alarms_too(name: str) -> None:
    steps, changes, step = LONG[name]
    assert fired(judged(numbers(steps, changes))).get(name) == step


COMPANIONS = {  # what may fire together with a case, since it is the same event
    "ref_kl_negative": {"instability"}, "kl_explosion": {"instability"}, "no_samples_left": {"dropped_high"},
    "response_length_explosion": {"length_hacking"}, "oom_near": {"memory_nearly_full"}, "dead_gradient": {"instability"},
    "instability": {"entropy_explosion", "kl_explosion", "grad_norm_spike"}, "slow_stage": {"throughput_drop"},
    "memory_nearly_full": {"memory_above_plan"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_fires_at_the_step_by_hand_says_what_it_saw_and_is_alone(name: str) -> None:
    changes, of_ranks, facts, step = CASES[name]
    evaluation = judged(numbers(STEPS, changes, of_ranks), facts)
    found = fired(evaluation)
    assert found.pop(name, None) == step
    assert found.keys() <= COMPANIONS.get(name, set())
    (course, *_) = [one for one in evaluation.courses if one.rule.id == name and one.firings]
    firing = course.firings[0]
    assert firing.evidence
    for sentence in firing.message.values():
        assert not any(sign in sentence for sign in ("{", "?", "<stage>"))


# ----------------------------------------------------------------------------------------------------------- silence


@pytest.mark.parametrize("warm_up", [2, 12])
def test_the_first_updates_after_a_critic_warmed_up_alone_are_none_too_large(warm_up: int) -> None:
    moved = [0.0] * warm_up + [0.12, 0.08, 0.1, 0.09, 0.1]
    quiet = judged(numbers(len(moved), {"update_ratio": moved}))
    assert "update_too_large" not in fired(quiet)
    loud = judged(numbers(len(moved) + 1, {"update_ratio": [*moved, 2.0]}))
    assert fired(loud)["update_too_large"] == len(moved)


healthy = st.sampled_from(sorted(HEALTHY))


def test_a_healthy_run_is_silent_and_nearly_every_alarm_has_judged_it() -> None:
    evaluation = judged(numbers(40), Facts(sizes={"V": 150_000, "B": 512}, planned={"memory_allocated": 45e9}))
    assert fired(evaluation) == {}
    assert [one.rule.id for one in evaluation.courses if not one.known] == []


@settings(max_examples=12, deadline=None)
@given(
    scales=st.lists(st.floats(0.96, 1.04), min_size=12, max_size=12),
    names=st.lists(healthy, min_size=1, max_size=8, unique=True),
)
def test_small_noise_on_any_numbers_fires_nothing(scales: list[float], names: list[str]) -> None:
    noisy = {
        name: [HEALTHY[name] * scale for scale in scales] for name in names if name not in ("lr", "metrics_not_finite")
    }
    assert fired(judged(numbers(12, noisy))) == {}


@settings(max_examples=60, deadline=None)
@given(level=st.floats(1e-3, 50), noise=st.floats(0, 0.2), k=st.floats(8.1, 1000), at=st.integers(5, 12))
def test_a_step_of_many_spreads_fires_at_once_and_constant_numbers_never(
    level: float, noise: float, k: float, at: int
) -> None:
    """The law of thresholds from history, on a rule that says just that."""
    course = [level * (1 + noise * (-1) ** step) for step in range(at)]
    middle = statistics.median(course[1:])
    spread = max(1.4826 * statistics.median([abs(one - middle) for one in course[1:]]), 0.1 * middle)
    mine = rule("grad_norm > bound", thresholds={"bound": {"history": "usual(grad_norm) + 8 * spread(grad_norm)"}})
    assert fired(judged(_only("grad_norm", [*course, middle + k * spread]), chosen=[mine])) == {"mine": at}
    assert fired(judged(_only("grad_norm", [level] * 30), chosen=[mine])) == {}


def _only(name: str, course: list[float]) -> Numbers:
    return Numbers(job={name: dict(enumerate(course))})


QUIET: Mapping[str, tuple[dict[str, Any], Facts]] = {
    "β = 0: the KL is 0 and that is right": ({"ref_kl": 0.0, "kl_loss": 0.0}, Facts()),
    "no reference: no KL at all": ({"ref_kl": [None], "kl_loss": [None]}, Facts()),
    "learning-rate warm-up from 0": ({"lr": [1e-6 * step / 10 for step in range(STEPS)]}, Facts()),
    "critic warm-up: the policy has no gradient yet": ({"grad_norm": [None] * 6 + [0.4], "policy_loss": [None] * 6 + [0.01], "lr": [0.0] * 6 + [1e-6]}, Facts()),
    "validation every fourth step takes long": (
        {"step_time_s": [60.0 + 200 * (s % 4 == 0) for s in range(40)], "stage_time_s/validate": [200.0 * (s % 4 == 0) for s in range(40)],
         "tokens_per_s": [20_000.0 / (1 + 3.3 * (s % 4 == 0)) for s in range(40)]}, Facts()),
    "the first step compiles": ({"step_time_s": [400.0, 90.0, 60.0], "tokens_per_s": [3000.0, 13000.0, 20000.0], "stage_time_s/rollout": [300.0, 60.0, 30.0]}, Facts()),
    "one spike of the time": ({"step_time_s": {8: 300.0, 9: 60.0}, "stage_time_s/rollout": {8: 270.0, 9: 30.0}, "tokens_per_s": {8: 4000.0, 9: 20000.0}}, Facts()),
    "entropy falls while the reward rises: it converges": (
        {"entropy": [0.8 * 0.8**s for s in range(12)], "reward/mean": [0.1 + 0.05 * s for s in range(12)]}, Facts()),
    "a model with random weights never ends": ({"truncation_ratio": 1.0, "entropy": 5.55}, Facts(sizes={"V": 264})),
    "top_p cuts the distribution on one side": ({"rollout_gap/mean": 0.3}, Facts(config={"rollout": {"top_p": 0.9}})),
    "asynchronous: one step behind is allowed": ({"policy_lag": 3.0, "rollout_gap/mean": 0.1}, Facts(config={"async": {"max_staleness": 4}, "model": {"dtype": "bfloat16"}})),
    "gspo clips sequences": ({"clip_ratio": 0.6}, Facts(config={"algorithm": {"policy_loss": "gspo"}})),
    "k1 is below 0 by chance": ({"ref_kl": -0.2}, Facts(config={"algorithm": {"kl_form": "k1"}})),
    "a fresh critic is wrong": ({"explained_variance": [-3.0] * 15 + [0.1]}, Facts()),
    "memory grows for the first steps, then stays": ({"memory_kept": [10e9, 28e9, 29e9, 30e9]}, Facts()),
    "responses grow slowly with the reward": ({"response_length/mean": [900 + 15.0 * s for s in range(STEPS)], "reward/mean": [0.3 + 0.01 * s for s in range(STEPS)]}, Facts()),
    "reserved by an engine from the start": ({"memory_reserved": 76e9, "memory_limit": 80e9}, Facts()),
    "only level steps: no memory, no tensors, no samples": ({name: [None] for name in HEALTHY if name.startswith(("memory", "shape", "reward_by", "policy_lag"))}, Facts()),
}  # fmt: skip


@pytest.mark.parametrize("story", QUIET)
def test_silent_where_nothing_is_wrong(story: str) -> None:
    changes, facts = QUIET[story]
    steps = max([STEPS, *(len(one) for one in changes.values() if isinstance(one, list))])
    assert fired(judged(numbers(steps, changes), facts)) == {}


def test_a_single_rank_is_compared_with_nobody() -> None:
    told = numbers(
        STEPS,
        {},
        {"trained_tokens": (9.0,), "busy_time_s": (500.0,), "silent_s": (900.0,), "grad_norm": (0.4,), "lr": (1e-6,)},
    )
    evaluation = judged(told)
    assert fired(evaluation) == {}
    lacks = {one.rule.id: evaluation.lacks(one) for one in evaluation.courses if not one.known}
    assert lacks["load_imbalance_tokens"] == [
        "trained_tokens: spans of update_actor with tokens, of at least two ranks"
    ]
    assert lacks["ranks_disagree"] == ["grad_norm of at least two ranks", "lr of at least two ranks"]


def test_after_a_resume_it_is_warm_up_again() -> None:
    slow = {"stage_time_s/rollout": {8: 300.0, 9: 60.0, 10: 30.0}}
    mine = rule('m["stage_time_s/rollout"] > 100', warm_up=1)
    assert fired(judged(numbers(STEPS, slow), chosen=[mine])) == {"mine": 8}
    resumed = numbers(STEPS, slow)
    resumed.resumed = {8}
    assert fired(judged(resumed, chosen=[mine])) == {}


# ------------------------------------------------------------------------------------- how long, and where it is from


def test_for_counts_steps_in_a_row_and_steps_without_the_number_neither_count_nor_break() -> None:
    mine = rule("grad_norm > 1", **{"for": 3})
    assert fired(judged(_only("grad_norm", [2, 2, 0, 2, 2, 2]), chosen=[mine])) == {"mine": 5}
    assert fired(
        judged(
            Numbers(job={"grad_norm": {0: 2, 1: 2, 4: 2}, "lr": dict.fromkeys(range(5), 1.0)}),
            chosen=[rule("grad_norm > 1 and lr > 0", **{"for": 3})],
        )
    ) == {"mine": 4}


def test_an_alarm_is_over_and_may_fire_again() -> None:
    evaluation = judged(_only("grad_norm", [2, 2, 0, 0, 2, 2]), chosen=[rule("grad_norm > 1", **{"for": 2})])
    (course,) = evaluation.courses
    assert [firing.step for firing in course.firings] == [1, 5]
    assert course.ends == [3]
    assert course.firings[0].since == 0


@pytest.mark.parametrize(
    ("facts", "steps", "origin", "bound"),
    [
        (Facts(planned={"memory_allocated": 3.0}, config={"optim": {"lr": 5.0}}), 8, "from the plan", 3),
        (Facts(config={"optim": {"lr": 5.0}}), 8, "from the configuration", 5),
        (Facts(), 8, "from the run's own history", 10),
        (Facts(), 2, "default", 7),
    ],
)  # fmt: skip
def test_a_threshold_is_the_plans_else_the_configurations_else_the_historys_else_a_default(
    facts: Facts, steps: int, origin: str, bound: float
) -> None:
    mine = rule(
        "grad_norm > bound",
        thresholds={
            "bound": {
                "default": 7,
                "source": "a book",
                "history": "10 * usual(grad_norm)",
                "config": 'config("optim.lr")',
                "plan": 'planned("memory_allocated")',
            }
        },
    )
    evaluation = judged(_only("grad_norm", [1.0] * steps + [100.0]), facts, [mine])
    (line,) = [one for one in evaluation.courses[0].firings[0].evidence if one.startswith("bound = ")]
    assert line.startswith(f"bound = {bound}, {origin}")
    assert ("a book" in line) is (origin == "default")


def test_a_case_of_its_own_for_each_stage() -> None:
    evaluation = judged(numbers(STEPS, {"stage_time_s/reward": from_(40), "step_time_s": from_(98)}))
    assert {(one.rule.id, one.alarm.stage) for one in evaluation.courses if one.firings} == {("slow_stage", "reward")}


# ---------------------------------------------------------------------------------------------------- rows of users

ROW = "- {id: mine, goal: data, when: 'grad_norm > 1', severity: warning, message: 'g {grad_norm:.3g}', next_step: look}\n"


def test_a_users_rows_are_added_and_one_with_our_id_takes_its_place() -> None:
    added = rules.parsed(ROW + ROW.replace("mine", "grad_norm_spike"), "mine.yaml")
    joined = rules.joined(rules.built_in(), added)
    assert len(joined) == len(rules.built_in()) + 1
    assert next(one for one in joined if one.id == "grad_norm_spike").when == "grad_norm > 1"
    assert fired(judged(_only("grad_norm", [2.0]), chosen=joined)) == {"mine": 0, "grad_norm_spike": 0}


BAD: Mapping[str, tuple[str, str]] = {
    "no YAML": ("- {id: [", "is no YAML"),
    "empty": ("", "a list of alarms is expected"),
    "a number": ("3", "a list of alarms is expected"),
    "a text": ("- words", "alarm 1: a row:"),
    "an unknown key": (ROW.replace("next_step", "next_stop"), "next_stop is no field of an alarm; did you mean next_step?"),
    "a missing key": (ROW.replace(", next_step: look", ""), "(mine): next_step: field required"),
    "a goal that is none": (ROW.replace("data", "date"), "(mine): goal: input should be 'correctness'"),
    "a bad id": (ROW.replace("mine", "My Alarm"), "id: string should match"),
    "twice": (ROW + ROW, "the id 'mine' stands twice"),
    "a stage that is none": (ROW.replace("{id", "{stage: rolout, id"), "no stage is called 'rolout'; did you mean rollout?"),
    "an object": ("- !!python/object/apply:os.system ['true']", "is no YAML"),
    "a for of 0": (ROW.replace("{id", "{for: 0, id"), "for: input should be greater than or equal to 1"),
    "a typo": (ROW.replace("'grad_norm > 1'", "'gradnorm > 1'"), "alarm mine, when: no metric is called 'gradnorm'; did you mean grad_norm?"),
    "a message with code": (ROW.replace("{grad_norm:.3g}", "{grad_norm.__class__}"), "message (en): not taken here"),
    "a wide format": (ROW.replace(":.3g", ":>999999999"), "is written as {expression}"),
    "a threshold of nothing": (ROW.replace("{id", "{thresholds: {b: {}}, id"), "needs a name and one of plan, config, history, default"),
    "a threshold of itself": (ROW.replace("{id", "{thresholds: {b: {history: b}}, id"), "no metric is called 'b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_say_which_and_why(case: str, tmp_path: Path) -> None:
    text, expected = BAD[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        rules.compiled(rules.read(file))
    assert expected in str(refused.value)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        rules.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(BadInput, match="no text in UTF-8"):
        rules.read(tmp_path / "binary.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (rules.LARGEST + 1))
    with pytest.raises(BadInput, match="at most"):
        rules.read(tmp_path / "large.yaml")


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_row_has_its_words_in_both_languages_and_a_source_for_each_default() -> None:
    for one in rules.built_in():
        assert one.zh and one.next_step and one.next_step_zh, one.id
        for name, threshold in one.thresholds.items():
            assert threshold.default is None or threshold.source, f"{one.id}: {name}"
    goals = {one.goal for one in rules.built_in()}
    assert goals == {"correctness", "stability", "performance", "memory", "balance", "data"}


def test_numbers_besides_metrics_say_what_they_are_and_need() -> None:
    assert all(row.unit and row.definition and row.zh and row.needs for row in number_rows().values())
    used = Evaluation(rules.built_in(), Facts())
    assert number_rows().keys() <= used.metrics | used.of_ranks


def test_sixty_alarms_over_a_thousand_steps_of_sixty_four_ranks_take_half_a_second_or_so() -> None:
    told = numbers(1000)
    told.ranks = {
        name: {step: dict.fromkeys(range(64), 1.0 + 0.01 * (step % 7)) for step in range(1000)} for name in told.ranks
    }
    evaluation = Evaluation(rules.built_in(), Facts(sizes={"V": 150_000, "B": 512}))
    assert len(evaluation.courses) >= 60
    before = time.process_time()
    evaluation.advance(told)
    assert time.process_time() - before < 2.0  # 0.5 s of an idle core
