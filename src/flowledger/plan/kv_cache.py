"""Keys and values of generated tokens: bytes a token and a sequence on one rank, blocks, and how much a pool holds.

All figures are those of the fullest pipeline stage. A key-value head is never cut: with more tensor-parallel ranks than
heads each rank keeps a copy. The latent of MLA has no heads, so every tensor-parallel rank keeps it whole.
"""

from dataclasses import dataclass
from itertools import pairwise

from flowledger.config.engine import Dtype, Mesh, Serving
from flowledger.plan.job import ITEMSIZE
from flowledger.tables.models import Architecture, Linear

STATE_ITEMSIZE = 4  # recurrent states of linear attention are kept in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What fits into the bytes that an engine sets aside."""

    bytes: int  # whole blocks only
    blocks: int
    tokens: int  # blocks * tokens of one block
    bytes_per_token: int
    block_tokens: int


def pool(architecture: Architecture, serving: Serving, available: int) -> Pool:
    """Whole blocks within `available` bytes; all zero where nothing is left.

    An engine takes the minimum over its ranks (vLLM get_kv_cache_configs), which here is the fullest stage.
    """
    each = bytes_per_token(architecture, serving.mesh, itemsize(serving))
    block = each * serving.block_tokens
    blocks = max(0, available) // block if block else 0
    return Pool(
        bytes=blocks * block,
        blocks=blocks,
        tokens=blocks * serving.block_tokens,
        bytes_per_token=each,
        block_tokens=serving.block_tokens,
    )


def needed(architecture: Architecture, serving: Serving, *, sequences: int, tokens: int) -> int:
    """Bytes for `sequences` samples of `tokens` tokens each, all running at once, in whole blocks. Below it an engine
    preempts or queues."""
    whole = -(-tokens // serving.block_tokens) * serving.block_tokens
    return sequences * sequence_bytes(architecture, serving.mesh, itemsize(serving), whole)


def capacity(architecture: Architecture, serving: Serving, available: int, *, tokens: int) -> int:
    """Samples of `tokens` tokens that run at once in `available` bytes."""
    one = needed(architecture, serving, sequences=1, tokens=tokens)
    return max(0, available) // one if one else 0


def itemsize(serving: Serving) -> int:
    """Bytes of one kept number: `kv_dtype`, else the weights' compute dtype (bfloat16 under float8 weights)."""
    wide = serving.dtype if serving.dtype in ("float32", "float16", "bfloat16") else "bfloat16"
    kept: Dtype = serving.kv_dtype or wide
    return ITEMSIZE[kept]


def bytes_per_token(architecture: Architecture, mesh: Mesh, item: int = 2) -> int:
    """Bytes one more token takes on one rank, sliding layers included: layers * 2 * max(K/tp, 1) * D * itemsize.

    MLA keeps kv_lora + qk_rope numbers a layer, whatever tp is. Linear-attention layers take nothing a token.
    """
    return max(
        (
            sum(_layer_token(architecture, mesh, item) for layer in stage if _caches(architecture, layer))
            for stage in _stages(architecture, mesh)
        ),
        default=0,
    )


def sequence_bytes(architecture: Architecture, mesh: Mesh, item: int, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens: sliding layers stop at their window, linear ones keep a state."""
    return max(
        (
            sum(_layer_sequence(architecture, mesh, item, tokens, architecture.kind(layer)) for layer in stage)
            for stage in _stages(architecture, mesh)
        ),
        default=0,
    )


def slot_bytes(architecture: Architecture, *, slots: int, positions: int, item: int) -> int:
    """flowledger's own cache, allocated once: 2 * L * slots * K * positions * D * itemsize; windows do not shorten it."""
    return slots * positions * bytes_per_token(architecture, Mesh(), item)


def state_bytes(linear: Linear, tp: int, item: int = 2) -> int:
    """What one linear-attention layer keeps of one sequence: the recurrent state and the convolution's last inputs."""
    heads = -(-linear.value_heads // tp)
    state = heads * linear.key_dim * linear.value_dim * STATE_ITEMSIZE
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    read = linear.groups * linear.key_dim if linear.kind == "mamba2" else keys  # B and C, or queries and keys
    channels = values + 2 * read
    return state + -(-channels // tp) * (linear.conv_kernel - 1) * item


def _caches(architecture: Architecture, layer: int) -> bool:
    """Whether a layer has attention, which keeps keys and values of each token."""
    return architecture.kind(layer) not in ("linear", "feed_forward")


def _layer_token(architecture: Architecture, mesh: Mesh, item: int) -> int:
    if architecture.mla:
        return (architecture.mla.kv_lora + architecture.mla.qk_rope) * item
    return 2 * max(1, -(-architecture.kv_heads // mesh.tp)) * architecture.head_dim * item


def _layer_sequence(architecture: Architecture, mesh: Mesh, item: int, tokens: int, kind: str) -> int:
    if kind == "feed_forward":
        return 0
    if kind == "linear" and architecture.linear:
        return state_bytes(architecture.linear, mesh.tp, item)
    if kind == "sliding" and architecture.window:
        tokens = min(tokens, architecture.window)
    return tokens * _layer_token(architecture, mesh, item)


def _stages(architecture: Architecture, mesh: Mesh) -> list[range]:
    """Layers of each pipeline stage: as even as possible, what is left over on the later ones."""
    bounds = [architecture.layers * rank // mesh.pp for rank in range(mesh.pp + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
