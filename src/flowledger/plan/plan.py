"""One plan from end to end: the page to read first. Configuration in, the three ledgers and the findings out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flowledger.config.agreement import OWN
from flowledger.config.engine import Serving
from flowledger.config.foreign import Reading
from flowledger.config.schema import RunConfig
from flowledger.flow.stages import order
from flowledger.ledger.layout import rank_classes
from flowledger.ledger.rows import FindingRow, Row, TensorRow
from flowledger.plan import lifetimes, loop_setting, memory, own_loop, roles, serving, shapes
from flowledger.plan.bindings import bindings
from flowledger.plan.chain import Chain, chain
from flowledger.plan.checks import check
from flowledger.plan.communication import by_ranks, communication, spans
from flowledger.plan.course import Course
from flowledger.plan.engines import engines
from flowledger.plan.facts import facts
from flowledger.plan.job import Job
from flowledger.plan.lengths import Lengths
from flowledger.plan.load import Load, load
from flowledger.plan.memory import Scene, StageMemory
from flowledger.plan.own_loop import Share, dealt, within
from flowledger.plan.roles import Work
from flowledger.plan.rows_of_tokens import Micro
from flowledger.plan.serving import Served
from flowledger.plan.setting import trains_on
from flowledger.plan.shapes import RankClass, Setting
from flowledger.plan.shards import Shards
from flowledger.plan.subject import other_model
from flowledger.plan.talk import Talk
from flowledger.plan.timeline import Live
from flowledger.plan.verdicts import pools_hold, verdicts
from flowledger.tables.constants import constant
from flowledger.tables.gpus import Gpu
from flowledger.tables.models import Architecture

VISION = "only the language model is planned: the vision or audio tower and what it makes of images are left out"


@dataclass(frozen=True)
class Plan:
    """What a configuration comes to. The parts are computed when they are first asked for, and once."""

    reading: Reading
    architecture: Architecture
    gpu: Gpu | None
    lengths: Lengths | None = None

    @property
    def config(self) -> RunConfig:
        return self.reading.config

    @cached_property
    def works(self) -> tuple[Work, ...]:
        works = roles.works(self.config)
        return tuple(replace(one, engine=dealt(one.engine, self.sizes_of(one.role).layers)) for one in works)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        return roles.stages(self.config)

    @cached_property
    def classes(self) -> tuple[RankClass, ...]:
        """The actor's kinds of ranks."""
        return self._classes["actor"]

    @cached_property
    def _classes(self) -> Mapping[str, tuple[RankClass, ...]]:
        """Role -> the pipeline stages of its model."""
        world = roles.world(self.config)
        return {
            work.role: roles.classes(work.engine, self.sizes_of(work.role), world)
            for work in self.works
            if work.role == "actor" or self.config.framework == OWN
        }

    @cached_property
    def loads(self) -> Mapping[str, Load]:
        """Stage -> its worst micro-batch."""
        values = facts(self.config, self.architecture, self.lengths).values
        return {work.stage: load(work, self.config, self.dp(work), self.lengths, values) for work in self.works}

    def dp(self, work: Work) -> int:
        """Data-parallel degree of the model at work."""
        mesh = work.engine.mesh or self.config.mesh
        return max(1, roles.world(self.config) // mesh.model)

    @cached_property
    def chain(self) -> Chain:
        """From prompts to optimizer steps."""
        return chain(self.config, self.architecture, self.lengths)

    @cached_property
    def findings(self) -> list[FindingRow]:
        """What the rules say, and what the memory ledger means."""
        rules = check(self.config, self.architecture, self.lengths)
        return [*rules, *verdicts(self.config, self.architecture, self.serving, self.served, self.memory)]

    @cached_property
    def jobs(self) -> Mapping[tuple[str, str], tuple[Work, Job]]:
        """(stage, rank class) -> the model at work there."""
        return {
            (work.stage, ranks.name): (work, self._job(work, index))
            for work in self.works
            for index, ranks in enumerate(self.classes)
        }

    def _job(self, work: Work, index: int) -> Job:
        one = self.loads[work.stage]
        made = self._of_load(work, index, one)
        return made if one.last is None else replace(made, last=self._of_load(work, index, one.last))

    def _of_load(self, work: Work, index: int, one: Load) -> Job:
        mesh = work.engine.mesh or self.config.mesh
        return roles.job(
            work, self.config, self.sizes_of(work.role), tokens=one.tokens, sequences=one.sequences,
            micro_batches=one.micro_batches, pp_rank=min(index, mesh.pp - 1), beside_tokens=one.beside_tokens,
        )  # fmt: skip

    def sizes_of(self, role: str) -> Architecture:
        """The model of a role: its own where it names another that the catalogue knows, else the policy's."""
        return self._others.get(role) or self.architecture

    @cached_property
    def _others(self) -> Mapping[str, Architecture]:
        return {
            role: found
            for role, path in roles.own_models(self.config).items()
            if (found := other_model(path, self.config, self.architecture)) is not None
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how it was planned, beside how it was read."""
        unknown = [role for role in roles.own_models(self.config) if role not in self._others]
        seen = (VISION,) if re.search(r"(?i)(\b|[-_])(vl|vision|omni)(\b|[-_\d])", self.config.model.path) else ()
        return seen + tuple(
            f"the {role}'s model {roles.own_models(self.config)[role]!r} is not in the catalogue: planned as large as the policy"
            for role in unknown
        )

    @cached_property
    def limit(self) -> int | None:
        """Bytes of one device, as asked for or as its driver reports."""
        return self.config.memory.limit_bytes or (self.gpu.memory_bytes if self.gpu else None)

    @cached_property
    def served(self) -> Served:
        """One rank of the inference engine, with the trainer's models resting beside it where it is colocated.

        It starts before the first update, so before the optimizer has any state. Where ranks sample unequal shares: one of
        those that sample most.
        """
        if self.config.framework == OWN:
            return own_loop.served(self.config, self.architecture, self.shares[0].prompts)
        resting, asked = 0, self.serving
        if asked.colocated:
            scene = self._scene(None, batch={})
            resting = sum(
                live.total for live in memory.resting(scene, "rollout", self.classes[0], memory.FIRST) if not live.host
            )
        device = self.limit or round(constant("device_without_name"))
        return serving.engine(self.architecture, asked, device_bytes=device, resident_bytes=resting)

    @property
    def serving(self) -> Serving:
        """The inference engine as configured; flowledger's own loop has one of its own."""
        if self.config.framework != OWN:
            return self.config.rollout.serving
        return own_loop.serving(self.config, self.shares[0].prompts, self.config.rollout.samples_per_prompt)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The ranks of flowledger's own loop that sample equally many prompts."""
        return own_loop.shares(self.config)

    @cached_property
    def memory(self) -> list[StageMemory]:
        """The memory ledger: of each kind of rank, and of flowledger's own loop by what a rank samples too."""
        if self.config.framework != OWN:
            served = self.served if self.serving.colocated else None
            return memory.ledger(self._scene(served), self.classes, self.stages)
        found = [
            one
            for share in self.shares
            for one in memory.ledger(self._own_scene(share), within(self.classes, share), self.stages)
        ]
        places = {name: place for place, name in enumerate(order())}
        return sorted(found, key=lambda one: (one.step, places[one.stage], one.ranks.first))

    def _scene(
        self, served: Served | None, rank: int | None = None, batch: Mapping[str, tuple[Live, ...]] | None = None
    ) -> Scene:
        return Scene(
            config=self.config, architecture=self.architecture, jobs=self.jobs, serving=self.serving, served=served,
            limit=self.limit, batch=self._batch(rank) if batch is None else batch,
        )  # fmt: skip

    def _own_scene(self, share: Share) -> Scene:
        """The same for ranks of flowledger's own loop that sample so many prompts."""
        config, sizes = self.config, self.architecture
        greedy = own_loop.served(config, sizes, share.prompts, greedy=True) if config.needs("baseline") else None
        served = own_loop.served(config, sizes, share.prompts)
        return replace(self._scene(served, share.first), greedy=greedy)

    def _batch(self, rank: int | None = None) -> Mapping[str, tuple[Live, ...]]:
        """Data tensors of the whole step: on the device in flowledger's own loop, in the driver's host memory elsewhere."""
        own = self.config.framework == OWN
        split = self.setting.rollout is not None and self.setting.mesh.degree("dp") > 1
        trains = replace(self.setting, engines=None)  # engines answer requests: the step lies with who asks
        rows = [  # what estimators put together of the whole step is gone with them
            row
            for row in shapes.shapes(trains, self.classes, "batch", rank=rank)
            if row.tensor_name not in self.setting.stand_ins
            and (not split or row.placement or row.stage != "advantage")
        ]
        return memory.batch_lives(rows, self.stages, on_host=not own, held=own)

    @cached_property
    def setting(self) -> Setting:
        actor = next(work for work in self.works if work.stage == "update_actor")
        own = self.config.framework == OWN
        on = trains_on(actor.engine.mesh or self.config.mesh, self.dp(actor), folds=not own)
        tokens = self.loads["update_actor"].tokens
        sizes = bindings(self.config, self.architecture, self.dp(actor), tokens)
        if not own:  # a pool is not cut into slots: so many samples of full length lie in it at once
            holds = pools_hold(self.config, self.architecture, self.served)
            sizes["B_slot"] = min(sizes["B_slot"], holds or sizes["B_slot"])
        made = Setting(
            stages=self.stages, bindings=sizes,
            mesh=on, dtypes=self._dtypes(), packed=actor.engine.packed,
            unused=roles.unused(self.config), unwritten=roles.unwritten(self.config), shards=self._shards,
            stand_ins=roles.stand_ins(self.config), engines=engines(self.config, self.architecture),
        )  # fmt: skip
        of_stage = {work.stage: self._of_stage(work, made) for work in self.works if self._differs(work, actor)}
        whole = loop_setting.spread(made, self.config, self.loads[actor.stage], self.classes) if own else made
        return replace(whole, of_stage=of_stage)

    def _differs(self, work: Work, actor: Work) -> bool:
        """Whether a stage has other micro-batches or another model than the policy's update, on the same mesh."""
        other = self.sizes_of(work.role) != self.architecture
        if self.config.framework != OWN:
            return work.engine.mesh == actor.engine.mesh and (other or work.micro != actor.micro)
        asked, of_actor = own_loop.asked(self.config, work.role), own_loop.asked(self.config, "actor")
        return other or asked != of_actor or roles.cut_anew(self.config, work.stage)

    def _of_stage(self, work: Work, made: Setting) -> Setting:
        """The setting of such a stage: its micro-batches, sizes and pipeline stages."""
        one, dp, classes = self.loads[work.stage], self.dp(work), self._classes.get(work.role, ())
        sizes = bindings(
            self.config, self.sizes_of(work.role), dp, one.tokens, micro=work.micro,
            samples_at_once=work.mini_batch_samples or self.config.samples_per_step,
        )  # fmt: skip
        alone = replace(made, bindings=sizes, classes=classes)
        if self.config.framework != OWN:
            return alone
        return loop_setting.spread(alone, self.config, one, classes, work.role)

    @cached_property
    def _shards(self) -> Mapping[str, Shards]:
        """The pieces of each model of flowledger's own loop; of others it is not known here what they fuse."""
        if self.config.framework != OWN:
            return {}
        models = {work.role: (self.sizes_of(work.role), work.head) for work in self.works}
        models = {"rollout": (self.architecture, "lm"), **models}
        return loop_setting.shards(models, self.config, {"rollout": self.classes, **self._classes})

    def course(
        self, rank: int, mini_batches: Sequence[Sequence[Micro]] | None = None, *,
        own: Mapping[str, Sequence[Sequence[Micro]]] | None = None, prompt: int | None = None, response: int | None = None,
    ) -> Course:  # fmt: skip
        """What one rank of flowledger's own loop does in a step; without micro-batches and widths, at its limits."""
        models = {role: (self.sizes_of(role), one) for role, one in self._shards.items()}
        return Course(
            config=self.config, rank=rank, on=self.setting.mesh, models=models,
            mini_batches=self._full if mini_batches is None else mini_batches,
            own=self._full_own if own is None else own,
            prompt=prompt or self.config.data.max_prompt_tokens,
            response=response or self.config.rollout.max_response_tokens,
        )  # fmt: skip

    @cached_property
    def _full(self) -> Sequence[Sequence[Micro]]:
        """Mini-batches of one data-parallel rank, every micro-batch as full as it may get."""
        return self._full_of(next(work for work in self.works if work.stage == "update_actor"))

    @cached_property
    def _full_own(self) -> Mapping[str, Sequence[Sequence[Micro]]]:
        """The same of stages that cut samples anew."""
        return {work.stage: self._full_of(work) for work in self.works if roles.cut_anew(self.config, work.stage)}

    def _full_of(self, work: Work) -> Sequence[Sequence[Micro]]:
        one, samples = self.loads[work.stage], self.config.samples_per_step
        micro = loop_setting.fullest_micro_batch(self.config, one)
        return ((micro,) * one.micro_batches,) * -(-samples // (work.mini_batch_samples or samples))

    def _dtypes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for work in self.works:
            found[work.role] = work.engine.compute_dtype or work.engine.param_dtype
            found[f"param/{work.role}"] = work.engine.param_dtype
        found["rollout"] = self.config.rollout.serving.dtype or found["actor"]
        return found

    @cached_property
    def shapes(self) -> list[TensorRow]:
        """The shape ledger."""
        return shapes.shapes(self.setting, self.classes)

    @cached_property
    def fates(self) -> list[dict[str, Any]]:
        """The lifetime table."""
        return lifetimes.lifetimes(self.shapes, self.stages, self.setting.stand_ins)

    @property
    def worst(self) -> StageMemory:
        """The stage and kind of rank that come closest to the limit."""
        return memory.worst(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the engine starts and every stage stays within the device; None where no device was named."""
        return None if self.limit is None else self.served.fits and all((one.free or 0) >= 0 for one in self.memory)

    @property
    def rank_classes(self) -> dict[str, list[int]]:
        """Class -> its ranks: with equal shares of layers, heads, samples and prompts, as a manifest has it."""
        config = self.config.model_dump(mode="json", by_alias=True)
        degrees = dict(self.setting.mesh.degrees)
        return rank_classes(self.config.framework, config, degrees, self.setting.bindings)

    def rows(self) -> Sequence[Row]:
        """Everything as rows of the ledger."""
        events = lifetimes.storages(self.shapes, self.fates, self.setting.stand_ins)
        mesh = self.setting.mesh
        talks = [row for ranks, talks in self.talks for row in spans(talks, mesh, ranks.first, ranks.count)]
        return [*self.shapes, *events, *talks, *memory.rows(self.memory), *self.findings]

    def communication(self, ranks: RankClass) -> list[Talk]:
        """The collectives of a step on the first of these ranks; of flowledger's own loop alone."""
        return communication(self.course(ranks.first)) if self._shards else []

    @cached_property
    def talks(self) -> list[tuple[RankClass, list[Talk]]]:
        """The same of every rank: classes, and their parts where ranks of one send unequal bytes."""
        return by_ranks(self.course, self.setting.mesh, self.classes) if self._shards else []
