"""Sample G responses to each prompt: one prefill per prompt, then decode steps over the running samples.

The prefill writes all but the last token of a prompt into the KV cache; that token is the first one a response feeds to
a decode step. So every sampled token comes out of a decode step, and the running counts of `generation_metadata` add
up to the number of sampled tokens.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flowledger.config.schema import Rollout
from flowledger.flow.errors import BadInput
from flowledger.flow.words import FINISH_REASONS
from flowledger.run import sampling
from flowledger.run.cache import SlotCache
from flowledger.run.exceptions import told
from flowledger.run.scheduler import Scheduler, Turnover

STOP, LENGTH, ABORT, TIMEOUT = (FINISH_REASONS.index(reason) for reason in ("stop", "length", "abort", "timeout"))
UNFINISHED = -1

Abort = Callable[[int, list[int]], bool]  # (sample_id, response so far) -> end it now?


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The responses of one rollout, right-padded to the longest (at least 1), and how they came about."""

    response_ids: Tensor  # int64 [B_prompt*G, S_resp]
    response_mask: Tensor  # int64 [B_prompt*G, S_resp]
    rollout_log_prob: Tensor  # float32 [B_prompt*G, S_resp], 0 where masked
    finish_reason: Tensor  # int64 [B_prompt*G], indices into flow.words.FINISH_REASONS
    generation_metadata: Tensor  # int64 [N_decode, 2]: running, waiting


