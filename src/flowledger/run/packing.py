"""A micro-batch as one row of tokens without padding, where neighbours with the same prompt hold it once.

Ranks of cp and sp make the same row, and each goes on with its slice of it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowledger.flow.slices import Slices
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.parallel.slices import places, shared
from flowledger.run.segments import Segment, Segments, leaders, segments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The row, or this rank's slice of it, and where in it to look for what predicts each response token."""

    ids: Tensor  # int64 [1, T/(cp*sp)]
    positions: Tensor  # int64 [1, T/(cp*sp)]
    segments: Segments  # of the whole row
    before: Tensor  # int64 [T_resp], the place in the slice of the token before each response token
    wanted: Tensor  # bool [B_micro, S_resp], the response tokens; of several ranks one has each


def pack(
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    response_mask: Tensor,
    *,
    shared_prompts: bool,
    ranks: Ranks = ALONE,
    sequence_parallel: bool = False,
) -> Packed:
    """ids, mask, positions [B_micro, S] and response_mask [B_micro, S_resp] of the last columns as one row.

    T is filled up for cp, sp and, where norms and residuals are cut over it too (`sequence_parallel`), tp; T is never
    0. The filling is a segment of its own, which nobody attends to. With cp > 1 each sample stands alone, also where
    prompts are the same, and is filled up behind its last token, where causal attention does not look.
    """
    cp, own, width = ranks.degree("cp"), torch.arange(len(ids), device=ids.device), mask.shape[1]
    start, wanted = width - response_mask.shape[1], response_mask.bool()
    ids, valid, positions = _filled(ids, mask.bool(), positions, cp)
    leader = leaders(ids[:, :start], valid[:, :start]) if shared_prompts and cp == 1 else own  # [B_micro]
    held = valid.clone()  # a prompt stands in the packed row once, with its first sample
    held[:, :start] &= (leader == own)[:, None]
    row = (held.flatten().cumsum(0) - 1).view_as(held)  # packed row of each token
    before = torch.cat([row[leader, start - 1 : start], row[:, start : width - 1]], 1)  # that of the token before
    segments = segments_of(leader.tolist(), valid[:, :start].sum(1).tolist(), valid[:, start:].sum(1).tolist())
    tokens, positions = ids[held], positions[held]
    tp = ranks.degree("tp") if sequence_parallel else 1
    filling = Slices(lengths=(len(tokens),), cp=cp, sp=ranks.degree("sp"), tp=tp).filled[-1]
    if filling:
        tokens = torch.cat([tokens, tokens.new_zeros(filling)])
        positions = torch.cat([positions, torch.arange(filling, device=positions.device)])
        segments = Segments((*segments.rows, Segment(filling, (0,))))
    return _sliced(tokens, positions, segments, before, wanted, ranks)


def _filled(ids: Tensor, valid: Tensor, positions: Tensor, cp: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, valid and positions [B_micro, S] with more columns on the right, which make equal chunks of each sample."""
    if cp == 1:
        return ids, valid, positions
    lengths = valid.sum(1)
    filled = torch.tensor(Slices(lengths=tuple(lengths.tolist()), cp=cp).filled[:-1], device=ids.device)
    column = torch.arange(2 * cp - 1, device=ids.device).expand(len(ids), -1)
    filling = column < (filled - lengths)[:, None]
    return (
        torch.cat([ids, torch.zeros_like(column)], 1),
        torch.cat([valid, filling], 1),
        torch.cat([positions, column], 1),
    )


def _sliced(
    tokens: Tensor, positions: Tensor, segments: Segments, before: Tensor, wanted: Tensor, ranks: Ranks
) -> Packed:
    """What this rank has of the row: tokens and positions [T], before and wanted [B_micro, S_resp]."""
    together = shared(segments.pieces, ranks)
    if together is not None:
        mine = places(together.slices, ranks.at("cp"), ranks.at("sp")).to(tokens.device)
        here = torch.full_like(tokens, -1)
        here[mine] = torch.arange(len(mine), device=tokens.device)
        tokens, positions, before = tokens[mine], positions[mine], here[before]
        wanted = wanted & (before >= 0)
        segments = replace(segments, shared=together)
    return Packed(ids=tokens[None], positions=positions[None], segments=segments, before=before[wanted], wanted=wanted)
