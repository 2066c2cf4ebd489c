"""Training steps of Hugging Face models on CPU with every storage counted: the second implementation of plan/fsdp."""

import contextlib
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from flowledger.tables.models import Architecture
from tests.plan.live_storages import Tracker

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 192, "vocab": 128}


def architecture(**other: object) -> Architecture:
    return Architecture(name="small", **{**SHAPE, **other})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes of a step: `peak` with parameters and moments, which are `resting`."""

    peak: int
    resting: int


def causal_lm(shape: Architecture, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """Llama, Qwen2 or Qwen3 with random weights, by its biases and norms of queries and keys."""
    settings = {
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocab, "attn_implementation": attention, "use_cache": False, "tie_word_embeddings": shape.tied,
        "pad_token_id": 0,
    }  # fmt: skip
    family = "Qwen3" if shape.qk_norm == "head" else "Qwen2" if shape.qkv_bias else "Llama"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    """The same with every layer recomputed in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def decoder_step(
    model: nn.Module,
    tokens: int,
    *,
    foreach: bool = False,
    fused: bool = False,
    autocast: bool = False,
    gradients: bool = True,
) -> Measured:
    """Forward, backward and AdamW over one sequence, the loss a fixed weighting of the last hidden states."""
    decoder = model.model
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, foreach=foreach, fused=fused or None)  # type: ignore[union-attr]
    ids, positions = torch.randint(1, 100, (1, tokens)), torch.arange(tokens)[None]
    weighting = torch.randn(1, tokens, model.config.hidden_size, dtype=next(model.parameters()).dtype)  # type: ignore[union-attr, arg-type]

    def step() -> None:
        region = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with region, torch.set_grad_enabled(gradients):
            hidden = decoder(ids, position_ids=positions)[0]  # type: ignore[operator]
        if not gradients:
            return
        loss = (hidden * weighting).sum()
        del hidden
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return counted(step, decoder, optimizer, (ids, positions, weighting), warm=gradients)  # type: ignore[arg-type]


def counted(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: tuple[Tensor, ...],
    *,
    warm: bool,
) -> Measured:
    """Peak of a step. `warm`: the optimizer has its moments, which a step of gradients of 0 makes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if warm:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        gc.collect()
        states = [value for state in optimizer.state.values() for value in state.values()]
        resting = sum(parameter.nbytes for parameter in model.parameters())
        resting += sum(value.nbytes for value in states if value.dim())
        with Tracker(*model.parameters(), *model.buffers(), *states, *others) as tracker:
            step()
    return Measured(peak=resting + tracker.peak, resting=resting)


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """What a decoder's forward pass saves for backward, each storage once, parameters and buffers not."""
    seen = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = model(ids, use_cache=False)
    del held
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)
