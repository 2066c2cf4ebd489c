"""Attention in a trace: torch's own where the plan is for a CPU, and where it is for a GPU what flash-attn allocates."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from flowledger.plan.fsdp.symbols import is_packed_loop
from flowledger.plan.job import Job

SEGMENTS, KERNEL = "traced_segments", "traced_kernel"  # a name with `flash` in it is looked up on the hub


def attention_of(job: Job) -> str:
    """The name of the attention to build a model with; ours are registered when they are first asked for."""
    if job.engine.attention == "eager":
        return "eager"
    if is_packed_loop(job.engine):
        return _register(SEGMENTS, segments)
    return "sdpa" if job.device is None else _register(KERNEL, kernel)


def _register(name: str, function: Any) -> str:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def segments(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """One packed segment after another, then joined: flowledger's own loop. [1, A, T, D] -> [1, T, A, D].

    Samples that share a prompt come last: each attends to its response beside a copy of the first sample's prompt.
    """
    job: Job | None = kwargs.get("job")
    tokens, longest = query.shape[2], job.longest if job else query.shape[2]
    others = job.beside_tokens // longest if job else 0
    response = max(1, (tokens - (job.sequences - others) * longest) // others) if job and others else 0
    alone = tokens - others * response
    lengths = [longest] * (alone // longest) + ([alone % longest] if alone % longest else []) + [response] * others
    mask = query.new_zeros(longest, longest) if others else None
    parts = list(zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True))
    prompt = [x[:, :, : longest - response] for x in parts[0][1:]]
    found = []
    for index, (q, k, v) in enumerate(parts):
        shares = index >= len(parts) - others
        if shares:
            k, v = (torch.cat(both, 2) for both in zip(prompt, (k, v), strict=True))
        seen = mask[-q.shape[2] :, : k.shape[2]] if mask is not None and shares else None
        found.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=not shares, scale=kwargs.get("scaling"),
                enable_gqa=k.shape[1] != q.shape[1],
            )
        )  # fmt: skip
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """A fused kernel on a GPU. [B, A, T, D] -> [B, T, A, D]."""
    return _Kernel.apply(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Kernel(torch.autograd.Function):
    """flash-attn 2: saves q, k, v, its output and a row's logsumexp (csrc/flash_attn/flash_api.cpp mha_fwd, mha_bwd).

    Backward accumulates dq in float32 beside dq, and with grouped heads writes dk and dv of every head first.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        ctx.save_for_backward(query, key, value, out, _rows(query))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        accumulated = torch.empty(query.shape, dtype=torch.float32, device=query.device), _rows(query)
        expanded = [query.new_empty(query.shape) for _ in range(2) if key.shape != query.shape]
        found = tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (query, key, value))
        del accumulated, expanded
        return found


def _rows(query: Tensor) -> Tensor:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(batch, heads, tokens, dtype=torch.float32)
