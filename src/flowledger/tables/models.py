"""The sizes of published models: one row each in `models.toml`, with the source of its shape and of its parameter count.

An `Architecture` is what a plan needs of a model: enough to count every parameter and every activation. It is also what
`config/model_file` makes of a `config.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the feed-forward layer."""

    experts: int  # E, routed
    topk: int
    ffn: int  # width of one routed expert
    shared_ffn: int = 0  # width of all shared experts together; 0: none
    shared_gate: bool = False  # a [H, 1] gate in front of the shared expert (Qwen2-MoE, Qwen3-Next)
    dense: tuple[int, ...] = ()  # layers that keep a plain feed-forward
    router_bias: bool = False  # a bias or correction term of the router, one a routed expert
    expert_bias: bool = False  # biases inside the experts (gpt-oss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention."""

    q_lora: int | None  # null: a plain query projection
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear-attention (gated DeltaNet) or state-space (Mamba-2) layers of a hybrid model."""

    kind: str  # gated_deltanet, mamba2, kda
    key_heads: int
    value_heads: int
    key_dim: int  # of one head; the state size of Mamba-2
    value_dim: int  # of one head
    conv_kernel: int
    groups: int = 1  # Mamba-2: groups of B and C


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of one decoder-only model. Biases are off unless said; the norm has weights, LayerNorm a bias too."""

    name: str
    layers: int  # L
    hidden: int  # H
    heads: int  # A
    kv_heads: int  # K
    head_dim: int  # D (of keys; MLA has its own)
    ffn: int  # F of a dense layer
    vocab: int  # V, rows of the embedding
    tied: bool = False  # the head is the embedding
    mlp: str = "swiglu"  # swiglu, geglu (two branches); gelu, relu, squared_relu (one)
    norm: str = "rmsnorm"  # rmsnorm, layernorm
    norms_per_layer: int = 2  # 4: Gemma 2 and 3, GLM-4; 1: parallel residual with one norm
    final_norm: bool = True
    qk_norm: str = "none"  # head: one weight of D shared by the heads; full: over all heads together
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    attention_gate: bool = False  # an output gate as wide as the queries (Qwen3-Next)
    sinks: bool = False  # one learnt logit a head (gpt-oss)
    positions: str = "rope"  # rope, learned, none
    max_positions: int = 0  # rows of a learned position table, and the longest sequence the model was made for
    parallel_residual: bool = False
    kinds: tuple[str, ...] = ()  # of each layer: full, sliding, linear; empty: all full
    window: int | None = None  # of sliding layers
    moe: Moe | None = None
    mla: Mla | None = None
    linear: Linear | None = None
    mtp_layers: int = 0  # multi-token-prediction layers, beside `layers`
    dtype: str = "bfloat16"  # of the published weights
    published: int | None = None  # parameters, as published
    source: str = ""  # of the sizes and of the count
    aliases: tuple[str, ...] = ()

    @property
    def branches(self) -> int:
        """2 for gated feed-forward layers, else 1."""
        return 2 if self.mlp in ("swiglu", "geglu") else 1

    def kind(self, layer: int) -> str:
        """full, sliding or linear."""
        return self.kinds[layer] if self.kinds else "full"

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense

    @property
    def query_width(self) -> int:
        """A*D, or A*(qk_nope + qk_rope) with MLA."""
        return self.heads * (self.mla.qk_nope + self.mla.qk_rope if self.mla else self.head_dim)


Catalogue = Mapping[str, Architecture]
