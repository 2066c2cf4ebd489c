"""Weights of one rank of an inference engine: how it cuts, copies, pads and quantises what a model has."""

from flowledger.config.engine import Dtype, Lora, Mesh
from flowledger.plan.fsdp.adapters import parameters
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.weight import Weight, local_numel
from flowledger.plan.weights import weights
from flowledger.tables.constants import constant
from flowledger.tables.models import Architecture

LINEAR = ("attention", "mlp", "experts", "shared_expert", "linear", "mtp")  # parts whose matrices are quantised
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8}


def weight_bytes(
    architecture: Architecture,
    mesh: Mesh,
    dtype: Dtype = "bfloat16",
    *,
    expert_dtype: Dtype | None = None,
    padded: bool = True,
    lora: Lora | None = None,
) -> int:
    """Bytes of the weights on the fullest rank, with the table of rotary embeddings.

    Embedding and head are cut over tp, norms and routers copied, key-value heads copied where tp exceeds them, experts
    dealt to ep ranks. Of 8- and 4-bit dtypes only the matrices inside layers are quantised (`expert_dtype`: the experts
    alone); embedding, head, norms and routers stay in bfloat16. `padded`: as vLLM and SGLang pad the vocabulary. `lora`:
    adapters that stay beside the weights, in their own dtype.
    """
    stages = [0] * mesh.pp
    for weight in weights(architecture):
        size = _bytes(weight, architecture, mesh, expert_dtype if weight.expert and expert_dtype else dtype, padded)
        for stage in _stages_of(weight, architecture, mesh.pp):
            stages[stage] += size
    beside = sum(one.numel for one in parameters(weights(architecture), lora)) if lora else 0
    return (
        max(stages)
        + (_rotary(architecture) if padded else 0)
        + beside * ITEMSIZE.get(lora.dtype if lora and lora.dtype else dtype, 2)
    )


def replicated_bytes(architecture: Architecture, tp: int, item: int = 2) -> int:
    """Weights of one rank under DeepSpeed's automatic tensor parallelism: embedding, positions, head and norms copied."""
    return item * sum(
        weight.numel if weight.part in ("embed", "positions", "head", "norm", "final_norm") else local_numel(weight, tp)
        for weight in weights(architecture)
    )


def stages_of(layer: int, layers: int, pp: int) -> int:
    """The pipeline stage of a layer: as even as possible, what is left over on the later ones."""
    return ((layer + 1) * pp - 1) // layers


def _bytes(weight: Weight, architecture: Architecture, mesh: Mesh, dtype: Dtype, padded: bool) -> int:
    etp = mesh.etp or (mesh.tp if mesh.ep == 1 else max(1, mesh.tp // mesh.ep))
    numel = local_numel(weight, mesh.tp, mesh.ep, etp)
    if padded and weight.part in ("embed", "head") and weight.shape[0] == architecture.vocab:
        numel = numel * _up(architecture.vocab, int(constant("vocab_multiple"))) // architecture.vocab
    quantised = weight.part in LINEAR and len(weight.shape) > 1
    if quantised and dtype == "int4" and weight.expert:
        hidden = architecture.hidden
        numel = numel * _up(hidden, int(constant("mxfp4_hidden_multiple"))) // hidden
    if dtype == "int4":
        return round(numel * (constant("int4_bits") if quantised else 16) / 8)
    bits = BITS[dtype]
    return numel * (bits if quantised or bits > 16 else 16) // 8


def _rotary(architecture: Architecture) -> int:
    """Cosines and sines in 16 bits for every position the model was made for; one table for all layers."""
    if architecture.positions != "rope":
        return 0
    width = architecture.mla.qk_rope if architecture.mla else architecture.head_dim
    return architecture.max_positions * width * 2


def _stages_of(weight: Weight, architecture: Architecture, pp: int) -> tuple[int, ...]:
    """Pipeline stages that hold a weight: layers as even as possible, embedding first, head last (a tied one on both)."""
    if weight.layer is not None:
        return (stages_of(weight.layer, architecture.layers, pp),)
    if weight.part in ("embed", "positions"):
        tied = architecture.tied and weight.part == "embed" and pp > 1
        return (0, pp - 1) if tied else (0,)
    return (pp - 1,)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
