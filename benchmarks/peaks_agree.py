"""Peaks of live bytes, planned beside recorded: every stage on every rank of a mesh, of this project's own loop.

Each rank runs two steps and is watched operator by operator; the second is compared, when the optimizer has its states.
"""

from typing import Any, NamedTuple

import forked

from flowledger.config.foreign import Reading
from flowledger.config.schema import RunConfig
from flowledger.plan.memory import LATER, StageMemory
from flowledger.plan.plan import Plan
from flowledger.plan.subject import architecture_of
from flowledger.record.adapters.collectives import PROBES as COLLECTIVES
from flowledger.record.adapters.loop import PROBES
from flowledger.record.attach import attach
from flowledger.record.recorder import Recorder
from flowledger.run import loop


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
    """Takes rows, and keeps the bytes by kind at the peak of each stage of the last step."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, int]] = {}

    def put(self, row: Any) -> None:
        if getattr(row, "instant", None) == "peak" and row.step == LATER and row.stage is not None:
            self.kinds.setdefault(row.stage, {})[row.kind] = row.allocated


def peaks(config: RunConfig) -> list[Pair]:
    """Every stage on every rank. Prompts should all have `data.max_prompt_tokens`: that is what is planned."""
    plan, world = planned(config), config.mesh.dp * config.mesh.model
    found = []
    for rank, recorded in enumerate(forked.ranks(world, watched, config)):
        for stage, kinds in recorded.items():
            found.append(Pair(rank, stage, _on(plan, rank, stage).peak.bytes, sum(kinds.values())))
    return found


def worst(pairs: list[Pair]) -> Pair:
    """The pair that agrees least."""
    return max(pairs, key=lambda pair: abs(pair.error))


def planned(config: RunConfig) -> Plan:
    """The plan of a configuration of the loop."""
    return Plan(reading=Reading(config=config), architecture=architecture_of(config, None), gpu=None)


def watched(config: RunConfig) -> dict[str, dict[str, int]]:
    """Stage -> kind -> bytes at its peak in the second step, on this rank."""
    rows = Peaks()
    with loop.prepared(config.model_copy(update={"steps": LATER + 1})) as world:
        recorder = Recorder(rows, level="tensors", bindings=world.bindings, ops_every=1, rank=world.ranks.rank)
        world.stop_ids = ()  # every response is as long as it may be, as it is planned
        with attach((*PROBES, *COLLECTIVES), recorder):
            for _ in loop.train(world):
                pass
    return rows.kinds


def _on(plan: Plan, rank: int, stage: str) -> StageMemory:
    return next(
        one
        for one in plan.memory
        if one.stage == stage and one.step == LATER and one.ranks.first <= rank < one.ranks.first + one.ranks.count
    )
