"""Prompts in, sequences with responses out: generation, and the conversation where there is an environment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowledger.config.schema import Rollout
from flowledger.run import generate, prompts
from flowledger.run.batches import Rollouts
from flowledger.run.environments import Conversations, Environment
from flowledger.run.weights import RolloutWeights


def respond(
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
    """G responses to each of left-padded prompts [B_prompt, S_prompt], right-padded [B, S_resp]; `sample_id` [B]."""
    chats = (
        Conversations(environment=environment, tokenizer=tokenizer, problems=problems, sample_id=sample_id)
        if environment
        else None
    )
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
        answer=chats.answer if chats else None,
    )
    prompt_of = torch.arange(len(prompt_ids)).repeat_interleave(settings.samples_per_prompt)
    mask = torch.cat([attention_mask[prompt_of], made.attention_mask], 1)
    return Rollouts(
        response_ids=made.response_ids,
        response_mask=made.response_mask,
        full_sequence=torch.cat([prompt_ids[prompt_of], made.response_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        rollout_log_prob=made.rollout_log_prob,
        finish_reason=made.finish_reason,
        turns=made.turns,
        environment_errors=tuple(chats.errors.get(index) if chats else None for index in range(len(mask))),
        generation_metadata=made.generation_metadata,
    )
