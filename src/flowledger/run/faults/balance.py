"""Time that is lost: work that is dealt badly, and ranks, slots and rewards that the others wait for."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import Changes, words
from flowledger.run.faults.data import ENDINGS, LENGTH, endings
from flowledger.run.faults.last_rank import is_last_rank
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import Ranks

FORWARD, REWARD = "flowledger.run.forward:micro_batch_forward", "flowledger.run.stages:reward"
MICRO, DEALT = "flowledger.run.batching:micro_batches", "flowledger.run.batching:_dealt"
SCHEDULER, ACCUMULATE = "flowledger.run.generate:Scheduler", "flowledger.run.update:accumulate"
STEP = "flowledger.run.update:optimizer_step"
FOLDER, DUE, WRITE = (f"flowledger.run.checkpoints:{name}" for name in ("folder_of", "due", "write"))

LATE_S = 0.25  # of one rank, each forward pass
REWARD_S, WRITE_S = 6.0, 4.0  # of a stage, once a step


def _slow(seconds: float) -> Any:
    def make(original: Function) -> Function:
        def sick(*args: Any, **given: Any) -> Any:
            time.sleep(seconds)
            return original(*args, **given)

        return sick

    return make


def slow_rank() -> Changes:
    """The last rank is slower than the others in every forward pass."""
    return {FORWARD: _slow(LATE_S)} if is_last_rank() else {}


def slow_reward() -> Changes:
    """One response takes the verifier seconds, and everybody waits for it."""
    return {REWARD: _slow(REWARD_S)}


def slow_checkpoint() -> Changes:
    """A checkpoint after every step, to a disk that takes its time (and keeps nothing), while everybody waits."""
    somewhere = {FOLDER: lambda _: lambda *_: Path("checkpoints"), DUE: lambda _: lambda *_: True}
    return {**somewhere, WRITE: lambda _: lambda *_: time.sleep(WRITE_S)}


def long_sample() -> Changes:
    """The first sample of each step does not end before the limit, long after all others have."""

    def goes_on(responses: Any, reason: Tensor) -> Tensor:
        return torch.where((responses.samples == 0) & (reason != LENGTH), -1, reason)

    return {ENDINGS: endings(goes_on)}


def dealt_by_length() -> Changes:
    """The samples are sorted by length and cut into as many heaps as there are ranks: one has all the long ones."""

    def make(original: Function) -> Function:
        def sick(samples: Any, lengths: Any, kept: Any, ranks: int) -> list[list[int]]:
            order, each = sorted(samples, key=lambda i: lengths[i]), len(samples) // ranks
            return [sorted(order[k * each : (k + 1) * each]) for k in range(ranks)]

        return sick

    return {DEALT: make}


def tiny_micro_batches() -> Changes:
    """Every sample is a micro-batch of its own, whatever the limits allow."""

    def make(original: Function) -> Function:
        return lambda samples, *_: tuple((i,) for i in samples)

    return {MICRO: make}


def slots_idle() -> Changes:
    """Half of the slots of the engine stay empty while samples wait for one."""

    def make(original: Function) -> Function:
        return lambda *, slots, **given: original(slots=max(1, slots // 2), **given)

    return {SCHEDULER: make}


def micro_batch_skipped() -> Changes:
    """The last rank leaves the last micro-batch of each mini-batch out."""
    short = words(batch=lambda batch: replace(batch, micro_batches=batch.micro_batches[:-1]))
    return {ACCUMULATE: short} if is_last_rank() else {}


def collectives_out_of_order() -> Changes:
    """The last rank asks for a gather where the others add up."""

    def make(original: Function) -> Function:
        def sick(*, ranks: Ranks, **given: Any) -> Any:
            collectives.gathered(torch.zeros(2, device=ranks.device), ranks.group("world"))
            return original(ranks=ranks, **given)

        return sick

    return {STEP: make} if is_last_rank() else {}


def rank_dies() -> Changes:
    """The last rank is killed in the middle of a step, without a word."""

    def make(original: Function) -> Function:
        def sick(**given: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        return sick

    return {REWARD: make} if is_last_rank() else {}
