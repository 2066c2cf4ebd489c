"""The critic: its values of the step's tokens, and its update towards the returns.

Epochs, mini-batches and micro-batches are the policy's where `critic` has none of its own. As in the policy's update,
every function is called by its global name with keyword arguments, so that it can be watched from outside.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowledger.config import schema
from flowledger.config.passes import limits_of
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import finite, models, value_model
from flowledger.run import update as updates
from flowledger.run.algorithms.aggregation import Totals, aggregate_tokens
from flowledger.run.algorithms.value_loss import value_loss
from flowledger.run.batches import CriticUpdate
from flowledger.run.batching import Batches, Indices, MiniBatch
from flowledger.run.optimizer import adamw
from flowledger.run.parallel import pipeline, schedules
from flowledger.run.parallel.collectives import total
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.parallel.rows import Columns
from flowledger.run.parallel.sharded import cut
from flowledger.run.recut import recut
from flowledger.run.update import rows_of
from flowledger.run.value_model import ValueModel


@dataclass(slots=True, kw_only=True)
class Critic:
    """A model with one value per token, and its optimizer."""

    model: ValueModel
    optimizer: torch.optim.Optimizer
    bytes_per_token: int  # estimated activations, for micro-batches that close by bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticLoss:
    """The loss of one micro-batch."""

    value_loss: Tensor  # [] its share of the mini-batch's; what backward starts from
    loss_mat: Tensor  # [B_micro, S_resp]
    clipped: Tensor  # bool [B_micro, S_resp]: the clip decided, so the value has no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStep:
    """What one optimizer step came to, each []."""

    value_loss: Tensor
    grad_norm: Tensor
    clipped: Tensor  # tokens that the clip decided
    tokens: int


def load_critic(config: RunConfig, policy: models.Policy, ranks: Ranks = ALONE) -> Critic:
    """The critic that `critic.path` names, trained in full, and its AdamW with the constant learning rate `critic.lr`.

    Of several ranks each is left with its shards.

    The policy must be as it starts: a critic from `start` copies it. Raises BadInput as `load_value_model` does.
    """
    settings = _settings(config)
    model = value_model.load_value_model(
        settings.path, policy, sizes=config.model.tiny, seed=config.seed, packed=config.actor.packed,
        shared_prompts=config.actor.shared_prompts,
    )  # fmt: skip
    if config.actor.activation_checkpointing:
        models.recompute_activations(model.backbone)
    sizes = model.sizes
    cut(model, ranks, settings.engine or config.actor.engine)
    return Critic(
        model=model,
        optimizer=adamw(model, config.optim, lr=settings.lr),
        bytes_per_token=models.bytes_per_token(layers=sizes.num_hidden_layers, hidden_size=sizes.hidden_size),
    )


def values(*, critic: Critic, config: RunConfig, ranks: Ranks = ALONE, batches: Batches, columns: Columns) -> Tensor:
    """The value before each response token, float32 [B_prompt*G, S_resp], without gradient.

    0 for dropped samples and where response_mask is 0.
    """
    made = torch.zeros(columns["response_mask"].shape, device=columns["response_mask"].device)
    if limits := limits_of(config, "values"):
        batches = recut(batches, columns, ranks, limits=limits, bytes_per_token=critic.bytes_per_token)

    def one(samples: Indices) -> None:
        made[list(samples)] = values_micro_batch(
            model=critic.model, config=config, ranks=ranks, **rows_of(columns, samples)
        )

    for batch in batches.mini_batches:
        schedules.each(one, batch.micro_batches, model=critic.model, config=config, ranks=ranks, columns=columns)
    return schedules.from_last(made, ranks)


@torch.no_grad()
def values_micro_batch(
    *,
    model: ValueModel,
    config: RunConfig,
    ranks: Ranks = ALONE,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Values [B_micro, S_resp] of one micro-batch without gradient."""
    return value_model.token_values(
        model=model,
        ranks=ranks,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        packed=config.actor.packed,
        shared_prompts=config.actor.shared_prompts,
    )


def update(
    *, critic: Critic, config: RunConfig, ranks: Ranks = ALONE, batches: Batches, columns: Columns
) -> CriticUpdate:
    """Move the critic towards the returns: `epochs` passes over the samples, one optimizer step per mini-batch.

    columns: the step's tensors by flow name, each with B_prompt*G rows; `values` are those before the update.
    """
    settings = _settings(config)
    if settings.micro_batch or settings.mini_batch_prompts:
        prompts = settings.mini_batch_prompts or config.mini_batch_prompts
        batches = recut(
            batches, columns, ranks, bytes_per_token=critic.bytes_per_token,
            mini_batch_samples=prompts * config.rollout.samples_per_prompt // ranks.degree("dp"),
            limits=settings.micro_batch or config.actor.micro_batch,
        )  # fmt: skip
    batches = updates.of_unmasked(batches, columns["loss_mask"], ranks)
    steps: list[CriticStep] = []
    for _ in range(settings.epochs or config.actor.epochs):
        steps += critic_epoch(critic=critic, config=config, ranks=ranks, batches=batches, columns=columns)
    clipped = sum(float(step.clipped) for step in steps) / max(sum(step.tokens for step in steps), 1)
    return CriticUpdate(
        value_loss=torch.stack([step.value_loss for step in steps]),
        grad_norm=torch.stack([step.grad_norm for step in steps]),
        metrics={"value_clip_ratio": clipped, "critic_lr": critic.optimizer.param_groups[0]["lr"]},
    )


