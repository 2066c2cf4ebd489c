"""A batch that cannot be dealt out equally: the nearest that can, in prompts where its rows are the samples of prompts."""

from math import gcd
from typing import NamedTuple

# What each framework calls the prompts of a step.
PROMPTS = {
    "flowledger": "data.prompts_per_step", "verl": "data.train_batch_size", "openrlhf": "--rollout.batch_size",
    "slime": "--rollout-batch-size", "nemo_rl": "grpo.num_prompts_per_step",
}  # fmt: skip


class Dealt(NamedTuple):
    """A change, and what it follows from in a sentence."""

    fix: dict[str, str]
    why: str


def dealt(rows: int, chunks: int, *, group: int | None, prompts: int | None, framework: str) -> Dealt:
    """What to change where `rows` do not divide by `chunks`. group: samples of a prompt, n; prompts: of a step; None: not known."""
    key = PROMPTS.get(framework, "prompts of a step")
    if group is not None and group > 1 and rows == prompts:
        return Dealt(
            _fix(key, rows, chunks),
            f"these are the prompts before each has its n = {group} samples: {_must('prompts', rows, chunks)}",
        )
    if group is not None and rows % group == 0:
        each = chunks // gcd(chunks, group)
        made = f"{rows:,} rows are {rows // group:,} prompts * n = {group}"
        return Dealt(_fix(key, rows // group, each), f"{made}: {_must('prompts', rows // group, each)}")
    if group is not None:
        why = f"{rows:,} rows are no prompts * n = {group}: some were dropped, or it is another batch (validation, the last of an epoch)"
        return Dealt(_fix("rows of this batch", rows, chunks), f"{why}; {_must('rows', rows, chunks)}")
    return Dealt(
        _fix("rows of this batch (prompts * n)", rows, chunks),
        f"{_must('rows', rows, chunks)}; they are prompts * n, so that n counts too: give the CONFIG for the prompts",
    )  # fmt: skip


def _must(what: str, now: int, each: int) -> str:
    return f"{what} must be a multiple of {each}, such as {_nearest(now, each)}"


def _fix(key: str, now: int, each: int) -> dict[str, str]:
    return {"key": key, "from": str(now), "to": _nearest(now, each)}


def _nearest(now: int, each: int) -> str:
    below = now // each * each
    return " or ".join(str(one) for one in (below, below + each) if one)
