"""Why a sample is not learnt from, and what to say when not one sample of a step is left."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowledger.flow.words import DROPPED_REASONS, FINISH_REASONS

# What to do about each reason for which a sample is dropped.
WAYS_OUT = {
    "abort": "check rollout.abort_function",
    "empty": "check the model: its first token ends the response",
    "environment_error": "mend rollout.environment",
    "no_baseline": "see why no greedy response could be scored",
    "reward_error": "mend the reward, or set reward.on_error to zero",
    "reward_timeout": "raise reward.timeout_s",
    "timeout": "raise rollout.timeout_s",
}


def reasons(
    *,
    response_mask: Tensor,
    finish_reason: Tensor,
    environment_errors: Sequence[str | None],
    failed: Sequence[str | None],
    no_baseline: Sequence[str | None] = (),
) -> tuple[str | None, ...]:
    """Why each of B samples is dropped, or None. The first reason counts, in the order in which a step meets them.

    response_mask [B, S_resp], finish_reason [B]; `no_baseline` is per prompt, and empty where nobody needs one.
    """
    ended = [FINISH_REASONS[code] for code in finish_reason.tolist()]
    columns = (
        [end if end in ("abort", "timeout") else None for end in ended],
        ["environment_error" if error else None for error in environment_errors],
        [None if length else "empty" for length in response_mask.sum(-1).tolist()],
        failed,
        ["no_baseline" if said else None for said in _of_samples(no_baseline, len(ended))],
    )
    return tuple(next(filter(None, each), None) for each in zip(*columns, strict=True))


def codes(reasons: Sequence[str | None]) -> Tensor:
    """Reasons as indices into flow.words.DROPPED_REASONS, int64 [B]; -1 for None."""
    return torch.tensor(
        [-1 if reason is None else DROPPED_REASONS.index(reason) for reason in reasons], dtype=torch.int64
    )


def decoded(codes: Tensor) -> tuple[str | None, ...]:
    """The reasons behind `codes` [B]."""
    return tuple(None if code < 0 else DROPPED_REASONS[code] for code in codes.tolist())


def without_reward(
    *,
    response_mask: Tensor,
    finish_reason: Tensor,
    environment_errors: Sequence[str | None],
    failed: Sequence[str | None],
    errors: Sequence[str | None],
) -> tuple[str | None, ...]:
    """What is wrong with each greedy response that cannot be a baseline, and None for the others; one a prompt."""
    why = reasons(
        response_mask=response_mask, finish_reason=finish_reason, environment_errors=environment_errors, failed=failed
    )
    said = details(why, environment_errors=environment_errors, errors=errors, no_baseline=())
    return tuple(
        reason and f"its greedy response: {reason}{f' ({error})' if error else ''}"
        for reason, error in zip(why, said, strict=True)
    )


def details(
    reasons: Sequence[str | None],
    *,
    environment_errors: Sequence[str | None],
    errors: Sequence[str | None],
    no_baseline: Sequence[str | None],
) -> list[str | None]:
    """What is known of each sample's reason beyond its name: an error from the user's code, or from the greedy response."""
    known = {
        "environment_error": environment_errors, "reward_error": errors, "reward_timeout": errors,
        "no_baseline": _of_samples(no_baseline, len(reasons)),
    }  # fmt: skip
    return [known[reason][index] if reason in known else None for index, reason in enumerate(reasons)]


def nothing_left(reasons: Sequence[str], said: Sequence[str | None], ids: Sequence[int]) -> str:
    """One line: how many for which reason, what is known of the first that failed, and what to change."""
    there = sorted(set(reasons))
    counts = ", ".join(f"{reason} {reasons.count(reason)}" for reason in there)
    failed = (f"; sample {sample}: {text}" for sample, text in zip(ids, said, strict=True) if text)
    return (
        f"all {len(reasons)} samples of this step were dropped ({counts}): nothing to learn from"
        f"{next(failed, '')}; {', '.join(WAYS_OUT[reason] for reason in there)}"
    )


def _of_samples(per_prompt: Sequence[str | None], samples: int) -> list[str | None]:
    """What was said of a prompt, for each of its samples; None for all where nothing was."""
    if not per_prompt:
        return [None] * samples
    return [said for said in per_prompt for _ in range(samples // len(per_prompt))]
