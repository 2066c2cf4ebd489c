"""What Prometheus takes: the text of one step by the letter of its format, and what alarms ask of earlier steps in PromQL."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flowledger.diagnose.alarms import prometheus, rules
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.promql import promql
from flowledger.diagnose.alarms.promql_names import metric_name, metric_names
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, Row
from flowledger.ledger.writer import Writer
from tests.diagnose.alarm_stories import metric, rule, written

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
VALUE = re.compile(r"NaN|[+-]Inf|[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
UNESCAPED = {'\\"': '"', "\\\\": "\\", "\\n": "\n"}
Series = tuple[str, frozenset[tuple[str, str]]]


def parsed(text: str) -> tuple[dict[Series, float], dict[str, str]]:
    """(series -> value, name -> help) of the text format 0.0.4. Fails on everything that the format does not have.

    https://prometheus.io/docs/instrumenting/exposition_formats: lines end in a line feed, the last one too; one HELP and one TYPE a name,
    TYPE before its samples; all lines of a name in one group; no series twice; no raw sign below a blank.
    """
    assert text.endswith("\n") and not text.startswith("\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    series: dict[Series, float] = {}
    helps: dict[str, str] = {}
    types: dict[str, str] = {}
    groups: list[str] = []
    for line in text[:-1].split("\n"):
        assert line
        if line.startswith("#"):
            _, word, name, rest = line.split(" ", 3)
            assert NAME.fullmatch(name) and word in ("HELP", "TYPE")
            assert not re.search(r"\\(?![\\n])", rest.replace("\\\\", ""))
            known = helps if word == "HELP" else types
            assert name not in known and (word == "TYPE") == (name in helps)
            known[name] = re.sub(r"\\[\\n]", lambda found: UNESCAPED[found[0]], rest)
            assert word == "HELP" or rest in ("gauge", "counter")
        else:
            name, labels, value = sample(line)
            assert name in types and (name, labels) not in series
            series[name, labels] = value
        if not groups or groups[-1] != name:
            assert name not in groups
            groups.append(name)
    return series, helps


def sample(line: str) -> tuple[str, frozenset[tuple[str, str]], float]:
    """One line with a number."""
    name = NAME.match(line)
    assert name is not None and line[name.end()] == "{", line
    at, labels = name.end() + 1, {}
    while line[at] != "}":
        found = LABEL.match(line, at)
        assert found is not None and found[1] not in labels, line
        labels[found[1]] = re.sub(r'\\["\\n]', lambda escape: UNESCAPED[escape[0]], found[2])
        at = found.end() + (line[found.end()] == ",")
    assert line[at + 1] == " " and VALUE.fullmatch(line[at + 2 :]), line
    return name[0], frozenset(labels.items()), float(line[at + 2 :])


def of_run(path: Path, rows: list[tuple[int, Row]], ranks: int = 1) -> tuple[dict[str, float], prometheus.Exposition]:
    """`name` or `name label=value …`, the run left out -> number."""
    with Ledger(written(path, rows, ranks=ranks)) as ledger:
        made = prometheus.exposition(ledger, rules.built_in())
    series, _ = parsed(made.text)
    return {
        " ".join([name, *(f"{key}={value}" for key, value in sorted(labels) if key != "run")]): value
        for (name, labels), value in series.items()
    }, made


def test_the_numbers_of_one_step_and_of_no_other(tmp_path: Path) -> None:
    rows: list[tuple[int, Row]] = [
        (rank, metric(step, "grad_norm", 0.5 + step + rank)) for step in range(3) for rank in (0, 1)
    ]
    rows += [
        (0, metric(1, "entropy", 4.0)),
        (0, metric(2, "stage_time_s/rollout", 3.25)),
        (0, metric(2, "own/metric-name", math.inf)),
    ]
    rows += [(0, metric(2, "lr", float("nan"))), (1, metric(2, "only/rank", 5.0))]
    found, made = of_run(tmp_path / "a run", rows, ranks=2)
    assert made.step == 2 and found["flowledger_step"] == 2
    assert found["flowledger_grad_norm"] == 3  # the mean of 2.5 and 3.5
    assert (found["flowledger_grad_norm rank=0"], found["flowledger_grad_norm rank=1"]) == (2.5, 3.5)
    assert found["flowledger_stage_time_seconds stage=rollout"] == 3.25
    assert found["flowledger_own_metric_name"] == math.inf and math.isnan(found["flowledger_lr"])
    assert not any("entropy" in name for name in found)  # step 1 is not now
    (said,) = made.left_out
    assert said.startswith("step 2 has no number for entropy: left out")


def test_a_step_is_the_last_that_is_whole_or_the_one_asked_for(tmp_path: Path) -> None:
    """A summary after the last step has few numbers; a step that goes on has a span without an end."""
    names = ("reward/mean", "reward/std", "lr", "entropy")
    rows: list[tuple[int, Row]] = [(0, metric(step, name, float(step))) for step in (3, 4) for name in names]
    rows.append((0, metric(9, "train_runtime", 60.0)))
    path = written(tmp_path / "run", rows)
    with Ledger(path) as ledger:
        assert prometheus.exposition(ledger, []).step == 4
        third, _ = parsed(prometheus.exposition(ledger, [], 3).text)
        assert third["flowledger_lr", frozenset({("run", "run")})] == 3
        assert ("flowledger_train_runtime", frozenset({("run", "run")})) in parsed(
            prometheus.exposition(ledger, [], 9).text
        )[0]
        with pytest.raises(BadInput, match="no number of step 7; the nearest that has is --step 9"):
            prometheus.exposition(ledger, [], 7)


def test_names_are_told_apart_and_every_sign_is_escaped(tmp_path: Path) -> None:
    hostile = 'x"y\\z\n# TYPE a counter\r\x1b[31m\u2028'
    names = ["reward/mean", "reward_mean", "a/b", "a_b", "a-b", "", "///", "奖励", "长度", "step", hostile, "U__a__b"]
    book = create(tmp_path / "run", Manifest(run=hostile))
    ink = Writer(book.part("actor", 0))
    for value, name in enumerate(names):
        ink.put(MetricRow(step=1, name=name, raw_name=name, value=float(value), t_ns=1))
    ink.close()
    with Ledger(book.path) as ledger:
        series, helps = parsed(prometheus.exposition(ledger, []).text)
    own = {name: value for (name, _), value in series.items() if value != 1 or name != "flowledger_step"}
    assert sorted(own.values()) == [*map(float, range(len(names)))]  # each number once, each under a name of its own
    assert (
        own["flowledger_reward_mean"] == 0 and own["flowledger_U__reward__mean"] == 1
    )  # the one that we know keeps its name
    assert own["flowledger_U__a_2F_b"] == 2 and own["flowledger_U__a_2D_b"] == 4 and own["flowledger_U__step"] == 9
    runs = {dict(labels)["run"] for _, labels in series}
    assert runs == {'x"y\\z\n# TYPE a counter\ufffd\ufffd[31m\ufffd'}
    assert 'x"y\\z\n# TYPE a counter\ufffd\ufffd[31m\ufffd' in helps.values()


def test_units_stand_in_names() -> None:
    for name, expected in {
        "step_time_s": "step_time_seconds", "stage_time_s/rollout": "stage_time_seconds", "tokens_per_s": "tokens_per_s",
        "memory_allocated": "memory_allocated_bytes", "grad_norm": "grad_norm", "timing_s/gen": "timing_s_gen",
    }.items():  # fmt: skip
        assert metric_name(name) == f"flowledger_{expected}"
    assert metric_names(["a/b", "c"]) == {"a/b": "flowledger_a_b", "c": "flowledger_c"}


def test_a_run_without_numbers_is_told(tmp_path: Path) -> None:
    create(tmp_path / "run", Manifest(run="run"))
    with Ledger(tmp_path / "run") as ledger, pytest.raises(BadInput, match="no number of any step"):
        prometheus.exposition(ledger, [])


HISTORY = "quantile_over_time(0.5, ({0})[1440s:60s] offset 60s) and count_over_time(({0})[1440s:60s] offset 60s) >= 4"


def said() -> Iterator[tuple[str, str]]:
    lr, entropy = 'flowledger_lr{rank=""}', 'flowledger_entropy{rank=""}'
    usual = f"({HISTORY.format(lr)})"
    yield "lr > 2 * usual(lr)", f"{lr} > on(run) (2 * {usual})"
    yield "lr > usual(entropy)", f"{lr} > on(run) ({HISTORY.format(entropy)})"
    yield "lr > prev(lr)", f"{lr} > on(run) last_over_time(({lr})[60s:60s] offset 60s)"
    yield "mean(lr, 5) > 1", f"avg_over_time(({lr})[300s:60s]) > 1"
    yield (
        "low(lr - prev(lr), 3) > 1",
        f"min_over_time((({lr} - on(run) last_over_time(({lr})[60s:60s] offset 60s)))[180s:60s]) > 1",
    )
    yield "rising(lr, 3)", f"(resets(({lr})[240s:]) == 0 and changes(({lr})[240s:]) >= 3)"
    yield "falling(lr, 3)", f"(resets((-({lr}))[240s:]) == 0 and changes((-({lr}))[240s:]) >= 3)"
    yield "lr > max(0.5, 2 * entropy, 0.7)", f"{lr} > on(run) clamp_min((2 * {entropy}), 0.7)"
    yield "lr > min(lr, entropy)", f"{lr} > on(run) ({lr} <= on(run) {entropy} or on(run) ({entropy} and on(run) {lr}))"
    yield "lr > 1 and first(entropy > 2, 1)", f"({lr} > 1 unless on(run) {entropy} <= 2)"
    yield "lr > 1 and not first(entropy > 2, 0)", f"({lr} > 1 unless on(run) {entropy} > 2)"
    yield (
        "lr > 1 and first(policy_lag, entropy, 0) < 1",
        (f'({lr} > 1 unless on(run) (flowledger_policy_lag{{rank=""}} or on(run) {entropy}) >= 1)'),
    )
    yield "first(lr, 0) > 1", f"{lr} > 1"
    yield 'lr > 1 and not first(entropy > log(size("V")), entropy > 3)', f"({lr} > 1 and on(run) {entropy} <= 3)"
    yield (
        "count(lr > 1, entropy > 2) >= 2",
        (
            f'count by (run) (label_replace({lr} > 1, "part", "0", "", "") or label_replace({entropy} > 2, "part", "1", "", "")) >= 2'
        ),
    )
    yield "step > 3", 'flowledger_step{rank=""} > 3'


@pytest.mark.parametrize(("when", "expected"), said(), ids=[when for when, _ in said()])
def test_what_alarms_ask_of_earlier_steps(when: str, expected: str) -> None:
    """Steps of a minute. What these say Prometheus itself was asked once, with series by hand (promtool test rules)."""
    assert promql(rule(when), "", Facts(), step_s=60) == expected


def test_short_steps_are_milliseconds() -> None:
    assert (
        promql(rule("mean(lr, 5) > 1"), "", Facts(), step_s=0.25)
        == 'avg_over_time((flowledger_lr{rank=""})[1250ms:250ms]) > 1'
    )


def test_nearly_every_alarm_is_told_and_the_others_say_why(tmp_path: Path) -> None:
    with Ledger(
        written(tmp_path / "run", [(0, metric(step, "reward/mean", 1.0)) for step in range(3)], bindings={"V": 100})
    ) as ledger:
        text = prometheus.rules_file(ledger, [*rules.built_in(), rule('m["own_name"] > m["own/name"]', id="alike")])
    told = [one for group in yaml.safe_load(text)["groups"] for one in group["rules"]]
    reasons = text.split("# Not told:\n")[1].splitlines()
    assert [reason.split(":")[0] for reason in reasons] == [
        "# step_time_drift",
        "# load_imbalance_time",
        "# memory_above_plan",
    ]
    (alike,) = [one["expr"] for one in told if one["alert"] == "FlowledgerAlike"]
    assert alike == 'flowledger_U__own__name{rank=""} > on(run) flowledger_U__own_2F_name{rank=""}'
    for one in told:
        assert one["expr"].count("(") == one["expr"].count(")") and " or on(run) 0" not in one["expr"]
