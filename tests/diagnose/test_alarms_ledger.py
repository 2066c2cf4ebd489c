"""Alarms on ledgers: numbers that come of rows, runs of the loop, and Prometheus' forms."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flowledger.diagnose import alarms
from flowledger.diagnose.alarms import prometheus, rules
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.numbers import numbers, numbers_of
from flowledger.diagnose.alarms.promql import promql
from flowledger.diagnose.alarms.promql_history import Untold
from flowledger.diagnose.alarms.verdicts import evaluated, finding
from flowledger.ledger import directory, manifest, writer
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, Row, SampleRow, SpanRow, TensorRow, Trained
from tests.diagnose.alarm_stories import MS, metric, rule, written
from tests.run.worlds import config

GB = 1 << 30


def found(path: Path) -> dict[str, FindingRow]:
    with Ledger(path) as ledger:
        return {one.id: one for one in alarms.check(ledger)}


def sick(path: Path) -> Path:
    """Two ranks, eight steps. From step 5 on each thing that rows other than metrics can show goes wrong, by hand."""
    rows: list[tuple[int, Row]] = []
    for step in range(8):
        bad = step >= 5
        for rank in (0, 1):
            rows += [(rank, row) for row in _memory(step, bad, rank)]
            length = 16 if bad and rank == 1 else 12
            rows.append((rank, TensorRow(
                step=step, stage="reward", role="actor", t_ns=step * 1000 * MS, tensor_name="response_mask", dims="B, S_resp",
                logical_shape=[8, length], dtype="int64", access="read", shape_checksum=length,
            )))  # fmt: skip
            tokens = 1200 if bad and rank == 1 else 300
            rows.append((rank, SpanRow(
                id=10 * step + 1, step=step, stage="update_actor", phase="forward", t_ns=step * 1000 * MS, event="whole", name="forward",
                span_kind="compute", start_ns=0, end_ns=1, tokens_valid=tokens,
            )))  # fmt: skip
            seconds = 1.4 if bad and rank == 1 else 0.4
            rows.append((rank, SpanRow(
                id=10 * step + 2, step=step, stage="update_actor", t_ns=step * 1000 * MS, event="whole", name="update_actor", span_kind="stage",
                start_ns=step * 1000 * MS, end_ns=int((step + seconds) * 1000 * MS),
            )))  # fmt: skip
        rows += [(0, row) for row in _samples(step, bad)]
        rows += [(0, metric(step, "val/reward", float("nan"))), (0, metric(step, "step_time_s", 1.0))]
        rows.append((1, metric(step, "entropy", float("nan") if bad else 0.8)))
    return written(path, rows, ranks=2)


def _memory(step: int, bad: bool, rank: int) -> Iterator[Row]:
    base, now = (10 * GB + (step - 4) * GB // 2 if bad else 10 * GB), step * 1000 * MS
    where = {"step": step, "stage": "update_actor", "kind": "total", "instant": "end", "limit": 80 * GB}
    kept = base
    for micro_batch in range(4):
        yield MemoryRow(
            **where,
            phase="forward",
            mini_batch=0,
            micro_batch=micro_batch,
            allocated=kept + 4 * GB,
            t_ns=now + micro_batch * 10,
        )
        kept += 3 * GB if bad and rank == 1 else 4 << 20
        yield MemoryRow(
            **where,
            phase="backward",
            mini_batch=0,
            micro_batch=micro_batch,
            allocated=kept,
            t_ns=now + micro_batch * 10 + 5,
        )
    yield MemoryRow(
        step=step, kind="total", instant="end", allocated=base, reserved=(13 if bad else 12) * GB, host_used=GB, t_ns=now + 99,
        reserved_peak_since_stage=(76 if bad else 60) * GB, peak_since_stage=(50 if bad else 55) * GB, limit=80 * GB,
    )  # fmt: skip


def _samples(step: int, bad: bool) -> Iterator[Row]:
    """Eight samples, whose rewards follow their lengths where it is bad; trained on by the policy of this step."""
    for index in range(8):
        sample, now = str(8 * step + index), step * 1000 * MS
        reward = index / 8 if bad else (index * 5 % 8) / 8
        yield SampleRow(
            step=step,
            stage="rollout",
            sample_id=sample,
            versions=[step - 3 if bad else step],
            response_length=10 + index,
            finish_reason="stop",
            t_ns=now,
        )
        yield SampleRow(step=step, stage="reward", sample_id=sample, reward=reward, t_ns=now + 1)
        trained = [Trained(epoch=0, mini_batch=0, rank=0, micro_batch=0)]
        yield SampleRow(
            step=step, stage="update_actor", sample_id=sample, policy_version=step, trained=trained, t_ns=now + 2
        )


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sick(tmp_path_factory.mktemp("alarms") / "sick")


def test_numbers_of_rows_are_those_by_hand(sick_run: Path) -> None:
    with Ledger(sick_run) as ledger:
        told = numbers_of(ledger, numbers().keys(), numbers().keys())
    at = {
        name: (by_step[4], by_step[5])
        for name, by_step in told.job.items()
        if name in numbers() and {4, 5} <= by_step.keys()
    }
    assert at.pop("busy_time_s") == pytest.approx((0.4, 1.4))
    assert at.pop("memory_fragmentation") == pytest.approx((1 - 10 / 12, 1 - 10.5 / 13))
    assert at.pop("memory_kept_per_micro_batch") == pytest.approx((0.0009765625, 0.75))
    assert at.pop("reward_by_length") == pytest.approx((_correlation(False), 1.0))
    assert at == {
        "memory_allocated": (55 * GB, 50 * GB), "memory_reserved": (60 * GB, 76 * GB), "memory_limit": (80 * GB, 80 * GB),
        "memory_kept": (10 * GB, 10.5 * GB), "host_memory": (GB, GB), "trained_tokens": (300, 1200), "policy_lag": (0, 3),
        "metrics_not_finite": (0, 1), "shape_checksums_differ": (0, 1),
    }  # fmt: skip
    assert told.ranks["trained_tokens"][5] == {0: 300, 1: 1200}
    assert told.notes["metrics_not_finite", 5] == "rank 1: entropy = nan"
    assert (
        told.notes["shape_checksums_differ", 5] == "response_mask at reward: rank 0 [8, 12] int64; rank 1 [8, 16] int64"
    )


def _correlation(bad: bool) -> float:
    """Pearson's, of 0 to 7 with what is made of it."""
    ys = [index if bad else index * 5 % 8 for index in range(8)]
    return sum((x - 3.5) * (y - 3.5) for x, y in enumerate(ys)) / sum((x - 3.5) ** 2 for x in range(8))


