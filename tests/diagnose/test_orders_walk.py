"""Walking: which orders, what joins at a step, the first that fails, the likeliest cause, and what is said where nothing is wrong."""

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from flowledger.diagnose import findings as detecting
from flowledger.diagnose.orders import advice, walk
from flowledger.diagnose.orders.answer import passed
from flowledger.diagnose.orders.evidence import ABOUT_RECORDING, Evidence
from flowledger.diagnose.orders.kept import planned_of
from flowledger.diagnose.unfinished import stopped_early
from flowledger.ledger import planned
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, TensorRow
from tests.diagnose import sick
from tests.diagnose.sick import cause, first, verdict

GIB = 1 << 30


def bad(name: str, message: str = "", verdict: str = "fail", **more: object) -> FindingRow:
    severity = {"fail": "error", "warn": "warning"}[verdict]
    return FindingRow(id=name, verdict=verdict, severity=severity, message=message or name, **more)  # type: ignore[arg-type]


def met(*findings: FindingRow, **more: object) -> walk.Diagnosis:
    return walk.diagnose(Evidence(findings=findings), **more)  # type: ignore[arg-type]


def test_correctness_is_told_before_stability_before_balance_before_memory() -> None:
    found = [bad("memory_grows"), bad("load_imbalance_tokens"), bad("grad_norm_spike"), bad("masks_nest")]
    told = []
    while found:
        told.append(first(met(*found)))
        found = [one for one in found if walk.step_of(one).id != told[-1]]
    assert told == ["shape_mismatch.mask", "instability.optimizer", "imbalance.tokens", "oom.dynamic_batch"]


def test_within_an_order_the_first_step_fails_and_the_surest_is_the_cause() -> None:
    found = met(
        bad("rollout_gap_high", confidence=0.6),
        bad("loss_wrong", "the loss is not that of its tokens", confidence=0.95),
    )
    assert first(found) == "instability.gap"
    assert cause(found) == "the loss is not that of its tokens"
    assert found.cause[0].id == "instability.objective"


def test_findings_of_one_step_join_the_surest_speaks_and_a_failure_before_a_warning() -> None:
    found = met(
        bad("kl_explosion", "KL is high", "warn", confidence=0.9), bad("loss_wrong", "loss", evidence=["step 3: 1.0, not 2.0"], confidence=0.8),
        bad("advantages_wrong", "advantages", confidence=0.7, fix={"key": "k", "from": "1", "to": "2"}, next_step="look there"),
    )  # fmt: skip
    answer = next(answer for step, answer in found.steps if step.name == "objective")
    assert answer.message == "loss" and answer.verdict == "fail"
    assert answer.evidence[0] == "step 3: 1.0, not 2.0"
    assert {"KL is high", "advantages"} <= set(answer.evidence)


def test_a_warning_is_told_only_where_nothing_fails() -> None:
    warned = met(bad("grad_norm_spike", verdict="warn"))
    assert warned.first[0].id == "instability.optimizer" and warned.first[1].verdict == "warn"
    assert first(met(bad("grad_norm_spike", verdict="warn"), bad("memory_grows"))) == "oom.dynamic_batch"


