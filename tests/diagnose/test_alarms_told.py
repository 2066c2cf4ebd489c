"""What frameworks tell by their own names is judged like our own numbers, and what alarms say can be read as it stands."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from flowledger.diagnose import alarms
from flowledger.diagnose.alarms import prometheus, rules
from flowledger.diagnose.alarms.live import Watch
from flowledger.diagnose.orders import data_quality
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MetricRow
from flowledger.tables.metrics import canonical
from tests.diagnose.alarm_stories import metric, rule, written

# A step as the frameworks' own loggers name it (verl 0.9.1 compute_data_metrics, TRL 1.16 GRPOTrainer), in which all is well.
VERL = {
    "critic/score/mean": 0.4, "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/mean": 0.4, "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0, "critic/advantages/mean": 0.0, "critic/advantages/max": 1.2, "critic/advantages/min": -1.2,
    "response_length/mean": 300.0, "response_length/max": 1024.0, "response_length/clip_ratio": 0.03, "prompt_length/mean": 80.0,
    "prompt_length/max": 120.0, "prompt_length/clip_ratio": 0.0, "actor/entropy": 0.5, "actor/grad_norm": 0.2,
}  # fmt: skip
TRL = {
    "reward": 0.4, "reward_std": 0.45, "frac_reward_zero_std": 0.3, "completions/mean_length": 300.0, "completions/clipped_ratio": 0.03,
    "entropy": 0.5, "grad_norm": 0.2,
}  # fmt: skip
SICK = {
    "verl": {name: 0.0 for name in VERL if name.startswith("critic/")} | {"response_length/clip_ratio": 0.95},
    "trl_grpo": {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "completions/clipped_ratio": 1.0},
}
WELL = {"verl": VERL, "trl_grpo": TRL}


def run(path: Path, framework: str, since: int | None, *, steps: int = 13, without: str = "-") -> Path:
    """A run of a framework that is sick from one step on (None: never)."""
    rows = []
    for step in range(1, steps + 1):
        sick: Mapping[str, float] = SICK[framework] if since is not None and step >= since else {}
        for raw, value in {**WELL[framework], **sick}.items():
            if raw != without:
                row = MetricRow(step=step, t_ns=step, name=canonical(framework, raw), raw_name=raw, value=value)
                rows.append((0, row))
    return written(path, rows)


def found(path: Path) -> dict[str, FindingRow]:
    with Ledger(path) as ledger:
        return {one.id: one for one in alarms.check(ledger)}


@pytest.mark.parametrize(
    ("framework", "since", "expected"),
    [
        ("verl", 11, {"reward_stuck", "advantage_zero", "truncation_high"}),
        ("trl_grpo", 1, {"reward_stuck", "zero_variance_groups_high", "truncation_high"}),
    ],
)
def test_equal_rewards_and_cut_off_responses_are_seen_by_the_names_of_frameworks(
    framework: str, since: int, expected: set[str], tmp_path: Path
) -> None:
    told = found(run(tmp_path / "run", framework, since))
    assert {name for name in told if name != "reward_drop"} == expected
    assert all(told[name].step == since + 1 for name in expected)  # two steps in a row
    assert not any("fired again" in line for name in expected for line in told[name].evidence or [])


def test_all_cut_off_from_the_start_is_said_without_entropy_too_and_not_of_random_weights(tmp_path: Path) -> None:
    assert "truncation_high" in found(run(tmp_path / "unknown", "trl_grpo", 1, steps=3, without="entropy"))
    random = [
        (0, metric(step, name, value))
        for step in range(9)
        for name, value in (("truncation_ratio", 1.0), ("entropy", 10.4))
    ]
    assert found(written(tmp_path / "random", random)) == {}


def test_rewards_were_looked_at_only_where_groups_were(tmp_path: Path) -> None:
    with (
        Ledger(run(tmp_path / "verl", "verl", None, steps=2)) as verl,
        Ledger(run(tmp_path / "trl", "trl_grpo", None, steps=2)) as trl,
    ):
        of_verl, of_trl = Evidence(books=(verl,)), Evidence(books=(trl,))
        unknown, known = data_quality.rewards(of_verl), data_quality.rewards(of_trl)
        assert data_quality.responses(of_verl).verdict == data_quality.prompts(of_verl).verdict == "pass"
        assert data_quality.prompts(of_trl).verdict == "skipped"
    assert unknown.verdict == "skipped" and unknown.needs == (
        "groups without variance: zero_variance_groups or zero_variance_samples",
    )
    assert "reward/mean 0.4" in unknown.message
    assert known.verdict == "pass" and "zero_variance_samples 0.3" in known.message


def test_a_rule_may_name_what_only_the_run_has_and_a_slip_is_told_once(tmp_path: Path) -> None:
    rows = [(0, metric(step, "reward_std", 0.2)) for step in range(4)]
    own = written(tmp_path / "own", rows)
    watch = Watch(
        own,
        [rule('m["reward_std"] < bound', thresholds={"bound": {"default": 1}}), rule('m["reward_sdt"] < 1', id="slip")],
    )
    assert [event.finding.id for event in watch.look()] == ["mine"]
    assert watch.strangers() == ["alarm slip: this run has no metric 'reward_sdt' so far; did you mean reward_std?"]
    assert watch.strangers() == []
    kept = Watch(
        run(tmp_path / "verl", "verl", None, steps=2), [*rules.built_in(), rule('m["critic/score/mean"] > 0.3')]
    )
    assert [event.finding.id for event in kept.look()] == ["mine"] and kept.strangers() == []


def test_a_setting_that_the_run_has_not_is_told_with_the_nearest(tmp_path: Path) -> None:
    rows = [(0, metric(step, "grad_norm", 0.2)) for step in range(4)]
    own = written(tmp_path / "own", rows, config={"algorithm": {"kl_coef": 0.1}, "optim": {"lr": 1e-6}})
    asked = [
        rule('grad_norm > config("algorithm.kl_coeff")'),
        rule('grad_norm > config("__class__")', id="odd"),
        rule('grad_norm > size("Vv") or grad_norm > planned("memory_alocated")', id="sizes"),
        rule('grad_norm > config("async.max_staleness", 9)', id="may_be_absent"),
        rule('grad_norm > config("optim.lr")', id="there"),
    ]
    watch = Watch(own, asked)
    watch.look()
    assert watch.strangers() == [
        "alarm mine: this run has no setting 'algorithm.kl_coeff'; did you mean algorithm.kl_coef?",
        "alarm odd: this run has no setting '__class__': settings are algorithm.kl_coef, optim.lr, …",
        "alarm sizes: this run has no symbol 'Vv'; did you mean V?",
        "alarm sizes: this run has no planned number 'memory_alocated'; did you mean memory_allocated?",
    ]


def test_metrics_that_are_not_finite_are_named(tmp_path: Path) -> None:
    rows = [(0, metric(step, name, float("nan") if step else 1.0)) for step in range(2) for name in ("entropy", "lr")]
    said = found(written(tmp_path / "run", rows))["metric_not_finite"]
    assert said.message == "metrics are nan or infinite: rank 0: entropy = nan, lr = nan"


def test_a_long_list_of_metrics_that_are_not_finite_is_cut_in_the_sentence_and_whole_beside_it(tmp_path: Path) -> None:
    rows = [(0, metric(1, f"my/metric_{number:03d}", float("inf"))) for number in range(40)]
    said = found(written(tmp_path / "run", rows))["metric_not_finite"]
    assert said.message.endswith(", …") and len(said.message) < 240 and "my/metric_000 = inf" in said.message
    assert any("my/metric_039 = inf" in line for line in said.evidence or [])


def test_what_watch_refuses_is_not_exported(tmp_path: Path) -> None:
    own = run(tmp_path / "run", "verl", None, steps=2)
    for when in ("grad_nrom > 1", "grad_norm > 1 && lr > 1", "medain(lr, 3) > 1"):
        with pytest.raises(BadInput) as watched:
            Watch(own, [rule(when)])
        with Ledger(own) as ledger, pytest.raises(BadInput, match=re.escape(str(watched.value))):
            prometheus.rules_file(ledger, [rule(when)])


def test_a_summary_for_prometheus_has_no_holes(tmp_path: Path) -> None:
    mine = rule(
        "lr > bound and entropy > 2",
        thresholds={"bound": {"default": 0.25}},
        message="rate {lr:.3g} (limit {bound:.0%})",
    )
    other = rule(
        "lr > bound", id="other_rule", thresholds={"bound": {"default": 0.25}}, message="{lr:.3g} of {entropy:.3g}"
    )
    with Ledger(run(tmp_path / "run", "verl", None, steps=2)) as ledger:
        text = prometheus.rules_file(ledger, [*rules.built_in(), mine, other])
    alerts = {
        one["alert"]: one["annotations"]["summary"]
        for group in yaml.safe_load(text)["groups"]
        for one in group["rules"]
    }
    assert all("…" not in said and "{" not in re.sub(r"{{ \$value \| \w+ }}", "", said) for said in alerts.values())
    assert alerts["FlowledgerMine"] == "rate {{ $value | humanize }} (limit 25%)"
    assert alerts["FlowledgerOtherRule"] == "other rule: lr > 0.25"
    assert alerts["FlowledgerShapeChecksum"].startswith(
        "ranks hold different shapes or dtypes of {{ $value | humanize }} tensors"
    )


def test_evidence_has_plain_names_and_one_line_on_when_it_was_true(tmp_path: Path) -> None:
    rows = [(0, metric(step, "policy_kl", 0.01 if step < 8 else 9.0)) for step in range(12)]
    when = "first(ref_kl, policy_kl) > 3 * usual(first(ref_kl, policy_kl)) and policy_kl > prev(policy_kl, 4)"
    with Ledger(written(tmp_path / "run", rows)) as ledger:
        (told,) = alarms.check(ledger, [rule(when, **{"for": 2})])
    assert told.evidence == [
        "step 9: policy_kl = 9", "step 9: usual policy_kl = 0.01", "step 9: policy_kl 4 steps before = 0.01",
            "fired on first(ref_kl, policy_kl) > 3 * usual(first(ref_kl, policy_kl)): 9 against 0.03",
        "true since step 8, 2 steps in a row; in 4 of the 8 steps judged",
    ]  # fmt: skip


def test_the_bound_that_fired_is_told_and_not_the_one_beside_it(tmp_path: Path) -> None:
    """Entropy falls from 0.6 to 0.1, below half of its usual value less 0.05 = 0.25; the fixed bound of 0.01 is far."""
    rows = [(0, metric(step, "entropy", 0.6 if step < 16 else 0.1)) for step in range(18)]
    with Ledger(written(tmp_path / "run", rows)) as ledger:
        told = {one.id: one for one in alarms.check(ledger)}["entropy_collapse"]
    assert told.evidence is not None
    assert "fired on entropy < 0.5 * usual(entropy) - 0.05: 0.1 against 0.25" in told.evidence
    assert not any(line.startswith("bound") for line in told.evidence)
