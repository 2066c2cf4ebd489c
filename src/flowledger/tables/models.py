"""The sizes of published models: one row each in `models.toml`, with the source of its shape and of its parameter count.

An `Architecture` is what a plan needs of a model: enough to count every parameter and every activation. It is also what
`config/model_file` makes of a `config.json`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from flowledger.flow.errors import BadInput, nearest


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
    kinds: tuple[str, ...] = ()  # of each layer: full, sliding, linear, feed_forward (no mixer); empty: all full
    single: bool = False  # a layer is a mixer or a feed-forward, never both (Nemotron-H)
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
        """full, sliding, linear or feed_forward."""
        return self.kinds[layer] if self.kinds else "full"

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention or what stands in its place."""
        return self.kind(layer) != "feed_forward"

    def has_feed_forward(self, layer: int) -> bool:
        return not self.single or not self.has_mixer(layer)

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.has_feed_forward(layer) and layer not in self.moe.dense

    @property
    def query_width(self) -> int:
        """A*D, or A*(qk_nope + qk_rope) with MLA."""
        return self.heads * (self.mla.qk_nope + self.mla.qk_rope if self.mla else self.head_dim)


KINDS = {"F": "full", "S": "sliding", "L": "linear", "N": "feed_forward"}


def architecture(name: str) -> Architecture:
    """The row of a model by its name or an alias, in any case. Raises BadInput with the nearest known name."""
    found = _by_name().get(name.casefold())
    if found is None:
        known = {alias: None for row in models().values() for alias in (row.name, *row.aliases)}
        raise BadInput(f"no model is called {name!r}{nearest(name, known)}")
    return found


def find(path: str) -> Architecture | None:
    """The model that a path or a hub id names: `Qwen/Qwen2.5-7B-Instruct`, `/models/Qwen3-8B-sft/global_step_372`.

    The parts of the path are tried from the last to the first: as a name, then as a longer name around a known one
    (a fine-tune keeps its base's sizes) unless a word of the rest says that it is another model (`vl`, `mini`, …).
    """
    whole = _by_name().get(path.strip().casefold())
    if whole is not None:
        return whole
    for part in reversed([part for part in re.split(r"[/\\]+|--", path) if part]):
        found = _by_name().get(part.casefold()) or _inside(_words(part))
        if found is not None:
            return found
    return None


@cache
def models() -> Mapping[str, Architecture]:
    """Every model of the table by its name."""
    rows: dict[str, dict[str, Any]] = {}
    for raw in _table()["model"]:
        rows[raw["name"]] = {**rows.get(raw.get("like"), {}), "aliases": (), **raw}
    return {name: _row(raw) for name, raw in rows.items()}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.tables").joinpath("models.toml").read_text(encoding="utf-8"))


@cache
def _by_name() -> Mapping[str, Architecture]:
    found: dict[str, Architecture] = {}
    for row in models().values():
        for name in (row.name, *row.aliases):
            if found.setdefault(name.casefold(), row) is not row:
                raise AssertionError(f"models.toml: {name} names two models")
    return found


@cache
def _by_words() -> Mapping[tuple[str, ...], Architecture]:
    """Longest names first, so that the most telling one is found first."""
    rows = {_words(name): row for name, row in _by_name().items()}
    return dict(sorted(rows.items(), key=lambda item: -len(item[0])))


def _inside(words: tuple[str, ...]) -> Architecture | None:
    others = frozenset(_table()["other_words"])
    for known, row in _by_words().items():
        for start in range(len(words) - len(known) + 1):
            end = start + len(known)
            if words[start:end] == known and not _tells_more(words[:start], others) | _tells_more(words[end:], others):
                return row
    return None


def _tells_more(rest: tuple[str, ...], others: frozenset[str]) -> bool:
    """Whether words beside a known name make it another model: a word of the list, or a second size (`8 b`)."""
    sizes = any(word.isdigit() and after in ("b", "m") for word, after in pairwise(rest))
    return sizes or bool(others.intersection(rest))


def _words(name: str) -> tuple[str, ...]:
    """`Qwen2.5-7B`, `qwen2_5_7b` and `qwen-2.5-7b` are the same words."""
    return tuple(re.findall(r"[a-z]+|\d+", name.casefold()))


def _row(raw: Mapping[str, Any]) -> Architecture:
    fields = {key: value for key, value in raw.items() if key != "like"}
    pattern, dense = fields.pop("pattern", ""), fields.pop("dense_first", 0)
    if pattern:
        kinds = tuple(KINDS[pattern[layer % len(pattern)]] for layer in range(fields["layers"]))
        fields["kinds"] = () if set(kinds) == {"full"} else kinds
        fields["window"] = fields.get("window") if "sliding" in kinds else None
    if "moe" in fields:
        moe = {"dense": range(dense), **fields["moe"]}
        fields["moe"] = Moe(**{**moe, "dense": tuple(moe["dense"])})
    if "mla" in fields:
        fields["mla"] = Mla(**{"q_lora": None, **fields["mla"]})
    if "linear" in fields:
        fields["linear"] = Linear(**fields["linear"])
    return Architecture(**{**fields, "aliases": tuple(fields["aliases"]), "published": fields.get("published") or None})
