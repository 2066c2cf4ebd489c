"""The update of the policy: epochs, mini-batches (one optimizer step each), micro-batches (one forward and backward each).

Every function here is also a seam: it is called by its global name with keyword arguments, so it can be watched or
replaced from outside. Normalisers are those of the mini-batch and are handed down, never computed from a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowledger.config.passes import limits_of
from flowledger.config.schema import RunConfig
from flowledger.run import finite, forward, recut
from flowledger.run import loss as losses
from flowledger.run.algorithms.aggregation import Totals, totals_of
from flowledger.run.batches import Update
from flowledger.run.batching import Batches, Indices, MiniBatch, without
from flowledger.run.causal_lm import unwrapped
from flowledger.run.correction import corrected
from flowledger.run.models import bytes_per_token
from flowledger.run.parallel import pipeline, schedules, sharded
from flowledger.run.parallel.collectives import total
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.parallel.rows import WHOLE, Columns, Rows
from flowledger.run.sums import FirstPass, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one micro-batch leaves behind."""

    loss: Tensor  # [] without a graph, but in a pipeline, whose schedule starts the backward pass from it
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


def update(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    ranks: Ranks = ALONE,
    rows: Rows = WHOLE,
    kl_coef: float,
    batches: Batches,
    columns: Columns,
) -> Update:
    """`epochs` passes over the samples, one optimizer step per mini-batch; columns: the step's tensors by flow name."""
    loss_mask, old_log_prob = columns["loss_mask"], columns.get("old_log_prob")
    first = FirstPass.of(loss_mask) if old_log_prob is None or config.bypasses else None
    sums = Sums(first=first)
    batches = of_unmasked(batches, loss_mask, ranks)
    steps: list[Step] = []
    for _ in range(config.actor.epochs):
        steps += epoch(
            model=model, optimizer=optimizer, config=config, ranks=ranks, kl_coef=kl_coef, batches=batches,
            columns=columns, sums=sums,
        )  # fmt: skip
    metrics, correction = sums.metrics(ranks), config.algorithm.rollout_correction
    seen = first.columns(mask=config.bypasses and bool(correction.rejections)) if first else {}
    seen = schedules.columns_from_last(seen, ranks)
    first_log_prob = seen.get("new_log_prob")
    if first_log_prob is not None and old_log_prob is not None and correction.active:
        read = {"old_log_prob": first_log_prob, "rollout_log_prob": old_log_prob, "loss_mask": loss_mask}
        weighted = correction.loss == "reinforce"
        metrics |= corrected(**rows.whole(read), settings=correction, weighted=weighted).metrics
    return Update(
        policy_loss=torch.stack([step.policy_loss for step in steps]),
        kl_loss=torch.stack([step.kl_loss for step in steps]),
        entropy_loss=torch.stack([step.entropy_loss for step in steps]),
        grad_norm=torch.stack([step.grad_norm for step in steps]),
        old_log_prob=first_log_prob if old_log_prob is None else None,
        first_log_prob=first_log_prob,
        loss_mask=seen.get("loss_mask"),
        metrics=metrics,
    )


def epoch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    ranks: Ranks = ALONE,
    kl_coef: float,
    batches: Batches,
    columns: Columns,
    sums: Sums,
) -> list[Step]:
    """One pass over all samples: one optimizer step per mini-batch that has something to learn from."""
    steps = (
        mini_batch(
            model=model,
            optimizer=optimizer,
            config=config,
            ranks=ranks,
            kl_coef=kl_coef,
            batch=batch,
            columns=columns,
            sums=sums,
        )
        for batch in batches.mini_batches
        if batch.micro_batches
    )
    return [step for step in steps if step is not None]


def of_unmasked(batches: Batches, loss_mask: Tensor, ranks: Ranks = ALONE) -> Batches:
    """These batches without the samples no token of which is left in loss_mask [B_prompt*G, S_resp].

    Several ranks keep their micro-batches, be they empty now: all of them pass through the same collectives.
    """
    left = loss_mask.any(-1).tolist()
    rejected = {i for i, some in enumerate(left) if not some}
    return batches if not rejected else without(batches, rejected, keep_empty=ranks.size > 1)


def mini_batch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    ranks: Ranks = ALONE,
    kl_coef: float,
    batch: MiniBatch,
    columns: Columns,
    sums: Sums,
) -> Step | None:
    """Accumulate the gradient over micro-batches, then step once; None, and no step, where the loss rejected every token."""
    totals = mini_batch_totals(config, batch, columns["loss_mask"], ranks)
    with finite.traced(who="policy", rate="optim.lr", model=model, sample_id=columns["sample_id"][list(batch.samples)]):
        made = accumulate(
            model=model, config=config, ranks=ranks, kl_coef=kl_coef, totals=totals, batch=batch, columns=columns,
            sums=sums,
        )  # fmt: skip
        each = [torch.cat([one.losses, one.loss_mask.any()[None]]) for one in made]
        here = torch.stack(each).sum(0) if made else torch.zeros(4, device=ranks.device)
        *losses, left = total(schedules.from_last(here, ranks), ranks.group("dp"))
        if not left:
            optimizer.zero_grad(set_to_none=True)
            return None
        grad_norm = optimizer_step(model=model, optimizer=optimizer, ranks=ranks, grad_clip=config.actor.grad_clip)
    policy_loss, kl_loss, entropy_loss = losses
    return Step(policy_loss=policy_loss, kl_loss=kl_loss, entropy_loss=entropy_loss, grad_norm=grad_norm)


