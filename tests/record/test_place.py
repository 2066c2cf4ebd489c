"""On one of several ranks: the form of a tensor, its placement, and whose it is, from what the rank holds of it."""

from typing import Any

import pytest
import torch

from flowledger.flow.mesh import mesh
from flowledger.ledger.rows import TensorRow
from flowledger.record.extract import Templates, Where
from flowledger.record.place import Place

SIZES = {"B_prompt": 5, "G": 4}


def met(
    name: str, shape: tuple[int, ...], stage: str, access: str = "read", within: str | None = None, rank: int = 0,
    **degrees: int,
) -> TensorRow:  # fmt: skip
    """The row of a tensor of this shape, met by a rank of a mesh."""
    train = mesh(**degrees)
    place = Place(rank=rank, meshes={"train": train, "rollout": mesh(dp=train.size)})
    templates = Templates(bindings=SIZES, rank=rank, rank_count=train.size, place=place)
    return templates.of(name, torch.zeros(shape), Where(stage, access, within))


SEEN: list[tuple[Any, ...]] = [
    # name, on this rank, stage, access, within, rank, mesh: dims, placement, owners
    # five prompts on two ranks that sample: three and two
    ("response_mask", (12, 7), "rollout", "write", None, 0, {"dp": 2}, "B_prompt*G, S_resp", ["dp: Shard(0)"], "0-1"),
    ("response_mask", (8, 7), "rollout", "write", None, 1, {"dp": 2}, "B_prompt*G, S_resp", ["dp: Shard(0)"], "0-1"),
    ("sample_id", (8,), "filter", "read", None, 1, {"tp": 2}, "B_prompt*G", ["dp: Shard(0)"], "0-1"),
    # they are dealt by samples to who trains
    ("loss_mask", (8, 7), "balance", "read", None, 1, {"tp": 2}, "B_prompt*G, S_resp", ["dp: Shard(0)"], "0-1"),
    ("loss_mask", (20, 7), "balance", "write", None, 1, {"tp": 2}, "B_prompt*G, S_resp", [], "0"),
    ("loss_mask", (10, 7), "balance", "write", None, 1, {"dp": 2}, "B_prompt*G, S_resp", ["dp: Shard(0)"], "0-1"),
    # advantage is handed a rank's rows, and gathers the step
    ("loss_mask", (10, 7), "advantage", "read", None, 1, {"dp": 2}, "B_prompt*G, S_resp", ["dp: Shard(0)"], "0-1"),
    ("loss_mask", (20, 7), "advantage", "read", None, 1, {"dp": 2}, "B_prompt*G, S_resp", [], "0"),
    ("advantages", (20, 7), "advantage", "write", None, 0, {"dp": 2}, "B_prompt*G, S_resp", [], "0"),
    ("reward", (5, 4), "advantage", "write", None, 0, {"dp": 2}, "B_prompt, G", [], "0"),
    # micro-batches, decode steps
    ("loss_mask", (10, 7), "update_actor", "read", "micro_batch", 0, {"dp": 2}, "B_micro, S_resp", ["dp: Shard(0)"], "0-1"),
    ("logits", (8, 99), "rollout", "write", "decode", 0, {"tp": 2}, "B_run, V", ["dp: Shard(0)"], "0-1"),
    ("logits", (8, 99), "old_log_prob", "write", "micro_batch", 0, {"tp": 2}, "T_logit, V", ["tp: Shard(1)"], "0-1"),
    ("prompt_ids", (3, 9), "rollout", "read", None, 0, {"dp": 2}, "B_prompt, S_prompt", ["dp: Shard(0)"], "0-1"),
    ("prompt_ids", (3, 9), "rollout", "read", "decode", 0, {"dp": 2}, "B_admit, S_prompt", ["dp: Shard(0)"], "0-1"),
    # what a pipeline stage has for itself is its ranks'
    ("params", (30,), "weight_sync", "read", None, 3, {"pp": 2, "dp": 2}, "P", ["dp: Shard(0)"], "2-3"),
    ("params", (30,), "weight_sync", "read", None, 2, {"pp": 2, "sp": 2}, "P", ["sp: Shard(0)"], "2-3"),
    ("new_log_prob", (4, 7), "update_actor", "write", "micro_batch", 3, {"pp": 2, "tp": 2}, "B_micro, S_resp", [], "2"),
    ("old_log_prob", (20, 7), "old_log_prob", "write", None, 3, {"pp": 2, "tp": 2}, "B_prompt*G, S_resp", [], "0"),
    ("full_sequence", (10, 9), "update_actor", "read", None, 3, {"dp": 2, "tp": 2},
     "B_prompt*G, S_prompt + S_resp", ["dp: Shard(0)"], "0, 2"),
    # ranks of cp see all tokens of a sample in its loss; a sum of storages is no part of a whole
    ("policy_loss", (), "update_actor", "write", "micro_batch", 1, {"cp": 2}, "", [], "0"),
    ("policy_loss", (), "update_actor", "write", "micro_batch", 1, {"dp": 2}, "", ["dp: Partial()"], "0"),
    ("activations", (999,), "update_actor", "write", "micro_batch", 1, {"cp": 2}, None, [], "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "stage", "access", "within", "rank", "degrees", "dims", "cut", "owners"), SEEN
)
def test_what_a_rank_holds_is_named_for_what_it_is(
    name: str, shape: tuple[int, ...], stage: str, access: str, within: str | None, rank: int, degrees: dict[str, int],
    dims: str | None, cut: list[str], owners: str,
) -> None:  # fmt: skip
    row = met(name, shape, stage, access, within, rank, **degrees)
    assert (row.dims, row.placement, row.owner_rank) == (dims, cut, owners)
    assert row.local_shape == list(shape)
    sharded = any("Shard" in one for one in cut)
    assert row.logical_shape == (None if sharded else list(shape))  # one rank cannot know it
    assert (row.shape_checksum is None) == sharded


def test_the_residual_stream_under_sequence_parallelism_is_cut_over_tp_too() -> None:
    place = Place(rank=1, meshes={"train": mesh(cp=2, tp=2), "rollout": mesh(dp=4)})
    templates = Templates(bindings=SIZES, rank=1, rank_count=4, place=place)
    where = Where("update_actor", "write", "micro_batch")
    plain, along = (
        templates.of("hidden_states", torch.zeros(1, 8, 16), one)
        for one in (where, where._replace(variant="megatron_sp"))
    )
    assert plain.placement == ["cp: Shard(1)"] and along.placement is not None
    assert set(along.placement) == {"cp: Shard(1)", "tp: Shard(1)"}
    assert (plain.owner_rank, along.owner_rank) == ("0, 2", "0-3")


def test_one_process_names_no_placement_and_finds_the_step_before_the_micro_batch() -> None:
    templates = Templates(bindings=SIZES, rank=0, rank_count=1)
    row = templates.of("new_log_prob", torch.zeros(20, 7), Where("update_actor", "read"))
    assert (row.dims, row.placement, row.owner_rank) == ("B_prompt*G, S_resp", None, "0")
