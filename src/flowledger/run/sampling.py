"""Draw the next token: temperature, then top-k, then top-p, then one uniform number per token.

A token is drawn by inverting the cumulative distribution at a number in [0, 1) that belongs to the sample and the
position in its response (`streams`). So what a sample says depends on the seed and on its own logits only, not on
which other samples happened to run beside it (up to the last digits of a logit, which a matrix product over another
number of rows may round differently).
"""

import torch
from torch import Tensor

# Logits handled at once: bounds the temporaries (about 16 bytes each) and keeps them in the processor's caches.
CHUNK_LOGITS = 1 << 21
# The largest number below 1 whose product with any total is below it: a token of probability 0 is never found.
BELOW_ONE = 1 - 2.0**-52


def streams(*, samples: int, positions: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), float64 [B, positions]: one for every token that may be drawn."""
    return torch.rand(samples, positions, generator=generator, dtype=torch.float64, device=generator.device).to(device)


def sample(*, logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """(token_ids int64 [B_run], log_prob float32 [B_run]) from logits [B_run, V] and uniform numbers [B_run].

    The log-prob is that of the distribution drawn from: temperature included, renormalised after top-k and top-p.
    It is NaN where the logits hold a NaN.
    """
    rows = max(1, CHUNK_LOGITS // logits.shape[1])
    if logits.shape[0] <= rows:
        return _invert(*candidates(logits=logits, temperature=temperature, top_k=top_k, top_p=top_p), uniform)
    drawn = [
        _invert(*candidates(logits=part, temperature=temperature, top_k=top_k, top_p=top_p), numbers)
        for part, numbers in zip(torch.split(logits, rows), torch.split(uniform, rows), strict=True)
    ]
    token_ids, log_prob = zip(*drawn, strict=True)
    return torch.cat(token_ids), torch.cat(log_prob)


def candidates(*, logits: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """(scores float32 [B_run, C], token ids [B_run, C] or None when C is the whole vocabulary in its order).

    Scores are log-probs up to a constant per row, at most 0, and -inf for what may not be drawn. Among equal logits
    at the edge of top-k exactly k stay; top-p keeps the most probable tokens until their sum reaches p.
    """
    scores, ids = logits.float(), None
    # Less the maximum first, so that a tiny temperature cannot overflow.
    scores = scores - scores.amax(-1, keepdim=True)
    if temperature != 1:
        scores.div_(temperature)
    if 0 < top_k < scores.shape[1]:
        scores, ids = scores.topk(top_k, dim=-1)
    if top_p < 1:
        if ids is None:
            scores, ids = scores.sort(dim=-1, descending=True)
        before = scores.softmax(-1, dtype=torch.float64).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0  # the most probable token always stays
        scores = scores.masked_fill(before >= top_p, -torch.inf)
    return scores, ids


def _invert(scores: Tensor, ids: Tensor | None, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate at which the cumulative probability first exceeds each uniform number, and its log-prob."""
    # float64: in float32 the sum over a large vocabulary would swallow its rare tokens.
    cumulative = scores.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = uniform[:, None].clamp(max=BELOW_ONE) * total
    chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[1] - 1)
    log_prob = (scores.gather(1, chosen) - total.log()).float()
    return (chosen if ids is None else ids.gather(1, chosen))[:, 0], log_prob[:, 0]
