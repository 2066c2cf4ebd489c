"""The planned memory ledger against a step of the loop that was watched operator by operator, and its laws."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.kinds import KINDS
from flowledger.ledger.rows import TensorRow
from flowledger.plan import memory
from flowledger.plan.memory import FIRST, LATER, StageMemory
from flowledger.plan.plan import Plan
from flowledger.plan.shapes import RankClass
from flowledger.plan.timeline import Live, Peak
from flowledger.plan.weights import weights
from flowledger.plan.whatif import changed, with_config
from tests.plan.conftest import WATCHED, Witnesses, planned

TOLERANCE = 0.02
RANKS = RankClass(name="all", first=0, count=1, layers=(0,))


def recorded_peaks(witness: Witnesses) -> dict[str, dict[str, Any]]:
    """Stage -> its fullest moment: bytes of live tensors by kind, and their sum in `known`."""
    rows = witness.ledger.rows(
        "FROM memory_by_stage WHERE step = ? AND instant = 'peak' AND stage IS NOT NULL ORDER BY known", [WATCHED]
    )
    return {row["stage"]: row for row in rows}


def later(plan: Plan) -> dict[str, StageMemory]:
    return {one.stage: one for one in plan.memory if one.step == LATER}


def models(plan: Plan) -> int:
    """Copies of the policy: trained, reference, and the rollout's where it has one of its own."""
    return 2 + (plan.config.rollout.weights != "shared")


