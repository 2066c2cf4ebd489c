"""The update of the policy: epochs, mini-batches (one optimizer step each), micro-batches (one forward and backward each).

Every function here is also a seam: it is called by its global name with keyword arguments, so it can be watched or
replaced from outside. Normalisers are those of the mini-batch and are handed down, never computed from a micro-batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import forward
from flowledger.run import loss as losses
from flowledger.run.algorithms.aggregation import Totals, totals_of
from flowledger.run.batching import Batches, Indices, MiniBatch


@dataclass(slots=True, kw_only=True)
class Sums:
    """What the update adds up over micro-batches, weighted by tokens where it is a mean over tokens."""

    totals: dict[str, Tensor] = field(default_factory=dict)  # name -> []
    ratio_max: Tensor | None = None
    old_log_prob: Tensor | None = None  # [B_prompt*G, S_resp], filled where the update makes it

    def add(self, made: losses.MicroBatchLoss, entropy: Tensor, old: Tensor, new: Tensor, mask: Tensor) -> None:
        kept = mask.bool()
        means = {
            "tokens": mask,
            "clip_ratio": made.clipped,
            "entropy": entropy.detach(),
            "policy_kl": old - new.detach(),
        }
        if made.dual_clipped is not None:
            means["clip_ratio/dual"] = made.dual_clipped
        if made.kl is not None:
            means["ref_kl"] = made.kl
        for name, value in means.items():
            self.totals[name] = self.totals.get(name, 0) + torch.where(kept, value, 0).sum()
        largest = torch.where(kept, made.ratio, 0).max()
        self.ratio_max = largest if self.ratio_max is None else torch.maximum(self.ratio_max, largest)

    def metrics(self) -> dict[str, float]:
        """Means over all tokens that went through the update."""
        sums = {name: float(total) for name, total in self.totals.items()}
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        means = {name: total / tokens for name, total in sums.items()}
        return means if self.ratio_max is None else means | {"ratio/max": float(self.ratio_max)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one micro-batch leaves behind."""

    losses: Tensor  # [3] policy, KL and entropy loss
    old_log_prob: Tensor  # [B_micro, S_resp] that the ratio was taken against


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step came to, each []."""

    policy_loss: Tensor
    kl_loss: Tensor
    entropy_loss: Tensor
    grad_norm: Tensor


Columns = Mapping[str, Tensor]  # the step's tensors by flow name, each with B rows


def epoch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    kl_coef: float,
    batches: Batches,
    columns: Columns,
    sums: Sums,
) -> list[Step]:
    """One pass over all samples: one optimizer step per mini-batch that has something to learn from."""
    return [
        mini_batch(
            model=model, optimizer=optimizer, config=config, kl_coef=kl_coef, batch=batch, columns=columns, sums=sums
        )
        for batch in batches.mini_batches
        if bool(columns["loss_mask"][list(batch.samples)].any())
    ]


def mini_batch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    kl_coef: float,
    batch: MiniBatch,
    columns: Columns,
    sums: Sums,
) -> Step:
    """Accumulate the gradient over micro-batches, then step once."""
    totals = mini_batch_totals(config, columns["loss_mask"][list(batch.samples)])
    parts = []
    for samples in batch.micro_batches:
        rows = rows_of(columns, samples)
        made = micro_batch(model=model, config=config, kl_coef=kl_coef, totals=totals, sums=sums, **rows)
        parts.append(made.losses)
        if sums.old_log_prob is not None:
            sums.old_log_prob[list(samples)] = made.old_log_prob
    policy_loss, kl_loss, entropy_loss = torch.stack(parts).sum(0)
    grad_norm = optimizer_step(model=model, optimizer=optimizer, grad_clip=config.actor.grad_clip)
    return Step(policy_loss=policy_loss, kl_loss=kl_loss, entropy_loss=entropy_loss, grad_norm=grad_norm)


def mini_batch_totals(config: RunConfig, loss_mask: Tensor) -> Totals:
    """The normalisers of a mini-batch with this loss mask [B_mini, S_resp]."""
    horizon = config.algorithm.loss_scale_factor or config.rollout.max_response_tokens
    return totals_of(loss_mask, horizon=horizon)


def micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    kl_coef: float,
    totals: Totals,
    sums: Sums,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_prob: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
) -> MicroBatch:
    """Forward, loss, backward of one micro-batch.

    Without old_log_prob the policy has not moved since it sampled: its new log-probs are the old ones, the ratio is 1.
    """
    new = forward.micro_batch_forward(
        model=model,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        temperature=config.rollout.temperature,
        packed=config.actor.packed,
        chunk_tokens=config.actor.log_prob_chunk_tokens,
        entropy_grad=config.algorithm.entropy_coef != 0,
    )
    old = new.new_log_prob.detach().clone() if old_log_prob is None else old_log_prob
    made = losses.micro_batch_loss(
        algorithm=config.algorithm,
        kl_coef=kl_coef,
        totals=totals,
        sample_id=sample_id,
        new_log_prob=new.new_log_prob,
        entropy=new.entropy,
        old_log_prob=old,
        ref_log_prob=ref_log_prob,
        advantages=advantages,
        loss_mask=loss_mask,
        rollout_is_weights=rollout_is_weights,
    )
    micro_batch_backward(model=model, loss=made.loss)
    sums.add(made, new.entropy, old, new.new_log_prob, loss_mask)
    parts = torch.stack([made.policy_loss, made.kl_loss, made.entropy_loss])
    return MicroBatch(losses=parts, old_log_prob=old)


def micro_batch_backward(*, model: nn.Module, loss: Tensor) -> None:
    """Add this micro-batch's gradient to what the mini-batch has so far."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def optimizer_step(*, model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float) -> Tensor:
    """Clip the gradient (0: not at all), step, drop it. Returns the gradient's norm [] before clipping; it must be finite."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, grad_clip or math.inf)
    if not torch.isfinite(norm):
        names = [
            n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        raise BadInput(
            f"grad_norm is {float(norm)}; the first gradient that is not finite: {names[0] if names else 'their sum'}"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()


def log_probs(
    *, model: nn.Module, config: RunConfig, batches: Batches, columns: Columns, sum_pi_squared: bool = False
) -> dict[str, Tensor]:
    """new_log_prob and entropy [B_prompt*G, S_resp] without gradient, and sum_pi_squared where asked for.

    Micro-batch by micro-batch; 0 for dropped samples.
    """
    names = ["new_log_prob", "entropy", *(["sum_pi_squared"] if sum_pi_squared else [])]
    made = {name: torch.zeros(columns["response_mask"].shape) for name in names}
    for samples in batches.micro_batches:
        rows = rows_of(columns, samples)
        part = log_prob_micro_batch(model=model, config=config, sum_pi_squared=sum_pi_squared, **rows)
        for name, tensor in made.items():
            tensor[list(samples)] = getattr(part, name)
    return made


@torch.no_grad()
def log_prob_micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    sum_pi_squared: bool,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
) -> forward.Forward:
    """Log-probs of one micro-batch without gradient, for the old and the reference policy."""
    return forward.micro_batch_forward(
        model=model,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        temperature=config.rollout.temperature,
        packed=config.actor.packed,
        chunk_tokens=config.actor.log_prob_chunk_tokens,
        sum_pi_squared=sum_pi_squared,
    )


def rows_of(columns: Columns, samples: Indices | Sequence[int]) -> dict[str, Tensor]:
    """The rows of these samples, by flow name."""
    index = torch.as_tensor(samples)
    return {name: tensor[index.to(tensor.device)] for name, tensor in columns.items()}
