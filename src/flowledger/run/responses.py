"""What the samples of one rollout have said so far, and how each response ended.

A response is what the policy sampled and, where there is an environment, its answers between the policy's turns. An
answer counts against max_response_tokens like any token, and is left out where no room for another turn would remain:
so a response that is not cut off ends with a token of the policy.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowledger.config.schema import Rollout
from flowledger.flow.errors import BadInput
from flowledger.flow.words import FINISH_REASONS
from flowledger.run import sampling
from flowledger.run.cache import up_to
from flowledger.run.exceptions import told

STOP, LENGTH, ABORT, TIMEOUT = (FINISH_REASONS.index(reason) for reason in ("stop", "length", "abort", "timeout"))
UNFINISHED = -1

Abort = Callable[[int, list[int]], bool]  # (sample_id, response so far) -> end it now?
Answer = Callable[[int, list[int]], list[int] | None]  # (sample index, the turn just ended) -> the answer, or the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The responses of one rollout, right-padded to the longest (at least 1), and how they came about."""

    response_ids: Tensor  # int64 [B_prompt*G, S_resp]
    response_mask: Tensor  # int64 [B_prompt*G, S_resp], 1 on what the policy sampled
    attention_mask: Tensor  # int64 [B_prompt*G, S_resp], 1 on what an environment wrote as well
    rollout_log_prob: Tensor  # float32 [B_prompt*G, S_resp], 0 where response_mask is 0
    finish_reason: Tensor  # int64 [B_prompt*G], indices into flow.words.FINISH_REASONS
    turns: Tensor  # int64 [B_prompt*G], in which the policy spoke
    generation_metadata: Tensor  # int64 [N_decode, 2]: running, waiting


