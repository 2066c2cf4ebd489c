"""Tensor parallelism: each rank of `tp` has some heads, some neurons of each MLP and some tokens of the vocabulary.

As Megatron-LM cuts them (Shoeybi et al. 2019, arXiv 1909.08053): the first weights of attention and MLP by their outputs,
the last by their inputs, so that a layer adds up its parts twice. With sequence parallelism (Korthikanti et al. 2022,
arXiv 2205.05198) norms and residuals hold T/tp tokens: parts are added up and cut at once, and gathered before the next.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.run.causal_lm import layers_of, unwrapped
from flowledger.run.parallel.ranks import Ranks

# Parts of a decoder layer that can be cut, by their names in transformers.
COLUMNS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
)  # fmt: skip
ROWS = ("self_attn.o_proj", "mlp.down_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of each head: [1, T, A/tp, D]
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def cut(model: nn.Module, ranks: Ranks, *, sequence_parallel: bool = False) -> None:
    """Leave this rank its part of the model, in place.

    Hidden states between layers are [1, T, H] on all ranks of `tp`; with sequence parallelism [1, T/tp, H], and T must be
    a multiple of tp. The decoder gives whole ones, the output head logits [T_logit, V/tp] of a share of the vocabulary.
    A head of another kind, and the experts of a layer that has some, stay whole on each rank.

    Raises BadInput for sizes that tp does not divide, adapters, and layers with parts that are not known here.
    """
    mesh = ranks.submesh("tp")
    if mesh is None:
        return
    _check(model, ranks.degree("tp"))
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    setattr(model, "sequence_parallel", sequence_parallel)  # noqa: B010  who packs rows for it fills them up
    for layer in layers_of(model):
        if any(True for _ in layer.parameters()):  # another stage of a pipeline holds the others
            parallelize_module(layer, mesh, _plan(layer, between), src_data_rank=None)
    _cut_ends(model, mesh, between)
    for weight in model.parameters():
        if isinstance(weight, DTensor) and weight.device_mesh == mesh and weight.requires_grad:
            hold: Any = weight  # torch leaves its hooks untyped
            hold.register_hook(partial(_placed, weight.placements))  # where FSDP holds a weight, it does so by itself


def _cut_ends(model: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    """Cut what comes before the layers and after them: embedding, last norm, output head. Tied weights stay tied."""
    causal: Any = unwrapped(model)
    decoder = causal.get_decoder()
    entrance = causal.get_input_embeddings()
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    tied = isinstance(head, nn.Linear) and isinstance(entrance, nn.Embedding) and head.weight is entrance.weight
    if isinstance(entrance, nn.Embedding):
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        parallelize_module(entrance, mesh, style, src_data_rank=None)
    if between == Shard(1) and list(decoder.norm.parameters()):
        parallelize_module(decoder.norm, mesh, SequenceParallel(), src_data_rank=None)
        whole = PrepareModuleOutput(output_layouts=between, desired_output_layouts=Replicate())
        parallelize_module(decoder.norm, mesh, whole)
    if isinstance(head, nn.Linear):
        parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
        if tied:
            head.weight = entrance.weight


def _plan(layer: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    """Part of a decoder layer -> how it is cut; hidden states between layers are placed as `between` says."""
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan: dict[str, ParallelStyle] = {"self_attn": attention}
    if _dense(layer):
        plan["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    elif between == Shard(1):  # experts see all tokens
        plan["mlp"] = PrepareModuleInputOutput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),), use_local_input=True,
            output_layouts=(Replicate(),), desired_output_layouts=(between,),
        )  # fmt: skip
    plan |= {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ROWS}
    plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in HEAD_NORMS}
    if between == Shard(1):
        plan |= {name: SequenceParallel(use_local_output=True) for name in NORMS}
    here = {name for name, _ in layer.named_modules()}
    return {name: style for name, style in plan.items() if name in here}


def _placed(placements: tuple[Placement, ...], grad: Tensor) -> Tensor:
    """The gradient of a weight, placed as the weight is.

    Each rank of tp has used a norm for other heads or tokens, and theirs add up; of an embedding each has made it whole.
    """
    return grad.redistribute(placements=placements) if isinstance(grad, DTensor) else grad


def _check(model: nn.Module, tp: int) -> None:
    if hasattr(model, "get_base_model"):
        raise BadInput(
            f"model.lora with mesh.tp = {tp}: adapters are not cut; use mesh.tp = 1, mesh.dp works with them"
        )
    causal: Any = model
    sizes = getattr(causal, "sizes", None) or causal.config.get_text_config()
    if unknown := next(_unknown(model, getattr(sizes, "head_dim", None)), None):
        raise BadInput(
            f"mesh.tp = {tp}: a model of type {sizes.model_type!r} has {unknown}, and it is not known how to cut that; "
            f"use mesh.tp = 1, mesh.dp works with it"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(sizes, name, None) or tp) % tp:
            raise BadInput(
                f"mesh.tp = {tp} does not divide the model's {name} = {size}; use {nearest_divisor(tp, size)}"
            )


def _unknown(model: nn.Module, head_size: int | None) -> Iterator[str]:
    """Parts with weights whose place in the model is not known."""
    causal: Any = unwrapped(model)
    entrance, known = causal.get_input_embeddings(), {*COLUMNS, *ROWS, *NORMS, *HEAD_NORMS}
    if isinstance(entrance, nn.Embedding) and type(entrance) is not nn.Embedding:
        yield type(entrance).__name__
    if not hasattr(causal.get_decoder(), "norm"):
        yield "another last norm"
    for layer in layers_of(model):
        for name, weight in layer.named_parameters():
            part = name.rpartition(".")[0]
            whole = part.startswith("mlp.") and not _dense(layer)
            over_all_heads = part in HEAD_NORMS and weight.shape != (head_size,)
            if over_all_heads or not (whole or part in known):
                yield name


def _dense(layer: nn.Module) -> bool:
    """Whether a layer has one MLP, and no experts."""
    return hasattr(layer.mlp, "gate_proj")
