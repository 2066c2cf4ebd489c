"""Attention of a block of queries to a block of keys, with the log-sum-exp of the scores, so that blocks can be merged.

In backward the result and the log-sum-exp of all blocks together are handed in: each block's part of the gradient then
follows on its own (FlashAttention-2, arXiv:2307.08691, section 3.1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Both directions of one implementation. q [1, A, S_q, D]; k, v [1, K, S_k, D]; hidden bool [S_q, S_k] or None.

    forward(q, k, v, causal, hidden, scale): what was found [1, A, S_q, D], and lse float32 [1, A, S_q], -inf for a query
    that sees nothing. backward(grad, q, k, v, found, lse, causal, hidden, scale): gradients of q, k and v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def of_device(device: torch.device) -> BlockAttention:
    """Torch's flash kernel on a CPU, which says the log-sum-exp; plain matrix products elsewhere."""
    return FLASH_CPU if device.type == "cpu" else PLAIN


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (_each(x, q.shape[1]) for x in (k, v))
    found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_added(hidden, q), scale=scale
    )
    return found, lse if hidden is None else lse.masked_fill(hidden.all(-1), -torch.inf)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Tensor, lse: Tensor, causal: bool, hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = k.shape[1]
    k, v = (_each(x, q.shape[1]) for x in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, found, lse, 0.0, causal, attn_mask=_added(hidden, q), scale=scale
    )
    return dq, _added_up(dk, heads), _added_up(dv, heads)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, _each(k, q.shape[1]), causal, hidden, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # -inf - -inf, where nothing is seen
    return weights @ _each(v, q.shape[1]).float(), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Tensor, lse: Tensor, causal: bool, hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads, grad = k.shape[1], grad.float()
    k, v = (_each(x, q.shape[1]).float() for x in (k, v))
    weights = (_scores(q, k, causal, hidden, scale) - lse[..., None]).exp()  # of all keys that the query sees
    to_weights = grad @ v.transpose(-1, -2) - (grad * found.float()).sum(-1, keepdim=True)
    to_scores = weights * to_weights * scale
    dk, dv = to_scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ grad
    return to_scores @ k, _added_up(dk, heads), _added_up(dv, heads)


def _scores(q: Tensor, k: Tensor, causal: bool, hidden: Tensor | None, scale: float) -> Tensor:
    """Scores in float32 [1, A, S_q, S_k], -inf where a query does not see a key."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores if hidden is None else scores.masked_fill(hidden.to(q.device), -torch.inf)


def _added(hidden: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to scores: 0, or -inf where it is hidden."""
    return None if hidden is None else like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _each(x: Tensor, heads: int) -> Tensor:
    """Keys or values [1, K, S, D] of each of `heads` query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _added_up(grad: Tensor, heads: int) -> Tensor:
    """Gradients [1, A, S, D] of keys or values as those of the `heads` there are."""
    return grad if grad.shape[1] == heads else grad.view(1, heads, -1, *grad.shape[2:]).sum(2)


FLASH_CPU = BlockAttention(_flash, _flash_backward)
PLAIN = BlockAttention(_plain, _plain_backward)
