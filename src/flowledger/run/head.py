"""The output head: hidden states to logits, in chunks, and what the distribution over the vocabulary says of each token.

Only `chunk_tokens` states meet the head at a time, so that the fp32 logits of a whole batch never exist. With gradients
each of several chunks is recomputed in backward. Where tensor parallelism cuts the head, each rank has the logits of its
share of the vocabulary, and only numbers per token are added up over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowledger.run.causal_lm import unwrapped
from flowledger.run.parallel.collectives import summed, total
from flowledger.run.parallel.ranks import ALONE, Group
from flowledger.run.parallel.vocabulary import log_softmax, picked, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Hidden states to logits: the output embedding and what the architecture does after it."""

    embedding: nn.Module
    multiplier: float = 1.0
    softcap: float | None = None
    group: Group = field(default_factory=lambda: ALONE.group("tp"))  # ranks that share the vocabulary
    first: int = 0  # the first token of this rank's share


def project_logits(*, hidden_states: Tensor, head: Head) -> Tensor:
    """Logits [T_logit, V] of hidden states [T_logit, H], in float32; of this rank's share of V where several have one."""
    logits: Tensor = head.embedding(hidden_states).float()
    if head.multiplier != 1.0:
        logits = logits * head.multiplier
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits


def head_of(model: nn.Module) -> Head:
    """The output head, with the known ways in which architectures post-process logits.

    Called where the model's parameters are whole: inside `sharded.within`.
    """
    causal = unwrapped(model)
    config = causal.config
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    scaling = getattr(config, "logits_scaling", None)  # Granite divides
    embedding = causal.get_output_embeddings()
    group, first = share_of(embedding.weight)
    return Head(
        embedding=embedding,
        multiplier=float(scale) if scale else 1.0 / float(scaling) if scaling else 1.0,
        softcap=getattr(config, "final_logit_softcapping", None),
        group=group,
        first=first,
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
    """Log-prob and entropy [T_resp] of `targets`, and Σπ² where asked for, chunk by chunk; the same on all ranks of tp."""

    def chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        logits = partial(project_logits, hidden_states=states, head=head)  # no name for them: they are freed at once
        log_probs = log_softmax(logits() if temperature == 1 else logits() / temperature, head.group)
        log_prob = picked(log_probs, wanted, head.first, head.group)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = summed(_entropy(log_probs), head.group)
        if sum_pi_squared:
            return log_prob, entropy, total((2 * log_probs.detach()).exp().sum(-1), head.group)
        return log_prob, entropy

    size = chunk_tokens or max(1, len(targets))
    recompute = size < len(targets) and torch.is_grad_enabled() and hidden.requires_grad  # one chunk: nothing to save
    call: Callable[..., Any] = (lambda *xs: checkpoint(chunk, *xs, use_reentrant=False)) if recompute else chunk
    parts = [call(*xs) for xs in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
    return [torch.cat(several) for several in zip(*parts, strict=True)]


def _entropy(log_probs: Tensor) -> Tensor:
    """-Σ π·log π [T] over a share of the vocabulary [T, V/tp]; without gradient the product is made where π was."""
    if torch.is_grad_enabled():
        return -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.exp().mul_(log_probs).sum(-1).neg_()