@pytest.fixture(scope="module")
def verdicts(sick_run: Path) -> dict[str, dict[str, FindingRow]]:
    """Language -> alarm -> what `check_all` says of the run."""
    with Ledger(sick_run) as ledger:
        evaluation = evaluated(ledger)
    courses = list(enumerate(evaluation.courses, 1))
    return {lang: {one.rule.id: finding(evaluation, one, at, lang) for at, one in courses} for lang in ("en", "zh")}


def test_each_of_them_fires_its_alarm_at_its_step_with_its_rank(verdicts: dict[str, dict[str, FindingRow]]) -> None:
    fired = {name: one for name, one in verdicts["en"].items() if one.verdict in ("warn", "fail")}
    steps = {name: one.step for name, one in fired.items()}
    assert steps == {
        "shape_checksum": 5, "metric_not_finite": 5, "stale_weights": 5, "reward_follows_length": 6, "load_imbalance_tokens": 6,
        "load_imbalance_time": 6, "memory_grows": 7, "memory_grows_per_micro_batch": 6,
    }  # fmt: skip
    assert {name: one.rank for name, one in fired.items() if one.rank is not None} == {
        "metric_not_finite": 1, "load_imbalance_tokens": 1, "load_imbalance_time": 1, "memory_grows": 0, "memory_grows_per_micro_batch": 1,
    }  # fmt: skip
    assert fired["shape_checksum"].severity == "critical" and fired["shape_checksum"].verdict == "fail"
    assert "rank 1 [8, 16] int64" in " ".join(fired["shape_checksum"].evidence or [])
    assert all(one.next_step and one.evidence and one.order == "alarms" for one in fired.values())


def test_every_alarm_has_a_verdict_and_those_that_lack_something_say_what(
    verdicts: dict[str, dict[str, FindingRow]],
) -> None:
    assert verdicts["en"].keys() == {one.id for one in rules.built_in()}
    skipped = {name: one.needs for name, one in verdicts["en"].items() if one.verdict == "skipped"}
    assert skipped["kl_explosion"] == ["metric ref_kl", "metric reward_kl", "metric kl_loss"]
    assert skipped["memory_above_plan"] == ["a plan with memory_allocated"]
    assert all(skipped.values())
    assert "oom_near" not in skipped  # a limit is known


def test_words_in_chinese(verdicts: dict[str, dict[str, FindingRow]]) -> None:
    told = verdicts["zh"]["stale_weights"]
    assert told.message == "样本比训练时的策略旧 3 个版本，允许 1 个"
    assert "weight_sync" in (told.next_step or "")