def generate(
    *,
    model: nn.Module,
    settings: Rollout,
    stop_ids: tuple[int, ...],
    generator: torch.Generator,
    prompt_ids: Tensor,
    prompt_length: Tensor,
    sample_id: Tensor,
    pad_id: int,
    abort: Abort | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generated:
    """Responses to left-padded prompts [B_prompt, S_prompt] of the lengths given.

    A stop token is part of its response. `abort` and the time limit (from a sample's admission, prefill included) are
    looked at before each token; what was sampled so far is kept. Raises BadInput for an empty prompt, for a model whose
    attention the cache cannot serve, and for NaN logits.
    """
    B, longest = sample_id.shape[0], _longest(prompt_length)
    slots = min(settings.max_running or B, B)
    positions = longest + settings.max_response_tokens - 1  # the last sampled token is never fed back
    kv_cache = SlotCache(config=model.config, slots=slots, positions=positions, device=prompt_ids.device)
    scheduler = Scheduler(slots=slots, total=B, group_size=settings.samples_per_prompt)
    responses = _Responses.blank(settings, stop_ids, generator, prompt_ids, pad_id)
    metadata: list[tuple[int, int]] = []

    def turn_over(freed: Sequence[int]) -> None:
        turnover = scheduler.turn_over(freed)
        responses.admit(turnover.admitted, clock)
        _fill_slots(turnover, kv_cache=kv_cache, model=model, prompt_ids=prompt_ids, prompt_length=prompt_length)

    with torch.no_grad(), _evaluating(model):
        turn_over(())
        while scheduler.running:
            running, waiting = scheduler.running, scheduler.waiting
            samples = torch.tensor(scheduler.samples, device=prompt_ids.device)
            freed = responses.interrupt(samples, sample_id, abort, clock)
            if not freed:
                metadata.append((running, waiting))
                token_ids = responses.next_ids[samples]
                logits = decode_step(
                    model=model, kv_cache=kv_cache, token_ids=token_ids, running=running, waiting=waiting
                )
                freed = responses.extend(samples, logits, sample_id)
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


def decode_step(*, model: nn.Module, kv_cache: SlotCache, token_ids: Tensor, running: int, waiting: int) -> Tensor:
    """Feed one token [B_run] to each running sample; returns the logits [B_run, V] of the next.

    `waiting` (samples without a slot) is not needed to compute; it is here for who watches.
    """
    positions = kv_cache.begin_decode(running)
    mask = kv_cache.decode_mask(next(model.parameters()).dtype)
    return _forward(model, kv_cache, input_ids=token_ids[:, None], position_ids=positions[:, None], attention_mask=mask)


def _forward(model: nn.Module, kv_cache: SlotCache, **inputs: Any) -> Tensor:
    """The model's own forward; logits of the last position [B_run, V]."""
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()  # a LoRA wrapper hides the signature
    inputs[_cache_keyword(type(unwrapped))] = kv_cache  # type: ignore[arg-type]  # mypy: a class is not Hashable
    logits: Tensor = model(**inputs, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


@cache
def _cache_keyword(architecture: type[Any]) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`, and warns of the old name."""
    return "cache" if "cache" in inspect.signature(architecture.forward).parameters else "past_key_values"


@dataclass(slots=True, kw_only=True)
class _Responses:
    """What has been sampled so far, by sample index."""

    settings: Rollout
    stop_ids: Tensor  # [N_stop]
    uniform: Tensor  # [B, max_response_tokens]
    next_ids: Tensor  # [B], the token that each sample feeds to its next decode step
    ids: Tensor  # [B, max_response_tokens]
    log_prob: Tensor  # [B, max_response_tokens]
    length: Tensor  # [B]
    reason: Tensor  # [B]
    deadline: Tensor  # [B], on the clock

    @classmethod
    def blank(
        cls, settings: Rollout, stop_ids: tuple[int, ...], generator: torch.Generator, prompt_ids: Tensor, pad_id: int
    ) -> "_Responses":
        device, limit = prompt_ids.device, settings.max_response_tokens
        B = prompt_ids.shape[0] * settings.samples_per_prompt
        stops = sorted({*stop_ids, *settings.stop_token_ids})
        return cls(
            settings=settings,
            stop_ids=torch.tensor(stops, dtype=torch.int64, device=device),
            uniform=sampling.streams(samples=B, positions=limit, generator=generator, device=device),
            next_ids=prompt_ids[:, -1].repeat_interleave(settings.samples_per_prompt),
            ids=torch.full((B, limit), pad_id, dtype=torch.int64, device=device),
            log_prob=torch.zeros(B, limit, dtype=torch.float32, device=device),
            length=torch.zeros(B, dtype=torch.int64, device=device),
            reason=torch.full((B,), UNFINISHED, dtype=torch.int64, device=device),
            deadline=torch.full((B,), torch.inf, dtype=torch.float64, device=device),
        )

    def admit(self, admitted: Sequence[int], clock: Callable[[], float]) -> None:
        """Start the time limit of the samples that begin now."""
        if self.settings.timeout_s is not None and admitted:
            self.deadline[list(admitted)] = clock() + self.settings.timeout_s

    def interrupt(
        self, samples: Tensor, sample_id: Tensor, abort: Abort | None, clock: Callable[[], float]
    ) -> list[int]:
        """Slots whose sample is out of time or is to be aborted."""
        reason = torch.full_like(samples, UNFINISHED)
        if self.settings.timeout_s is not None:
            reason[self.deadline[samples] <= clock()] = TIMEOUT
        if abort is not None:
            for slot, index in enumerate(samples.tolist()):
                response = self.ids[index, : int(self.length[index])].tolist()
                if _asked(abort, int(sample_id[index]), response, self.settings.abort_function):
                    reason[slot] = ABORT
        elif self.settings.timeout_s is None:
            return []
        return self._finish(samples, reason)

    def extend(self, samples: Tensor, logits: Tensor, sample_id: Tensor) -> list[int]:
        """Sample one token for each running sample; returns the slots whose sample is thereby finished."""
        position, settings = self.length[samples], self.settings
        token_ids, log_prob = sampling.sample(
            logits=logits,
            uniform=self.uniform[samples, position],
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        if not bool(log_prob.isfinite().all()):
            bad = int((~log_prob.isfinite()).nonzero()[0])
            raise BadInput(
                f"rollout: the logits of sample {int(sample_id[samples[bad]])} are not finite at response position "
                f"{int(position[bad])}; look for NaN in the weights of model.path, or lower optim.lr"
            )
        self.ids[samples, position] = token_ids
        self.log_prob[samples, position] = log_prob
        self.next_ids[samples] = token_ids
        self.length[samples] = position + 1
        reason = torch.full_like(samples, UNFINISHED)
        reason[position + 1 == settings.max_response_tokens] = LENGTH
        reason[(token_ids[:, None] == self.stop_ids).any(1)] = STOP
        return self._finish(samples, reason)

    def collect(self, metadata: list[tuple[int, int]]) -> Generated:
        """The responses, cut to the longest."""
        width = max(1, int(self.length.max()))
        mask = torch.arange(width, device=self.length.device) < self.length[:, None]
        return Generated(
            response_ids=self.ids[:, :width].clone(),
            response_mask=mask.long(),
            rollout_log_prob=self.log_prob[:, :width].clone(),
            finish_reason=self.reason,
            generation_metadata=torch.tensor(metadata, dtype=torch.int64).reshape(-1, 2),
        )

    def _finish(self, samples: Tensor, reason: Tensor) -> list[int]:
        done = reason != UNFINISHED
        self.reason[samples[done]] = reason[done]
        slots: list[int] = done.nonzero()[:, 0].tolist()
        return slots


def _asked(abort: Abort, sample: int, response: list[int], path: str | None) -> bool:
    """Whether the user's function ends the sample. Raises BadInput when it raises or gives no yes or no."""
    name = f"rollout.abort_function = {path or getattr(abort, '__name__', abort)!r}"
    try:
        found: Any = abort(sample, response)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's code may raise anything at all)
        raise BadInput(f"{name} raised {told(error)} for sample {sample} after {len(response)} tokens") from None
    if getattr(found, "shape", None) == ():  # a NumPy or torch truth value
        found = found.item()
    if not isinstance(found, bool | int | None):
        raise BadInput(f"{name} returned a {type(found).__name__} for sample {sample}; it must return True or False")
    return bool(found)


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
    empty = (prompt_length < 1).nonzero()
    if len(empty):
        raise BadInput(f"rollout: prompt {int(empty[0])} of this step has no tokens; a prompt needs at least 1")
    return int(prompt_length.max())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off (and the KV cache on, which models refuse while they train with checkpointing), then as before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