def accumulate(
    *,
    model: nn.Module,
    config: RunConfig,
    ranks: Ranks = ALONE,
    kl_coef: float,
    totals: Totals,
    batch: MiniBatch,
    columns: Columns,
    sums: Sums,
) -> list[MicroBatch]:
    """Add up the gradient over micro-batches. Returns what each left behind; in a pipeline, on the last stage."""
    made: list[MicroBatch] = []

    def one(samples: Indices) -> Tensor:
        rows = rows_of(columns, samples)
        made.append(
            micro_batch(model=model, config=config, ranks=ranks, kl_coef=kl_coef, totals=totals, sums=sums, **rows)
        )
        if sums.first is not None:
            sums.first.add(samples, new_log_prob=made[-1].new_log_prob, loss_mask=made[-1].loss_mask)
        return made[-1].loss

    schedules.each(one, batch.micro_batches, model=model, config=config, ranks=ranks, columns=columns, learns=True)
    return made


def mini_batch_totals(config: RunConfig, batch: MiniBatch, loss_mask: Tensor, ranks: Ranks = ALONE) -> Totals:
    """The normalisers of a mini-batch of a step with this loss mask [B_prompt*G, S_resp], over all data-parallel ranks."""
    horizon = config.algorithm.loss_scale_factor or config.rollout.max_response_tokens
    mine = totals_of(loss_mask[list(batch.samples)], horizon=horizon, sequences=batch.sequences)
    tokens, rows = total(torch.tensor([mine.tokens, mine.rows]), ranks.group("dp")).tolist()
    return replace(mine, tokens=tokens, rows=rows)


def micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    ranks: Ranks = ALONE,
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
    """Forward, loss, backward of one micro-batch; in a pipeline its last stage, and backward when the schedule says so.

    Without old_log_prob the policy has not moved since it sampled: its new log-probs are the old ones, the ratio is 1.
    """
    new = forward.micro_batch_forward(
        model=model,
        ranks=ranks,
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
    loss = made.loss
    if pipeline.of(model) is None:
        micro_batch_backward(model=model, loss=loss)
        loss = loss.detach()
    sums.add(made, new.entropy, old, new.new_log_prob)
    parts = torch.stack([made.policy_loss, made.kl_loss, made.entropy_loss])
    return MicroBatch(loss=loss, losses=parts, new_log_prob=new.new_log_prob.detach(), loss_mask=made.mask)


def micro_batch_backward(*, model: nn.Module, loss: Tensor) -> None:
    """Add this micro-batch's gradient to what the mini-batch has so far."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def optimizer_step(
    *, model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float, ranks: Ranks = ALONE
) -> Tensor:
    """Clip the gradient (0: not at all), step, drop it. Returns the gradient's norm [] before clipping.

    Raises NotFinite where it is not finite, before anything has moved.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sharded.gradient_norm([p.grad for p in pipeline.counted(model) if p.grad is not None], ranks)
    finite.check_norm(model, norm, ranks)  # before clipping: it would multiply every gradient with what is not finite
    if grad_clip:
        sharded.clip(gradients, grad_clip, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()


def log_probs(
    *,
    stage: str = "old_log_prob",
    model: nn.Module,
    config: RunConfig,
    ranks: Ranks = ALONE,
    batches: Batches,
    columns: Columns,
    names: Sequence[str] = ("new_log_prob",),
) -> dict[str, Tensor]:
    """`names` of what a forward pass says, each [B_prompt*G, S_resp], without gradient; 0 for dropped samples.

    Micro-batch by micro-batch: those of the update, unless the settings have limits for the pass of this stage.
    """
    if limits := limits_of(config, stage):
        sizes = unwrapped(model).config.get_text_config()
        each = bytes_per_token(layers=sizes.num_hidden_layers, hidden_size=sizes.hidden_size)
        batches = recut.recut(batches, columns, ranks, limits=limits, bytes_per_token=each)
    where, squares = columns["response_mask"], "sum_pi_squared" in names
    made = {name: torch.zeros(where.shape, device=where.device) for name in names}

    def one(samples: Indices) -> None:
        rows = rows_of(columns, samples)
        part = log_prob_micro_batch(model=model, config=config, ranks=ranks, sum_pi_squared=squares, **rows)
        for name, tensor in made.items():
            tensor[list(samples)] = getattr(part, name)

    for batch in batches.mini_batches:
        schedules.each(one, batch.micro_batches, model=model, config=config, ranks=ranks, columns=columns)
    return schedules.columns_from_last(made, ranks)


@torch.no_grad()
def log_prob_micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    ranks: Ranks = ALONE,
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
        ranks=ranks,
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
    index = torch.as_tensor(samples, dtype=torch.int64)
    return {name: tensor[index.to(tensor.device)] for name, tensor in columns.items()}