def test_a_run_of_nothing_is_skipped_all_over(tmp_path: Path) -> None:
    with Ledger(written(tmp_path / "empty", [])) as ledger:
        assert {one.verdict for one in alarms.check_all(ledger)} == {"skipped"}


def test_planned_memory_is_what_the_plan_says(tmp_path: Path) -> None:
    rows = [
        (0, MemoryRow(step=s, kind="total", instant="end", allocated=9 * GB, reserved=9 * GB, t_ns=s)) for s in range(3)
    ]
    path = written(tmp_path / "run", rows)
    plan = written(tmp_path / "plan", [(0, MemoryRow(kind="total", instant="peak", allocated=5 * GB))])
    (path / "plan").mkdir()
    with Ledger(plan, external_access=True) as ledger:
        ledger._connection.execute(
            f"COPY (SELECT * REPLACE ('plan' AS source) FROM memory) TO '{path}/plan/memory.parquet'"
        )
    assert "bytes" not in found(path)["memory_above_plan"].message
    assert (
        found(path)["memory_above_plan"].message
        == "9.00 GiB are allocated, a quarter more than the 5.00 GiB that were planned"
    )


def test_a_rank_that_ended_long_before_the_run_is_silent(tmp_path: Path) -> None:
    rows: list[tuple[int, Row]] = []
    for step in range(500):
        rows += [(rank, metric(step, "lr", 1e-6)) for rank in ((0, 1) if step < 100 else (0,))]
    fired = found(written(tmp_path / "run", rows, ranks=2, state="crashed"))
    assert fired["rank_silent"].rank == 1
    assert "rank 1 has recorded nothing for 400 s" in fired["rank_silent"].message


def test_a_resumed_rank_is_in_warm_up_again(tmp_path: Path) -> None:
    """Another process takes rank 0 over at step 4; what it says of its first step is no alarm."""
    book = directory.create(tmp_path / "run", manifest.Manifest(run="run"))
    for steps in (range(4), range(4, 8)):
        ink = writer.Writer(book.part("actor", 0))
        for step in steps:
            ink.put(metric(step, "grad_norm", 100.0 if step == 4 else 1.0))
            ink.put(
                SpanRow(
                    id=step,
                    step=step,
                    rank=0,
                    t_ns=step,
                    event="whole",
                    name="step",
                    span_kind="host",
                    start_ns=step,
                    end_ns=step + 1,
                )
            )
        ink.close()
    book.close()
    with Ledger(book.path) as ledger:
        assert numbers_of(ledger, ["grad_norm"], []).resumed == {4}
        assert alarms.check(ledger, [rule("grad_norm > 50")])[0].step == 4
        assert alarms.check(ledger, [rule("grad_norm > 50", warm_up=1)]) == []


# ---------------------------------------------------------------------------------------------------- runs of the loop


@pytest.mark.usefixtures("rewards_here")
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"kl_coef": 0.04}, "ref": {"path": "start"}, "record": {"level": "tensors"}},
        {
            "algorithm": {"advantage": "gae"},
            "critic": {"path": "start"},
            "actor": {"epochs": 2},
            "record": {"level": "steps"},
        },
    ],
)
def test_runs_of_the_loop_in_which_nothing_is_wrong_are_silent(changes: dict, tmp_path: Path) -> None:
    from flowledger.record.adapters.loop import PROBES
    from flowledger.record.attach import attach
    from flowledger.record.recorder import Recorder
    from flowledger.run import loop

    made = config(steps=6, **changes)
    with loop.prepared(made) as world:
        book = directory.create(
            tmp_path / "run",
            manifest.Manifest(run="run", config=made.model_dump(mode="json", by_alias=True), bindings=world.bindings),
        )
        ink = writer.Writer(book.part("actor", 0), capacity=1_000_000)
        with attach(PROBES, Recorder(ink, level=made.record.level, bindings=world.bindings, ops_every=0)):
            list(loop.train(world))
        ink.close()
        book.close()
    with Ledger(book.path) as ledger:
        told = alarms.check_all(ledger)
    assert [(one.id, one.message) for one in told if one.verdict not in ("pass", "skipped")] == []
    assert sum(one.verdict == "pass" for one in told) >= 25


# ---------------------------------------------------------------------------------------------------------- Prometheus


