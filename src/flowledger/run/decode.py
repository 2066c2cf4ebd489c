"""A decode step of Llama-like models in a few tensor operations a layer, without the machinery around their modules.

It calls the model's own embedding, linears, activations and head (so what wraps those, LoRA for instance, is computed),
takes the weights of the norms as they are when a generation begins, and writes keys and values straight into the slot cache. It serves only models
whose every module is of a class known here, and those only once `verify` has found its logits equal to the model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation

from flowledger.flow.errors import BadInput
from flowledger.run.cache import SlotCache
from flowledger.run.causal_lm import unwrapped

# Model types of transformers whose layers differ only in biases and in norms of q and k.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Class, after the family's prefix -> its children, by name.
CHILDREN = {
    "ForCausalLM": {"model", "lm_head"},
    "Model": {"embed_tokens", "layers", "norm", "rotary_emb"},
    "DecoderLayer": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "Attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "MLP": {"gate_proj", "up_proj", "down_proj", "act_fn"},
    "RMSNorm": set[str](),
    "RotaryEmbedding": set[str](),
}
HEAD_NORMS = {"q_norm", "k_norm"}  # an Attention may have both
WRAPPERS = {"PeftModel", "PeftModelForCausalLM", "LoraModel"}  # what they do is done in the linears and embeddings
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the others' tables depend on the longest position asked for
TOLERANCE = dict.fromkeys((torch.float32, torch.float64), 1e-4)  # of max|logits|; norms go through float32 in both
TOLERANCE_ROUNDED = 0.03  # bfloat16 and float16 round after every operation, and not after the same ones

_verified: WeakSet[nn.Module] = WeakSet()

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer computes with."""

    attention_norm: Map
    q: Map
    k: Map
    v: Map
    q_norm: Map
    k_norm: Map
    out: Map
    head_dim: int
    scaling: float
    kind: str  # names its mask where layers have different ones
    mlp_norm: Map
    gate: Map
    activation: Map
    up: Map
    down: Map


class Decoder:
    """The decode step during one generation. Of the weights it holds none but those of the norms."""

    def __init__(self, model: nn.Module, *, positions: int) -> None:
        causal = unwrapped(model)
        inner = causal.model
        kinds = getattr(causal.config, "layer_types", None) or [""] * len(inner.layers)
        self._embed, self._norm, self._head = inner.embed_tokens, _norm(inner.norm), _called(causal.lm_head)
        self._layers = [_layer(layer, kind) for layer, kind in zip(inner.layers, kinds, strict=True)]
        self._kv_heads: int = causal.config.num_key_value_heads
        self._like = inner.norm.weight.detach()
        cos, sin = inner.rotary_emb(self._like, torch.arange(positions, device=self._like.device)[None])
        half = sin.shape[-1] // 2  # the sign of the half that changes sides stands in the table
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self._turns = torch.stack((cos[0], sin[0]), 1)[:, :, None]  # [S_cache, 2, 1, D]
        self._starts: Tensor | None = None

    def logits(self, token_ids: Tensor, kv_cache: SlotCache) -> Tensor:
        """Logits [B_run, V] of what follows token_ids [B_run]; after `kv_cache.begin_decode`."""
        self._begin(kv_cache)
        with torch.inference_mode():  # a tenth faster than no_grad; what leaves it is made by the head
            x = self._norm(self._states(token_ids, kv_cache))
        return self._head(x)

    def _states(self, token_ids: Tensor, kv_cache: SlotCache) -> Tensor:
        """Hidden states [B_run, H] after the last layer; writes keys and values of token_ids [B_run]."""
        positions, width, running = kv_cache.cursor.positions, kv_cache.cursor.width, token_ids.shape[0]
        assert positions is not None and self._starts is not None, "it follows begin_decode"
        mask = None if kv_cache.shows_all else kv_cache.decode_mask(self._like.dtype)
        places = (self._starts[:running] + positions[:, None]).view(-1)
        cos, sin = self._turns.index_select(0, positions).unbind(1)  # [B_run, 1, D]
        x: Tensor = self._embed(token_ids)  # [B_run, H]
        for layer, kept in zip(self._layers, kv_cache.layers, strict=True):
            D = layer.head_dim
            q, k, v = _heads(layer, layer.attention_norm(x), cos, sin)
            kept.keys.view(-1, D).index_copy_(0, places, k.reshape(-1, D))
            kept.values.view(-1, D).index_copy_(0, places, v.reshape(-1, D))
            attended = scaled_dot_product_attention(
                q.reshape(running, self._kv_heads, -1, D),  # heads of a group as queries of their one key
                kept.keys[:running, :, :width], kept.values[:running, :, :width],
                attn_mask=mask[layer.kind] if isinstance(mask, dict) else mask, scale=layer.scaling,
            )  # fmt: skip
            x = x + layer.out(attended.reshape(running, -1))
            h = layer.mlp_norm(x)
            x = x + layer.down(layer.activation(layer.gate(h)).mul_(layer.up(h)))
        return x

    def _begin(self, kv_cache: SlotCache) -> None:
        """Once: see to it that the cache has its memory, and where a head of a slot starts in it, [B_slot, K].

        A layer's cache is seen as rows [B_slot*K*S_cache, D] where one token of one head goes to.
        """
        if self._starts is not None:
            return
        for layer, kept in zip(self._layers, kv_cache.layers, strict=True):
            if not kept.is_initialized:  # every prompt has one token: nothing was prefilled
                states = self._like.new_empty(1, self._kv_heads, 1, layer.head_dim)
                kept.lazy_initialization(states, states)
        slots, heads, length, _ = kv_cache.layers[0].keys.shape
        self._starts = torch.arange(0, slots * heads * length, length, device=self._like.device).view(slots, heads)


