"""The stages of one RL step. Parameters and result fields bear the names of the flow's tensors; B = B_prompt*G.

Always call a stage through this module (`stages.rollout(...)`): a name imported from it could not be watched from outside.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowledger.config.schema import Actor, Data, Rollout, RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import advantage as advantage_of
from flowledger.run import batching, checkpoints, dropped, generate, prompts, update
from flowledger.run import critic as critics
from flowledger.run.batches import (
    Advantages,
    Baselines,
    CriticUpdate,
    Filtered,
    OldLogProbs,
    Prompts,
    RefLogProbs,
    Rewards,
    Rollouts,
    Synced,
    Update,
    Values,
)
from flowledger.run.correction import corrected
from flowledger.run.environments import Environment
from flowledger.run.models import Policy, Reference
from flowledger.run.respond import respond
from flowledger.run.rewards import Scorer
from flowledger.run.sums import FirstPass, Sums
from flowledger.run.weights import RolloutWeights


def prompt(
    *, source: prompts.PromptSource, tokenizer: prompts.Tokenizer, data: Data, step: int, samples_per_prompt: int
) -> Prompts:
    """B_prompt problems of this step as left-padded ids [B_prompt, S_prompt], and the ids of the B samples to come."""
    taken = prompts.take(source, tokenizer, data, step)
    samples = torch.arange(data.prompts_per_step * samples_per_prompt)
    return Prompts(
        prompt_ids=taken.prompt_ids,
        attention_mask=taken.attention_mask,
        position_ids=taken.position_ids,
        prompt_length=taken.prompt_length,
        sample_id=step * len(samples) + samples,
        group_id=step * data.prompts_per_step + samples // samples_per_prompt,
        problems=taken.problems,
    )


def rollout(
    *,
    weights: RolloutWeights,
    settings: Rollout,
    stop_ids: tuple[int, ...],
    pad_id: int,
    generator: torch.Generator,
    abort: generate.Abort | None,
    environment: Environment | None,
    tokenizer: prompts.Tokenizer,
    problems: Sequence[prompts.Problem],
    prompt_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: Tensor,
    sample_id: Tensor,
) -> Rollouts:
    """G responses per prompt, right-padded [B, S_resp], and the sequences [B, S_prompt + S_resp] they complete.

    With an environment a response is a conversation: its answers are in the attention mask, not in the response mask.
    """
    return respond(
        weights=weights, settings=settings, stop_ids=stop_ids, pad_id=pad_id, generator=generator, abort=abort,
        environment=environment, tokenizer=tokenizer, problems=problems, prompt_ids=prompt_ids,
        attention_mask=attention_mask, prompt_length=prompt_length, sample_id=sample_id,
    )  # fmt: skip


def reward(
    *,
    scorer: Scorer,
    tokenizer: prompts.Tokenizer,
    problems: Sequence[prompts.Problem],
    step: int,
    full_sequence: Tensor,
    attention_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    sample_id: Tensor,
) -> Rewards:
    """Every component [B, N_reward], their weighted sum [B], and the same laid on tokens [B, S_resp]."""
    scores = scorer.score_responses(
        tokenizer=tokenizer, problems=problems, step=step, full_sequence=full_sequence, attention_mask=attention_mask,
        response_ids=response_ids, response_mask=response_mask, sample_id=sample_id,
    )  # fmt: skip
    return Rewards(
        reward_components=scores.reward_components,
        reward=scores.reward,
        token_level_reward=scores.token_level_reward,
        component_names=scores.component_names,
        failed=scores.failed,
        errors=scores.errors,
    )


def baseline_rollout(*, weights: RolloutWeights, settings: Rollout, sample_id: Tensor, **sampling: Any) -> Rollouts:
    """One greedy response to each prompt (top_k = 1), made as the others are: what `remax` compares them with."""
    greedy = settings.model_copy(update={"samples_per_prompt": 1, "top_k": 1})
    return respond(weights=weights, settings=greedy, sample_id=sample_id, **sampling)


def baseline_reward(
    *,
    scorer: Scorer,
    tokenizer: prompts.Tokenizer,
    problems: Sequence[prompts.Problem],
    step: int,
    greedy: Rollouts,
    sample_id: Tensor,
) -> Baselines:
    """What the greedy response to each prompt is worth [B_prompt], and where it is worth nothing because it failed."""
    scores = scorer.score_responses(
        tokenizer=tokenizer, problems=problems, step=step, full_sequence=greedy.full_sequence,
        attention_mask=greedy.attention_mask, response_ids=greedy.response_ids, response_mask=greedy.response_mask,
        sample_id=sample_id,
    )  # fmt: skip
    no_baseline = dropped.without_reward(
        response_mask=greedy.response_mask, finish_reason=greedy.finish_reason,
        environment_errors=greedy.environment_errors, failed=scores.failed, errors=scores.errors,
    )  # fmt: skip
    return Baselines(baseline_reward=scores.reward, no_baseline=no_baseline)


def filter(
    *,
    response_mask: Tensor,
    finish_reason: Tensor,
    environment_errors: Sequence[str | None],
    failed: Sequence[str | None],
    errors: Sequence[str | None],
    no_baseline: Sequence[str | None],
    sample_id: Tensor,
) -> Filtered:
    """Drop samples that cannot be learnt from: aborted, timed out, empty, or without an answer, a reward or a baseline.

    `no_baseline` [B_prompt] is empty where no estimator asks for one. Raises BadInput when no sample is left, with what
    is known of the first that failed.
    """
    reasons = dropped.reasons(
        response_mask=response_mask, finish_reason=finish_reason, environment_errors=environment_errors, failed=failed,
        no_baseline=no_baseline,
    )  # fmt: skip
    if all(reasons):
        said = dropped.details(reasons, environment_errors=environment_errors, errors=errors, no_baseline=no_baseline)
        raise BadInput(dropped.nothing_left([reason for reason in reasons if reason], said, sample_id.tolist()))
    kept = torch.tensor([reason is None for reason in reasons], device=response_mask.device)
    return Filtered(loss_mask=response_mask * kept[:, None], dropped_reason=reasons)


def balance(
    *,
    attention_mask: Tensor,
    loss_mask: Tensor,
    sample_id: Tensor,
    mini_batch_samples: int,
    actor: Actor,
    bytes_per_token: int,
) -> batching.Batches:
    """Which samples make a mini-batch, and which a micro-batch, from their lengths without padding."""
    return batching.split(
        lengths=attention_mask.sum(-1).tolist(),
        kept=(loss_mask.sum(-1) > 0).tolist(),
        mini_batch_samples=mini_batch_samples,
        limits=actor.micro_batch,
        bytes_per_token=bytes_per_token,
    )


def old_log_prob(
    *,
    model: nn.Module,
    config: RunConfig,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    sample_id: Tensor,
) -> OldLogProbs:
    """The policy's own log-probs before any update [B, S_resp]: what the ratio of the loss is taken against."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    made = update.log_probs(
        model=model, config=config, batches=batches, columns=columns, sum_pi_squared=config.needs("sum_pi_squared")
    )
    return OldLogProbs(
        old_log_prob=made["new_log_prob"], entropy=made["entropy"], sum_pi_squared=made.get("sum_pi_squared")
    )


