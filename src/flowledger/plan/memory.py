"""The planned memory ledger: each stage on each kind of rank, its peak instant and what it is made of.

Both sides of a colocated device are in one sum: the model at work, the models that rest beside it, and the inference
engine, awake while it generates and asleep while others train.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flowledger.config.agreement import OWN
from flowledger.config.engine import Serving
from flowledger.config.schema import RunConfig
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import order
from flowledger.flow.stages import stage as flow_stage
from flowledger.ledger.rows import MemoryRow, TensorRow
from flowledger.plan import weight_sync
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.job import Job
from flowledger.plan.megatron import timeline as megatron
from flowledger.plan.reserved import reserved
from flowledger.plan.roles import Work
from flowledger.plan.serving import Served
from flowledger.plan.shapes import RankClass
from flowledger.plan.timeline import BLOCK, Clock, Live, Peak, Timeline
from flowledger.tables.constants import constant
from flowledger.tables.models import Architecture

FIRST, LATER = 0, 1  # the first step, and every later one: optimizer states are there from the second update on


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One stage on one rank class, on the first step or a later one. Bytes of one rank."""

    stage: str
    role: str
    ranks: RankClass
    step: int
    peak: Peak
    reserved: int  # what the caching allocator is expected to hold then
    host: int  # in host memory, at its fullest
    rest: Mapping[str, int]  # kind -> bytes that stay on the device when the stage has ended
    limit: int | None

    @property
    def kinds(self) -> dict[str, int]:
        """Kind -> bytes at the peak. They add up to it: what the allocator's blocks round up is residue."""
        found = self.peak.by_kind()
        rounded = self.peak.bytes - sum(found.values())
        return found | ({"residue": found.get("residue", 0) + rounded} if rounded else {})

    @property
    def free(self) -> int | None:
        """Bytes between the expected reserved memory and the limit; negative where it does not fit."""
        return None if self.limit is None else self.limit - max(self.reserved, self.peak.bytes)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a memory ledger is computed from: jobs by stage, engines, and the device."""

    config: RunConfig
    architecture: Architecture
    jobs: Mapping[tuple[str, str], tuple[Work, Job]]  # (stage, rank class) -> the model at work there
    serving: Serving
    served: Served | None  # the inference engine, where it lives on the same devices
    greedy: Served | None = None  # a second generation, which gives each prompt one response
    limit: int | None
    batch: Mapping[str, tuple[Live, ...]]  # stage -> data tensors that lie on the device during it

    @cached_property
    def timelines(self) -> Mapping[tuple[str, str], Timeline]:
        """(stage, rank class) -> the model at work there, alone, on a later step."""
        return {key: backend(job).timeline(job) for key, (_, job) in self.jobs.items()}

    @cached_property
    def held(self) -> Mapping[tuple[str, str], tuple[Live, ...]]:
        """(role, rank class) -> what a role holds between stages: said by its update where it has one."""
        trained = {work.role for work, _ in self.jobs.values() if work.gradients}
        return {
            (work.role, ranks): backend(job).resting(job)
            for (_, ranks), (work, job) in self.jobs.items()
            if work.gradients or work.role not in trained
        }

    @cached_property
    def sync(self) -> Timeline:
        """The weight sync, which is alike on every rank."""
        clock = Clock()
        trainer = next(work.engine for work, _ in self.jobs.values() if work.stage == "update_actor")
        shared = self.config.rollout.weights == "shared"
        lives = weight_sync.lives(self.architecture, trainer, self.serving, clock, shared=shared)
        return Timeline(tuple(f"weight_sync/{name}" for name in clock.names) or ("weight_sync",), tuple(lives))


def ledger(scene: Scene, classes: Sequence[RankClass], stages: Sequence[str]) -> list[StageMemory]:
    """Every stage on every rank class, first step and later ones, in the order of the flow."""
    return [
        _stage(scene, name, ranks, step)
        for step in (FIRST, LATER)
        for name in order()
        if name in stages
        for ranks in classes
    ]


def _stage(scene: Scene, name: str, ranks: RankClass, step: int) -> StageMemory:
    timeline = _timeline(scene, name, ranks, step)
    peak = timeline.peak(block=_block(scene))
    hosted = timeline.totals(host=True)
    rest = [live for live in timeline.alive(len(timeline.instants) - 1) if live.persistent]
    found = scene.jobs.get((name, ranks.name))
    role = found[0].role if found else flow_stage(name).role
    return StageMemory(
        stage=name, role=role, ranks=ranks, step=step, peak=peak, host=max(hosted, default=0),
        reserved=reserved(timeline, found[1]) if found else peak.bytes, rest=_by_kind(rest), limit=scene.limit,
    )  # fmt: skip


def _block(scene: Scene) -> int:
    """The caching allocator of a GPU rounds up; a CPU does not."""
    return BLOCK if scene.config.hardware.gpu else 1


def _timeline(scene: Scene, name: str, ranks: RankClass, step: int) -> Timeline:
    """The stage with everything that rests beside it."""
    found = scene.jobs.get((name, ranks.name))
    beside = [*resting(scene, name, ranks, step), *scene.batch.get(name, ()), *_process(scene)]
    if found is None:
        return _engine_stage(scene, name).beside(beside)
    work, job = found
    timeline: Timeline = scene.timelines[(name, ranks.name)]
    if step == FIRST and work.gradients and work.updates == 1:
        timeline = backend(job).first_step(timeline)
    return timeline.beside([*beside, *_engine(scene, awake=False)])


def _process(scene: Scene) -> tuple[Live, ...]:
    """What the trainer's own process holds on a GPU beside its tensors: the context, and NCCL where ranks talk."""
    if not scene.config.hardware.gpu:
        return ()
    job = next(job for _, job in scene.jobs.values())
    size = round(constant("cuda_context")) + (round(constant("trainer_nccl")) if job.world > 1 else 0)
    return (
        Live(name="comm_buffer", kind="residue", bytes=size, label="context and NCCL of the trainer", persistent=True),
    )