@torch.no_grad()
def verify(model: nn.Module) -> bool:
    """Compare with the model's own logits; `decoder_of` has a decoder for a model only after they were found equal."""
    was_training = model.training
    model.eval()
    try:
        if _is_known(model) and _gap(model) <= TOLERANCE.get(_dtype(model), TOLERANCE_ROUNDED):
            _verified.add(model)
    except (AttributeError, RuntimeError, TypeError, BadInput):  # modules of another version: the model runs itself
        return False
    finally:
        model.train(was_training)
    return model in _verified


def decoder_of(model: nn.Module, *, positions: int) -> Decoder | None:
    """A decoder for samples of at most `positions` tokens; None where the model's own forward has to run."""
    return Decoder(model, positions=positions) if model in _verified and _is_known(model) else None


def _gap(model: nn.Module) -> float:
    """max|difference| / max|logits| over two samples of 5 tokens, the second always one token behind the first."""
    config, device = unwrapped(model).config, next(model.parameters()).device
    ids = torch.arange(3, 13, device=device).view(2, 5) % config.vocab_size
    truth = model(input_ids=ids, use_cache=False).logits.float()  # [2, 5, V]
    kv_cache, decoder = SlotCache(config=config, slots=2, positions=5, device=device), Decoder(model, positions=5)
    gap = torch.zeros((), device=device)
    for step in range(5):
        rows = torch.arange(min(step + 1, 2), device=device)
        kv_cache.begin_decode(len(rows))
        logits = decoder.logits(ids[rows, step - rows], kv_cache)
        gap = torch.maximum(gap, (logits - truth[rows, step - rows]).abs().max())
    return float(gap / truth.abs().max())


