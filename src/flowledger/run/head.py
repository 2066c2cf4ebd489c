"""The output head: hidden states to logits, in chunks, and what the distribution over the vocabulary says of each token.

Only `chunk_tokens` states meet the head at a time, so that the fp32 logits of a whole batch never exist. With gradients
each of several chunks is recomputed in backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowledger.run.causal_lm import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Hidden states to logits: the output embedding and what the architecture does after it."""

    embedding: nn.Module
    multiplier: float = 1.0
    softcap: float | None = None


def project_logits(*, hidden_states: Tensor, head: Head) -> Tensor:
    """Logits [T_logit, V] of hidden states [T_logit, H], in float32."""
    logits: Tensor = head.embedding(hidden_states).float()
    if head.multiplier != 1.0:
        logits = logits * head.multiplier
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits


def head_of(model: nn.Module) -> Head:
    """The output head, with the known ways in which architectures post-process logits."""
    causal = unwrapped(model)
    config = causal.config
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    scaling = getattr(config, "logits_scaling", None)  # Granite divides
    return Head(
        embedding=causal.get_output_embeddings(),
        multiplier=float(scale) if scale else 1.0 / float(scaling) if scaling else 1.0,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def token_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    chunk_tokens: int,
    entropy_grad: bool,
    sum_pi_squared: bool,
) -> list[Tensor]:
    """Log-prob and entropy [T_resp] of `targets`, and Σπ² where asked for, chunk by chunk."""

    def chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        log_probs = (project_logits(hidden_states=states, head=head) / temperature).log_softmax(-1)
        picked = log_probs.gather(-1, wanted[:, None])[:, 0]
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        if sum_pi_squared:
            return picked, entropy, (2 * log_probs.detach()).exp().sum(-1)
        return picked, entropy

    size = chunk_tokens or max(1, len(targets))
    recompute = size < len(targets) and torch.is_grad_enabled() and hidden.requires_grad  # one chunk: nothing to save
    call: Callable[..., Any] = (lambda *xs: checkpoint(chunk, *xs, use_reentrant=False)) if recompute else chunk
    parts = [call(*xs) for xs in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
    return [torch.cat(several) for several in zip(*parts, strict=True)]
