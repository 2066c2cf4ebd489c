"""Builds a model's own code for a trace: transformers' classes under FakeTensor, sharded by FSDP2 and TP on a fake group."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from flowledger.flow.errors import BadInput
from flowledger.flow.seams import replaced
from flowledger.plan.job import Job
from flowledger.plan.trace.attention import attention_of
from flowledger.plan.trace.loss import Loss
from flowledger.tables.models import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
FINAL_NORMS = ("norm", "ln_f", "final_layernorm")
# Under FakeTensor transformers believes that it is being exported, and builds 4-D masks that no run ever builds.
AS_IN_A_RUN: list[tuple[str, Callable[[Any], Any]]] = [
    ("transformers.masking_utils:find_packed_sequence_indices", lambda _: lambda position_ids: None),
    # The fake form of torch's grouped product takes bfloat16 only; transformers has one of its own for the rest.
    ("transformers.integrations.moe:_can_use_grouped_mm", lambda _: lambda rows, *args: rows.dtype == torch.bfloat16),
    ("transformers.masking_utils:is_tracing", lambda _: lambda *args, **kwargs: False),
]


@contextmanager
def fake_world(ranks: int) -> Iterator[FakeTensorMode]:
    """A process group of `ranks` that sends nothing, and tensors without storage; both end with it."""
    if dist.is_initialized():
        raise BadInput("--trace makes a process group of its own, and this process has one already")
    hook = sys.excepthook  # torch puts one of its own there, which marks every line with a rank
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with replaced([*AS_IN_A_RUN, ("torch.distributed.device_mesh:DeviceMesh.__init__", _really)]):
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _really(init: Any) -> Any:
    """A mesh holds real ranks, and FSDP makes further meshes while fake mode is on."""

    def made(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            init(*args, **kwargs)

    return made


def build(job: Job, config_path: str | None = None) -> nn.Module:
    """The model on this rank, sharded as the job says. Raises BadInput."""
    config = read(config_path) if config_path else _config(job.architecture)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention_of(job), dtype=DTYPES[job.engine.param_dtype]
    )
    if job.engine.recompute.granularity == "full" and job.gradients:
        causal: Any = model  # transformers renamed the switch in version 5
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train(job.gradients)
    if job.engine.strategy == "fsdp2":
        _shard(model, job)
    return model


class LossHead(nn.Module):
    """Output head and loss in one, [1, T, H] -> [T], inside the model: there FSDP has gathered the head's weight."""

    def __init__(self, head: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, hidden: Tensor) -> Tensor:
        return self.loss.from_states(self.head, hidden.squeeze(0))


def mesh_of(job: Job) -> DeviceMesh:
    """[dp, tp], made outside fake mode."""
    return init_device_mesh("cpu", (job.world // job.mesh.tp, job.mesh.tp), mesh_dim_names=("dp", "tp"))


def _shard(model: Any, job: Job) -> None:
    """Each layer is a unit; what stands outside the layers is grouped as `Engine.outside` says."""
    engine = job.engine
    with unset_fake_temporarily():
        mesh = mesh_of(job)
    embedding, head, layers = model.get_input_embeddings(), model.get_output_embeddings(), layers_of(model)
    tied = head.weight is embedding.weight
    if job.mesh.tp > 1:
        _cut(model, mesh["tp"], layers)
        if tied:
            head.weight = embedding.weight
    shard = partial(
        fully_shard,
        mesh=mesh["dp"],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=DTYPES[engine.compute_dtype] if engine.compute_dtype else None,
            reduce_dtype=DTYPES[engine.reduce_dtype] if engine.reduce_dtype else None,
        ),
    )
    asked = engine.reshard_after_forward
    if not tied and engine.outside != "root":
        shard(embedding, reshard_after_forward=asked)
    if not tied and engine.outside == "head":
        shard(head, reshard_after_forward=asked)
    if not tied and engine.outside == "tail":
        last = next((norm for name, norm in model.get_decoder().named_children() if name in FINAL_NORMS), None)
        shard([*([last] if last else []), head], reshard_after_forward=False)
    for layer in layers:
        shard(layer, reshard_after_forward=asked)
    shard(model, reshard_after_forward={"tail": None, "root": False}.get(engine.outside, asked))


def layers_of(model: Any) -> Any:
    """The decoder's layers: its only list of modules. Raises BadInput."""
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise BadInput(f"--trace: {type(model).__name__} does not have one list of layers, which FSDP2 would shard")
    return lists[0]


def _cut(model: Any, mesh: DeviceMesh, layers: Any) -> None:
    """Projections by columns and rows; embedding and head by the vocabulary, whose logits stay cut."""
    for layer in layers:
        names = [name for name, _ in layer.named_modules() if name.rpartition(".")[2] in (*COLUMN, *ROW)]
        if {name.rpartition(".")[2] for name in names} != {*COLUMN, *ROW}:
            raise BadInput(f"--trace: tp is traced for layers with {', '.join((*COLUMN, *ROW))}; use tp 1")
        styles: dict[str, Any] = {
            name: ColwiseParallel() if name.rpartition(".")[2] in COLUMN else RowwiseParallel() for name in names
        }
        parallelize_module(layer, mesh, styles)
    parallelize_module(model.get_input_embeddings(), mesh, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.get_output_embeddings(), mesh, ColwiseParallel())


def read(path: str) -> Any:
    """A transformers configuration of a config.json or its directory. Raises BadInput."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"--trace: {path}: {str(error).strip().splitlines()[0]}") from None


def _config(architecture: Architecture) -> Any:
    """A transformers configuration of these sizes. Raises BadInput for what its classes here do not cover."""
    a = architecture
    if a.mla or a.linear or a.moe or a.norm != "rmsnorm" or a.mlp != "swiglu" or a.norms_per_layer != 2:
        raise BadInput(
            f"--trace: {a.name} is built from its config.json only; give --model path/to/config.json "
            "(by name, dense Llama-, Qwen2- and Qwen3-like models are traced)"
        )
    kind = "qwen3" if a.qk_norm == "head" else "qwen2" if a.qkv_bias else "llama"
    return AutoConfig.for_model(
        kind, hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=a.heads, head_dim=a.head_dim,
        num_key_value_heads=a.kv_heads, intermediate_size=a.ffn, vocab_size=a.vocab, tie_word_embeddings=a.tied,
        max_position_embeddings=max(a.max_positions, 1),
    )  # fmt: skip
