"""The update of the policy: epochs, mini-batches (one optimizer step each), micro-batches (one forward and backward each).

Every function here is also a seam: it is called by its global name with keyword arguments, so it can be watched or
replaced from outside. Normalisers are those of the mini-batch and are handed down, never computed from a micro-batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowledger.config.schema import RunConfig
from flowledger.run import finite, forward
from flowledger.run import loss as losses
from flowledger.run.algorithms.aggregation import Totals, totals_of
from flowledger.run.batching import Batches, Indices, MiniBatch, without
from flowledger.run.sums import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one micro-batch leaves behind."""

    losses: Tensor  # [3] policy, KL and entropy loss
    new_log_prob: Tensor  # [B_micro, S_resp], without a graph
    loss_mask: Tensor  # [B_micro, S_resp], less what the loss itself rejected


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
    steps = (
        mini_batch(
            model=model, optimizer=optimizer, config=config, kl_coef=kl_coef, batch=batch, columns=columns, sums=sums
        )
        for batch in batches.mini_batches
        if batch.micro_batches
    )
    return [step for step in steps if step is not None]


def of_unmasked(batches: Batches, loss_mask: Tensor) -> Batches:
    """These batches without the samples no token of which is left in loss_mask [B_prompt*G, S_resp]."""
    left = loss_mask.any(-1).tolist()
    return batches if all(left) else without(batches, {i for i, some in enumerate(left) if not some})


def mini_batch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    kl_coef: float,
    batch: MiniBatch,
    columns: Columns,
    sums: Sums,
) -> Step | None:
    """Accumulate the gradient over micro-batches, then step once; None, and no step, where the loss rejected every token."""
    totals = mini_batch_totals(config, batch, columns["loss_mask"])
    parts, left = [], []
    with finite.traced(who="policy", rate="optim.lr", model=model, sample_id=columns["sample_id"][list(batch.samples)]):
        for samples in batch.micro_batches:
            rows = rows_of(columns, samples)
            made = micro_batch(model=model, config=config, kl_coef=kl_coef, totals=totals, sums=sums, **rows)
            parts.append(made.losses)
            left.append(made.loss_mask.any())
            if sums.first is not None:
                sums.first.add(samples, new_log_prob=made.new_log_prob, loss_mask=made.loss_mask)
        if not bool(torch.stack(left).any()):
            optimizer.zero_grad(set_to_none=True)
            return None
        grad_norm = optimizer_step(model=model, optimizer=optimizer, grad_clip=config.actor.grad_clip)
    policy_loss, kl_loss, entropy_loss = torch.stack(parts).sum(0)
    return Step(policy_loss=policy_loss, kl_loss=kl_loss, entropy_loss=entropy_loss, grad_norm=grad_norm)


def mini_batch_totals(config: RunConfig, batch: MiniBatch, loss_mask: Tensor) -> Totals:
    """The normalisers of a mini-batch of a step with this loss mask [B_prompt*G, S_resp]."""
    horizon = config.algorithm.loss_scale_factor or config.rollout.max_response_tokens
    return totals_of(loss_mask[list(batch.samples)], horizon=horizon, sequences=batch.sequences)


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
        shared_prompts=config.actor.shared_prompts,
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
    sums.add(made, new.entropy, old, new.new_log_prob)
    parts = torch.stack([made.policy_loss, made.kl_loss, made.entropy_loss])
    return MicroBatch(losses=parts, new_log_prob=new.new_log_prob.detach(), loss_mask=made.mask)


def micro_batch_backward(*, model: nn.Module, loss: Tensor) -> None:
    """Add this micro-batch's gradient to what the mini-batch has so far."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def optimizer_step(*, model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float) -> Tensor:
    """Clip the gradient (0: not at all), step, drop it. Returns the gradient's norm [] before clipping.

    Raises NotFinite where it is not finite, before anything has moved.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    finite.check_norm(model, norm)  # before clipping, which would multiply every gradient with what is not finite
    torch.nn.utils.clip_grads_with_norm_(trained, grad_clip or math.inf, norm)
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
        shared_prompts=config.actor.shared_prompts,
        chunk_tokens=config.actor.log_prob_chunk_tokens,
        sum_pi_squared=sum_pi_squared,
    )


def rows_of(columns: Columns, samples: Indices | Sequence[int]) -> dict[str, Tensor]:
    """The rows of these samples, by flow name."""
    index = torch.as_tensor(samples)
    return {name: tensor[index.to(tensor.device)] for name, tensor in columns.items()}
