"""Sample G responses to each prompt: one prefill per prompt, then decode steps over the running samples.

The prefill writes all but the last token of a prompt into the KV cache; that token is the first one a response feeds to
a decode step. What an environment answers between two turns is read in the same way: all but its last token at once.
So every sampled token comes out of a decode step, and the running counts of `generation_metadata` add up to the number
of sampled tokens.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flowledger.config.schema import Rollout
from flowledger.flow.errors import BadInput
from flowledger.run.cache import SlotCache
from flowledger.run.causal_lm import unwrapped
from flowledger.run.decode import Decoder, decoder_of
from flowledger.run.responses import Abort as Abort
from flowledger.run.responses import Answer as Answer
from flowledger.run.responses import Generated as Generated
from flowledger.run.responses import Responses
from flowledger.run.scheduler import Scheduler, Turnover


def generate(
    *,
    model: nn.Module,
    settings: Rollout,
    stop_ids: tuple[int, ...],
    uniform: Tensor,
    prompt_ids: Tensor,
    prompt_length: Tensor,
    sample_id: Tensor,
    pad_id: int,
    abort: Abort | None = None,
    answer: Answer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generated:
    """Responses to left-padded prompts [B_prompt, S_prompt] of the lengths given, drawn at the numbers of `uniform`.

    A stop token is part of its response. With `answer` it ends a turn: what that returns follows, and sampling goes on,
    up to settings.max_turns turns. `abort` and the time limit (from a sample's admission, prefill and its own answers
    included, not the answers to others) are looked at before each token; what was said so far is kept. Raises BadInput for an empty prompt, for a model
    whose attention the cache cannot serve, and for NaN logits.
    """
    B, longest = sample_id.shape[0], _longest(prompt_length)
    slots = min(settings.max_running or B, B)
    positions = longest + settings.max_response_tokens - 1  # the last sampled token is never fed back
    kv_cache = SlotCache(config=model.config, slots=slots, positions=positions, device=prompt_ids.device)
    scheduler = Scheduler(slots=slots, total=B, group_size=settings.samples_per_prompt)
    responses = Responses.blank(settings, stop_ids, uniform, prompt_ids, pad_id)
    metadata: list[tuple[int, int]] = []

    def turn_over(freed: Sequence[int]) -> None:
        turnover = scheduler.turn_over(freed)
        responses.admit(turnover.admitted, clock)
        responses.seat(torch.tensor(scheduler.samples, dtype=torch.int64, device=prompt_ids.device))
        _fill_slots(turnover, kv_cache=kv_cache, model=model, prompt_ids=prompt_ids, prompt_length=prompt_length)

    with torch.no_grad(), _evaluating(model):
        decoder = decoder_of(model, positions=positions)
        turn_over(())
        while scheduler.running:
            running, waiting = scheduler.running, scheduler.waiting
            freed = responses.interrupt(sample_id, abort, clock)
            if not freed:
                metadata.append((running, waiting))
                logits = decode_step(
                    model=model, kv_cache=kv_cache, token_ids=responses.next_ids, running=running, waiting=waiting,
                    decoder=decoder,
                )  # fmt: skip
                reason = responses.extend(logits, sample_id)
                if reason is None:
                    continue
                if answer is not None and (answered := responses.reply(reason, answer, clock)):
                    rows = torch.tensor(answered, device=prompt_ids.device)
                    token_ids, lengths = responses.unread(rows)
                    read_answers(model=model, kv_cache=kv_cache, token_ids=token_ids, lengths=lengths, rows=rows)
                freed = responses.finish(reason)
            if freed:
                turn_over(freed)
    return responses.collect(metadata)


def prefill(*, model: nn.Module, prompt_ids: Tensor, prompt_length: Tensor, kv_cache: SlotCache, rows: Tensor) -> None:
    """Run prompts [B_prompt, S_prompt] (left-padded), each without its last token, into slots `rows` of the cache."""
    lengths = prompt_length - 1
    kv_cache.begin_prompts(rows, lengths)
    width = int(lengths.max())
    if width == 0:
        return
    # From left- to right-padded: a slot starts at position 0, and the causal mask hides what lies to the right.
    positions = torch.arange(width, device=prompt_ids.device)
    columns = (positions + (prompt_ids.shape[1] - prompt_length)[:, None]).clamp_(max=prompt_ids.shape[1] - 1)
    _forward(model, kv_cache, input_ids=prompt_ids.gather(1, columns), position_ids=positions.expand(len(rows), -1))


def decode_step(
    *,
    model: nn.Module,
    kv_cache: SlotCache,
    token_ids: Tensor,
    running: int,
    waiting: int,
    decoder: Decoder | None = None,
) -> Tensor:
    """Feed one token [B_run] to each running sample; returns the logits [B_run, V] of the next.

    With a decoder it runs in place of the model's own forward. `waiting` (samples without a slot) is not needed to
    compute; it is here for who watches.
    """
    positions = kv_cache.begin_decode(running)
    if decoder is not None:
        return decoder.logits(token_ids, kv_cache)
    mask = kv_cache.decode_mask(next(model.parameters()).dtype)
    return _forward(model, kv_cache, input_ids=token_ids[:, None], position_ids=positions[:, None], attention_mask=mask)


def read_answers(*, model: nn.Module, kv_cache: SlotCache, token_ids: Tensor, lengths: Tensor, rows: Tensor) -> None:
    """Feed `lengths` [B_run] tokens of token_ids [B_run, S] to the samples in slots `rows`, behind what is there.

    S is the longest; a row with fewer repeats its last token.
    """
    positions = kv_cache.begin_answers(rows, lengths)
    mask = kv_cache.decode_mask(next(model.parameters()).dtype)
    _forward(model, kv_cache, input_ids=token_ids, position_ids=positions, attention_mask=mask)


def _forward(model: nn.Module, kv_cache: SlotCache, **inputs: Any) -> Tensor:
    """The model's own forward; logits of the last position [B_run, V]."""
    causal = unwrapped(model)  # a LoRA wrapper hides the signature
    inputs[_cache_keyword(type(causal))] = kv_cache  # type: ignore[arg-type]  # mypy: a class is not Hashable
    logits: Tensor = model(**inputs, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


@cache
def _cache_keyword(architecture: type[Any]) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`, and warns of the old name."""
    return "cache" if "cache" in inspect.signature(architecture.forward).parameters else "past_key_values"


def _fill_slots(
    turnover: Turnover, *, kv_cache: SlotCache, model: nn.Module, prompt_ids: Tensor, prompt_length: Tensor
) -> None:
    """Prefill each prompt that is met for the first time, and copy what slots take over from other slots."""
    device = prompt_ids.device
    if turnover.prefill:
        rows, prompts = torch.tensor(turnover.prefill, device=device).T
        prefill(
            model=model,
            prompt_ids=prompt_ids[prompts],
            prompt_length=prompt_length[prompts],
            kv_cache=kv_cache,
            rows=rows,
        )
    if turnover.shares:
        rows, sources, prompts = torch.tensor(turnover.shares, device=device).T
        kv_cache.copy(rows=rows, sources=sources, lengths=prompt_length[prompts] - 1)
    if turnover.moves:
        rows, sources = torch.tensor(turnover.moves, device=device).T
        kv_cache.copy(rows=rows, sources=sources, lengths=kv_cache.lengths[sources])


def _longest(prompt_length: Tensor) -> int:
    """Tokens of the longest prompt. Raises BadInput for an empty one, which leaves nothing to begin a response from."""
    if not len(prompt_length):
        return 1
    empty = (prompt_length < 1).nonzero()
    if len(empty):
        raise BadInput(f"rollout: prompt {int(empty[0])} of this step has no tokens; a prompt needs at least 1")
    return int(prompt_length.max())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off (and the KV cache on, which models refuse while they train with checkpointing), then as before."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