def test_alarms_in_promql_by_hand() -> None:
    facts = Facts(config={"algorithm": {"policy_loss": "vanilla"}, "optim": {"lr": 0.5}}, sizes={"B": 512})
    for when, expected in {
        "grad_norm > 3": 'flowledger_grad_norm{rank=""} > 3',
        'm["rollout_gap/mean"] >= 0.5': 'flowledger_rollout_gap_mean{rank=""} >= 0.5',
        'm["stage_time_s/reward"] > 2': 'flowledger_stage_time_seconds{rank="",stage="reward"} > 2',
        "grad_norm > 2 * lr": 'flowledger_grad_norm{rank=""} > on(run) (2 * flowledger_lr{rank=""})',
        "lr > 1 and not entropy > 2": '(flowledger_lr{rank=""} > 1 and on(run) flowledger_entropy{rank=""} <= 2)',
        "not (lr > 1 and entropy > 2)": '(flowledger_lr{rank=""} <= 1 or on(run) flowledger_entropy{rank=""} <= 2)',
        'lr > 2 * config("optim.lr")': 'flowledger_lr{rank=""} > 1',
        'lr > 1 and config("algorithm.policy_loss") == "vanilla"': 'flowledger_lr{rank=""} > 1',
        'lr > 0.1 * size("B")': 'flowledger_lr{rank=""} > 51.2',
        "ranks_max(lr) > 1.5 * ranks_mean(lr)": 'max by (run) (flowledger_lr{rank!=""}) > on(run) (1.5 * avg by (run) (flowledger_lr{rank!=""}))',
        "first(ref_kl, kl_loss) > 2": '(flowledger_ref_kl{rank=""} or on(run) flowledger_kl_loss{rank=""}) > 2',
        "isnan(lr)": '(flowledger_lr{rank=""} - flowledger_lr{rank=""}) != 0',
        "abs(policy_kl) > 0.1": 'abs(flowledger_policy_kl{rank=""}) > 0.1',
    }.items():  # fmt: skip
        assert promql(rule(when), "", facts) == expected


def test_what_promql_cannot_say_has_a_reason() -> None:
    for when, reason in {
        "grad_norm > early(grad_norm)": "early() looks back over steps",
        "not rising(lr, 3)": "rising() looks back over steps",
        "count(lr > 1, entropy > 1) < 2": "what is absent counts as false",
        "first(lr, 0) > entropy": "a number in place of what is absent (0) has no run",
        "first(lr, 0) < 1": "a number in place of what is absent (0) has no run",
        "first(lr > 1, 1)": "which of lr > 1, 1 is known",
        "first(lr > 1, 1) and not first(entropy > 2, 0)": "holds where nothing is seen",
        "ranks_max(lr) > 2 * ranks_others(lr)": "ranks_others() has no form",
        "worst(lr) == 1": "worst() has no form",
        'lr > 1 and config("model.path", "a") == "b"': "by its configuration",
        "lr > planned(\"memory_allocated\")": "this run has no planned('memory_allocated')",
    }.items():  # fmt: skip
        with pytest.raises(Untold, match=re.escape(reason)):
            promql(rule(when), "", Facts())


def test_the_file_of_rules_is_what_prometheus_reads(sick_run: Path) -> None:
    """Groups of rules with the keys of Prometheus' documentation; `for` a duration; every alarm in it or in a comment."""
    with Ledger(sick_run) as ledger:
        text = prometheus.rules_file(ledger, rules.built_in())
    document = yaml.safe_load(text)
    assert list(document) == ["groups"]
    alerts = [one for group in document["groups"] for one in group["rules"]]
    assert len({group["name"] for group in document["groups"]}) == len(document["groups"])
    for one in alerts:
        assert one.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", one["alert"])
        assert re.fullmatch(r"\d+s", one.get("for", "1s"))
        assert one["expr"].count("(") == one["expr"].count(")")
        assert {"summary", "next_step"} <= one["annotations"].keys()
        assert set(re.findall(r"flowledger_[a-z0-9_]+", one["expr"]))
    told = {one["alert"] for one in alerts}
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    for row in rules.built_in():
        name = "Flowledger" + "".join(word.capitalize() for word in row.id.split("_"))
        assert name in told or any(re.match(rf"# {row.id}( \(|:)", line) for line in comments), row.id
    assert len(told) >= 48
    by_name = {one["alert"]: one for one in alerts}
    assert by_name["FlowledgerDeadGradient"]["for"] == "1s"  # two steps in a row, a second each
    assert by_name["FlowledgerDualClipHigh"]["for"] == "2s"


def test_a_metric_row_of_a_rank_alone_is_enough(tmp_path: Path) -> None:
    path = written(
        tmp_path / "run", [(0, MetricRow(step=0, name="grad_norm", raw_name="grad_norm", value=1.0, t_ns=1))]
    )
    with Ledger(path) as ledger:
        assert [one.id for one in alarms.check(ledger, [rule("grad_norm >= 1")])] == ["mine"]
