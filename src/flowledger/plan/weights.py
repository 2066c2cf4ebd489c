"""Every parameter tensor of a model, with its shape, its part, and how tensor and expert parallelism cut it.

Shapes are those of `torch.nn.Linear`: `[out, in]`. Module names are those that LoRA targets speak of (`q_proj`,
`gate_proj`, `kv_b_proj`, …). The counts are exact; what a framework fuses (`qkv`, `gate‖up`) has the same numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.plan.linear_weights import linear_layer
from flowledger.plan.weight import Weight, local_numel
from flowledger.tables.models import Architecture, Mla, Moe

__all__ = ["PARTS", "Weight", "count", "local_numel", "per_part", "stage_layers", "weights"]

PARTS = (
    "embed",
    "positions",
    "attention",
    "mlp",
    "experts",
    "shared_expert",
    "router",
    "linear",
    "norm",
    "final_norm",
    "head",
    "mtp",
)


@lru_cache(maxsize=256)
def weights(arch: Architecture, *, head: str = "lm") -> tuple[Weight, ...]:
    """Every parameter of a model. `head`: lm (absent when tied to the embedding), value (`[1, H]` and a bias), none."""
    found = [Weight("embed_tokens.weight", "embed", None, (arch.vocab, arch.hidden), 0)]
    if arch.positions == "learned":
        found.append(Weight("embed_positions.weight", "positions", None, (arch.max_positions, arch.hidden)))
    for layer in range(arch.layers):
        found += [replace(item, layer=layer) for item in _layer(arch, layer)]
    if arch.final_norm:
        found += _norm(arch, "norm", "final_norm")
    for index in range(arch.mtp_layers):
        found += [replace(item, name=f"mtp.{index}.{item.name}", part="mtp") for item in _mtp(arch)]
    found += _head(arch, head)
    return tuple(found)


def count(arch: Architecture) -> int:
    """All parameters, a tied head counted once."""
    return sum(weight.numel for weight in weights(arch))


def per_part(arch: Architecture) -> dict[str, int]:
    """Parameters of each part that the model has, in the order of `PARTS`."""
    found = dict.fromkeys(PARTS, 0)
    for weight in weights(arch):
        found[weight.part] += weight.numel
    return {part: number for part, number in found.items() if number}


def _layer(arch: Architecture, layer: int) -> Iterator[Weight]:
    for index in range(arch.norms_per_layer):
        yield from _norm(arch, f"norm_{index}", "norm")
    if arch.has_mixer(layer):
        yield from _mixer(arch, layer)
    if not arch.has_feed_forward(layer):
        return
    if arch.moe is not None and arch.is_moe(layer):
        yield from _moe(arch, arch.moe)
    else:
        yield from _feed_forward(arch, "mlp", "", arch.ffn, arch.mlp_bias)


def _mixer(arch: Architecture, layer: int) -> Iterator[Weight]:
    if arch.kind(layer) == "linear" and arch.linear is not None:
        return linear_layer(arch.linear, arch.hidden)
    return _mla(arch, arch.mla) if arch.mla is not None else _attention(arch)


def _attention(arch: Architecture) -> Iterator[Weight]:
    """Grouped-query attention; an output gate doubles the query projection."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    wide = queries * (2 if arch.attention_gate else 1)
    for name, width, unit in (("q_proj", wide, 1), ("k_proj", keys, arch.head_dim), ("v_proj", keys, arch.head_dim)):
        yield Weight(f"{name}.weight", "attention", None, (width, arch.hidden), 0, unit=unit)
        if arch.qkv_bias:
            yield Weight(f"{name}.bias", "attention", None, (width,), 0, unit=unit)
    yield Weight("o_proj.weight", "attention", None, (arch.hidden, queries), 1)
    if arch.o_bias:
        yield Weight("o_proj.bias", "attention", None, (arch.hidden,))
    if arch.qk_norm == "head":
        yield Weight("q_norm.weight", "attention", None, (arch.head_dim,))
        yield Weight("k_norm.weight", "attention", None, (arch.head_dim,))
    elif arch.qk_norm == "full":
        yield Weight("q_norm.weight", "attention", None, (queries,))
        yield Weight("k_norm.weight", "attention", None, (keys,))
    if arch.sinks:
        yield Weight("sinks", "attention", None, (arch.heads,), 0)


