"""Expert parallelism: each rank of `ep` has some of the experts of every layer, and tokens travel to theirs and back.

A token meets its router where it is. A copy of it goes to each of its experts, by one all-to-all, and what they made of
it comes back by another; there it is weighted and added. No token is dropped, whatever the load. All ranks of `ep` pass
through a layer together. The router's auxiliary loss is off, as usual in RL: it would pull against the reward.

FSDP2 cuts the experts of a rank over `expert_shards` only: the others hold other experts.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import Group, Ranks


def cut(model: nn.Module, ranks: Ranks) -> None:
    """Leave this rank its part of the experts of every layer, in place; a model without experts stays as it is.

    Raises BadInput where mesh.ep does not divide their number, and where they share a weight.
    """
    if ranks.degree("ep") == 1:
        return
    for layer in layers_of_experts(model):
        _keep(layer, ranks)
        layer.forward = partial(travelling, layer, ranks.group("ep"))
        # also where this rank alone holds its experts: FSDP then moves nothing, and one kind of parameter is left
        made: Any = fully_shard(layer, mesh=ranks.meshes["expert_shards"], reshard_after_forward=True)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)


def layers_of_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that hold the experts of one layer as tensors [E, ...], as transformers marks them."""
    return (part for part in model.modules() if hasattr(part, "_is_expert_parallel"))


def count(model: nn.Module) -> int:
    """E: experts of a layer of a model that is not cut; 0 where there is no mixture."""
    return next((int(layer.num_experts) for layer in layers_of_experts(model)), 0)  # type: ignore[arg-type]  # an int


def travelling(layer: Any, group: Group, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a layer's experts: of each token [T, H] the sum over its experts [T, k], by their weights [T, k]."""
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)  # [T*k] copies of tokens, those of one expert together
    copies = hidden_states[order // top_k_index.shape[1]]  # [T*k, H]
    counts = torch.bincount(chosen, minlength=group.size * layer.num_experts)  # [E]
    made = dispatch(layer=layer, x=copies, counts=counts, group=group)
    back = made[order.argsort()].view(*top_k_index.shape, -1)  # [T, k, H]
    return (back * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def dispatch(*, layer: Any, x: Tensor, counts: Tensor, group: Group) -> Tensor:
    """What its expert makes of each row of x [T*k, H], of which expert e gets the next `counts[e]` (int64 [E])."""
    each = [layer.num_experts] * group.size
    arriving = collectives.spread(counts, each, each, group).view(group.size, -1)  # [ep, E/ep] of each rank, expert
    sending, receiving = counts.view(group.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
    here = collectives.carried(x, sending, receiving, group)
    expert = torch.arange(arriving.numel(), device=x.device) % layer.num_experts
    return collectives.carried(
        _computed(layer, here, expert.repeat_interleave(arriving.flatten())), receiving, sending, group
    )


def _computed(layer: Any, x: Tensor, expert: Tensor) -> Tensor:
    """What the expert of each row of x [n, H] makes of it, by the layer's own function.

    A row of zeros is added: an expert whom nobody has chosen has a gradient too, and no rank waits for another in vain.
    """
    x, expert = torch.cat([x, x.new_zeros(1, x.shape[1])]), torch.cat([expert, expert.new_zeros(1)])
    made: Tensor = type(layer).forward(_Local(layer), x, expert[:, None], x.new_ones(len(x), 1))
    return made[:-1]


class _Local:
    """A module seen through: tensors that are cut are what this rank has of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def _keep(layer: Any, ranks: Ranks) -> None:
    """Leave this rank its experts: each tensor [E, ...] of a layer becomes one that is cut over ep."""
    group, number = ranks.group("ep"), layer.num_experts
    if number % group.size:
        raise BadInput(
            f"mesh.ep = {group.size} does not divide the {number} experts of a layer; "
            f"use mesh.ep = {nearest_divisor(group.size, of=number)}"
        )
    if any(len(weight) != number for weight in layer.parameters()):
        raise BadInput(f"mesh.ep = {group.size}: the experts of this model share a weight; use mesh.ep = 1")
    layer.num_experts = number // group.size
    first, mesh = group.at * layer.num_experts, ranks.submesh("ep")
    for name, whole in list(layer.named_parameters(recurse=False)):
        mine = whole.detach()[first : first + layer.num_experts].clone()
        cut_over_ep = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        setattr(layer, name, nn.Parameter(cut_over_ep, requires_grad=whole.requires_grad))
