"""Attention over samples packed in one row without padding, where neighbours with the same prompt hold it once.

A row [1, T] is cut into segments: a prompt, then its responses. The first sample of a segment is computed as it would be
alone; each other response attends to that prompt and to itself. Short ones go together, as a rectangle. Ranks that share
a row exchange heads for tokens, or pass keys and values around.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flowledger.run.parallel import ring, ulysses
from flowledger.run.parallel.slices import Shared

TOGETHER = 256  # tokens of responses up to which one call with padding is faster than a call each


@dataclass(frozen=True)
class Piece:
    """Responses that attend in one call: their tokens stand one after another in the packed row."""

    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def places(self) -> Tensor:
        """Token of the piece at each place of a rectangle [n, S_piece]; where a response has ended, its last one."""
        ends = torch.tensor(self.lengths)
        column = torch.minimum(torch.arange(max(self.lengths)), ends[:, None] - 1)
        return column + (ends.cumsum(0) - ends)[:, None]

    @cached_property
    def real(self) -> Tensor:
        """Places in that rectangle, row by row, at which a token stands [tokens]."""
        inside = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        return inside.flatten().nonzero()[:, 0]

    def rectangle(self, x: Tensor) -> Tensor:
        """[1, K, tokens, D] as [n, K, S_piece, D]."""
        x = x.squeeze(0)  # unlike x[0] it copies nothing on the way back
        if len(set(self.lengths)) == 1:
            return x.view(len(x), len(self.lengths), -1, x.shape[-1]).transpose(0, 1)
        return x[:, self.places.to(x.device)].transpose(0, 1)

    def row(self, x: Tensor) -> Tensor:
        """[n, A, S_piece, D] as [1, A, tokens, D]."""
        flat = x.transpose(0, 1).flatten(1, 2)
        return (flat if len(set(self.lengths)) == 1 else flat[:, self.real.to(x.device)])[None]


@dataclass(frozen=True)
class Segment:
    """Samples with the same prompt: its tokens, and those of each response."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Tokens of the first sample, prompt and response."""
        return self.prompt + self.responses[0]

    @cached_property
    def others(self) -> tuple[Piece, ...]:
        """The other responses: all together where that is little, else equally long neighbours. Empty ones are left out."""
        left = tuple(length for length in self.responses[1:] if length)
        if left and len(left) * max(left) <= TOGETHER:
            return (Piece(left),)
        return tuple(Piece(tuple(equal)) for _, equal in groupby(left))


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one packed row, and the masks that all layers of a pass share."""

    rows: tuple[Segment, ...]
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window
    shared: Shared | None = None  # where several ranks have slices of the row

    @property
    def pieces(self) -> list[int]:
        """Tokens of the parts that attend together, in the order of the row."""
        return [size for one in self.rows for size in (one.whole, *(piece.tokens for piece in one.others))]

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """What is added to the scores of a token (row) for each token (column) of the longest sample: 0 or -inf [S, S].

        The last tokens of a shorter sequence read from its rows: who may see whom depends on distance alone.
        """
        if window not in self.masks:
            longest = max(one.prompt + max(one.responses) for one in self.rows)
            at = torch.arange(longest, device=like.device)
            distance = at[:, None] - at
            hidden = (distance < 0) | (distance >= (window or longest))
            self.masks[window] = like.new_zeros(longest, longest).masked_fill_(hidden, -torch.inf)
        return self.masks[window]


def leaders(prompts: Tensor, valid: Tensor) -> Tensor:
    """For each row of prompts [B_micro, S_prompt] the first of the neighbours with the same prompt [B_micro]."""
    tokens = torch.where(valid, prompts, -1)
    same = (tokens[1:] == tokens[:-1]).all(1)
    first = torch.arange(len(prompts), device=prompts.device)
    first[1:] *= ~same
    return first.cummax(0).values


def segments_of(leader: Sequence[int], prompts: Sequence[int], responses: Sequence[int]) -> Segments:
    """The segments of samples with so many tokens in prompt and response; neighbours with one leader share a segment."""
    runs = (list(rows) for _, rows in groupby(range(len(leader)), leader.__getitem__))
    return Segments(tuple(Segment(prompts[rows[0]], tuple(responses[row] for row in rows)) for rows in runs))


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a packed row: query [1, A, T, D], key and value [1, K, T, D].

    Of a row that is shared these are the tokens of this rank. Returns what was found [1, T, A, D].
    """
    if segments is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )

    if segments.shared is None:
        found = row_attention(query, key, value, segments, sliding_window, scaling)
    else:
        found = _shared_attention(query, key, value, segments, segments.shared, sliding_window, scaling)
    return found.transpose(1, 2).contiguous(), None


def _shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    shared: Shared,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """The same between ranks: each attends with all tokens of its heads, or those of its cp slice, and then gives back."""
    group = shared.heads
    key, value = ulysses.repeated(key, group), ulysses.repeated(value, group)
    query, key, value = (ulysses.exchange(x=x, group=group, to="heads") for x in (query, key, value))
    if shared.ring is not None:
        found = ring.attend(query=query, key=key, value=value, ring=shared.ring, window=window, scale=scaling)
    elif shared.slices.cp == 1:
        found = row_attention(query, key, value, segments, window, scaling)
    else:
        order = shared.order.to(query.device)
        inverse = order.argsort()
        query, key, value = (x[:, :, inverse] for x in (query, key, value))
        found = row_attention(query, key, value, segments, window, scaling)[:, :, order]
    return ulysses.exchange(x=found, group=group, to="tokens")


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None, scaling: float | None
) -> Tensor:
    """Causal attention [1, A, T, D] within each sample of a whole row, piece by piece."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last tokens of n sequences: q [n, A, S_q, D], k and v [n, K, S_k, D]."""
        queries, keys = q.shape[2], k.shape[2]
        square = queries == keys and (window is None or keys <= window)
        mask = None if square else segments.mask(window, q)[keys - queries : keys, :keys]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=square, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    split = (torch.split(x, segments.pieces, 2) for x in (query, key, value))
    parts = zip(*split, strict=True)
    return torch.cat([piece for segment in segments.rows for piece in _within(segment, parts, attend)], 2)


def _within(
    segment: Segment, parts: Iterator[tuple[Tensor, ...]], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Iterator[Tensor]:
    """What one segment's pieces [1, A, S_piece, D] attend to."""
    q, k, v = next(parts)
    yield attend(q, k, v)
    if not segment.others:
        return
    prompt = [x[:, :, : segment.prompt] for x in (k, v)]
    for piece in segment.others:
        q, k, v = (piece.rectangle(x) for x in next(parts))
        k, v = (torch.cat([x.expand(len(y), -1, -1, -1), y], 2) for x, y in zip(prompt, (k, v), strict=True))
        yield piece.row(attend(q, k, v))