def _mla(arch: Architecture, mla: Mla) -> Iterator[Weight]:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): down-projections are whole on every rank."""
    if mla.q_lora is None:
        yield Weight("q_proj.weight", "attention", None, (arch.query_width, arch.hidden), 0)
    else:
        yield Weight("q_a_proj.weight", "attention", None, (mla.q_lora, arch.hidden))
        yield Weight("q_a_layernorm.weight", "attention", None, (mla.q_lora,))
        yield Weight("q_b_proj.weight", "attention", None, (arch.query_width, mla.q_lora), 0)
    yield Weight("kv_a_proj_with_mqa.weight", "attention", None, (mla.kv_lora + mla.qk_rope, arch.hidden))
    yield Weight("kv_a_layernorm.weight", "attention", None, (mla.kv_lora,))
    yield Weight("kv_b_proj.weight", "attention", None, (arch.heads * (mla.qk_nope + mla.v), mla.kv_lora), 0)
    yield Weight("o_proj.weight", "attention", None, (arch.hidden, arch.heads * mla.v), 1)


def _moe(arch: Architecture, moe: Moe) -> Iterator[Weight]:
    yield Weight("router.weight", "router", None, (moe.experts, arch.hidden))
    if moe.router_bias:
        yield Weight("router.bias", "router", None, (moe.experts,))
    for item in _feed_forward(arch, "experts", "experts.", moe.ffn, moe.expert_bias):
        yield replace(item, expert=True, count=moe.experts)
    if moe.shared_ffn:
        yield from _feed_forward(arch, "shared_expert", "shared_expert.", moe.shared_ffn, False)
    if moe.shared_gate:
        yield Weight("shared_expert_gate.weight", "shared_expert", None, (1, arch.hidden))


def _feed_forward(arch: Architecture, part: str, prefix: str, width: int, bias: bool) -> Iterator[Weight]:
    for name in ("gate_proj", "up_proj")[2 - arch.branches :]:
        yield Weight(f"{prefix}{name}.weight", part, None, (width, arch.hidden), 0)
        if bias:
            yield Weight(f"{prefix}{name}.bias", part, None, (width,), 0)
    yield Weight(f"{prefix}down_proj.weight", part, None, (arch.hidden, width), 1)
    if bias:
        yield Weight(f"{prefix}down_proj.bias", part, None, (arch.hidden,))


def _norm(arch: Architecture, name: str, part: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", part, None, (arch.hidden,))
    if arch.norm == "layernorm":
        yield Weight(f"{name}.bias", part, None, (arch.hidden,))


def _mtp(arch: Architecture) -> Iterator[Weight]:
    """One multi-token-prediction layer (DeepSeek-V3, section 2.2): two norms, a joint projection, a layer, a norm."""
    for name in ("enorm", "hnorm"):
        yield from _norm(arch, name, "mtp")
    yield Weight("eh_proj.weight", "mtp", None, (arch.hidden, 2 * arch.hidden), 0)
    yield from _layer(arch, arch.layers - 1)
    yield from _norm(arch, "norm", "mtp")


def _head(arch: Architecture, head: str) -> Iterator[Weight]:
    if head == "value":
        yield Weight("score.weight", "head", None, (1, arch.hidden))
        yield Weight("score.bias", "head", None, (1,))
    elif head == "lm":
        if not arch.tied:
            yield Weight("lm_head.weight", "head", None, (arch.vocab, arch.hidden), 0)
        if arch.head_bias:
            yield Weight("lm_head.bias", "head", None, (arch.vocab,), 0)
    elif head != "none":
        raise BadInput(f"head = {head!r}: a model ends in lm, value or none")
