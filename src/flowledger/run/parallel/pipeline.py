"""Pipeline parallelism: each rank of `pp` has some of the layers, and micro-batches pass through all of them.

A model that is cut keeps its modules and their names; what another rank has is `Elsewhere`, without weights. A stage is
the decoder as it is, seen through `shown`: what the stage before has left enters in place of the embedding, and what
goes to the next is taken before the last norm. Embedding and output head of tied weights are on both ends, each with a
gradient of its own part of the loss; `add_tied` makes it the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowledger.config.engine import Engine
from flowledger.config.engine import Pipeline as Kind
from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.flow.layers import stage_layers
from flowledger.run.causal_lm import unwrapped
from flowledger.run.parallel.ranks import Group, Ranks


class Elsewhere(nn.Module):
    """A part of the model that another rank has: what enters passes on."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A model in chunks of layers, chunk c on rank c mod pp, and what this rank has of it."""

    group: Group
    kind: Kind
    chunks: tuple[tuple[int, ...], ...]  # the layers of each, in order
    holders: Mapping[str, int]  # name of each trained tensor -> the place in pp that gives it to others
    entrance: str  # names of the decoder's modules before and after the layers
    norm: str
    tied: str | None  # name of the weight that is both embedding and output head
    hidden: int  # H
    dtype: torch.dtype
    sequence: int  # ranks that share the tokens between two layers: tp with sequence parallel

    @property
    def mine(self) -> tuple[int, ...]:
        """The chunks of this rank."""
        return tuple(range(self.group.at, len(self.chunks), self.group.size))

    @property
    def ends_here(self) -> bool:
        """Whether this rank has the last chunk, and the output head."""
        return self.group.at == self.group.size - 1

    @property
    def copies_tied(self) -> bool:
        """Whether this rank has the weight of embedding and head as a copy of that on the first."""
        return self.ends_here and self.tied is not None


@dataclass(slots=True)
class Passing:
    """What one micro-batch brings into a stage and leaves behind it."""

    received: Tensor | None  # [N, H], at least as many rows as the micro-batch has tokens; None: ids enter
    left: Tensor | None = None  # [..., H]


def cut(model: nn.Module, ranks: Ranks, engine: Engine | None = None) -> None:
    """Leave this rank its part of the model, in place.

    Raises BadInput where layers do not divide into stages, and for a model that is more than embedding, layers, norm
    and head in a row.
    """
    if ranks.degree("pp") == 1:
        return
    line = _line(model, ranks, engine or Engine())
    _check(model, line)
    decoder, mine = unwrapped(model).get_decoder(), {layer for chunk in line.mine for layer in line.chunks[chunk]}
    for name in _tail(model) if not line.ends_here else ():
        model.set_submodule(name, Elsewhere())
    if line.group.at and not line.copies_tied:
        setattr(decoder, line.entrance, Elsewhere())
    for at in set(range(len(decoder.layers))) - mine:
        decoder.layers[at] = Elsewhere()
    setattr(model, "pipeline", line)  # noqa: B010  no attribute that nn.Module knows


def of(model: nn.Module) -> Pipeline | None:
    """How a model was cut; None for one that is whole."""
    return getattr(model, "pipeline", None)


def holders(model: nn.Module) -> Mapping[str, int]:
    """The names of a model's trained tensors on all ranks -> the place in pp that gives each to the others."""
    line = of(model)
    return line.holders if line else {name: 0 for name, weight in model.named_parameters() if weight.requires_grad}


