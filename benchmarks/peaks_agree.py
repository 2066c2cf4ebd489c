"""Peaks of live bytes, planned beside recorded: every stage on every rank of a mesh, of this project's own loop.

Each rank runs two steps. The first makes the optimizer's states; the second is watched operator by operator. A thread of gloo
lets go of a finished collective's tensors a moment after their owner goes on, so that now and then a buffer lives into the
next one's allocation. Here the owner waits for that moment: what is left are the loop's own tensors, the same in every run.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import forked

from flowledger.config.foreign import Reading
from flowledger.config.schema import RunConfig
from flowledger.flow.seams import Function, replaced
from flowledger.plan.memory import LATER, StageMemory
from flowledger.plan.plan import Plan
from flowledger.plan.subject import architecture_of
from flowledger.record.adapters.collectives import PROBES as COLLECTIVES
from flowledger.record.adapters.loop import PROBES
from flowledger.record.attach import attach
from flowledger.record.recorder import Recorder
from flowledger.run import loop

PAUSE_S = 0.001  # after each wait for a collective
_WAIT = "torch._C._distributed_c10d:Work.wait"
_DISPATCH = "flowledger.record.operators:Operators.__torch_dispatch__"  # functional collectives wait in an operator


class Pair(NamedTuple):
    """The peak of one stage on one rank, in bytes."""

    rank: int
    stage: str
    planned: int
    recorded: int

    @property
    def error(self) -> float:
        """Signed, as a fraction of what was recorded."""
        return self.planned / self.recorded - 1


class Peaks:
    """Takes rows, and keeps the bytes by kind at the peak of each stage of a later step."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, int]] = {}

    def put(self, row: Any) -> None:
        if getattr(row, "instant", None) == "peak" and row.step == LATER and row.stage is not None:
            self.kinds.setdefault(row.stage, {})[row.kind] = row.allocated


def peaks(config: RunConfig) -> list[Pair]:
    """Every stage on every rank. Prompts should all have `data.max_prompt_tokens`: that is what is planned."""
    return pairs(config, forked.ranks(config.mesh.dp * config.mesh.model, watched, config))


def pairs(config: RunConfig, recorded: Sequence[Mapping[str, int]]) -> list[Pair]:
    """What each rank has recorded of its stages, beside what is planned."""
    plan = planned(config)
    return [
        Pair(rank, stage, _on(plan, rank, stage).peak.bytes, size)
        for rank, sizes in enumerate(recorded)
        for stage, size in sizes.items()
    ]


def worst(pairs: list[Pair]) -> Pair:
    """The pair that agrees least."""
    return max(pairs, key=lambda pair: abs(pair.error))


def planned(config: RunConfig) -> Plan:
    """The plan of a configuration of the loop."""
    return Plan(reading=Reading(config=config), architecture=architecture_of(config, None), gpu=None)


def watched(config: RunConfig) -> dict[str, int]:
    """Stage -> bytes at its peak in a later step, on this rank."""
    return {stage: sum(kinds.values()) for stage, kinds in kinds_of_peaks(config).items()}


def kinds_of_peaks(config: RunConfig) -> dict[str, dict[str, int]]:
    """The same by kind."""
    rows = Peaks()
    with loop.prepared(config.model_copy(update={"steps": LATER + 1})) as world:
        world.stop_ids = ()  # every response is as long as it may be, as it is planned
        steps = loop.train(world)
        for _ in range(LATER):
            next(steps)
        recorder = Recorder(rows, level="tensors", bindings=world.bindings, ops_every=1, rank=world.ranks.rank)
        with _patient(), attach((*PROBES, *COLLECTIVES), recorder):
            list(steps)
    return rows.kinds


@contextmanager
def _patient() -> Iterator[None]:
    """Gloo has let go of what a collective moved before its owner goes on."""

    def waiting(wait: Function) -> Function:
        def waited(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            time.sleep(PAUSE_S)
            return result

        return waited

    def dispatching(dispatch: Function) -> Function:
        def dispatched(watch: Any, operator: Any, *args: Any) -> Any:
            result = dispatch(watch, operator, *args)
            if operator.name() == "_c10d_functional::wait_tensor":
                time.sleep(PAUSE_S)
            return result

        return dispatched

    with replaced([(_WAIT, waiting), (_DISPATCH, dispatching)]) as missed:
        assert not missed
        yield


def _on(plan: Plan, rank: int, stage: str) -> StageMemory:
    return next(
        one
        for one in plan.memory
        if one.stage == stage and one.step == LATER and one.ranks.first <= rank < one.ranks.first + one.ranks.count
    )
