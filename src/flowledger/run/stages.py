"""The stages of one RL step. Parameters and result fields bear the names of the flow's tensors; B = B_prompt*G.

Always call a stage through this module (`stages.rollout(...)`): a name imported from it could not be watched from outside.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flowledger.config.schema import Actor, Algorithm, Data, Rollout, RunConfig
from flowledger.flow.errors import BadInput
from flowledger.flow.words import FINISH_REASONS
from flowledger.run import advantages as estimators
from flowledger.run import batching, checkpoints, dropped, generate, prompts, update
from flowledger.run.batches import (
    Advantages,
    Filtered,
    OldLogProbs,
    Prompts,
    RefLogProbs,
    Rewards,
    Rollouts,
    Synced,
    Update,
)
from flowledger.run.losses import KL_FORMS
from flowledger.run.models import Policy, Reference
from flowledger.run.rewards import Scorer
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
    prompt_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: Tensor,
    sample_id: Tensor,
) -> Rollouts:
    """G responses per prompt, right-padded [B, S_resp], and the sequences [B, S_prompt + S_resp] they complete."""
    made = generate.generate(
        model=weights.model,
        settings=settings,
        stop_ids=stop_ids,
        generator=generator,
        prompt_ids=prompt_ids,
        prompt_length=prompt_length,
        sample_id=sample_id,
        pad_id=pad_id,
        abort=abort,
    )
    prompt_of = torch.arange(len(prompt_ids)).repeat_interleave(settings.samples_per_prompt)
    mask = torch.cat([attention_mask[prompt_of], made.response_mask], 1)
    return Rollouts(
        response_ids=made.response_ids,
        response_mask=made.response_mask,
        full_sequence=torch.cat([prompt_ids[prompt_of], made.response_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        rollout_log_prob=made.rollout_log_prob,
        finish_reason=made.finish_reason,
        generation_metadata=made.generation_metadata,
    )


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
    group_size = len(response_ids) // len(problems)
    lengths = response_mask.sum(-1).tolist()  # responses are padded on the right
    written = [ids[:length] for ids, length in zip(response_ids.tolist(), lengths, strict=True)]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    scores = scorer.score(
        problems=tuple(problem for problem in problems for _ in range(group_size)),
        responses=texts,
        response_ids=response_ids,
        response_mask=response_mask,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        sample_id=sample_id,
        step=step,
    )
    return Rewards(
        reward_components=scores.reward_components,
        reward=scores.reward,
        token_level_reward=scores.token_level_reward,
        component_names=scores.component_names,
        failed=scores.failed,
        errors=scores.errors,
    )


def filter(
    *,
    response_mask: Tensor,
    finish_reason: Tensor,
    failed: Sequence[str | None],
    errors: Sequence[str | None],
    sample_id: Tensor,
) -> Filtered:
    """Drop samples that cannot be learnt from: aborted, timed out, empty, or without a reward.

    Raises BadInput when none is left, with what `errors` says of the first whose reward failed.
    """
    ended = [FINISH_REASONS[code] for code in finish_reason.tolist()]
    lengths = response_mask.sum(-1).tolist()
    reasons = tuple(
        end if end in ("abort", "timeout") else "empty" if not length else fail
        for end, length, fail in zip(ended, lengths, failed, strict=True)
    )
    if all(reasons):
        raise BadInput(dropped.nothing_left([reason for reason in reasons if reason], errors, sample_id.tolist()))
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
    log_prob, entropy = update.log_probs(model=model, config=config, batches=batches, columns=columns)
    return OldLogProbs(old_log_prob=log_prob, entropy=entropy)


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
        log_prob, _ = update.log_probs(model=model, config=config, batches=batches, columns=columns)
    return RefLogProbs(ref_log_prob=log_prob)


def advantage(
    *,
    algorithm: Algorithm,
    group_size: int,
    token_level_reward: Tensor,
    loss_mask: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor | None,
    sample_id: Tensor,
    group_id: Tensor,
) -> Advantages:
    """Advantage per sample [B] and per token [B, S_resp]; first the KL penalty, where KL is in the reward."""
    kl = None
    if ref_log_prob is not None and algorithm.kl_in == "reward":
        kl = KL_FORMS[algorithm.kl_form](old_log_prob - ref_log_prob) * loss_mask
        token_level_reward = token_level_reward - algorithm.kl_coef * kl
    inputs = estimators.AdvantageInputs(
        token_level_reward=token_level_reward,
        mask=loss_mask,
        group_size=group_size,
        settings=algorithm,
        old_log_prob=old_log_prob,
    )
    made = estimators.ADVANTAGES[algorithm.advantage](inputs)
    return Advantages(
        advantage=made.advantage,
        advantages=made.advantages,
        returns=made.returns,
        token_level_reward=None if kl is None else token_level_reward,
        kl=kl,
    )


def update_actor(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    batches: batching.Batches,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor | None,
    advantages: Tensor,
    sample_id: Tensor,
) -> Update:
    """Train the policy `epochs` times over the step's samples, one optimizer step per mini-batch."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "loss_mask": loss_mask, "old_log_prob": old_log_prob,
        "advantages": advantages, "sample_id": sample_id,
    }  # fmt: skip
    if ref_log_prob is not None:
        columns["ref_log_prob"] = ref_log_prob
    sums = update.Sums()
    steps: list[update.Step] = []
    for _ in range(config.actor.epochs):
        steps += update.epoch(
            model=model, optimizer=optimizer, config=config, batches=batches, columns=columns, sums=sums
        )
    return Update(
        policy_loss=torch.stack([step.policy_loss for step in steps]),
        kl_loss=torch.stack([step.kl_loss for step in steps]),
        entropy_loss=torch.stack([step.entropy_loss for step in steps]),
        grad_norm=torch.stack([step.grad_norm for step in steps]),
        metrics=sums.metrics(),
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
