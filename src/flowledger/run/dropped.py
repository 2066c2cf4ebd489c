"""What to say when not one sample of a step is left to learn from."""

from collections.abc import Sequence

# What to do about each reason for which a sample is dropped.
WAYS_OUT = {
    "abort": "check rollout.abort_function",
    "empty": "check the model: its first token ends the response",
    "reward_error": "mend the reward, or set reward.on_error to zero",
    "reward_timeout": "raise reward.timeout_s",
    "timeout": "raise rollout.timeout_s",
}


def nothing_left(reasons: Sequence[str], errors: Sequence[str | None], ids: Sequence[int]) -> str:
    """One line: how many for which reason, what the first failed reward said, and what to change."""
    there = sorted(set(reasons))
    counts = ", ".join(f"{reason} {reasons.count(reason)}" for reason in there)
    failed = (
        f"; sample {sample}: {error}"
        for sample, error, reason in zip(ids, errors, reasons, strict=True)
        if error and reason in ("reward_error", "reward_timeout")
    )
    return (
        f"all {len(reasons)} samples of this step were dropped ({counts}): nothing to learn from"
        f"{next(failed, '')}; {', '.join(WAYS_OUT[reason] for reason in there)}"
    )