def _is_known(model: nn.Module) -> bool:
    """Whether every module that is passed over has a known class and known children, and no hooks."""
    causal = unwrapped(model)
    family = getattr(getattr(causal, "config", None), "model_type", None)
    if family not in FAMILIES:
        return False
    inner, layers = causal.model, causal.model.layers
    passed: list[tuple[nn.Module, str]] = [
        (causal, "ForCausalLM"), (inner, "Model"), (inner.norm, "RMSNorm"), (inner.rotary_emb, "RotaryEmbedding"),
        *((layer, "DecoderLayer") for layer in layers), *((layer.self_attn, "Attention") for layer in layers),
        *((layer.mlp, "MLP") for layer in layers), *((layer.input_layernorm, "RMSNorm") for layer in layers),
        *((layer.post_attention_layernorm, "RMSNorm") for layer in layers),
        *((getattr(layer.self_attn, name), "RMSNorm") for layer in layers for name in _head_norms(layer)),
    ]  # fmt: skip
    wrappers = [] if model is causal else [model, model.base_model]
    return (
        all(_is_of(module, family, suffix) and _is_bare(module) for module, suffix in passed)
        and all(type(module).__name__ in WRAPPERS and _is_bare(module) for module in wrappers)  # type: ignore[arg-type]
        and inner.rotary_emb.rope_type in STATIC_ROPE
    )


def _is_of(module: nn.Module, family: str, suffix: str) -> bool:
    kind, children = type(module), {name for name, _ in module.named_children()}
    if suffix == "Attention" and children >= HEAD_NORMS:
        children -= HEAD_NORMS
    where = f"transformers.models.{family}.modeling_{family}"
    return (kind.__module__, kind.__name__) == (where, FAMILIES[family] + suffix) and children == CHILDREN[suffix]


def _is_bare(module: nn.Module) -> bool:
    """Nothing was hung on a module that calling it would run."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _head_norms(layer: nn.Module) -> list[str]:
    return sorted(HEAD_NORMS & {name for name, _ in layer.self_attn.named_children()})  # type: ignore[union-attr]


def _layer(layer: Any, kind: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        attention_norm=_norm(layer.input_layernorm), q=_called(attention.q_proj), k=_called(attention.k_proj),
        v=_called(attention.v_proj), q_norm=_norm(getattr(attention, "q_norm", None)),
        k_norm=_norm(getattr(attention, "k_norm", None)), out=_called(attention.o_proj),
        head_dim=attention.head_dim, scaling=attention.scaling, kind=kind,
        mlp_norm=_norm(layer.post_attention_layernorm), gate=_called(mlp.gate_proj), activation=_called(mlp.act_fn),
        up=_called(mlp.up_proj), down=_called(mlp.down_proj),
    )  # fmt: skip


def _heads(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B_run, A, D], keys and values [B_run, K, D] of hidden states [B_run, H], turned by their positions."""
    q, k, v = (project(x).view(x.shape[0], -1, layer.head_dim) for project in (layer.q, layer.k, layer.v))
    both = torch.cat((layer.q_norm(q), layer.k_norm(k)), 1)
    both = torch.addcmul(both * cos, both.roll(layer.head_dim // 2, -1), sin)
    return both[:, : q.shape[1]], both[:, q.shape[1] :], v


def _norm(module: Any) -> Map:
    """The function of an RMSNorm: x * weight * sqrt(H) / sqrt(|x|^2 + H * eps), half as long as torch's on a CPU."""
    if module is None:
        return _same
    size, dtype = module.weight.shape[0], torch.promote_types(module.weight.dtype, torch.float32)
    weight = module.weight.detach().to(dtype) * size**0.5
    least = torch.tensor((size * module.variance_epsilon) ** 0.5, dtype=dtype, device=weight.device)

    def norm(x: Tensor) -> Tensor:
        lengths = vector_norm(x, dim=-1, keepdim=True, dtype=dtype).hypot_(least)
        scaled: Tensor = (x / lengths).mul_(weight)
        return scaled.to(x.dtype)

    return norm


def _called(module: nn.Module) -> Map:
    """A module as a function of rows; a plain linear or a SiLU without the way through its call."""
    if type(module) is nn.Linear and _is_bare(module):
        turned = module.weight.detach().t()  # once: `linear` would turn it for every token
        return (
            partial(torch.mm, mat2=turned)
            if module.bias is None
            else partial(torch.addmm, module.bias.detach(), mat2=turned)
        )
    return silu if type(module) is SiLUActivation and _is_bare(module) else module


def _same(x: Tensor) -> Tensor:
    return x


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
