"""A micro-batch as one row of tokens without padding, where neighbours with the same prompt hold it once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.run.segments import Segment, Segments, leaders, segments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The row, and where in it to look for what predicts each response token."""

    ids: Tensor  # int64 [1, T]
    positions: Tensor  # int64 [1, T]
    segments: Segments
    before: Tensor  # int64 [T_resp], the place in the row of the token before each response token
    wanted: Tensor  # bool [B_micro, S_resp], the response tokens


def pack(
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    response_mask: Tensor,
    *,
    shared_prompts: bool,
    multiple: int = 1,
) -> Packed:
    """ids, mask, positions [B_micro, S] and response_mask [B_micro, S_resp] of the last columns as one row.

    T is filled up to a multiple of `multiple` (and at least that, where there is no token) with tokens of a segment of
    their own, which nobody attends to: ranks that share a row take equally much of it, and pass through it together.
    """
    start, valid, own = mask.shape[1] - response_mask.shape[1], mask.bool(), torch.arange(len(ids), device=ids.device)
    leader = leaders(ids[:, :start], valid[:, :start]) if shared_prompts else own  # [B_micro]
    held = valid.clone()  # a prompt stands in the packed row once, with its first sample
    held[:, :start] &= (leader == own)[:, None]
    wanted = response_mask.bool()
    row = (held.flatten().cumsum(0) - 1).view_as(mask)  # packed row of each token
    before = torch.cat([row[leader, start - 1 : start], row[:, start:-1]], 1)  # that of the token before
    segments = segments_of(leader.tolist(), valid[:, :start].sum(1).tolist(), valid[:, start:].sum(1).tolist())
    tokens, positions = ids[held], positions[held]
    filling = -len(tokens) % multiple or (0 if len(tokens) else multiple)
    if filling:
        tokens = torch.cat([tokens, tokens.new_zeros(filling)])
        positions = torch.cat([positions, torch.arange(filling, device=positions.device)])
        segments = Segments((*segments.rows, Segment(filling, (0,))))
    return Packed(ids=tokens[None], positions=positions[None], segments=segments, before=before[wanted], wanted=wanted)
