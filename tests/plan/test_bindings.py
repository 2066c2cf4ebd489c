"""The values of symbols against those that the loop itself wrote into a run's manifest."""

from collections.abc import Callable

import pytest

from flowledger.config.schema import MicroBatch
from flowledger.plan.bindings import bindings, micro_samples
from flowledger.plan.plan import Plan
from flowledger.plan.whatif import changed
from tests.plan.conftest import Witnesses, planned

TINY = planned("tiny.yaml")


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_they_are_what_the_loop_bound(witnesses: Callable[[str], Witnesses], name: str) -> None:
    witness = witnesses(name)
    own = witness.ledger.directory.manifest.bindings
    planned_ = witness.plan.setting.bindings
    shared = own.keys() & planned_.keys()
    assert shared >= {"B_prompt", "G", "H", "L", "V"}
    assert {symbol: planned_[symbol] for symbol in shared} == {symbol: own[symbol] for symbol in shared}


def test_by_hand() -> None:
    """examples/tiny.yaml: 4 prompts * 4 samples of 32 + 16 tokens in 12 slots, two layers of width 64."""
    found = bindings(TINY.config, TINY.architecture, 1, 192)
    assert found == {
        "B_prompt": 4, "G": 4, "B": 16, "B_mini": 8, "B_micro": 4, "B_run": 12, "B_slot": 12, "B_admit": 3, "S_prompt": 32,
        "S_resp": 16, "S": 48, "S_cache": 47, "N_decode": 32, "N_reward": 1, "T": 192, "T_logit": 64, "L": 2, "H": 64, "A": 4,
        "K": 2, "D": 16, "F": 128, "V": 264,
    }  # fmt: skip


def test_what_is_not_known_is_not_bound() -> None:
    found = bindings(TINY.config, None, 1, None)
    assert not {"T", "T_logit", "H", "V", "E"} & found.keys()
    assert "E" in planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g").setting.bindings


def test_slots_that_are_refilled_decode_as_often_as_rounds_are_needed() -> None:
    for running, steps in ((16, 16), (12, 32), (4, 64), (1, 256)):
        config = changed(TINY.config, "rollout.max_running", running)
        assert bindings(config, None, 1, None)["N_decode"] == steps


def test_a_token_budget_holds_as_many_samples_as_fit_at_full_length() -> None:
    assert micro_samples(MicroBatch(max_tokens=200), TINY.config, 1, 200) == 4
    assert micro_samples(MicroBatch(max_tokens=20), TINY.config, 1, 20) == 1
    assert micro_samples(MicroBatch(samples=64), TINY.config, 1, 200) == 8  # no more than a mini-batch
    assert micro_samples(MicroBatch(samples=4), TINY.config, 4, 96) == 2


def test_micro_batches_count_all_data_parallel_ranks() -> None:
    one, eight = (bindings(TINY.config, TINY.architecture, dp, 96) for dp in (1, 8))
    assert (one["T"], eight["T"]) == (96, 768)


@pytest.mark.parametrize(
    ("words", "local", "whole", "tokens"),
    [
        # 8 samples of a mini-batch, 4 on each of two dp ranks: 2 prompts * 32 + 4 responses * 16 tokens
        (("mesh.dp=2", "mesh.tp=2"), 4, 8, 128),
        # the same over four: 2 samples of two prompts
        (("mesh.dp=4",), 2, 8, 96),
        # 8 samples on one dp rank: micro-batches of 4 samples of one prompt
        (("mesh.tp=2",), 4, 4, 96),
        # a budget of 200 tokens holds 4 samples of 48, and is planned full
        (("mesh.dp=2", "mesh.tp=2", "actor.micro_batch={max_tokens: 200}"), 4, 8, 192),
        (("mesh.tp=2", "actor.micro_batch={max_tokens: 200}"), 4, 4, 200),
        (("mesh.dp=2", "mesh.tp=2", "actor.micro_batch={max_tokens: 100}"), 2, 4, 100),
    ],
)
def test_samples_of_a_micro_batch_on_a_mesh_by_hand(
    words: tuple[str, ...], local: int, whole: int, tokens: int
) -> None:
    """examples/tiny.yaml: mini-batches of 2 prompts * 4 samples of 32 + 16 tokens, in micro-batches of 4 samples."""
    plan = planned("tiny.yaml", *words)
    assert plan.setting.bindings["B_micro"] == whole
    rows = [row for row in plan.shapes if row.stage == "update_actor" and row.dims == "[B_micro]"]
    assert {(tuple(row.local_shape), tuple(row.logical_shape)) for row in rows} == {((local,), (whole,))}
    packed = [row for row in plan.shapes if row.tensor_name == "full_sequence" and row.dims == "[1, T]"]
    assert {tuple(row.local_shape) for row in packed if row.stage == "update_actor"} == {(1, tokens)}


def sizes(plan: Plan, tensor: str, dims: str) -> dict[str, list[int] | None]:
    """Stage -> the logical shape of a tensor in a form."""
    return {
        one.stage or "": one.logical_shape
        for one in plan.shapes
        if (one.tensor_name, one.dims) == (tensor, f"[{dims}]")
    }


def test_a_stage_that_cuts_samples_anew_has_sizes_of_its_own() -> None:
    # 8 samples of two prompts: 2*32 + 8*16 tokens; 4 of one: 32 + 4*16; 2 of one: 32 + 2*16
    own = (
        "actor.log_prob_micro_batch.samples=8",
        "critic.path=start",
        "critic.micro_batch.samples=2",
        "algorithm.advantage=gae",
    )
    due = {"old_log_prob": 192, "ref_log_prob": 192, "update_actor": 96, "values": 64, "update_critic": 64}
    found = sizes(planned("tiny.yaml", *own), "full_sequence", "1, T")
    assert found == {stage: [1, tokens] for stage, tokens in due.items()}
    padded = sizes(planned("tiny.yaml", *own, "actor.packed=false"), "hidden_states", "B_micro, S, H")
    samples = {"old_log_prob": 8, "ref_log_prob": 8, "update_actor": 4, "values": 2, "update_critic": 2}
    assert {stage: padded[stage] for stage in samples} == {stage: [n, 48, 64] for stage, n in samples.items()}


def test_a_row_is_filled_for_the_ranks_that_share_it_in_this_model() -> None:
    """Three responses of 15 tokens to a prompt of 32 are 77; where norms are cut along tokens two ranks share one more."""
    plan = planned(
        "tiny.yaml", "mesh.tp=2", "rollout.max_response_tokens=15", "rollout.samples_per_prompt=3",
        "actor.micro_batch.samples=3", "critic.path=start", "algorithm.advantage=gae",
        "critic.engine.sequence_parallel=true",
    )  # fmt: skip
    found = sizes(plan, "full_sequence", "1, T")
    assert (found["update_actor"], found["update_critic"]) == ([1, 77], [1, 78])


def test_a_micro_batch_of_another_framework_s_pass_too() -> None:
    one = planned(
        "verl_qwen3_8b_fsdp.sh", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3", gpu="h100-80g",
    )  # fmt: skip
    dp, whole = one.setting.mesh.degree("dp"), one.setting.bindings["S"]
    found = sizes(one, "full_sequence", "1, T")
    assert found["old_log_prob"] == [1, 3 * whole * dp]
    assert found["update_actor"] == [1, one.loads["update_actor"].tokens * dp] != found["old_log_prob"]