@pytest.mark.parametrize("name", ["usual", "alone", "variant"])
def test_the_peak_of_every_stage_is_within_two_percent_of_the_recorded_one(
    witnesses: Callable[[str], Witnesses], name: str
) -> None:
    witness = witnesses(name)
    plan, seen = later(witness.plan), recorded_peaks(witness)
    assert len(seen) >= 9  # weight_sync has nothing to do where weights are shared
    off = {stage: plan[stage].peak.bytes / row["known"] - 1 for stage, row in seen.items()}
    assert {stage: f"{error:+.1%}" for stage, error in off.items() if abs(error) > TOLERANCE} == {}


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_parameters_states_and_the_cache_are_exact(witnesses: Callable[[str], Witnesses], name: str) -> None:
    """Up to what is no parameter: two rotation tables a model, and one float32 counter of steps a trained tensor."""
    witness = witnesses(name)
    plan, seen = later(witness.plan), recorded_peaks(witness)
    architecture = witness.plan.architecture
    rotations = models(witness.plan) * 2 * (architecture.head_dim // 2) * 4
    counters = 4 * sum(one.count for one in weights(architecture))
    for stage, row in seen.items():
        kinds = plan[stage].kinds
        assert kinds["param"] == row["param"] - rotations, stage
        assert kinds["optimizer"] == row["optimizer"] - counters, stage
        assert kinds.get("kv_cache", 0) == (row["kv_cache"] or 0), stage


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_gradients_are_exact(witnesses: Callable[[str], Witnesses], name: str) -> None:
    witness = witnesses(name)
    plan, seen = later(witness.plan), recorded_peaks(witness)
    assert {stage: one.kinds.get("grad", 0) for stage, one in plan.items() if stage in seen} == {
        stage: row["grad"] or 0 for stage, row in seen.items()
    }


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_between_stages_lies_what_lay_there_in_the_recording(witnesses: Callable[[str], Witnesses], name: str) -> None:
    """The data tensors of the step, once they are all there, to a number a sample: the estimator's own come and go."""
    witness = witnesses(name)
    planned, found = later(witness.plan)["advantage"].kinds["batch"], recorded_peaks(witness)["advantage"]["batch"]
    assert abs(planned - found) <= 4 * 16  # float32 [B_prompt*G]


EXAMPLES = (
    ("tiny.yaml", {}),
    ("verl_qwen3_8b_fsdp.sh", {"gpu": "h100-80g"}),
    ("verl_qwen3_235b_megatron.sh", {"gpu": "h100-80g"}),
)


@pytest.mark.parametrize(("source", "question"), EXAMPLES)
def test_the_kinds_of_a_peak_add_up_to_it_and_every_stage_has_one(source: str, question: dict[str, str]) -> None:
    plan = planned(source, **question)
    assert {(one.stage, one.ranks.name, one.step) for one in plan.memory} == {
        (stage, ranks.name, step) for stage in plan.stages for ranks in plan.classes for step in (FIRST, LATER)
    }
    for one in plan.memory:
        assert sum(one.kinds.values()) == one.peak.bytes
        assert set(one.kinds) <= set(KINDS)
        assert all(size >= 0 for size in one.kinds.values())
        assert one.reserved >= one.peak.bytes


TINY = planned("tiny.yaml")


@settings(max_examples=12, deadline=None)
@given(
    samples=st.sampled_from([1, 2, 4, 8]),
    response=st.integers(2, 64),
    more=st.integers(1, 40),
    chunk=st.integers(0, 300),
)
def test_longer_responses_never_take_less_and_kinds_still_add_up(
    samples: int, response: int, more: int, chunk: int
) -> None:
    config = changed(TINY.config, "actor.micro_batch.samples", samples)
    config = changed(config, "actor.log_prob_chunk_tokens", chunk)

    def peak(tokens: int) -> int:
        plan = with_config(TINY, changed(config, "rollout.max_response_tokens", tokens))
        assert all(sum(one.kinds.values()) == one.peak.bytes for one in plan.memory)
        return later(plan)["update_actor"].peak.bytes

    assert peak(response) <= peak(response + more)


def test_optimizer_states_are_not_there_before_the_first_update() -> None:
    one_update = planned("tiny.yaml", "actor.mini_batch_prompts=4")
    first = {one.stage: one for one in one_update.memory if one.step == FIRST}
    assert "optimizer" not in first["rollout"].kinds
    assert "optimizer" not in first["ref_log_prob"].kinds
    assert first["weight_sync"].kinds["optimizer"] == later(one_update)["weight_sync"].kinds["optimizer"] > 0
    assert first["update_actor"].peak.bytes < later(one_update)["update_actor"].peak.bytes


def test_a_sleeping_engine_keeps_its_memory_from_nobody() -> None:
    plan = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")
    stages = later(plan)
    assert stages["rollout"].kinds["kv_cache"] == plan.served.kv_pool > 30 * 2**30
    assert all("kv_cache" not in one.kinds for name, one in stages.items() if name not in ("rollout", "weight_sync"))
    awake = later(planned("verl_qwen3_8b_fsdp.sh", "actor_rollout_ref.rollout.free_cache_engine=False", gpu="h100-80g"))
    assert awake["update_actor"].kinds["kv_cache"] > 20 * 2**30


def test_what_stays_is_what_the_next_stage_finds() -> None:
    plan = planned("tiny.yaml")
    stages = later(plan)
    held = (
        models(plan) * 90_944 * 4 + 2 * 90_944 * 4
    )  # parameters of each model, two moments of one; counted by hand in test_cli
    assert {name: sum(one.rest.values()) for name, one in stages.items() if name not in ("rollout", "weight_sync")} == {
        name: held for name in stages if name not in ("rollout", "weight_sync")
    }


def stage_memory(bytes_: int, reserved: int, limit: int | None, step: int = LATER) -> StageMemory:
    peak = Peak("somewhere", bytes_, (Live(name="params", kind="param", bytes=bytes_),))
    return StageMemory(
        stage="update_actor",
        role="actor",
        ranks=RANKS,
        step=step,
        peak=peak,
        reserved=reserved,
        host=0,
        rest={},
        limit=limit,
    )


def test_free_is_what_the_limit_leaves_of_the_larger_figure() -> None:
    assert stage_memory(10, 12, 20).free == 8
    assert stage_memory(10, 9, 20).free == 10
    assert stage_memory(10, 30, 20).free == -10
    assert stage_memory(10, 30, None).free is None


def test_rounding_to_blocks_is_residue() -> None:
    peak = Peak(
        "somewhere", 1024, (Live(name="params", kind="param", bytes=700), Live(name="x", kind="residue", bytes=200))
    )
    one = StageMemory(stage="s", role="r", ranks=RANKS, step=1, peak=peak, reserved=0, host=0, rest={}, limit=None)
    assert one.kinds == {"param": 700, "residue": 324}


def test_the_worst_stage_is_the_one_that_asks_for_most() -> None:
    few, many, as_many = stage_memory(10, 12, 20), stage_memory(14, 11, 20), stage_memory(9, 14, 20, FIRST)
    assert memory.worst([few, many, as_many]) is many


def row(stage: str, name: str, dims: str, size: int, phase: str | None = None) -> TensorRow:
    return TensorRow(stage=stage, phase=phase, tensor_name=name, dims=dims, bytes=size, kind="batch")


def test_data_tensors_live_from_writer_to_last_reader_in_the_largest_form_met_so_far() -> None:
    rows = [
        row("prompt", "attention_mask", "[B_prompt, S_prompt]", 10),
        row("rollout", "attention_mask", "[B_prompt*G, S_prompt + S_resp]", 90),
        row("old_log_prob", "attention_mask", "[B_micro, S_prompt + S_resp]", 500, "forward"),
        row("reward", "reward", "[B_prompt*G]", 4),
        row("advantage", "reward", "[B_prompt, G]", 4),
    ]
    stages = ("prompt", "rollout", "reward", "advantage", "update_actor")

    def sizes(*, held: bool) -> dict[str, int]:
        lives = memory.batch_lives(rows, stages, on_host=False, held=held)
        return {stage: sum(live.total for live in of) for stage, of in lives.items()}

    assert sizes(held=False) == {"prompt": 10, "rollout": 90, "reward": 4, "advantage": 4, "update_actor": 0}
    assert sizes(held=True) == {"prompt": 10, "rollout": 90, "reward": 94, "advantage": 94, "update_actor": 94}


def test_rows_of_the_ledger_say_the_same() -> None:
    plan = planned("tiny.yaml")
    rows = memory.rows(plan.memory)
    for one in plan.memory:
        of = {r.kind: r for r in rows if (r.stage, r.step, r.instant) == (one.stage, one.step, "peak")}
        assert {kind: r.allocated for kind, r in of.items() if kind != "total" and r.allocated} == {
            kind: size for kind, size in one.kinds.items() if size
        }
        assert (of["total"].allocated, of["total"].reserved) == (one.peak.bytes, one.reserved)
    assert [r.seq for r in rows] == list(range(len(rows)))