def critic_epoch(
    *, critic: Critic, config: RunConfig, ranks: Ranks = ALONE, batches: Batches, columns: Columns
) -> list[CriticStep]:
    """One pass over all samples: one optimizer step per mini-batch that has something to learn from."""
    steps = (
        critic_mini_batch(critic=critic, config=config, ranks=ranks, batch=batch, columns=columns)
        for batch in batches.mini_batches
        if batch.micro_batches
    )
    return [step for step in steps if step is not None]


def critic_mini_batch(
    *, critic: Critic, config: RunConfig, ranks: Ranks = ALONE, batch: MiniBatch, columns: Columns
) -> CriticStep | None:
    """Accumulate the gradient over micro-batches, then step once; None, and no step, where every token is rejected."""
    totals = updates.mini_batch_totals(config, batch, columns["loss_mask"], ranks)
    if not totals.tokens:
        return None
    samples = columns["sample_id"][list(batch.samples)]
    with finite.traced(who="critic", rate="critic.lr", model=critic.model, sample_id=samples):
        made = critic_accumulate(critic=critic, config=config, ranks=ranks, totals=totals, batch=batch, columns=columns)
        clip = _settings(config).grad_clip
        grad_norm = updates.optimizer_step(model=critic.model, optimizer=critic.optimizer, ranks=ranks, grad_clip=clip)
    sums = [torch.stack([one.value_loss, one.clipped.sum()]) for one in made]
    added = torch.stack(sums).sum(0) if sums else torch.zeros(2, device=ranks.device)
    loss, clipped = total(schedules.from_last(added, ranks), ranks.group("dp"))
    return CriticStep(
        value_loss=loss,
        grad_norm=grad_norm,
        clipped=clipped,
        tokens=totals.tokens,
    )


def critic_accumulate(
    *,
    critic: Critic,
    config: RunConfig,
    ranks: Ranks = ALONE,
    totals: Totals,
    batch: MiniBatch,
    columns: Columns,
) -> list[CriticLoss]:
    """Add up the gradient over micro-batches. Returns the loss of each; in a pipeline, on the last stage."""
    made: list[CriticLoss] = []

    def one(samples: Indices) -> Tensor:
        rows = rows_of(columns, samples)
        made.append(critic_micro_batch(model=critic.model, config=config, ranks=ranks, totals=totals, **rows))
        return made[-1].value_loss

    schedules.each(
        one, batch.micro_batches, model=critic.model, config=config, ranks=ranks, columns=columns, learns=True
    )
    return made


def critic_micro_batch(
    *,
    model: ValueModel,
    config: RunConfig,
    ranks: Ranks = ALONE,
    totals: Totals,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    values: Tensor,
    returns: Tensor,
) -> CriticLoss:
    """Forward, loss, backward of one micro-batch. What it returns holds no graph, but in a pipeline the loss does."""
    new_values = value_model.token_values(
        model=model,
        ranks=ranks,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        packed=config.actor.packed,
        shared_prompts=config.actor.shared_prompts,
    )
    made = critic_loss(
        config=config,
        totals=totals,
        sample_id=sample_id,
        new_values=new_values,
        values=values,
        returns=returns,
        loss_mask=loss_mask,
    )
    loss = made.value_loss
    if pipeline.of(model) is None:
        updates.micro_batch_backward(model=model, loss=loss)
        loss = loss.detach()
    return CriticLoss(value_loss=loss, loss_mat=made.loss_mat.detach(), clipped=made.clipped)


def critic_loss(
    *,
    config: RunConfig,
    totals: Totals,
    sample_id: Tensor,
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
) -> CriticLoss:
    """This micro-batch's share of the mini-batch's value loss, aggregated as `algorithm.loss_aggregation` says.

    Raises NotFinite where the loss is not finite, naming the first input, sample and token that are not.
    """
    made = value_loss(
        new_values=new_values, old_values=values, returns=returns, mask=loss_mask, clip=_settings(config).clip_value
    )
    aggregation = config.algorithm.loss_aggregation
    loss = aggregate_tokens(made.loss_mat, mask=loss_mask, mode=aggregation, totals=totals).loss
    if not torch.isfinite(loss):
        inputs = {"values": values, "returns": returns, "the new value": new_values}
        named = finite.first_not_finite(inputs, loss_mask, sample_id)
        raise finite.NotFinite(
            f"the loss is not finite: {named or 'its inputs are, but their squared difference is not'}"
        )
    return CriticLoss(value_loss=loss, loss_mat=made.loss_mat, clipped=made.clipped)


def _settings(config: RunConfig) -> schema.Critic:
    if config.critic is None:
        raise BadInput("there is no critic; add `critic: {path: start}`")
    return config.critic
