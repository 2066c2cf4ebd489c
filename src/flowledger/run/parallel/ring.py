"""Ring attention: keys and values of all cp ranks come by, and each rank's queries attend to them, one block at a time.

Ring Attention (arXiv:2310.01889) on zig-zag slices. The next block is on its way while the one at hand is computed; what
the blocks give is merged by the log-sum-exp of their scores. Blocks that causality or a sliding window hides are left
out. In backward keys and values pass again, and their gradients travel behind them, in float32, back to their owner.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowledger.run.parallel.block_attention import BlockAttention, of_device
from flowledger.run.parallel.ranks import Group


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens of one sample that meet: queries of this rank, keys of the rank they come from."""

    queries: slice
    keys: slice
    causal: bool = False  # both begin and end together, and each sees itself and those before
    hidden: Tensor | None = None  # bool [S_q, S_k]; None: everything is seen, or what causal says


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks of cp around one row, and what meets in each round."""

    samples: tuple[int, ...]  # tokens of each sample, a multiple of 2*cp
    group: Group
    known: dict[int | None, list[list[Block]]] = field(default_factory=dict)  # by sliding window

    def rounds(self, window: int | None) -> list[list[Block]]:
        """The blocks of this rank in each round: in round j it has keys and values of the rank j places before it."""
        if window not in self.known:
            cp, at = self.group.size, self.group.at
            sources = ((at - j) % cp for j in range(cp))
            self.known[window] = [list(blocks(self.samples, cp, at, source, window)) for source in sources]
        return self.known[window]


def blocks(samples: Sequence[int], cp: int, at: int, source: int, window: int | None) -> Iterator[Block]:
    """What queries of cp rank `at` see of the keys of rank `source`.

    Of a rank before it, both its chunks see the first chunk and none sees the second; of one after it, its second chunk
    sees both and its first none.
    """
    start = 0
    for tokens in samples:
        chunk = tokens // (2 * cp)
        queries = slice(start + (chunk if source > at else 0), start + 2 * chunk)
        keys = slice(start, start + (chunk if source < at else 2 * chunk))
        start += 2 * chunk
        if window is None or window >= tokens:
            if chunk:
                yield Block(queries, keys, causal=source == at)
            continue
        distance = _positions(chunk, cp, at)[-(queries.stop - queries.start) :, None]
        distance = distance - _positions(chunk, cp, source)[: keys.stop - keys.start]
        hidden = (distance < 0) | (distance >= window)
        if not hidden.all():
            yield Block(queries, keys, hidden=hidden)


def attend(*, query: Tensor, key: Tensor, value: Tensor, ring: Ring, window: int | None, scale: float | None) -> Tensor:
    """Causal attention of the tokens of this rank, [1, A, T/cp, D], to all tokens of their samples before them.

    key and value [1, K, T/cp, D], K dividing A; a token sees the last `window` tokens, itself included; null: all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    course = _Course(ring.rounds(window), partial(start, group=ring.group), of_device(query.device), scale)
    return _Attend.apply(query, key, value, course)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


@dataclass(frozen=True, slots=True)
class Transfer:
    """A block on its way."""

    arriving: Tensor
    works: Sequence[Any]

    def wait(self) -> Tensor:
        """The block that has arrived from the rank before, when the own one is gone too."""
        for work in self.works:
            work.wait()
        return self.arriving


def start(*, block: Tensor, group: Group) -> Transfer:
    """Begin to send a block to the next rank of the ring, and to receive that of the one before."""
    arriving = torch.empty_like(block)
    following, before = (group.ranks[(group.at + step) % group.size] for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, block, following, group.handle),
        dist.P2POp(dist.irecv, arriving, before, group.handle),
    ]
    return Transfer(arriving, dist.batch_isend_irecv(operations))


@dataclass(frozen=True, slots=True)
class _Course:
    """What stays the same in forward and backward."""

    rounds: list[list[Block]]
    start: Callable[..., Transfer]
    kernel: BlockAttention
    scale: float


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, course: _Course) -> Tensor:
        found = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        passing = torch.cat([key, value])  # [2, K, T/cp, D]
        for left, meeting in _countdown(course.rounds):
            arriving = course.start(block=passing) if left else None
            for block in meeting:
                k, v = passing[:, None, :, block.keys]
                made = course.kernel.forward(query[:, :, block.queries], k, v, block.causal, block.hidden, course.scale)
                _merge(found[:, :, block.queries], lse[:, :, block.queries], *made)
            passing = arriving.wait() if arriving else passing
        found = found.to(query.dtype)
        ctx.course = course
        ctx.save_for_backward(query, key, value, found, lse)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, found, lse = ctx.saved_tensors
        course: _Course = ctx.course
        to_query = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        passing, behind = torch.cat([key, value]), None
        for left, meeting in _countdown(course.rounds):
            arriving = course.start(block=passing) if left else None
            to_passing = torch.zeros_like(passing, dtype=torch.float32)
            for block in meeting:
                q, (k, v) = block.queries, passing[:, None, :, block.keys]
                dq, dk, dv = course.kernel.backward(
                    grad[:, :, q], query[:, :, q], k, v, found[:, :, q], lse[:, :, q],
                    block.causal, block.hidden, course.scale,
                )  # fmt: skip
                to_query[:, :, q] += dq
                to_passing[:, :, block.keys] += torch.cat([dk, dv])
            if behind is not None:
                to_passing += behind.wait()
            behind = course.start(block=to_passing)
            passing = arriving.wait() if arriving else passing
        assert behind is not None  # there is a round at least
        to_key, to_value = behind.wait().to(key.dtype)[:, None]
        return to_query.to(query.dtype), to_key, to_value, None


def _merge(found: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add to what was found [1, A, S_q, D], in place, what other keys give; lse [1, A, S_q] of the scores of either."""
    both = torch.logaddexp(lse, more_lse)
    found.mul_((lse - both).exp()[..., None]).add_(more * (more_lse - both).exp()[..., None])
    lse.copy_(both)


def _countdown(rounds: list[list[Block]]) -> Iterator[tuple[int, list[Block]]]:
    """Each round, and how many are left after it."""
    return zip(reversed(range(len(rounds))), rounds, strict=True)


def _positions(chunk: int, cp: int, at: int) -> Tensor:
    """Place in their sample of the tokens of cp rank `at`, int64 [2*chunk]."""
    first = torch.arange(chunk)
    return torch.cat([first + at * chunk, first + (2 * cp - 1 - at) * chunk])