def test_after_a_crash_only_its_order_is_walked_and_what_else_failed() -> None:
    crash = bad("crash", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", stage="update_actor")
    found = met(crash, bad("masks_nest"), bad("grad_norm_spike", verdict="warn"))
    assert [one.order.name for one in found.walked] == ["oom", "shape_mismatch"]
    assert first(found) == "oom.peak_stage"
    assert [one.id for one in found.besides] == ["grad_norm_spike"]


def test_what_belongs_nowhere_is_told_beside_and_hides_advice() -> None:
    found = met(bad("unheard_of", verdict="warn"))
    assert [one.id for one in found.besides] == ["unheard_of"] and found.first is None and not found.advice
    assert walk.summary(found, Evidence())["verdict"] == "warn"


def test_a_report_is_answered_first_and_is_the_cause_where_it_is_surer() -> None:
    answer = bad(
        "report.rope", "position ids restart at each shard", confidence=0.8, fix={"key": "cp", "from": "2", "to": "1"}
    )
    alone = walk.diagnose(Evidence(), reported=[answer])
    assert not alone.walked and cause(alone) == "position ids restart at each shard"
    beside = met(bad("grad_norm_spike", "spike", confidence=0.4), reported=[answer])
    assert first(beside) == "instability.optimizer" and cause(beside) == "position ids restart at each shard"
    assert walk.rows(beside)[0].id == "report.rope"
    surer = met(bad("masks_nest", "a prompt token in the loss", confidence=0.9), reported=[answer])
    assert cause(surer) == "a prompt token in the loss"


def test_what_an_exception_is_known_for_stands_behind_what_the_run_shows() -> None:
    crash = bad("crash", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", stage="update_actor")
    known = bad("guess", "an engine that is awake", confidence=0.99)
    found = walk.diagnose(Evidence(findings=(crash,), known=(known,)))
    assert first(found) == "oom.peak_stage" and found.cause[1].confidence <= 0.5
    assert "guess" in [one.id for one in walk.rows(found)]


def test_one_order_alone_can_be_asked_for() -> None:
    found = met(bad("masks_nest"), bad("memory_grows"), order="oom")
    assert [one.order.name for one in found.walked] == ["oom"] and first(found) == "oom.dynamic_batch"


def test_a_test_that_raises_is_a_step_that_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(evidence: Evidence) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(walk.MODULES["oom"], "by_kind", broken)
    found = met(bad("memory_grows"))
    answer = next(answer for step, answer in found.steps if step.name == "by_kind")
    assert answer.verdict == "skipped" and "ZeroDivisionError" in answer.needs[0]


def test_a_detector_that_raises_hides_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ledger: Ledger) -> list[FindingRow]:
        raise KeyError("no such column")

    def held(ledger: Ledger) -> list[FindingRow]:
        return [FindingRow(id="held", verdict="pass", message="fine")]

    monkeypatch.setattr(detecting, "detectors", lambda: {"broken": broken, "held": held})
    path = sick.run(tmp_path / "run", [[MetricRow(name="grad_norm", raw_name="grad_norm", value=1.0, step=0)]])
    with Ledger(path) as ledger:
        failed, passed = detecting.findings(ledger)
    assert (failed.id, failed.verdict, passed.id) == ("detector_failed", "skipped", "held")
    assert "broken raised KeyError" in failed.message and failed.needs


def test_the_table_of_detectors_has_the_laws_first_and_the_alarms_last() -> None:
    names = list(detecting.detectors())
    assert names[:5] == ["laws", "shapes", "balance", "waiting", "agreement"]
    assert len(set(names)) == len(names)


def test_a_loss_that_is_not_finite_fails_at_the_objective_with_its_step(tmp_path: Path) -> None:
    losses = [MetricRow(name="policy_loss", raw_name="actor/pg_loss", value=v, special=s, step=step)
              for step, (v, s) in enumerate([(0.1, None), (0.2, None), (None, "nan"), (None, "nan")])]  # fmt: skip
    grads = [MetricRow(name="grad_norm", raw_name="actor/grad_norm", value=1.0 + step, step=step) for step in range(4)]
    found = sick.told(sick.run(tmp_path / "run", [[*losses, *grads]]), order="instability")
    assert first(found) == "instability.objective"
    assert cause(found) == "policy_loss is nan from step 2 on" and found.cause[1].step == 2
    assert verdict(found, "instability.optimizer") == "pass"


def test_the_gap_is_told_by_a_frameworks_own_metrics_and_warns_where_they_stay_outside(tmp_path: Path) -> None:
    """rollout_corr/kl of verl is healthy up to 0.05 (tables/metrics)."""
    for name, kl, said in (("well", [0.001, 0.2, 0.002], "pass"), ("sick", [0.001, 0.06, 0.13], "warn")):
        rows = [
            MetricRow(name="rollout_correction/kl", raw_name="rollout_corr/kl", value=v, step=step)
            for step, v in enumerate(kl)
        ]
        found = sick.told(sick.run(tmp_path / name, [rows]), order="instability")
        assert verdict(found, "instability.gap") == said
    answer = {step.name: one for step, one in found.steps}["gap"]
    assert answer.step == 1 and "since step 1" in answer.message and "0.13" in answer.message


@pytest.mark.parametrize(("total", "said"), [(290, ["it stops at step 24 of 290"]), (25, []), (24, [])])
def test_a_log_that_stops_early_says_so(tmp_path: Path, total: int, said: list[str]) -> None:
    log = tmp_path / "console.log"
    log.write_text(
        f"Total training steps: {total}\nTraining Progress:   0%|   | 0/{total} [00:00<?, ?it/s]\n", encoding="utf-8"
    )
    rows = [MetricRow(name="lr", raw_name="lr", value=1.0, step=step) for step in range(1, 25)]
    with Ledger(sick.run(tmp_path / "run", [rows])) as ledger:
        assert list(stopped_early(ledger, [log])) == said


def test_advice_is_given_only_where_nothing_is_wrong(tmp_path: Path) -> None:
    config = {"actor": {"micro_batch": {"max_tokens": 8192}}}
    rows = [
        MemoryRow(instant="peak", kind="activation", allocated=20 * GIB, limit=80 * GIB, stage="update_actor", step=1)
    ]
    path = sick.run(tmp_path / "run", [rows], device="cuda:0", framework="verl", config=config)
    with Ledger(path) as ledger:
        evidence = Evidence(books=(ledger,))
        (one,) = advice.advice(evidence)
        assert one.fix == {"key": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "from": "8192", "to": "16384"}
        assert [row.id for row in walk.diagnose(evidence).advice] == ["advice.token_budget"]
        sickly = Evidence(books=(ledger,), findings=(bad("masks_nest"),))
        assert not walk.diagnose(sickly).advice


def test_a_plan_in_the_directory_of_a_run_is_read_from_there(tmp_path: Path) -> None:
    path = sick.run(tmp_path / "run", [[]], mesh={"dp": 2}, framework="verl", level="plan")
    shape = TensorRow(tensor_name="old_log_prob", stage="old_log_prob", dims="[B_prompt*G, S_resp]", logical_shape=[8, 4], local_shape=[4, 4],
                      dtype="float32", rank=0, rank_count=2, step=1)  # fmt: skip
    peaks = [MemoryRow(instant="peak", kind=kind, allocated=size, stage="update_actor", step=1, rank=0)
             for kind, size in (("param", 3), ("activation", 4))]  # fmt: skip
    planned.write(path, "run", [shape, *peaks, bad("memory.fits", scope="plan")])
    with Ledger(path) as ledger:
        told = planned_of(ledger)
    assert told is not None
    assert told.sizes == {"B_prompt*G": 8, "S_resp": 4} and told.summary.world == 2
    assert (told.rows[0].stage, told.rows[0].step, told.rows[0].param, told.rows[0].activation) == (
        "update_actor",
        "later",
        3,
        4,
    )
    assert [one.id for one in told.checks] == ["memory.fits"]


def test_an_end_that_no_order_is_for_is_told_and_all_orders_are_walked() -> None:
    found = met(bad("crash", "KeyError: 'ground_truth'", stage="reward"), bad("grad_norm_spike", verdict="warn"))
    assert found.ended is not None and found.ended.message == "KeyError: 'ground_truth'"
    assert len(found.walked) == 6 and found.first is None and not found.advice
    summary = walk.summary(found, Evidence())
    assert (summary["verdict"], summary["ended"], summary["cause"]) == ("fail", "KeyError: 'ground_truth'", None)
    assert walk.rows(found)[0].id == "crash"


def test_every_finding_that_detectors_alarms_and_faults_know_belongs_to_a_step(tmp_path: Path) -> None:
    """An id of a new detector has to be entered in orders.toml: else its finding stands beside the orders."""
    path = sick.run(tmp_path / "run", [[MetricRow(name="grad_norm", raw_name="grad_norm", value=1.0, step=0)]])
    with Ledger(path) as ledger:
        known = {finding.id for finding in detecting.findings(ledger)}
    tables = files("flowledger.diagnose")
    known |= {row["id"] for row in yaml.safe_load(tables.joinpath("alarms/alarms.yaml").read_text(encoding="utf-8"))}
    faults = [file for file in tables.iterdir() if file.name.startswith("faults") and file.name.endswith(".toml")]
    for file in faults:
        rows = tomllib.loads(file.read_text(encoding="utf-8")).get("fault", [])
        known |= {name for row in rows for name in row.get("expects", ())}
    assert len(known) > 60 and faults
    nowhere = {name for name in known if walk.step_of(bad(name)) is None}
    assert nowhere <= {
        "call_failed",
        "crash",
        "exception",
        *ABOUT_RECORDING,
    }  # told as how the run ended, or of the recording


def stands(message: str = "it holds") -> FindingRow:
    return FindingRow(id="masks_nest", verdict="pass", message=message)


def wants(need: str) -> FindingRow:
    return FindingRow(id="loss_mask_wrong", verdict="skipped", message="not checked", needs=[need])


@pytest.mark.parametrize(("findings", "verdict", "needs"), [
    ([stands()], "pass", True),  # the step's own test wants rows
    ([stands(), wants("rows of `tokens`: record.level = tokens")], "pass", True),
    ([wants("rows of `tokens`: record.level = tokens")], "skipped", True),
])  # fmt: skip
def test_a_step_that_wants_for_input_is_checked_in_part_at_most(
    findings: list[FindingRow], verdict: str, needs: bool
) -> None:
    found = met(*findings)
    step, answer = next(pair for pair in found.steps if pair[0].id == "shape_mismatch.mask")
    assert (answer.verdict, bool(walk.row(step, answer).needs)) == (verdict, needs)
    told = walk.summary(found, Evidence())
    assert ("shape_mismatch.mask" in [one["id"] for one in told["partly"]]) is (verdict == "pass")


def test_a_step_whose_own_test_passes_is_whole_only_where_its_detectors_had_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walk.MODULES["hang"], "who_waits", lambda evidence: passed("nobody waits"))

    def partly(*findings: FindingRow) -> bool:
        answer = next(answer for step, answer in met(*findings, order="hang").steps if step.id == "hang.who_waits")
        assert answer.verdict == "pass"
        return answer.is_partly

    hang = {"id": "hang", "verdict": "skipped", "message": "not checked"}
    assert not partly()
    assert partly(FindingRow(**hang, needs=["spans of all ranks: record.level = steps"]))
    assert not partly(
        FindingRow(**hang, needs=["two ranks: mesh.dp > 1, record.level = steps"])
    )  # of another kind of run