@dataclass(slots=True, kw_only=True)
class Responses:
    """What has been said so far, by sample index; and, by slot, what the next token of each running sample needs."""

    settings: Rollout
    stop_ids: Tensor  # [N_stop]
    uniform: Tensor  # [B, max_response_tokens]
    prompt_end: Tensor  # [B], the last token of each prompt
    ids: Tensor  # [B, max_response_tokens]
    log_prob: Tensor  # [B, max_response_tokens]
    length: Tensor  # [B]; of the running samples as `_count` has left it
    reason: Tensor  # [B]
    deadline: Tensor  # [B], on the clock
    answers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # sample -> where answers start and stop
    samples: Tensor  # [B_run], which sample runs in each slot
    next_ids: Tensor  # [B_run], the token that each feeds to its next decode step
    places: Tensor  # [B_run], where in `ids`, seen as one row, each next token goes
    room: int = 0  # tokens that every running sample may still say

    @classmethod
    def blank(
        cls, settings: Rollout, stop_ids: tuple[int, ...], uniform: Tensor, prompt_ids: Tensor, pad_id: int
    ) -> "Responses":
        device, limit = prompt_ids.device, settings.max_response_tokens
        B = prompt_ids.shape[0] * settings.samples_per_prompt
        stops = sorted({*stop_ids, *settings.stop_token_ids})
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        return cls(
            settings=settings,
            stop_ids=torch.tensor(stops, dtype=torch.int64, device=device),
            uniform=uniform,
            prompt_end=prompt_ids[:, -1].repeat_interleave(settings.samples_per_prompt),
            ids=torch.full((B, limit), pad_id, dtype=torch.int64, device=device),
            log_prob=torch.zeros(B, limit, dtype=torch.float32, device=device),
            length=torch.zeros(B, dtype=torch.int64, device=device),
            reason=torch.full((B,), UNFINISHED, dtype=torch.int64, device=device),
            deadline=torch.full((B,), torch.inf, dtype=torch.float64, device=device),
            samples=nobody,
            next_ids=nobody,
            places=nobody,
        )

    def admit(self, admitted: Sequence[int], clock: Callable[[], float]) -> None:
        """Start the time limit of the samples that begin now."""
        if self.settings.timeout_s is not None and admitted:
            self.deadline[list(admitted)] = clock() + self.settings.timeout_s

    def seat(self, samples: Tensor) -> None:
        """From now on slot r runs samples[r]."""
        limit, length = self.settings.max_response_tokens, self.length[samples]
        self.samples = samples
        said = self.ids[samples, (length - 1).clamp(min=0)]
        self.next_ids = torch.where(length > 0, said, self.prompt_end[samples])
        self.places = samples * limit + length
        self.room = limit - int(length.max()) if len(samples) else 0

    def interrupt(self, sample_id: Tensor, abort: Abort | None, clock: Callable[[], float]) -> list[int]:
        """Slots whose sample is out of time or is to be aborted."""
        if abort is None and self.settings.timeout_s is None:
            return []
        self._count()
        reason = torch.full_like(self.samples, UNFINISHED)
        if self.settings.timeout_s is not None:
            reason[self.deadline[self.samples] <= clock()] = TIMEOUT
        if abort is not None:
            for slot, index in enumerate(self.samples.tolist()):
                response = self.ids[index, : int(self.length[index])].tolist()
                if _asked(abort, int(sample_id[index]), response, self.settings.abort_function):
                    reason[slot] = ABORT
        return self.finish(reason)

    def extend(self, logits: Tensor, sample_id: Tensor) -> Tensor | None:
        """Sample one token for each running sample from logits [B_run, V].

        Returns how each thereby ended, or UNFINISHED [B_run]; None where none did. Raises BadInput for NaN logits.
        """
        settings = self.settings
        token_ids, log_prob = sampling.sample(
            logits=logits,
            uniform=self.uniform.view(-1).index_select(0, self.places),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        if not math.isfinite(float(log_prob.sum())):
            self._count()
            bad = int((~log_prob.isfinite()).nonzero()[0])
            index = int(self.samples[bad])
            raise BadInput(
                f"rollout: the logits of sample {int(sample_id[index])} are not finite at response position "
                f"{int(self.length[index])}; look for NaN in the weights of model.path, or lower optim.lr"
            )
        self.ids.view(-1).index_copy_(0, self.places, token_ids)
        self.log_prob.view(-1).index_copy_(0, self.places, log_prob)
        self.places += 1
        self.next_ids = token_ids
        self.room -= 1
        return self._endings(token_ids)

    def _endings(self, token_ids: Tensor) -> Tensor | None:
        stopped = (token_ids[:, None] == self.stop_ids).any(1) if len(self.stop_ids) else None
        if self.room > 0 and (stopped is None or not bool(stopped.any())):
            return None
        self._count()
        reason = torch.full_like(self.samples, UNFINISHED)
        reason[self.length[self.samples] == self.settings.max_response_tokens] = LENGTH
        if stopped is not None:
            reason[stopped] = STOP
        return reason

    def _count(self) -> None:
        """Note how long the running responses are by now: whoever looks at `length` asks for it, not every token."""
        self.length[self.samples] = self.places - self.samples * self.settings.max_response_tokens

    def reply(self, reason: Tensor, answer: Answer, clock: Callable[[], float]) -> list[int]:
        """Let the environment answer where a turn has ended that is not the last; returns the slots with tokens to read.

        The `reason` of an answered sample becomes UNFINISHED, or LENGTH where the answer leaves no room for another token.
        An answer takes time from its own sample alone: the others wait for it, and their limits move.
        """
        answered: list[int] = []
        for slot in (reason == STOP).nonzero()[:, 0].tolist():
            index = int(self.samples[slot])
            spans = self.answers.get(index, [])
            if len(spans) + 1 >= self.settings.max_turns:
                continue
            start = int(self.length[index])
            turn = self.ids[index, spans[-1][1] if spans else 0 : start].tolist()
            with self._others_wait(index, clock):
                said = answer(index, turn)
            if said is None:
                continue
            stop = start + len(said)
            if stop >= self.settings.max_response_tokens:
                reason[slot] = LENGTH
                continue
            self.ids[index, start:stop] = torch.tensor(said, dtype=torch.int64, device=self.ids.device)
            self.answers[index] = [*spans, (start, stop)]
            self.length[index] = stop
            reason[slot] = UNFINISHED
            if said:
                answered.append(slot)
        if answered:
            self.seat(self.samples)
        return answered

    @contextmanager
    def _others_wait(self, index: int, clock: Callable[[], float]) -> Iterator[None]:
        """Push the limits of all samples but one back by the time spent within."""
        if self.settings.timeout_s is None:
            yield
            return
        own, began = float(self.deadline[index]), clock()
        yield
        self.deadline += clock() - began
        self.deadline[index] = own

    def unread(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(token_ids [B_run, S], lengths [B_run]) that slots just answered have not read, less those they read next.

        S is the longest; a row with fewer repeats its last token.
        """
        samples = self.samples[slots]
        start, stop = torch.tensor([self.answers[index][-1] for index in samples.tolist()], device=samples.device).T
        lengths = stop - start  # with the token that ended the turn
        return self.ids[samples].gather(1, start[:, None] - 1 + up_to(lengths)), lengths

    def finish(self, reason: Tensor) -> list[int]:
        """Note how samples ended; returns the slots that are free now."""
        done = reason != UNFINISHED
        self.reason[self.samples[done]] = reason[done]
        slots: list[int] = done.nonzero()[:, 0].tolist()
        return slots

    def _turns(self) -> Tensor:
        """Turns of the policy in each response: those answered, and one more where something was said since."""
        answered, heard = torch.zeros_like(self.length), torch.zeros_like(self.length)
        for index, spans in self.answers.items():
            answered[index], heard[index] = len(spans), spans[-1][1]
        return answered + (self.length > heard)

    def collect(self, metadata: list[tuple[int, int]]) -> Generated:
        """The responses, cut to the longest."""
        width = max([1, *self.length.tolist()])
        written = (torch.arange(width, device=self.length.device) < self.length[:, None]).long()
        sampled = written.clone() if self.answers else written
        for index, spans in self.answers.items():
            for start, stop in spans:
                sampled[index, start:stop] = 0
        return Generated(
            response_ids=self.ids[:, :width].clone(),
            response_mask=sampled,
            attention_mask=written,
            rollout_log_prob=self.log_prob[:, :width].clone(),
            finish_reason=self.reason,
            turns=self._turns(),
            generation_metadata=torch.tensor(metadata, dtype=torch.int64).reshape(-1, 2),
        )


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
