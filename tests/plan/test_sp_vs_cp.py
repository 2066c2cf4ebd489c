"""What a rank has of which sample under each scheme, by hand; what the whole configuration leaves exposed; what is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowledger.config.detect import Asked, read
from flowledger.plan.ask import Question, make
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware
from flowledger.plan.sequence import ONES, held
from flowledger.plan.sp_vs_cp import compare
from flowledger.tables.gpus import gpu

ROOT = Path(__file__).parents[2]
SHARDS, TINY = "examples/shards.yaml", "examples/tiny.yaml"
FSDP, MEGATRON = "examples/verl_qwen3_8b_fsdp.sh", "examples/verl_qwen3_235b_megatron.sh"
SP = "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
Pieces = list[tuple[int, int, list[list[int]]]]  # first and last sample, and what a rank has of each of them


@cache
def document(source: str, overrides: tuple[str, ...] = (), device: str | None = "h100") -> dict[str, Any]:
    return compare(make(read(str(ROOT / source), Asked(overrides=overrides)), Question(gpu=device)))


def ends(found: dict[str, Any]) -> tuple[Pieces, Pieces]:
    """What the first and the last rank have."""
    first, last = ([(*one["samples"], one["runs"]) for one in found[f"{key}_rank"]] for key in ("first", "last"))
    return first, last


@pytest.mark.parametrize(
    ("degrees", "first", "last", "tokens"),
    [
        ({"sp": 2}, [(0, 0, [[0, 7]])], [(1, 1, [[0, 7]])], 8),  # a whole sample each
        ({"sp": 4}, [(0, 0, [[0, 3]])], [(1, 1, [[4, 7]])], 4),
        ({"sp": 3}, [(0, 0, [[0, 5]])], [(1, 1, [[4, 7]])], 6),  # filled to 18: 0-5, 6-11, 12-17
        ({"tp": 2, "msp": 2}, [(0, 0, [[0, 7]])], [(1, 1, [[0, 7]])], 8),
        ({"tp": 2}, [(0, 1, [[0, 7]])], [(0, 1, [[0, 7]])], 16),
        ({"cp": 2, "ring": 2}, [(0, 1, [[0, 1], [6, 7]])], [(0, 1, [[2, 3], [4, 5]])], 8),  # chunks 0, 3 and 1, 2 of 2
        # a cp rank's row is 0 1 6 7 of both samples
        ({"cp": 2, "ring": 2, "sp": 2}, [(0, 0, [[0, 1], [6, 7]])], [(1, 1, [[2, 3], [4, 5]])], 4),
    ],
)
def test_two_samples_of_eight_tokens_packed_in_a_row(
    degrees: dict[str, int], first: Pieces, last: Pieces, tokens: int
) -> None:
    """[B, S, H] = [2, 8, H], packed [1, 16, H]."""
    found = held(_job(16, 2), {**ONES, **degrees})
    assert ends(found) == (first, last)
    assert (found["rank_tokens"], found["row_tokens"], found["sample_tokens"]) == (tokens, 16, 8)


def test_padded_samples_are_cut_one_by_one() -> None:
    """[4, 48, H]: a rank has a piece of each."""
    rows = {row["scheme"]: row for row in document(TINY, ("actor.packed=false",))["schemes"]}
    assert ends(rows["ulysses"]) == ([(0, 3, [[0, 23]])], [(0, 3, [[24, 47]])])
    assert ends(rows["cp_ring"]) == ([(0, 3, [[0, 11], [36, 47]])], [(0, 3, [[12, 23], [24, 35]])])


def test_samples_that_share_a_prompt_have_their_responses_behind_it() -> None:
    """A prompt of 32 and two responses of 16 in a row of 64; under cp each sample has its own 48 tokens."""
    found = document(SHARDS)
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert ends(rows["ulysses"]) == ([(0, 0, [[0, 31]])], [(0, 1, [[32, 47]])]) == ends(rows["megatron_sp"])
    assert ends(rows["tp"])[0] == ends(rows["tp"])[1] == [(0, 0, [[0, 47]]), (1, 1, [[32, 47]])]
    assert ends(rows["cp_ring"]) == ([(0, 1, [[0, 11], [36, 47]])], [(0, 1, [[12, 23], [24, 35]])])
    assert (rows["ulysses"]["row_tokens"], rows["cp_ring"]["row_tokens"]) == (64, 96)
    assert found["sizes"]["shared_prompts"] and any("share a prompt" in note for note in found["notes"])


def test_rows_of_long_samples_by_hand() -> None:
    """Qwen3-8B: 8 samples of 9,216 over sp 4. Qwen3-235B: 2 of 18,432, cp 2 and within it tp 4."""
    rows = {row["scheme"]: row for row in document(FSDP, (f"{SP}4",))["schemes"]}
    assert ends(rows["ulysses"]) == ([(0, 1, [[0, 9215]])], [(6, 7, [[0, 9215]])])
    megatron = document(MEGATRON)
    rows = {row["scheme"]: row for row in megatron["schemes"]}
    assert ends(rows["megatron_sp"]) == ([(0, 0, [[0, 9215]])], [(1, 1, [[9216, 18431]])])
    assert ends(rows["cp_ring"])[0] == [(0, 1, [[0, 4607], [13824, 18431]])]
    # tp cuts the 18,432 tokens of a cp rank, 0-4607 and 13824-18431 of sample 0 first, in quarters
    assert ends(megatron["here"]) == ([(0, 0, [[0, 4607]])], [(1, 1, [[9216, 13823]])])


def test_four_all_reduces_a_layer_are_all_that_plain_tp_leaves_exposed() -> None:
    """Two forward and two backward of [1, 64, 64] float32, in one piece, over two ranks of a node; two layers."""
    here = document(SHARDS, ("hardware.gpus_per_node=4",))["here"]
    route = Hardware(gpu=gpu("h100"), gpus_per_node=4, world=4).route(1, 2)
    assert here["layer_exposed_here_s"] == pytest.approx(4 * route.seconds("all_reduce", 64 * 64 * 4))
    assert here["layer_bytes"] == 4 * 64 * 64 * 4
    whole = 2 * here["layer_exposed_here_s"] + here["outside_exposed_here_s"]
    assert here["micro_batch_exposed_here_s"] == pytest.approx(whole) and here["outside_exposed_here_s"] > 0


@pytest.mark.parametrize(("source", "overrides"), [(MEGATRON, ()), (FSDP, (f"{SP}4",)), (SHARDS, ())])
def test_the_whole_is_its_schemes_and_its_experts(source: str, overrides: tuple[str, ...]) -> None:
    found = document(source, overrides)
    used = [row for row in found["schemes"] if row["used"]]
    experts = [row for row in found["hiding"] if row["scheme"] == "any"]
    assert used and bool(experts) == (source == MEGATRON)
    for key in ("exposed_s", "exposed_here_s"):
        each = sum(row[f"layer_{key}"] for row in used) + sum(row["passes"] * row[key] for row in experts)
        assert found["here"][f"layer_{key}"] == pytest.approx(each)
    assert found["here"]["layer_compute_s"] == pytest.approx(used[0]["layer_compute_s"])


def test_without_a_device_the_whole_has_bytes_and_no_times() -> None:
    here = document(SHARDS, device=None)["here"]
    assert here["layer_bytes"] == 4 * 64 * 64 * 4
    assert {here[key] for key in here if key.endswith("_s")} == {None}


def test_a_rule_that_is_broken_is_said_in_both_languages() -> None:
    """32 heads over sp 7. No sample of the 129,024 tokens is longer than the 9,216 that there are at most."""
    found = document(FSDP, (f"{SP}7",), None)
    (row,) = (row for row in found["refused"] if row["id"] == "verl.W4")
    assert "num_attention_heads = 32" in row["message"] and "必须整除" in row["message_zh"]
    assert (found["sizes"]["n"], found["sizes"]["s"]) == (14, 9216)
    assert document(FSDP, (f"{SP}4",))["refused"] == []


@pytest.mark.parametrize("source", [SHARDS, TINY, FSDP, MEGATRON])
def test_notes_are_as_many_in_both_languages(source: str) -> None:
    found = document(source, device=None)
    assert len(found["notes"]) == len(found["notes_zh"]) > 1
    assert all(note.isascii() for note in found["notes"])
    assert not any(note.isascii() for note in found["notes_zh"])


def _job(tokens: int, samples: int) -> Job:
    plan = make(read(str(ROOT / SHARDS), Asked()), Question())
    _, job = plan.jobs[("update_actor", plan.classes[0].name)]
    return replace(job, tokens=tokens, sequences=samples, longest=tokens // samples, beside_tokens=0)
