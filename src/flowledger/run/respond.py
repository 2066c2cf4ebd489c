"""Prompts in, sequences with responses out: generation, and the conversation where there is an environment."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowledger.config.schema import Rollout
from flowledger.run import generate, prompts, sampling
from flowledger.run.batches import Rollouts
from flowledger.run.environments import Conversations, Environment
from flowledger.run.parallel import collectives, rows
from flowledger.run.parallel.ranks import ALONE, Ranks
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
    ranks: Ranks = ALONE,
    prompts_per_step: int | None = None,
) -> Rollouts:
    """G responses to each of left-padded prompts [B_prompt, S_prompt], right-padded [B, S_resp]; `sample_id` [B].

    Of several ranks each is given its part of the step's prompts; S_resp is the longest response on all of them.
    """
    chats = (
        Conversations(environment=environment, tokenizer=tokenizer, problems=problems, sample_id=sample_id)
        if environment
        else None
    )
    uniform = sampling.streams(
        samples=(prompts_per_step or len(prompt_ids)) * settings.samples_per_prompt,
        positions=settings.max_response_tokens, generator=generator, device=prompt_ids.device,
    )  # fmt: skip
    first = rows.part_of(prompts_per_step or len(prompt_ids), ranks).start * settings.samples_per_prompt
    made = generate.generate(
        model=weights.model,
        settings=settings,
        stop_ids=stop_ids,
        uniform=uniform[first : first + len(sample_id)],
        prompt_ids=prompt_ids,
        prompt_length=prompt_length,
        sample_id=sample_id,
        pad_id=pad_id,
        abort=abort,
        answer=chats.answer if chats else None,
    )
    made = _equally_wide(made, pad_id, ranks)
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


def _equally_wide(made: generate.Generated, pad_id: int, ranks: Ranks) -> generate.Generated:
    """Responses padded to the longest of all ranks."""
    width = int(collectives.largest(torch.tensor(made.response_ids.shape[1]), ranks.group("world")))
    return replace(
        made,
        response_ids=rows.widened(made.response_ids, width, pad_id),
        response_mask=rows.widened(made.response_mask, width),
        attention_mask=rows.widened(made.attention_mask, width),
        rollout_log_prob=rows.widened(made.rollout_log_prob, width),
    )
