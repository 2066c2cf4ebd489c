"""What the samples of one rollout have said so far, and how each response ended.

A response is what the policy sampled and, where there is an environment, its answers between the policy's turns. An
answer counts against max_response_tokens like any token, and is left out where no room for another turn would remain:
so a response that is not cut off ends with a token of the policy.
"""

from collections.abc import Callable, Sequence
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
    generation_metadata: Tensor  # int64 [N_decode, 2]: running, waiting


@dataclass(slots=True, kw_only=True)
class Responses:
    """What has been said so far, by sample index."""

    settings: Rollout
    stop_ids: Tensor  # [N_stop]
    uniform: Tensor  # [B, max_response_tokens]
    next_ids: Tensor  # [B], the token that each sample feeds to its next decode step
    ids: Tensor  # [B, max_response_tokens]
    log_prob: Tensor  # [B, max_response_tokens]
    length: Tensor  # [B]
    reason: Tensor  # [B]
    deadline: Tensor  # [B], on the clock
    answers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # sample -> where answers start and stop

    @classmethod
    def blank(
        cls, settings: Rollout, stop_ids: tuple[int, ...], generator: torch.Generator, prompt_ids: Tensor, pad_id: int
    ) -> "Responses":
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
        return self.finish(samples, reason)

    def extend(self, samples: Tensor, logits: Tensor, sample_id: Tensor) -> Tensor:
        """Sample one token for each running sample; returns how each thereby ended, or UNFINISHED [B_run]."""
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
        return reason

    def reply(self, samples: Tensor, reason: Tensor, answer: Answer) -> list[int]:
        """Let the environment answer where a turn has ended that is not the last; returns the slots with tokens to read.

        The `reason` of an answered sample becomes UNFINISHED, or LENGTH where the answer leaves no room for another token.
        """
        answered: list[int] = []
        for slot in (reason == STOP).nonzero()[:, 0].tolist():
            index = int(samples[slot])
            spans = self.answers.get(index, [])
            if len(spans) + 1 >= self.settings.max_turns:
                continue
            start = int(self.length[index])
            said = answer(index, self.ids[index, spans[-1][1] if spans else 0 : start].tolist())
            if said is None:
                continue
            stop = start + len(said)
            if stop >= self.settings.max_response_tokens:
                reason[slot] = LENGTH
                continue
            self.ids[index, start:stop] = torch.tensor(said, dtype=torch.int64, device=self.ids.device)
            self.answers[index] = [*spans, (start, stop)]
            self.next_ids[index], self.length[index] = self.ids[index, stop - 1], stop
            reason[slot] = UNFINISHED
            if said:
                answered.append(slot)
        return answered

    def unread(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """(token_ids [B_run, S], lengths [B_run]) that samples just answered have not read, less those they read next.

        S is the longest; a row with fewer repeats its last token.
        """
        start, stop = torch.tensor([self.answers[index][-1] for index in samples.tolist()], device=samples.device).T
        lengths = stop - start  # with the token that ended the turn
        return self.ids[samples].gather(1, start[:, None] - 1 + up_to(lengths)), lengths

    def finish(self, samples: Tensor, reason: Tensor) -> list[int]:
        """Note how samples ended; returns the slots that are free now."""
        done = reason != UNFINISHED
        self.reason[samples[done]] = reason[done]
        slots: list[int] = done.nonzero()[:, 0].tolist()
        return slots

    def collect(self, metadata: list[tuple[int, int]]) -> Generated:
        """The responses, cut to the longest."""
        width = max(1, int(self.length.max()))
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