def backend(job: Job) -> Any:
    """The module that knows how this engine spends memory; both have one interface (timeline, first_step, resting)."""
    return megatron if job.engine.strategy == "megatron" else fsdp


def _engine(scene: Scene, *, awake: bool) -> tuple[Live, ...]:
    if scene.served is None:
        return ()
    return scene.served.awake if awake else scene.served.asleep


def _engine_stage(scene: Scene, name: str) -> Timeline:
    """A stage without a training job: the rollout, the weight sync, and those that only handle data."""
    if name == "weight_sync":
        pool = (live for live in _engine(scene, awake=True) if live.kind == "kv_cache")
        return scene.sync if scene.serving.sleeps else scene.sync.beside(pool)
    if name not in ("rollout", "validate"):
        return Timeline((name,), ()).beside(_engine(scene, awake=False))
    return _generation(scene, name)


def _generation(scene: Scene, name: str) -> Timeline:
    """Rollout. In flowledger's own loop the prompts pass through the model first, then tokens are sampled one by one."""
    if scene.config.framework != OWN or scene.served is None:
        return Timeline((name,), ()).beside(_engine(scene, awake=True))
    instants: list[str] = []
    lives = list(scene.served.asleep)  # the weights
    for word, served in (("", scene.served), ("greedy ", scene.greedy)):
        if served is not None:
            at = len(instants)
            instants += [f"{name}/{word}prefill", f"{name}/{word}decode"]
            lives += _one_generation(served, at)
    return Timeline(tuple(instants), tuple(lives))


def _one_generation(served: Served, at: int) -> list[Live]:
    """Prefill at an instant, decoding at the next; the cache is there in both."""
    prompts = Live(
        name="hidden_states", kind="temporary", bytes=served.prefill, born=at, dies=at,
        label="forward pass over the prompts",
    )  # fmt: skip
    made = (live for live in served.awake if not live.persistent)
    return [prompts, *(replace(live, born=at + (live.name == "logits"), dies=at + 1) for live in made)]


