"""The stages of one RL step. Parameters and result fields bear the names of the flow's tensors; B = B_prompt*G.

Always call a stage through this module (`stages.rollout(...)`): a name imported from it could not be watched from outside.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowledger.config.schema import Data, Rollout, RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import advantage as advantage_of
from flowledger.run import batching, checkpoints, dropped, generate, prompts, update
from flowledger.run import critic as critics
from flowledger.run.balance import balanced
from flowledger.run.batches import (
    Advantages,
    Balanced,
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
from flowledger.run.environments import Environment
from flowledger.run.models import Policy, Reference
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.parallel.rows import WHOLE, Rows, counts_of, cut, part_of
from flowledger.run.respond import respond
from flowledger.run.rewards import Scorer
from flowledger.run.weights import RolloutWeights


def prompt(
    *,
    source: prompts.PromptSource,
    tokenizer: prompts.Tokenizer,
    data: Data,
    step: int,
    samples_per_prompt: int,
    ranks: Ranks = ALONE,
) -> Prompts:
    """B_prompt problems of this step as left-padded ids [B_prompt, S_prompt], and the ids of the B samples to come.

    Of several ranks each takes its part of the problems; S_prompt is the longest prompt of the step on all of them.
    """
    taken, mine = prompts.take(source, tokenizer, data, step), part_of(data.prompts_per_step, ranks)
    device, total = ranks.device, data.prompts_per_step * samples_per_prompt
    samples = torch.arange(mine.start * samples_per_prompt, mine.stop * samples_per_prompt)
    return Prompts(
        prompt_ids=cut(taken.prompt_ids, mine).to(device),
        attention_mask=cut(taken.attention_mask, mine).to(device),
        position_ids=cut(taken.position_ids, mine).to(device),
        prompt_length=cut(taken.prompt_length, mine).to(device),
        sample_id=step * total + samples,  # stays on the CPU: Python reads it
        group_id=(step * data.prompts_per_step + samples // samples_per_prompt).to(device),
        problems=taken.problems[mine.start : mine.stop],
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
    ranks: Ranks = ALONE,
    prompts_per_step: int | None = None,
) -> Rollouts:
    """G responses per prompt, right-padded [B, S_resp], and the sequences [B, S_prompt + S_resp] they complete.

    With an environment a response is a conversation: its answers are in the attention mask, not in the response mask.
    """
    return respond(
        weights=weights, settings=settings, stop_ids=stop_ids, pad_id=pad_id, generator=generator, abort=abort,
        environment=environment, tokenizer=tokenizer, problems=problems, prompt_ids=prompt_ids,
        attention_mask=attention_mask, prompt_length=prompt_length, sample_id=sample_id, ranks=ranks,
        prompts_per_step=prompts_per_step,
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
    return scorer.score_responses(
        tokenizer=tokenizer, problems=problems, step=step, full_sequence=full_sequence, attention_mask=attention_mask,
        response_ids=response_ids, response_mask=response_mask, sample_id=sample_id,
    )  # fmt: skip


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
    prompts_per_step: int,
    ranks: Ranks = ALONE,
) -> Baselines:
    """What the greedy response to each prompt is worth [B_prompt], and where it is worth nothing because it failed.

    Of several ranks each has scored its part of the prompts, and is told of the others' rewards.
    """
    scores = scorer.score_responses(
        tokenizer=tokenizer, problems=problems, step=step, full_sequence=greedy.full_sequence,
        attention_mask=greedy.attention_mask, response_ids=greedy.response_ids, response_mask=greedy.response_mask,
        sample_id=sample_id,
    )  # fmt: skip
    no_baseline = dropped.without_reward(
        response_mask=greedy.response_mask, finish_reason=greedy.finish_reason,
        environment_errors=greedy.environment_errors, failed=scores.failed, errors=scores.errors,
    )  # fmt: skip
    everywhere = collectives.gathered(scores.reward, ranks.group("world"), counts_of(prompts_per_step, ranks))
    return Baselines(baseline_reward=everywhere, no_baseline=no_baseline)


def filter(
    *,
    response_mask: Tensor,
    finish_reason: Tensor,
    environment_errors: Sequence[str | None],
    failed: Sequence[str | None],
    errors: Sequence[str | None],
    no_baseline: Sequence[str | None],
    sample_id: Tensor,
    ranks: Ranks = ALONE,
) -> Filtered:
    """Drop samples that cannot be learnt from: aborted, timed out, empty, or without an answer, a reward or a baseline.

    `no_baseline` [B_prompt] is empty where no estimator asks for one. Raises BadInput when no sample is left, with what
    is known of the first that failed.
    """
    reasons = dropped.reasons(
        response_mask=response_mask, finish_reason=finish_reason, environment_errors=environment_errors, failed=failed,
        no_baseline=no_baseline,
    )  # fmt: skip
    some = torch.tensor(not all(reasons), dtype=torch.int64)
    if not collectives.largest(some, ranks.group("world")):
        said = dropped.details(reasons, environment_errors=environment_errors, errors=errors, no_baseline=no_baseline)
        raise BadInput(dropped.nothing_left([reason for reason in reasons if reason], said, sample_id.tolist()))
    kept = torch.tensor([reason is None for reason in reasons], dtype=torch.bool, device=response_mask.device)
    return Filtered(loss_mask=response_mask * kept[:, None], dropped_reason=reasons)


def balance(
    *,
    config: RunConfig,
    bytes_per_token: int,
    ranks: Ranks = ALONE,
    dropped_reason: Sequence[str | None],
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    rollout_log_prob: Tensor,
    token_level_reward: Tensor,
    reward_components: Tensor,
    sample_id: Tensor,
    group_id: Tensor,
) -> Balanced:
    """Which samples make a mini-batch, and which a micro-batch, from their lengths without padding.

    Of several ranks each has sampled a part of the step's B samples; whoever trains on one is sent its rows.
    """
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "loss_mask": loss_mask, "rollout_log_prob": rollout_log_prob,
        "token_level_reward": token_level_reward, "reward_components": reward_components, "sample_id": sample_id,
        "group_id": group_id,
    }  # fmt: skip
    return balanced(
        config=config, bytes_per_token=bytes_per_token, ranks=ranks, dropped_reason=dropped_reason, columns=columns
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
    ranks: Ranks = ALONE,
) -> OldLogProbs:
    """The policy's own log-probs before any update [B, S_resp]: what the ratio of the loss is taken against."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    made = update.log_probs(
        stage="old_log_prob", model=model, config=config, ranks=ranks, batches=batches, columns=columns,
        names=("new_log_prob", "entropy", *(("sum_pi_squared",) if config.needs("sum_pi_squared") else ())),
    )  # fmt: skip
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
    ranks: Ranks = ALONE,
) -> RefLogProbs:
    """The reference policy's log-probs on the same tokens [B, S_resp]."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    with reference.active() as model:
        made = update.log_probs(
            stage="ref_log_prob", model=model, config=config, ranks=ranks, batches=batches, columns=columns
        )
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
    ranks: Ranks = ALONE,
) -> Values:
    """What the critic expects before each response token [B, S_resp]."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "sample_id": sample_id,
    }  # fmt: skip
    return Values(values=critics.values(critic=critic, config=config, ranks=ranks, batches=batches, columns=columns))


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
    rows: Rows = WHOLE,
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
        rows=rows,
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
    ranks: Ranks = ALONE,
) -> CriticUpdate:
    """Train the critic `epochs` times over the step's samples, one optimizer step per mini-batch."""
    columns = {
        "full_sequence": full_sequence, "attention_mask": attention_mask, "position_ids": position_ids,
        "response_mask": response_mask, "loss_mask": loss_mask, "values": values, "returns": returns,
        "sample_id": sample_id,
    }  # fmt: skip
    return critics.update(critic=critic, config=config, ranks=ranks, batches=batches, columns=columns)


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
    ranks: Ranks = ALONE,
    rows: Rows = WHOLE,
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
    return update.update(
        model=model, optimizer=optimizer, config=config, ranks=ranks, rows=rows, kl_coef=kl_coef, batches=batches,
        columns=columns,
    )  # fmt: skip


def weight_sync(*, model: nn.Module, weights: RolloutWeights, ranks: Ranks = ALONE) -> Synced:
    """Rollout takes over the policy's weights, put together from the shards of all ranks: a new policy version."""
    ratio = weights.take(model, ranks)
    return Synced(policy_version=weights.version, update_ratio=ratio)


def checkpoint(*, policy: Policy, weights: RolloutWeights, folder: Path, step: int, ranks: Ranks = ALONE) -> Path:
    """Write the policy in Hugging Face form to `folder/step-N`. Of several ranks the first writes what rollout holds."""
    target = folder / f"step-{step}"
    if ranks.size > 1:
        policy = replace(policy, model=weights.model)
    if ranks.rank == 0:
        checkpoints.write(policy, target)
    return target
