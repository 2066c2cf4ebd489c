"""What a rank of an inference engine holds, worked out by hand from the sizes of Qwen3-8B.

Hidden 4096, 36 layers of 32 heads and 8 key-value heads of 128, feed-forward 12288, vocabulary 151936.
"""

import pytest

from flowledger.ledger.rows import TensorRow
from tests.plan.conftest import planned

SOURCE = "verl_qwen3_8b_fsdp.sh"
DEGREE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MATRICES = 4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 12288  # q and o, k and v, gate up and down
NORMS = 2 * 4096 + 2 * 128  # before attention and before the feed-forward, of queries and keys


def rows(tp: int, tensor: str, stage: str) -> list[TensorRow]:
    found = planned(SOURCE, f"{DEGREE}={tp}", gpu="h100-80g").shapes
    return [row for row in found if row.tensor_name == tensor and row.stage == stage]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_weights_are_cut_by_tp(tp: int) -> None:
    read = rows(tp, "updated_params", "rollout")
    layer = next(row for row in read if row.layer == 0)
    assert layer.logical_shape == [MATRICES + NORMS]
    assert layer.local_shape == [(MATRICES + NORMS) // tp]
    assert layer.rank_count == 8
    outside = next(row for row in read if row.layer is None)
    assert outside.local_shape == [(2 * 151936 * 4096 + 4096) // tp]
    written = rows(tp, "updated_params", "weight_sync")
    assert [row.local_shape for row in written if row.access == "write"] == [row.local_shape for row in read]


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1)])
def test_the_cache_has_the_heads_that_tp_leaves_and_the_samples_that_its_pool_holds(tp: int, heads: int) -> None:
    made = planned(SOURCE, f"{DEGREE}={tp}", gpu="h100-80g")
    cache = next(row for row in made.shapes if row.tensor_name == "kv_cache" and row.stage == "rollout")
    assert cache.logical_shape is not None and cache.local_shape is not None
    assert cache.logical_shape[1:] == [8, 1024 + 8192 - 1, 128]
    slots = cache.local_shape[0]
    assert cache.local_shape[1:] == [heads, 9215, 128]
    assert cache.logical_shape[0] == slots * (8 // tp), "each replica has as many"
    holds = made.served.kv_pool // (2 * 36 * heads * 9216 * 128 * 2)
    assert slots == min(holds, 256)  # max_num_seqs of a replica


def test_more_ranks_than_heads_hold_copies() -> None:
    made = planned(SOURCE, "trainer.nnodes=2", f"{DEGREE}=16", gpu="h100-80g")
    cache = next(row for row in made.shapes if row.tensor_name == "kv_cache" and row.stage == "rollout")
    assert cache.local_shape is not None and cache.local_shape[1] == 1
    assert cache.rank_count == 16


def test_each_replica_answers_its_part_of_the_prompts() -> None:
    (whole, *_) = [row for row in rows(2, "attention_mask", "rollout") if row.dims == "[B_prompt, S_prompt]"]
    assert whole.local_shape == [256 // 4, 1024]
    trained = next(
        row for row in rows(2, "old_log_prob", "old_log_prob") if row.dims == "[B_prompt*G, S_resp]" and not row.phase
    )
    assert trained.local_shape == [2048 // 8, 8192], "what trains is cut as before"