def ref_log_prob(
    *,
    reference: Reference,
    config: RunConfig,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    sample_id: Tensor,
) -> RefLogProbs:
    """The reference policy's log-probs on the same tokens [B, S_resp]."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    with reference.active() as model:
        made = update.log_probs(model=model, config=config, batches=batches, columns=columns)
    return RefLogProbs(ref_log_prob=made["new_log_prob"])


def values(
    *,
    critic: critics.Critic,
    config: RunConfig,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    sample_id: Tensor,
) -> Values:
    """What the critic expects before each response token [B, S_resp]."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    return Values(values=critics.values(critic=critic, config=config, batches=batches, columns=columns))


def advantage(
    *,
    config: RunConfig,
    kl_coef: float,
    token_level_reward: Tensor,
    reward_components: Tensor,
    loss_mask: Tensor,
    dropped_reason: Sequence[str | None],
    rollout_log_prob: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    values: Tensor | None,
    sum_pi_squared: Tensor | None,
    baseline_reward: Tensor | None,
    sample_id: Tensor,
    group_id: Tensor,
) -> Advantages:
    """Advantage per sample [B] and per token [B, S_resp], after the KL penalty and the correction of rollout."""
    return advantage_of.advantages(
        algorithm=config.algorithm,
        kl_coef=kl_coef,
        component_weights=tuple(component.weight for component in config.reward.components),
        token_level_reward=token_level_reward,
        reward_components=reward_components,
        loss_mask=loss_mask,
        dropped_reason=dropped_reason,
        rollout_log_prob=rollout_log_prob,
        old_log_prob=old_log_prob,
        ref_log_prob=ref_log_prob,
        values=values,
        sum_pi_squared=sum_pi_squared,
        baseline_reward=baseline_reward,
        group_id=group_id,
    )


