"""The loss of a trace: what lives between head and loss, computed as plan/logits names it, in torch.

Only what a tensor's life decides is done here: which copies exist, who holds them, and what backward needs. Kernels that
write where they read (flash-attn) are autograd functions whose allocations are those of the kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowledger.plan.job import Job
from flowledger.plan.logits import chunk_rows, implementation

CHUNKED = ("chunked", "own_chunked")
WHOLE = ("plain", "own", "pieces", "flash")
FOREIGN = {
    "fused": "the loss is a fused kernel, which no trace runs: compared without logits",
    "te": "the loss is Transformer Engine's kernel, which no trace runs: compared without logits",
    "parallel": "the loss is Megatron's, which no trace runs: compared without logits",
}
Head = Callable[[], Tensor]  # the logits, held by nobody else
TEMPERATURE = 1.0  # divides as any other would


class Loss:
    """Log-probs (and entropy) of every row, [T, H] or [T, V] -> [T].

    `held`: what a trainer's names keep alive until the micro-batch ends; the caller clears it then.
    """

    def __init__(self, job: Job, vocab: int) -> None:
        self.how, self.gradients, self.logits = implementation(job), job.gradients, job.engine.logits
        self.wide = self.logits.upcast or self.logits.dtype == "float32" or job.engine.autocast  # what the loss reads
        self.rows = partial(chunk_rows, job, vocab=vocab, how=self.how)
        self.compiled = ("TORCHDYNAMO_DISABLE", "1") not in job.environment
        self.held: list[Tensor] = []

    def from_states(self, head: Any, states: Tensor) -> Tensor:
        """Head and loss together, [T, H] -> [T], a chunk of rows at a time; with gradients each is computed again."""
        if self.how in FOREIGN:
            return _Unseen.apply(states, head.weight)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped
        compute = self._own if self.how == "own_chunked" else self._chunk

        def one(part: Tensor) -> Tensor:
            return compute(partial(head, part))

        call = partial(checkpoint, one, use_reentrant=False) if self.gradients else one
        return torch.cat([call(part) for part in _split(states, self.rows(len(states)))])

    def from_logits(self, box: list[Tensor]) -> Tensor:
        """The loss of all logits, [T, V] -> [T]; they come in a box, so that no caller's name keeps them."""
        if self.how == "own":
            return self._own(box.pop)
        read = self._read(box.pop())
        if self.how == "flash":
            return self._flash(read)
        return self._pieces(read) if self.how == "pieces" else self._plain(read)

    def _own(self, head: Head) -> Tensor:
        log_probs = (head().float() / TEMPERATURE).log_softmax(-1)
        return _picked(log_probs) - self._own_sum(log_probs)

    def _own_sum(self, log_probs: Tensor) -> Tensor:
        """Σ π·log π: without gradient the product is made where π was."""
        with torch.set_grad_enabled(self.logits.entropy_grad and torch.is_grad_enabled()):
            if torch.is_grad_enabled():
                return (log_probs.exp() * log_probs).sum(-1)
            return log_probs.exp().mul_(log_probs).sum(-1)

    def _chunk(self, head: Head) -> Tensor:
        """One chunk; the head's output has a name only where a copy is made beside it."""
        if self.logits.upcast:
            logits = head()
            log_probs = self._scaled(logits.float()).log_softmax(-1)
        else:
            log_probs = self._scaled(head().float() if self.wide else head()).log_softmax(-1)
        return _picked(log_probs) + self._entropy(log_probs)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits / TEMPERATURE if self.logits.temperature_copy else logits

    def _read(self, logits: Tensor) -> Tensor:
        """What the loss reads. Copies beside the logits have names; a recast takes the logits' own."""
        single, upcast = self.logits.dtype == "float32", self.logits.upcast
        if single and not upcast and self.how != "pieces":
            logits = logits.float()
        self._hold(logits)
        if upcast and not single and self.how != "pieces":
            logits = logits.float()
            self._hold(logits)
        if self.logits.temperature_copy:
            logits = logits / TEMPERATURE
            self._hold(logits)
        return logits

    def _hold(self, logits: Tensor) -> None:
        if self.logits.kept:
            self.held.append(logits)

    def _plain(self, logits: Tensor) -> Tensor:
        log_probs = (logits.float() if self.wide else logits).log_softmax(-1)  # where that is a copy, it has no name
        return _picked(log_probs) + self._entropy(log_probs)

    def _pieces(self, logits: Tensor) -> Tensor:
        found = []
        size = self.rows(len(logits))
        for start in range(0, len(logits), size):  # slices, as AReaL takes them: the backward of each fills all rows
            part = logits[start : start + size]
            log_probs = (part.float() if self.wide else part).log_softmax(-1)
            found.append(_picked(log_probs) + self._entropy(log_probs))
        return torch.cat(found)

    def _flash(self, logits: Tensor) -> Tensor:
        entropy = self.logits.entropy
        found: Tensor = _InPlace.apply(logits, entropy == "none")  # type: ignore[no-untyped-call]
        if entropy == "none":
            return found
        if self.compiled:
            return found + _Compiled.apply(logits)  # type: ignore[no-any-return, no-untyped-call]
        if entropy == "full":
            return found + _entropy_of(logits)
        return found + torch.cat([_entropy_of(part.float()) for part in _split(logits, self.rows(len(logits)))])

    def _entropy(self, log_probs: Tensor) -> Tensor:
        """A metric of the log-probs, without gradient."""
        if self.logits.entropy == "none":
            return log_probs.new_zeros(len(log_probs))
        size = self.rows(len(log_probs)) if self.logits.entropy == "chunked" else len(log_probs)
        with torch.no_grad():
            return torch.cat([-(part.exp() * part).sum(-1) for part in _split(log_probs, max(1, size))])


class _Unseen(torch.autograd.Function):
    """A head and a loss of which only the gradients are seen: of the hidden states and of the head's weight."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return states.new_empty(len(states))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


class _InPlace(torch.autograd.Function):
    """flash-attn's cross-entropy: figures of a row in forward; in backward the gradient, over the logits or beside them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, over: bool) -> Tensor:
        ctx.over = over
        ctx.save_for_backward(logits, logits.new_empty(len(logits), dtype=torch.float32))
        return logits.new_empty(len(logits), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (logits, _) = ctx.saved_tensors
        return (logits.detach() if ctx.over else torch.empty_like(logits)), None


class _Compiled(torch.autograd.Function):
    """A compiled entropy: one kernel forward, one backward, and only figures of a row between them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits, logits.new_empty(len(logits), dtype=torch.float32))
        return logits.new_empty(len(logits))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _split(rows: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(rows, size))


def _entropy_of(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def _picked(log_probs: Tensor) -> Tensor:
    tokens = torch.zeros(len(log_probs), 1, dtype=torch.int64, device=log_probs.device)
    return log_probs.gather(-1, tokens)[:, 0]
