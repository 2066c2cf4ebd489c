"""What a weight sync holds: sizes from published shapes, and the own loop against torch."""

import torch
from torch import nn

from flowledger.config.engine import Engine, Lora, Mesh, Offload, Serving
from flowledger.plan.timeline import Clock, Live, Timeline
from flowledger.plan.weight_sync import largest, lives
from flowledger.plan.weights import count
from flowledger.run.weights import RolloutWeights, rollout_weights
from flowledger.tables.models import Architecture, architecture
from tests.plan.live_storages import Tracker

MODEL = architecture("Qwen2.5-7B")
EMBEDDING = 152064 * 3584  # config.json of Qwen/Qwen2.5-7B
VLLM = Serving(engine="vllm", mesh=Mesh(tp=2))


def sync(engine: Engine, serving: Serving = VLLM, model: Architecture = MODEL) -> dict[str, list[Live]]:
    clock = Clock()
    found = lives(model, engine, serving, clock)
    assert tuple(clock.names) == ("gather", "send")
    kinds: dict[str, list[Live]] = {}
    for live in found:
        kinds.setdefault(live.kind, []).append(live)
    return kinds


def test_fsdp_sends_whole_tensors_as_stored() -> None:
    found = sync(Engine(strategy="fsdp2", param_dtype="float32", compute_dtype="bfloat16"))
    (whole,) = found["temporary"]
    assert whole.bytes == 4 * EMBEDDING
    (bucket,) = found["comm_buffer"]
    assert (bucket.bytes, bucket.count) == (2 * 2**30, 1)
    assert sync(Engine(strategy="fsdp1", param_dtype="bfloat16"))["temporary"][0].bytes == 2 * EMBEDDING


def test_the_engine_has_its_weights_back_and_no_pool() -> None:
    found = sync(Engine(strategy="fsdp2"))
    (held,) = found["param"]
    assert abs(held.bytes - count(MODEL)) < 0.01 * count(MODEL)  # two bytes, over two ranks
    assert "kv_cache" not in found and found["residue"]


def test_megatron_gathers_shards_in_the_compute_dtype() -> None:
    found = sync(Engine(strategy="megatron", mesh=Mesh(tp=4), param_dtype="bfloat16"))
    assert found["temporary"][0].bytes == 2 * EMBEDDING
    assert sorted(live.bytes for live in found["comm_buffer"]) == sorted([2 * EMBEDDING, 2 * 2**30])
    alone = sync(Engine(strategy="megatron", mesh=Mesh(tp=1), param_dtype="bfloat16"))
    assert len(alone["comm_buffer"]) == 1


def test_an_engine_elsewhere_costs_two_buckets_and_no_weights() -> None:
    found = sync(Engine(strategy="fsdp2"), VLLM.model_copy(update={"colocated": False}))
    assert found["comm_buffer"][0].total == 4 * 2**30
    assert "param" not in found and "residue" not in found


def test_offloaded_shards_come_back() -> None:
    offloaded = Offload(param=True)
    engine = Engine(strategy="fsdp1", mesh=Mesh(dp=8), param_dtype="float32", offload=offloaded)
    shard = [live for live in sync(engine)["param"] if "offloaded" in live.label]
    assert abs(sum(live.bytes for live in shard) - 4 * count(MODEL) / 8) < 8
    streamed = Engine(strategy="fsdp2", mesh=Mesh(dp=8), offload=Offload(param=True, streamed=True))
    assert not [live for live in sync(streamed)["param"] if "offloaded" in live.label]


def test_adapters_are_small() -> None:
    engine = Engine(strategy="fsdp2", lora=Lora(rank=32))
    assert largest(MODEL, engine).numel == 152064 * 32


def test_nothing_is_gathered_where_every_rank_has_all() -> None:
    assert "temporary" not in sync(Engine(strategy="ddp"))


def test_the_own_loop_compares_the_largest_tensor() -> None:
    """RolloutWeights.take of a model with one large tensor, watched storage by storage."""
    shape = Architecture(name="m", layers=1, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=4096)
    clock = Clock()
    found = lives(shape, Engine(), Serving(dtype="float32"), clock)
    assert tuple(clock.names) == ("copy",)
    policy = nn.Embedding(4096, 32)
    weights = rollout_weights(policy, shared=False)
    there = [*policy.parameters(), *weights.model.parameters()]
    with Tracker(*there) as tracker, torch.no_grad():
        weights.take(policy)
    compared = sum(live.total for live in found if live.kind == "temporary")
    assert compared <= tracker.peak <= compared + 1024
    assert Timeline(tuple(clock.names), tuple(found)).peak().bytes == compared + 4 * count(shape)


def test_shared_tensors_do_not_move() -> None:
    assert lives(MODEL, Engine(), Serving(), Clock(), shared=True) == []
    assert RolloutWeights(model=nn.Linear(1, 1), shared=True).take(nn.Linear(1, 1)) is None
