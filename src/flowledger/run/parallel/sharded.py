"""A model cut over the mesh in place, and what is asked of its shards: their norm, the whole of a tensor, a forward pass.

FSDP2 (`fully_shard`) cuts what the other axes leave of every parameter over the ranks of `shards`. Gradients add up
over them: the loss is normalised by the totals of all ranks, so nothing is averaged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from flowledger.config.engine import Engine
from flowledger.run.causal_lm import layers_of
from flowledger.run.device import CPU
from flowledger.run.parallel import collectives, experts, pipeline, tensor
from flowledger.run.parallel.ranks import Ranks

T = TypeVar("T")


def cut(model: nn.Module, ranks: Ranks, engine: Engine | None = None) -> None:
    """Cut a model over the mesh, in place: layers, experts, linear weights, then what is left of each parameter.

    Raises BadInput where the model cannot be cut so.
    """
    if ranks.size == 1:
        return
    pipeline.cut(model, ranks, engine)
    experts.cut(model, ranks)
    tensor.cut(model, ranks, sequence_parallel=engine is not None and engine.sequence_parallel)
    mesh = ranks.submesh("shards")
    if mesh is None:
        return
    for part in (*layers_of(model), model):  # each layer is gathered as a unit, the rest as one
        made: Any = fully_shard(part, mesh=mesh, reshard_after_forward=True)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum with a factor
    setattr(model, "within", MethodType(_within, model))  # noqa: B010  torch wraps the method
    register_fsdp_forward_method(model, "within")


def within(model: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """function(*args), which computes with the model's parameters: they are whole while it runs, and its result is a graph.

    `args` and the result are tensors, or tuples of tensors where they have gradients.
    """
    wrapped: Any = getattr(model, "within", None)
    return function(*args) if wrapped is None else wrapped(function, *args)


def _within(self: nn.Module, function: Callable[..., T], *args: Any) -> T:
    return function(*args)


def local(x: Tensor) -> Tensor:
    """What this rank holds of a parameter or a gradient."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """A tensor put together from the shards of all ranks that hold one: FSDP's first, it has cut what others left."""
    if not isinstance(x, DTensor):
        return x
    for axis in range(x.device_mesh.ndim):  # one by one: at once, torch warns that they are two gathers
        x = x.redistribute(placements=[*[Replicate()] * (axis + 1), *x.placements[axis + 1 :]])
    return x.full_tensor()


def everywhere(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors by name, put together from the shards of all ranks; every rank gets those of every pipeline stage."""
    mine = {
        name: whole(x).to(CPU) for name, x in tensors.items()
    }  # what is told would come back on the teller's device
    said = collectives.told(mine, ranks.group("pp"))
    return {name: x.to(ranks.device) for part in said for name, x in part.items()}


def gradient_norm(gradients: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """The 2-norm [] of gradients over all ranks, each element counted once; summed in float32, whatever they are kept in."""
    if ranks.size == 1:
        norms = (
            torch._foreach_norm([*gradients], 2, dtype=torch.float32)
            if gradients
            else [torch.zeros((), device=ranks.device)]
        )
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total
    norms = [torch.linalg.vector_norm(local(grad), dtype=torch.float32) for grad in gradients]
    squares = torch.stack([norm.square() / _copies(grad, ranks) for norm, grad in zip(norms, gradients, strict=True)])
    return collectives.total(squares.sum(), ranks.group("world")).sqrt()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm, which is `norm` [] now, is at most `limit`. As torch clips: + 1e-6."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(grad) for grad in gradients], scale)


def _copies(grad: Tensor, ranks: Ranks) -> int:
    """How many ranks of the world hold the same elements of a gradient."""
    owners = 1
    if isinstance(grad, DTensor):
        sizes = zip(grad.device_mesh.mesh.shape, grad.placements, strict=True)
        owners = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return ranks.size // (owners * ranks.degree("pp"))
