"""What the memory ledger means: one finding a fact, each with where it fires and what to do."""

from dataclasses import replace

from flowledger.ledger.rows import FindingRow
from flowledger.plan.memory import FIRST, LATER, StageMemory
from flowledger.plan.plan import Plan
from flowledger.plan.shapes import RankClass
from flowledger.plan.timeline import Live, Peak
from flowledger.plan.verdicts import verdicts
from tests.plan.conftest import planned

GIB = 2**30
FSDP = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")


def stage(name: str, gib: int, *, ranks: str = "all", step: int = LATER, limit: int | None = 80 * GIB) -> StageMemory:
    peak = Peak("loss/backward", gib * GIB, (Live(name="grads", kind="grad", bytes=gib * GIB),))
    return StageMemory(
        stage=name, role="actor", ranks=RankClass(name=ranks, first=0, count=1, layers=(0,)), step=step, peak=peak,
        reserved=0, host=0, rest={}, limit=limit,
    )  # fmt: skip


def found(*stages: StageMemory, plan: Plan = FSDP) -> list[FindingRow]:
    return list(verdicts(plan.config, plan.architecture, plan.serving, plan.served, list(stages)))


def test_without_a_device_it_says_what_it_needs() -> None:
    (one,) = found(stage("update_actor", 10, limit=None))
    assert (one.verdict, one.needs) == ("skipped", ["gpu"])
    assert one.next_step is not None and "--gpu" in one.next_step


def test_stages_that_fit_are_one_finding_and_those_that_do_not_are_one_too_the_worst_first() -> None:
    assert [(one.id, one.verdict) for one in found(stage("rollout", 70), stage("update_actor", 79))][:2] == [
        ("memory.engine", "pass"), ("memory.fits", "pass"),
    ]  # fmt: skip
    over = [
        one
        for one in found(stage("rollout", 70), stage("update_actor", 90), stage("old_log_prob", 81))
        if one.id == "memory.fits"
    ]
    assert [(one.stage, one.verdict, one.severity) for one in over] == [
        ("update_actor", "fail", "error"),
    ]  # fmt: skip
    assert "nor do old_log_prob" in over[0].message
    assert (
        "needs 90.0 GiB at loss/backward" in over[0].message
        and "80.0 GiB" in over[0].message
        and "grad" in over[0].message
    )


def test_a_stage_is_judged_on_its_fullest_ranks_and_names_them() -> None:
    (one,) = [
        row
        for row in found(stage("update_actor", 70, ranks="pp0"), stage("update_actor", 85, ranks="pp1"))
        if row.verdict == "fail"
    ]
    assert "on pp1" in one.message


def test_it_says_when_it_will_happen() -> None:
    for stages, when in (
        (("rollout", "update_actor"), "first_rollout"),
        (("old_log_prob", "update_actor"), "first_update"),
    ):
        (one,) = [row for row in found(*(stage(name, 90) for name in stages)) if row.verdict == "fail"]
        assert one.fires_at == when
    (first,) = [one for one in found(stage("old_log_prob", 90, step=FIRST)) if one.verdict == "fail"]
    assert first.step == FIRST


def test_an_engine_that_cannot_start_is_an_error_of_the_worker_start() -> None:
    served = replace(FSDP.served, fits=False, reason="no room for one block")
    rows = list(verdicts(FSDP.config, FSDP.architecture, FSDP.serving, served, [stage("rollout", 1)]))
    assert (rows[0].id, rows[0].verdict, rows[0].fires_at) == ("memory.engine", "fail", "worker_start")
    assert "no room for one block" in rows[0].message


def test_samples_that_must_wait_for_the_cache_are_a_warning() -> None:
    """59 samples of 9216 tokens, by hand: the pool over 36 layers * 4 heads of a rank * 128 * 2 * 2 bytes, in blocks of 16."""
    by_hand = FSDP.served.kv_pool // (9216 * 36 * 4 * 128 * 2 * 2)
    (one,) = [row for row in found(stage("rollout", 1)) if row.id == "memory.kv_pool"]
    assert one.verdict == "warn" and one.fires_at == "long_sample"
    assert f"holds {by_hand} samples of 9216 tokens" in one.message
    few = planned("verl_qwen3_8b_fsdp.sh", "data.max_response_length=256", "data.max_prompt_length=128", gpu="h100-80g")
    (one,) = [row for row in found(stage("rollout", 1), plan=few) if row.id == "memory.kv_pool"]
    assert one.verdict == "pass"


def test_the_own_loop_has_no_pool_that_anybody_waits_for() -> None:
    tiny = planned("tiny.yaml", "memory.limit_bytes=100000000")
    assert {one.id for one in tiny.findings if one.id.startswith("memory.")} == {"memory.engine", "memory.fits"}
