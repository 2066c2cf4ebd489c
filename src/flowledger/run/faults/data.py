"""Prompts, responses and rewards that are not what they should be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.flow.words import FINISH_REASONS
from flowledger.run.faults.changes import Changes, Maker, results, words

ROLLOUT, REWARD = "flowledger.run.stages:rollout", "flowledger.run.stages:reward"
TAKE = "flowledger.run.prompts:take"
STREAMS, SAMPLE = "flowledger.run.sampling:streams", "flowledger.run.sampling:sample"
ENDINGS = "flowledger.run.responses:Responses._endings"
LENGTH, ABORT = FINISH_REASONS.index("length"), FINISH_REASONS.index("abort")


def _rewarded(value: Callable[[Any, dict[str, Any]], Tensor]) -> Maker:
    """Every sample's reward is `value` [B] of the rewards and of what they were made from, on its last token."""

    def make(original: Function) -> Function:
        def sick(**given: Any) -> Any:
            made = original(**given)
            new, mask = value(made, given), given["response_mask"]
            last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
            tokens = torch.zeros_like(made.token_level_reward)
            tokens[torch.arange(len(new), device=new.device), last] = new
            parts = torch.zeros_like(made.reward_components)
            parts[:, 0] = new
            return replace(made, reward=new, token_level_reward=tokens, reward_components=parts)

        return sick

    return make


def reward_stuck() -> Changes:
    """The verifier says the same of every response."""
    return {REWARD: _rewarded(lambda made, _: torch.full_like(made.reward, 0.5))}


def reward_by_length() -> Changes:
    """What is rewarded is length."""
    return {REWARD: _rewarded(lambda _, given: given["response_mask"].sum(1) / given["response_mask"].shape[1])}


def groups_equal() -> Changes:
    """All responses to a prompt get its mean reward."""

    def means(made: Any, given: dict[str, Any]) -> Tensor:
        groups = made.reward.view(len(given["problems"]), -1)
        mean: Tensor = groups.mean(1, keepdim=True).expand_as(groups).reshape(-1)
        return mean

    return {REWARD: _rewarded(means)}


def reward_nan() -> Changes:
    """The reward of one sample is not a number."""

    def first(made: Any, _: dict[str, Any]) -> Tensor:
        new: Tensor = made.reward.clone()
        new[0] = torch.nan
        return new

    return {REWARD: _rewarded(first)}


def reward_scaled() -> Changes:
    """A reward model gives logits, a hundred times what it gave before."""
    return {REWARD: _rewarded(lambda made, _: 100 * made.reward)}


def never_stops() -> Changes:
    """The end of a response is not recognised, so all of them run into the limit."""
    return {
        ROLLOUT: words(stop_ids=lambda _: (), settings=lambda one: one.model_copy(update={"stop_token_ids": ()})),
    }


def endings(new: Callable[[Any, Tensor], Tensor]) -> Maker:
    """How the running samples end after each token."""

    def make(original: Function) -> Function:
        def sick(self: Any, token_ids: Tensor) -> Tensor | None:
            found = original(self, token_ids)
            return new(self, torch.full_like(self.samples, -1) if found is None else found)

        return sick

    return make


def says_nothing() -> Changes:
    """Every response ends with its first token."""

    def stopped(responses: Any, reason: Tensor) -> Tensor:
        responses._count()
        return torch.full_like(reason, FINISH_REASONS.index("stop"))

    return {ENDINGS: endings(stopped)}


def aborted() -> Changes:
    """Half of the requests are aborted."""

    def half(reason: Tensor) -> Tensor:
        made = reason.clone()
        made[::2] = ABORT
        return made

    return {ROLLOUT: results(finish_reason=half)}


def same_prompts() -> Changes:
    """The order of the prompts does not move on: every step gets those of the first."""

    def make(original: Function) -> Function:
        def sick(source: Any, tokenizer: Any, settings: Any, step: int) -> Any:
            return original(source, tokenizer, settings, 0)

        return sick

    return {TAKE: make}


def same_draws() -> Changes:
    """Every sample of a step is drawn with the same random numbers, as where all engines start from one seed."""

    def make(original: Function) -> Function:
        def sick(**given: Any) -> Tensor:
            made: Tensor = original(**given)
            return made[:1].expand_as(made).contiguous()

        return sick

    return {STREAMS: make}


def greedy() -> Changes:
    """The engine takes the likeliest token and says the log-prob at the temperature that it was asked for."""
    return {SAMPLE: _drawn(lambda logits: logits.argmax(-1))}


def one_word() -> Changes:
    """The policy says one and the same token to whatever it is asked."""
    return {SAMPLE: _drawn(lambda logits: torch.full((len(logits),), 65, device=logits.device))}


def _drawn(choose: Callable[[Tensor], Tensor]) -> Maker:
    def make(original: Function) -> Function:
        def sick(*, logits: Tensor, temperature: float, **given: Any) -> tuple[Tensor, Tensor]:
            chosen, scores = choose(logits), (logits.float() / temperature).log_softmax(-1)
            return chosen, scores.gather(1, chosen[:, None])[:, 0]

        return sick

    return make


def copied_across_groups() -> Changes:
    """The responses to the first prompt are handed out for every other prompt as well."""

    def first_group(original: Function) -> Function:
        def sick(**given: Any) -> Any:
            made = original(**given)
            each = len(made.response_ids) // len(given["problems"])
            rows = torch.arange(len(made.response_ids), device=made.response_ids.device) % each
            width = made.response_ids.shape[1]

            def tail(whole: Tensor) -> Tensor:
                return torch.cat([whole[:, :-width], whole[rows, -width:]], 1)

            mask = tail(made.attention_mask)
            picked = {
                name: getattr(made, name)[rows]
                for name in ("response_ids", "response_mask", "rollout_log_prob", "finish_reason", "turns")
            }
            return replace(
                made, full_sequence=tail(made.full_sequence), attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0), **picked,
            )  # fmt: skip

        return sick

    return {ROLLOUT: first_group}