def resting(scene: Scene, name: str, ranks: RankClass, step: int) -> Iterable[Live]:
    """What other models, and the parts of this one that do not take part, hold while a stage runs."""
    at_work = scene.jobs.get((name, ranks.name))
    alone = scene.timelines.get((name, ranks.name))
    brought = {live.label for live in alone.lives if live.kind == "param" and live.persistent} if alone else set()
    for (role, rank_class), lives in scene.held.items():
        if rank_class != ranks.name:
            continue
        unborn = step == FIRST and _before_first_update(role, name)
        own = at_work is not None and at_work[0].role == role
        for live in lives:
            if unborn and live.name == "optimizer_state":
                continue
            if own and at_work and (at_work[0].gradients or live.label in brought):
                continue  # the model at work brings its own
            yield live


def _before_first_update(role: str, name: str) -> bool:
    """Whether a stage of the first step runs before this role's optimizer has made its states."""
    places = list(order())
    update = {"actor": "update_actor", "critic": "update_critic"}.get(role)
    return update is not None and places.index(name) <= places.index(update)


def _by_kind(lives: Iterable[Live]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for live in lives:
        sums[live.kind] = sums.get(live.kind, 0) + live.total
    return sums


def rows(stages: Sequence[StageMemory]) -> list[MemoryRow]:
    """The same as rows of the ledger: for each stage its peak by kind with a total, and what is left at its end."""
    found: list[MemoryRow] = []
    for one in stages:
        common: dict[str, Any] = {
            "t_ns": 0, "step": one.step, "role": one.role, "stage": one.stage, "rank": one.ranks.first,
            "rank_count": one.ranks.count,
        }  # fmt: skip
        kinds = one.kinds
        found += [MemoryRow(**common, instant="peak", kind=kind, allocated=kinds.get(kind, 0)) for kind in KINDS]
        found.append(
            MemoryRow(
                **common,
                instant="peak",
                kind="total",
                allocated=one.peak.bytes,
                reserved=one.reserved,
                host_used=one.host,
                limit=one.limit,
                fragmentation=1 - one.peak.bytes / one.reserved if one.reserved else None,
            )
        )
        found += [MemoryRow(**common, instant="end", kind=kind, allocated=one.rest.get(kind, 0)) for kind in KINDS]
        found.append(MemoryRow(**common, instant="end", kind="total", allocated=sum(one.rest.values())))
    for number, row in enumerate(found):
        row.seq = row.t_ns = number
    return found


def worst(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage and rank class that come closest to the limit: most reserved memory, later steps first."""
    return max(stages, key=lambda one: (max(one.reserved, one.peak.bytes), one.step))


def batch_lives(
    rows_: Sequence[TensorRow], stages: Sequence[str], *, on_host: bool, held: bool
) -> dict[str, tuple[Live, ...]]:
    """Stage -> the data tensors of the whole step that are alive during it, on one rank. `held`: until the step ends.

    A tensor lives from the stage that writes it to the last that reads it, from each stage on in the largest form met so
    far; the forms of one micro-batch are part of the model's own timeline.
    """
    places = {name: index for index, name in enumerate(name for name in order() if name in stages)}
    sizes: dict[str, dict[int, int]] = {}  # tensor -> place -> bytes of its largest form there
    for row in rows_:
        if row.kind == "batch" and row.phase is None and row.dims and "B_prompt" in row.dims and row.stage in places:
            met = sizes.setdefault(row.tensor_name, {})
            at = places[row.stage]
            met[at] = max(met.get(at, 0), row.bytes or 0)
    return {
        name: tuple(
            Live(
                name=tensor, kind="batch", bytes=max(size for place, size in met.items() if place <= at), host=on_host,
                label=f"{tensor} of the step",
            )
            for tensor, met in sizes.items()
            if min(met) <= at and (held or at <= max(met))
        )
        for name, at in places.items()
    }  # fmt: skip
