"""The values of symbols against those that the loop itself wrote into a run's manifest."""

from collections.abc import Callable

import pytest

from flowledger.config.schema import MicroBatch
from flowledger.plan.bindings import bindings, micro_samples
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
