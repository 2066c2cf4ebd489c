"""The whole plan: what it says of the examples, that it is quick and light, and that figures hang together."""

import subprocess
import sys
import time

import pytest

from flowledger.ledger.rows import FindingRow, MemoryRow, StorageRow, TensorRow
from flowledger.plan.plan import Plan
from flowledger.plan.whatif import changed, with_config
from tests.plan.conftest import planned

PLANS = {
    "tiny": planned("tiny.yaml"),
    "fsdp": planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g"),
    "megatron": planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g"),
}


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


def test_planning_needs_no_torch() -> None:
    asked = (
        "import sys, flowledger.plan.ask, flowledger.config.detect; print({'torch', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_plan_of_a_thousand_gpus_takes_less_than_a_second_of_cpu() -> None:
    before = time.process_time()
    made = planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g")
    assert made.fits is not None and made.rows() and made.chain.rows
    assert time.process_time() - before < 2  # on two busy cores; a second on idle ones


def test_without_a_device_it_does_not_say_whether_it_fits() -> None:
    assert PLANS["tiny"].fits is None
    assert planned("verl_qwen3_8b_fsdp.sh").fits is None
    assert PLANS["fsdp"].fits is True


def test_a_limit_below_the_peak_does_not_fit_and_is_a_failing_check() -> None:
    worst = PLANS["tiny"].worst
    need = max(worst.reserved, worst.peak.bytes)
    for limit, fits in ((need, True), (need - 1, False)):
        limited = with_config(PLANS["tiny"], changed(PLANS["tiny"].config, "memory.limit_bytes", limit))
        assert limited.fits is fits
        assert ("fail" in {one.verdict for one in limited.findings if one.id == "memory.fits"}) is not fits


def test_a_larger_device_fits_what_a_smaller_one_fits() -> None:
    free = [planned("verl_qwen3_8b_fsdp.sh", gpu=name).worst.free for name in ("a100-40g", "h100-80g", "h200")]
    assert all(one is not None for one in free) and free == sorted(free)


def test_every_stage_that_computes_has_a_job_on_every_kind_of_rank(plan: Plan) -> None:
    assert set(plan.jobs) == {(work.stage, ranks.name) for work in plan.works for ranks in plan.classes}
    for (stage, _), (work, job) in plan.jobs.items():
        assert work.stage == stage
        assert job.tokens == plan.loads[stage].tokens
        assert job.world % job.mesh.model == 0


def test_degrees_multiply_to_the_world(plan: Plan) -> None:
    _, job = plan.jobs[("update_actor", plan.classes[0].name)]
    assert plan.setting.mesh.size == job.world
    assert sum(ranks.count for ranks in plan.classes) == job.world


def test_rows_are_of_the_four_planned_tables_and_numbered(plan: Plan) -> None:
    rows = plan.rows()
    assert {type(row) for row in rows} == {TensorRow, StorageRow, MemoryRow, FindingRow}
    for kind in (TensorRow, StorageRow, MemoryRow):
        numbers = [row.seq for row in rows if isinstance(row, kind)]
        assert numbers == list(range(len(numbers)))


def test_the_chain_and_the_shapes_count_the_same_samples(plan: Plan) -> None:
    chain = {row.quantity: row.value for row in plan.chain.rows}
    bound = plan.setting.bindings
    assert chain["samples"] == bound["B"] == bound["B_prompt"] * bound["G"]
    assert chain["mini-batch"] == bound["B_mini"]


def test_the_chain_and_the_memory_speak_of_the_same_micro_batch(plan: Plan) -> None:
    chain = {row.quantity: row.value for row in plan.chain.rows}
    load = plan.loads["update_actor"]
    assert chain["update: micro-batches"] == load.micro_batches
    if "update: worst micro-batch" in chain:
        assert chain["update: worst micro-batch"] == load.tokens


@pytest.mark.parametrize(
    ("settings", "rule", "layers"),
    [
        ("mesh.pp=2 actor.engine.layers_in_stages=[2,1]", "flowledger.stages", [1, 1]),
        ("mesh.pp=2 actor.engine.layers_in_stages=[1,1,1]", "flowledger.stages", [1, 1]),
        ("mesh.pp=2 model.tiny.layers=5", "model.layers_pp", [3, 2]),
        ("mesh.pp=2 mesh.vpp=2 actor.engine.pipeline=interleaved model.tiny.layers=5", "model.layers_pp", [3, 2]),
        ("mesh.pp=2 critic.path=start critic.engine.layers_in_stages=[1,2] algorithm.advantage=gae", "flowledger.critic_stages", [1, 1]),
        ("mesh.pp=4", "model.layers_pp", [1, 1, 0, 0]),
    ],
)  # fmt: skip
def test_layers_that_do_not_divide_are_a_failed_rule_and_the_rest_is_planned(
    settings: str, rule: str, layers: list[int]
) -> None:
    """Chunks of 2, 1, 1 and 1 layers in turn are 3 and 2."""
    plan = planned("tiny.yaml", *settings.split())
    assert [one.id for one in plan.findings if one.verdict == "fail"] == [rule]
    assert [len(one.layers) for one in plan.classes] == layers
    assert plan.memory and plan.shapes and plan.talks


def test_layers_of_another_framework_too() -> None:
    name = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
    plan = planned("verl_qwen3_235b_megatron.sh", f"{name}=7", gpu="h100-80g")
    assert "model.layers_pp" in {one.id for one in plan.findings if one.verdict == "fail"}
    assert [len(one.layers) for one in plan.classes] == [14, 14, 14, 13, 13, 13, 13]