def counted(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank that no other rank of pp counts."""
    line = of(model)
    return [
        weight for name, weight in model.named_parameters() if not (line and line.copies_tied and name == line.tied)
    ]


@contextmanager
def shown(model: nn.Module, line: Pipeline, chunk: int, passing: Passing) -> Iterator[None]:
    """Inside, the decoder is one chunk: a call goes from `passing.received` through its layers to `passing.left`.

    Modules stay registered where they are; the decoder's own code finds others under their names.
    """

    def enter(ids: Tensor) -> Tensor:
        tokens = ids.shape[1] // line.sequence
        assert passing.received is not None
        return passing.received[: len(ids) * tokens].view(len(ids), tokens, -1)

    def leave(hidden: Tensor) -> Tensor:
        passing.left = hidden
        return hidden.new_zeros(1).expand(len(hidden), hidden.shape[1] * line.sequence, 1)  # nobody reads it

    decoder, here = unwrapped(model).get_decoder(), line.chunks[chunk]
    seen: dict[str, Any] = {
        "layers": nn.ModuleList(layer if at in here else Elsewhere() for at, layer in enumerate(decoder.layers))
    }
    if chunk > 0:
        seen[line.entrance] = enter
    if chunk < len(line.chunks) - 1:
        seen[line.norm] = leave
    vars(decoder).update(seen)  # found before the registered ones
    try:
        yield
    finally:
        for name in seen:
            del vars(decoder)[name]


@torch.no_grad()
def add_tied(*, model: nn.Module, line: Pipeline) -> None:
    """Give both ends of the pipeline the sum of their gradients of a tied weight."""
    place, last = line.group.at, line.group.size - 1
    if line.tied is None or 0 < place < last:
        return
    weight = model.get_parameter(line.tied)
    if not weight.requires_grad:
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):
        weight.grad = weight.grad.redistribute(placements=weight.placements)  # tp leaves that of an embedding whole
    grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
    theirs, other, group = torch.empty_like(grad), line.group.ranks[last - place], line.group.handle
    talk = [dist.P2POp(dist.isend, grad.clone(), other, group), dist.P2POp(dist.irecv, theirs, other, group)]
    for work in dist.batch_isend_irecv(talk):
        work.wait()
    grad += theirs


def _line(model: nn.Module, ranks: Ranks, engine: Engine) -> Pipeline:
    group, kind, causal = ranks.group("pp"), engine.pipeline, unwrapped(model)
    decoder, entrance = causal.get_decoder(), causal.get_input_embeddings()
    if hasattr(model, "get_base_model"):
        raise BadInput(f"model.lora with mesh.pp = {group.size}: adapters are not cut; use mesh.pp = 1")
    if (kind == "interleaved") != (ranks.vpp > 1):
        raise BadInput(
            f"actor.engine.pipeline = {kind} with mesh.vpp = {ranks.vpp}: several chunks a rank and the interleaved order "
            f"belong together; use {'interleaved' if ranks.vpp > 1 else '1f1b, or mesh.vpp = 2'}"
        )
    parts = {name: part for name, part in decoder.named_children() if any(True for _ in part.parameters())}
    ends = sorted((name for name in parts if name != "layers"), key=lambda name: parts[name] is not entrance)
    if len(ends) != 2 or parts[ends[0]] is not entrance:
        raise _unknown(model, group, f"is not embedding, layers and norm in a row, but {', '.join(parts)}")
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    chunks = _chunks(len(decoder.layers), ranks, engine)
    holders = _holders(model, chunks, group)
    return Pipeline(
        group=group, kind=kind, chunks=chunks, holders=holders, entrance=ends[0], norm=ends[1],
        tied=_name(model, entrance.weight) if head is not None and head.weight is entrance.weight else None,
        hidden=decoder.config.get_text_config().hidden_size, dtype=entrance.weight.dtype,
        sequence=ranks.degree("tp") if engine.sequence_parallel else 1,
    )  # fmt: skip


def _chunks(layers: int, ranks: Ranks, engine: Engine) -> tuple[tuple[int, ...], ...]:
    """The layers of each chunk, as Megatron-Core deals them."""
    pp, vpp = ranks.degree("pp"), ranks.vpp
    first, last, explicit = engine.layers_in_first_stage, engine.layers_in_last_stage, engine.layers_in_stages
    if not explicit and first is None and last is None and layers % (pp * vpp):
        raise BadInput(
            f"{layers} layers do not divide among mesh.pp*vpp = {pp}*{vpp} stages; "
            f"use {nearest_divisor(pp * vpp, of=layers)} stages, or name actor.engine.layers_in_stages"
        )
    of_rank = stage_layers(layers, pp, vpp, first, last, explicit)
    if empty := [place for place in range(1, pp - 1) if not of_rank[place]]:
        raise BadInput(
            f"rank {empty[0]} of mesh.pp = {pp} has no layer, and neither embedding nor head; "
            f"give it one in actor.engine.layers_in_stages"
        )
    sizes = explicit or [len(of_rank[chunk % pp]) // vpp for chunk in range(pp * vpp)]
    return stage_layers(layers, pp * vpp, explicit=sizes)


def _holders(model: nn.Module, chunks: Sequence[Sequence[int]], group: Group) -> dict[str, int]:
    """The name of each trained tensor -> the first rank of pp that has it."""
    causal = unwrapped(model)
    place_of = {id(weight): group.size - 1 for weight in model.parameters()}
    place_of |= {id(weight): 0 for weight in causal.get_input_embeddings().parameters()}
    for chunk, layers in enumerate(chunks):
        inside = (weight for layer in layers for weight in causal.get_decoder().layers[layer].parameters())
        place_of |= {id(weight): chunk % group.size for weight in inside}
    return {name: place_of[id(weight)] for name, weight in model.named_parameters() if weight.requires_grad}


def _tail(model: nn.Module) -> list[str]:
    """Names of the modules with weights that come after the layers: last norm and head."""
    causal = unwrapped(model)
    others = {id(part) for part in (causal.get_input_embeddings(), *causal.get_decoder().layers.modules())}
    return [
        name for name, part in model.named_modules() if id(part) not in others and list(part.parameters(recurse=False))
    ]


def _name(model: nn.Module, weight: Tensor) -> str:
    return next(name for name, one in model.named_parameters() if one is weight)


@torch.no_grad()
def _check(model: nn.Module, line: Pipeline) -> None:
    """Refuse a model that in stages would compute something else, by comparing with its own decoder."""
    decoder, line = unwrapped(model).get_decoder(), replace(line, sequence=1)
    weight = unwrapped(model).get_input_embeddings().weight
    ids = torch.arange(18, device=weight.device).reshape(3, 6) % len(weight)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    truth, passing = decoder(**inputs)[0], Passing(None)
    for chunk in range(len(line.chunks)):
        with shown(model, line, chunk, passing):
            staged = decoder(**inputs)[0]
        passing = Passing(None if passing.left is None else passing.left.flatten(0, 1))
    if not float((staged - truth).abs().max()) <= 1e-3 * float(truth.abs().max()):
        raise _unknown(model, line.group, "computes something else in stages")


def _unknown(model: nn.Module, group: Group, what: str) -> BadInput:
    kind = unwrapped(model).get_decoder().config.get_text_config().model_type
    return BadInput(f"mesh.pp = {group.size}: a model of type {kind!r} {what}; use mesh.pp = 1")