def update_critic(
    *,
    critic: critics.Critic,
    config: RunConfig,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    values: Tensor,
    returns: Tensor,
    sample_id: Tensor,
) -> CriticUpdate:
    """Train the critic `epochs` times over the step's samples, one optimizer step per mini-batch."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "loss_mask": loss_mask, "values": values, "returns": returns,
        "sample_id": sample_id,
    }  # fmt: skip
    return critics.update(critic=critic, config=config, batches=batches, columns=columns)


def update_actor(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    kl_coef: float,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
    advantages: Tensor,
    rollout_is_weights: Tensor | None,
    sample_id: Tensor,
) -> Update:
    """Train the policy `epochs` times over the step's samples, one optimizer step per mini-batch.

    Without old_log_prob there is one optimizer step: the policy is still the one that sampled, and its first log-probs
    are the old ones.
    """
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "loss_mask": loss_mask, "advantages": advantages, "sample_id": sample_id,
    }  # fmt: skip
    optional = {
        "old_log_prob": old_log_prob, "ref_log_prob": ref_log_prob, "rollout_is_weights": rollout_is_weights,
    }  # fmt: skip
    columns |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    first = FirstPass.of(loss_mask) if old_log_prob is None or config.bypasses else None
    sums = Sums(first=first)
    batches = update.of_unmasked(batches, loss_mask)
    steps: list[update.Step] = []
    for _ in range(config.actor.epochs):
        steps += update.epoch(
            model=model, optimizer=optimizer, config=config, kl_coef=kl_coef, batches=batches, columns=columns,
            sums=sums,
        )  # fmt: skip
    metrics, correction = sums.metrics(), config.algorithm.rollout_correction
    if first and old_log_prob is not None and correction.active:
        metrics |= corrected(
            old_log_prob=first.new_log_prob, rollout_log_prob=old_log_prob, loss_mask=loss_mask, settings=correction,
            weighted=correction.loss == "reinforce",
        ).metrics  # fmt: skip
    return Update(
        policy_loss=torch.stack([step.policy_loss for step in steps]),
        kl_loss=torch.stack([step.kl_loss for step in steps]),
        entropy_loss=torch.stack([step.entropy_loss for step in steps]),
        grad_norm=torch.stack([step.grad_norm for step in steps]),
        old_log_prob=first.new_log_prob if first and old_log_prob is None else None,
        first_log_prob=first.new_log_prob if first else None,
        loss_mask=first.loss_mask if first and config.bypasses and correction.rejections else None,
        metrics=metrics,
    )


def weight_sync(*, model: nn.Module, weights: RolloutWeights) -> Synced:
    """Rollout takes over the policy's weights: a new policy version."""
    ratio = weights.take(model)
    return Synced(policy_version=weights.version, update_ratio=ratio)


def checkpoint(*, policy: Policy, folder: Path, step: int) -> Path:
    """Write the policy in Hugging Face form to `folder/step-N`."""
    target = folder / f"step-{step}"
    checkpoints.write(policy, target)
    return target
