"""The same cuts made by torch: DTensor's own arithmetic, torch.chunk, and parameters that FSDP2 has cut."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowledger.flow.axes import DENSE
from flowledger.flow.mesh import buffer_shape, local_box, local_shape, mesh


@st.composite
def dense(draw):
    on = mesh(**{axis: draw(st.integers(1, 3)) for axis in draw(st.sets(st.sampled_from(DENSE), max_size=3))})
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    dims = draw(st.lists(st.sampled_from([None, *range(len(shape))]), min_size=5, max_size=5))
    return on, shape, dims


@given(dense())
@settings(max_examples=50, deadline=None)
def test_uneven_splits_over_many_axes_are_those_of_dtensor(case):
    on, shape, dims = case
    placements = {axis: f"Shard({dim})" for axis, dim in zip(DENSE, dims, strict=True) if dim is not None}
    theirs = [Replicate() if dim is None else Shard(dim) for dim in dims]
    sizes = [on.degree(axis) for axis in DENSE]
    for rank in range(on.size):
        where = list(on.coordinates(rank).values())
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, where, theirs)
        box = local_box(shape, placements, on, rank)
        assert local_shape(shape, placements, on, rank) == tuple(local)
        assert [start for start, stop in box if stop > start] == [
            at for at, size in zip(offset, local, strict=True) if size
        ]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_a_strided_shard_is_chunk_after_chunk(size, shards, tp):
    on = mesh(dp=shards, tp=tp)
    for rank in range(on.size):
        first = _chunks(torch.arange(size), tp)[on.at(rank, "tp")]
        mine = _chunks(first, shards)[on.at(rank, "dp")]
        ((start, stop),) = local_box((size,), {"shards": "_StridedShard(0)", "tp": "Shard(0)"}, on, rank)
        assert mine.tolist() == list(range(start, stop))


def _chunks(x: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    found = list(torch.chunk(x, pieces))
    return [*found, *[x[:0]] * (pieces - len(found))]


@contextmanager
def faked(rank: int, size: int) -> Iterator[None]:
    """A process group in which this process is one rank, and nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# (out, in, dp, cp, tp): uneven over FSDP; over both; fewer rows than ranks
SIZES = [(6, 4, 4, 1, 1), (10, 6, 2, 1, 2), (5, 8, 2, 2, 2), (7, 9, 3, 1, 2), (3, 4, 2, 1, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_parameters_that_torch_has_cut_have_our_shapes_and_buffers(sizes):
    wide, narrow, dp, cp, tp = sizes
    on = mesh(dp=dp, cp=cp, tp=tp)
    cuts = {"up": {"shards": "_StridedShard(0)", "tp": "Shard(0)"}, "down": {"shards": "Shard(0)", "tp": "Shard(1)"}}
    shapes = {"up": (wide, narrow), "down": (narrow, wide)}
    for rank in range(on.size):
        with faked(rank, on.size):
            found = _cut_by_torch(shapes, dp * cp, tp)
        for name, (local, buffer) in found.items():
            assert local == local_shape(shapes[name], cuts[name], on, rank)
            assert buffer == buffer_shape(shapes[name], cuts[name], on, rank, axis="shards")


def _cut_by_torch(shapes, shards, tp):
    """name -> (local shape, shape of FSDP's buffer) of this rank, two linear layers cut over tp, then by FSDP2."""
    both = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("shards", "tp"))
    layers = {name: torch.nn.Linear(into, out, bias=False) for name, (out, into) in shapes.items()}
    model = torch.nn.Sequential(OrderedDict(layers))
    if tp > 1:
        parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=both["shards"])
    group = model._get_fsdp_state()._fsdp_param_group
    buffers = {param._module_info.module: param.padded_sharded_param_size for param in group.fsdp_params}
    return {
        name: (tuple(layer.weight.to_local().shape), tuple(buffers[layer]))
        for name, layer in model.named_children()
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(10, 3), (5, 7), (3, 2)])
def test_a_batch_that_torch_distributes_over_dp_and_tokens(shape):
    on = mesh(dp=2, cp=3)
    for rank in range(on.size):
        with faked(rank, on.size):
            names = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "cp"))
            mine = distribute_tensor(torch.zeros(shape), names, [Shard(0), Shard(1)]).to_local()
        assert tuple(mine.shape) == local_shape(shape, {"dp": "Shard(0)", "tokens": "Shard(1)"}, on, rank)
