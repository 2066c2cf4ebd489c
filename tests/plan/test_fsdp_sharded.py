"""FSDP2 itself on one rank of eight (a process group that communicates with nobody) against the planned timeline."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowledger.config.engine import Engine, Logits, Optimizer, Recompute
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.job import Job
from flowledger.plan.timeline import Timeline
from flowledger.tables.models import Architecture
from tests.plan.fsdp_runs import Measured, architecture, causal_lm, checkpointed
from tests.plan.live_storages import Tracker

WORLD = 8


class ShardTracker(Tracker):
    """FSDP2 frees gathered parameters by resizing their storage to nothing, which no operator tells of."""

    def __enter__(self) -> Any:
        self.resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            key, out = storage._cdata, self.resize(storage, size)
            self.live += size - self.sizes.get(key, 0)
            self.sizes[key] = size
            self.peak = max(self.peak, self.live)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *caught: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*caught)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        yield
        dist.destroy_process_group()


def shard(model: nn.Module, *, reshard: bool, split: bool) -> nn.Module:
    """Every layer a unit; embedding and head in the root, or (`split`) each a unit of its own."""
    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    body: Any = model.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if split:
        fully_shard(body.embed_tokens, mesh=mesh, mp_policy=policy)
        fully_shard([body.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=split)
    return model


def measured(shape: Architecture, tokens: int, *, recompute: bool, reshard: bool, split: bool) -> Measured:
    model = causal_lm(shape, torch.float32)
    model = shard(checkpointed(model) if recompute else model, reshard=reshard, split=split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    ids, positions = torch.randint(1, 100, (1, tokens)), torch.arange(tokens)[None]
    weighting = torch.randn(1, tokens, shape.vocab, dtype=torch.bfloat16)

    def step() -> None:
        loss = (model(ids, position_ids=positions).logits * weighting).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step()
        gc.collect()
        held = [local(parameter) for parameter in model.parameters()]
        states = [local(value) for state in optimizer.state.values() for value in state.values()]
        resting = sum(one.untyped_storage().nbytes() for one in (*held, *(value for value in states if value.dim())))
        with ShardTracker(*held, *states, *model.buffers(), ids, positions, weighting) as tracker:
            step()
    return Measured(peak=resting + tracker.peak, resting=resting)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def planned(shape: Architecture, tokens: int, *, recompute: bool, reshard: bool) -> Timeline:
    engine = Engine(
        strategy="fsdp2", param_dtype="float32", compute_dtype="bfloat16", reduce_dtype="float32", attention="sdpa",
        reshard_after_forward=reshard, recompute=Recompute(granularity="full" if recompute else "none"),
        optimizer=Optimizer(implementation="loop"), logits=Logits(kept=False),
    )  # fmt: skip
    return fsdp.timeline(
        Job(architecture=shape, engine=engine, world=WORLD, sequences=1, tokens=tokens, longest=tokens)
    )


@pytest.mark.parametrize(
    ("tied", "tokens", "recompute", "reshard", "within"),
    [
        (True, 256, False, True, 1e-5),  # the product of the last layer's feed-forward
        (True, 256, True, True, 2e-4),
        (True, 16, False, True, 1e-3),  # gathered units, gradients, the input of a reduction in flight
        (False, 16, False, True, 1e-3),
        (True, 16, False, False, 0.015),
    ],
)
def test_the_peak_of_a_shard(tied: bool, tokens: int, recompute: bool, reshard: bool, within: float) -> None:
    shape = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=512, tied=tied)
    truth = measured(shape, tokens, recompute=recompute, reshard=reshard, split=not tied)
    plan = planned(shape, tokens, recompute=recompute, reshard=reshard)
    assert plan.peak().bytes == pytest.approx(truth.peak, rel=within)
    assert sum(live.bytes for live in plan.lives if live.persistent) == truth.resting


@torch.no_grad()
def test_without_gradients_a_layer_arrives_beside_the_buffer_of_the_one_before_and_norms_come_later() -> None:
    shape = architecture(layers=4, hidden=128, head_dim=32, ffn=344, vocab=512, tied=True)
    ids = torch.randint(1, 100, (1, 128))
    model = shard(causal_lm(shape, torch.float32), reshard=True, split=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ids)
        gc.collect()
        held = [local(parameter) for parameter in model.parameters()]
        with ShardTracker(*held, *model.buffers(), ids) as tracker:
            model(ids)
    engine = Engine(
        strategy="fsdp2", param_dtype="float32", compute_dtype="bfloat16", attention="sdpa", logits=Logits(kept=False)
    )
    job = Job(
        architecture=shape, engine=engine, world=WORLD, sequences=1, tokens=128, longest=128, gradients=False,
    )  # fmt: skip
    truth = tracker.peak + sum(one.untyped_storage().nbytes() for one in held)
    assert fsdp.timeline(job).peak().bytes == pytest.approx(truth, rel=0.025)
