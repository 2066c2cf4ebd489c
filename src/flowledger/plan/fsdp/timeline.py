"""One optimizer step (or one pass without gradients) on one rank of a single process, DDP, FSDP or ZeRO, in instants.

`timeline` writes down the last micro-batch of a step and the optimizer step; what earlier micro-batches left is there
from the first instant. Steps later than the first: the optimizer's states exist. Bytes are those of one rank.
"""

from dataclasses import replace

from flowledger.plan.fsdp.pipeline import fills, in_flight
from flowledger.plan.fsdp.state import persistent, units
from flowledger.plan.fsdp.write import OPTIMIZER, Write
from flowledger.plan.job import Job
from flowledger.plan.timeline import Live, Timeline


def timeline(job: Job, *, variant: str = "") -> Timeline:
    """Everything alive on the device (and, marked, on the host) while this job runs.

    `variant` reads rows of another implementation of the layers first (a framework's own modules, compiled blocks; see
    tables/activations_hf.toml).
    """
    last = job.last if job.last and job.gradients else None
    number = job.micro_batches
    if fills(job):  # gradients come when activations are fewer
        ways = [
            _written(job, variant, first=True),
            _written(last if last and number == 2 else job, variant, first=False),
        ]
    elif last and (job.mesh.pp == 1 or in_flight(job) == 1):  # gradients are there when it is smaller
        ways = [_written(job, variant, first=number == 2), _written(last, variant)]
    else:
        ways = [_written(job, variant)]
    return max(ways, key=lambda made: made.peak().bytes)


def _written(job: Job, variant: str, *, first: bool | None = None) -> Timeline:
    write = Write(job, variant, first=first)
    write.forward()
    if job.gradients:
        write.backward()
        write.step()
    lives = [*persistent(job, write.units, working=True), *write.finish()]
    last = write.clock.now
    return Timeline(tuple(write.clock.names), tuple(_bounded(live, last) for live in lives))


def first_step(full: Timeline) -> Timeline:
    """The same on the first step: moments are made by the optimizer, so they do not exist before its instant."""
    at = full.instants.index(OPTIMIZER) if OPTIMIZER in full.instants else 0
    lives = [
        replace(live, born=at) if live.name == "optimizer_state" and not live.host else live for live in full.lives
    ]
    return Timeline(full.instants, tuple(lives))


def resting(job: Job) -> tuple[Live, ...]:
    """What stays between stages: parameters and optimizer states, on the device or (offloaded) on the host."""
    return tuple(persistent(job, units(job), working=False))


def _bounded(live: Live, last: int) -> Live:
    return live if live.dies <= last or live.persistent else replace(live, dies=last)
