"""Prompts: problems from a reasoning-gym task or a JSONL or Parquet file, turned into left-padded token ids.

Which problems a step gets depends on (seed, step) alone. A file is passed through over and over, in an order drawn anew
for each pass; a reasoning-gym task never ends.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from flowledger.config.schema import Data
from flowledger.flow.errors import BadInput
from flowledger.run import prompt_files
from flowledger.run.gym import Gym
from flowledger.run.problems import Problem

__all__ = ["Problem", "PromptSource", "Taken", "Tokenizer", "messages_of", "open_source", "take", "tokenise"]

REPLACEMENTS = 1000  # problems tried in place of one that is too long, before giving up
STRIDE = 1_000_003  # how far a replacement lies from what it replaces: no step ever gets there by itself

Fits = Callable[[Problem], bool]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    pad_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> str: ...
    def batch_decode(self, sequences: Any, **options: Any) -> list[str]: ...


class PromptSource(Protocol):
    """Problems by step. With `fits`, those that do not fit are left out and others take their place."""

    def batch(self, step: int, n: int, fits: Fits | None = None) -> tuple[Problem, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The problems of a step, and their prompts as left-padded ids."""

    problems: tuple[Problem, ...]
    prompt_ids: Tensor  # int64 [B_prompt, S_prompt]
    attention_mask: Tensor  # int64 [B_prompt, S_prompt]
    position_ids: Tensor  # int64 [B_prompt, S_prompt]
    prompt_length: Tensor  # int64 [B_prompt]


def open_source(settings: Data, *, seed: int) -> PromptSource:
    """The problems that `data` names. Raises BadInput for an unknown task or a file that cannot be read."""
    if settings.task is not None:
        return GymSource(Gym(settings.task, settings.task_options, seed))
    return FileSource(prompt_files.read(settings), seed=seed, shuffle=settings.shuffle)


def take(source: PromptSource, tokenizer: Tokenizer, settings: Data, step: int) -> Taken:
    """The problems of one step, tokenised. Raises BadInput for a prompt that is too long."""
    lengths = cache(lambda problem: len(_encode(problem, tokenizer, settings)))
    fits = (lambda problem: lengths(problem) <= settings.max_prompt_tokens) if settings.too_long == "skip" else None
    problems = source.batch(step, settings.prompts_per_step, fits)
    return tokenise(problems, tokenizer, settings)


def tokenise(problems: Sequence[Problem], tokenizer: Tokenizer, settings: Data) -> Taken:
    """Left-padded ids [B_prompt, S_prompt], S_prompt the longest. Raises BadInput for one over the limit."""
    encoded = [_limited(_encode(problem, tokenizer, settings), problem, settings) for problem in problems]
    length = torch.tensor([len(ids) for ids in encoded])
    width = int(length.max())
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    mask = (torch.arange(width) >= width - length[:, None]).long()
    return Taken(
        problems=tuple(problems),
        prompt_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded]),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        prompt_length=length,
    )


@dataclass(frozen=True, slots=True)
class GymSource:
    """Problems of a reasoning-gym task: step s takes the indices s*n .. s*n + n - 1."""

    gym: Gym

    def batch(self, step: int, n: int, fits: Fits | None = None) -> tuple[Problem, ...]:
        return tuple(self._one(step * n + slot, fits) for slot in range(n))

    def _one(self, index: int, fits: Fits | None) -> Problem:
        for attempt in range(REPLACEMENTS):
            problem = self._problem(index + attempt * STRIDE)
            if fits is None or fits(problem):
                return problem
        raise BadInput(
            f"data.task = {self.gym.task!r}: {REPLACEMENTS} problems in a row are "
            "longer than data.max_prompt_tokens; raise it"
        )

    def _problem(self, index: int) -> Problem:
        entry = self.gym.entry(index)
        return Problem(
            text=entry["question"],
            answer=entry["answer"],
            index=index,
            extra={"data_source": self.gym.task},
            where=f"{self.gym.task}[{index}]",
        )


@dataclass(slots=True)
class FileSource:
    """Problems of a file, each pass in an order of its own."""

    problems: tuple[Problem, ...]
    seed: int
    shuffle: bool
    _fitting: tuple[Problem, ...] | None = field(default=None, init=False)  # what is left by `fits`, found once

    def batch(self, step: int, n: int, fits: Fits | None = None) -> tuple[Problem, ...]:
        chosen = self.problems if fits is None else self._those_that(fits)
        places = range(step * n, step * n + n)
        orders = {turn: self._order(turn, len(chosen)) for turn in {place // len(chosen) for place in places}}
        return tuple(chosen[orders[place // len(chosen)][place % len(chosen)]] for place in places)

    def _those_that(self, fits: Fits) -> tuple[Problem, ...]:
        if self._fitting is None:
            self._fitting = tuple(problem for problem in self.problems if fits(problem))
            if not self._fitting:
                raise BadInput(
                    f"data.path: all {len(self.problems)} prompts are longer than data.max_prompt_tokens; raise it"
                )
        return self._fitting

    def _order(self, turn: int, size: int) -> list[int]:
        order = list(range(size))
        if self.shuffle:
            random.Random(f"{self.seed}/{turn}").shuffle(order)
        return order


def messages_of(problem: Problem, settings: Data) -> list[Mapping[str, Any]]:
    """A problem as a chat, with the system prompt where there is one."""
    messages: list[Mapping[str, Any]] = list(problem.messages or ({"role": "user", "content": problem.text},))
    if settings.system_prompt:
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    return messages


def _encode(problem: Problem, tokenizer: Tokenizer, settings: Data) -> list[int]:
    messages = messages_of(problem, settings)
    if settings.chat_template and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them itself
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    return list(ids)


def _limited(ids: list[int], problem: Problem, settings: Data) -> list[int]:
    limit = settings.max_prompt_tokens
    if len(ids) <= limit:
        return ids
    if settings.too_long == "truncate_left":
        return ids[-limit:]
    raise BadInput(
        f"{problem.where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens = {limit}; "
        f"set it to {len(ids)} or more, or data.too_long to skip or truncate_left"
    )
