"""How flowledger's own loop lies on its ranks: two meshes, the pieces of its weights, and the tokens of each rank.

Every rank samples a part of the prompts, whatever the mesh that trains; what is not cut evenly is counted out here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowledger.config.schema import RunConfig
from flowledger.flow.mesh import Mesh, cut, mesh
from flowledger.plan.fsdp.adapters import parameters
from flowledger.plan.load import Load
from flowledger.plan.own_loop import asked
from flowledger.plan.rows_of_tokens import Micro, Sample, Sharing, TokenRow, alike
from flowledger.plan.setting import RankClass, Setting
from flowledger.plan.shards import Shards
from flowledger.plan.weights import weights
from flowledger.tables.models import Architecture


def spread(
    setting: Setting, config: RunConfig, load: Load, classes: tuple[RankClass, ...], role: str = "actor"
) -> Setting:
    """A setting of one process, on the ranks of the configured mesh. One process stays as it is."""
    on = mesh(**config.mesh.degrees)
    if on.size == 1:
        return setting
    samples = setting.bindings["B_micro"] // on.degree("dp")
    place = Place(config=config, on=on, micro=fullest_micro_batch(config, load), samples=samples, role=role)
    return replace(
        setting, mesh=on, rollout=mesh(dp=on.size), local=place.sizes,
        bindings={**setting.bindings, **place.together(len(classes))},
        sequence_parallel=asked(config, role).sequence_parallel and on.degree("tp") > 1,
    )  # fmt: skip


def shards(
    models: Mapping[str, tuple[Architecture, str]], config: RunConfig, classes: Mapping[str, tuple[RankClass, ...]]
) -> dict[str, Shards]:
    """Role -> the pieces of its model, of which size, kind of head and pipeline stages are given.

    With LoRA the policy is the reference.
    """
    on, lora = mesh(**config.mesh.degrees), config.model.lora
    found = {}
    for role, (sizes, head) in models.items():
        held, adapted = weights(sizes, head=head), lora is not None and role in ("actor", "rollout")
        if lora is not None and adapted:
            held = (*held, *parameters(held, lora))
        tied, stages = sizes.tied and head == "lm", tuple(one.layers for one in classes[role])
        found[role] = Shards(weights=held, on=on, stages=stages, tied=tied, adapted=adapted)
    return {"ref": found["actor"], **found}


def sharing(config: RunConfig, role: str = "actor") -> Sharing:
    """Who shares a packed row of a role's model."""
    along = asked(config, role).sequence_parallel
    return Sharing(
        cp=config.mesh.cp, sp=config.mesh.sp, tp=config.mesh.tp if along else 1,
        shared_prompts=config.actor.shared_prompts,
    )  # fmt: skip


def fullest_micro_batch(config: RunConfig, load: Load) -> Micro:
    """The samples of the worst micro-batch of one data-parallel rank, at full length; what is left of its tokens is one more.

    Balancing deals the samples of a group to all dp ranks, as plan/load.py counts their prompts.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    group = max(1, config.rollout.samples_per_prompt // config.mesh.dp)
    micro = alike(load.sequences, prompt=prompt, response=response, group=group)
    # under cp each sample stands alone, and where it is padded
    shared = Sharing(shared_prompts=config.actor.shared_prompts and config.actor.packed and config.mesh.cp == 1)
    while len(micro) > 1 and TokenRow(micro, shared).tokens > load.tokens:  # a budget does not hold the last in full
        micro = micro[:-1]
    rest = load.tokens - TokenRow(micro, shared).tokens
    return micro if rest <= 0 else (*micro, Sample(prompt=rest, response=0, group=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What each rank has of a step whose samples are all of full length, or of the micro-batch given."""

    config: RunConfig
    on: Mesh
    micro: Micro
    role: str = "actor"  # whose model
    samples: int | None = (
        None  # B_micro of a dp rank; None: all of `micro`, which else has what is left of the tokens too
    )

    def sizes(self, lies_on: str, rank: int) -> Mapping[str, int]:
        """Symbol -> its size on this rank, on the mesh that trains or on that of the rollout."""
        return self._sampled(rank) if lies_on == "rollout" else self._trained(rank)

    def together(self, stages: int) -> dict[str, int]:
        """The same of all ranks."""
        sampled = [self._sampled(rank) for rank in range(self.on.size)] if self.on.size <= 64 else None
        row, dp = TokenRow(self.micro, sharing(self.config, self.role)), self.on.degree("dp")
        ways = self.on.size // (dp * self.on.degree("tp") * stages)
        one_replica = (
            self.on.rank({"cp": at // self.on.degree("sp"), "sp": at % self.on.degree("sp")}) for at in range(ways)
        )
        logits = sum(self._trained(rank)["T_logit"] for rank in one_replica) * dp
        found = {"T": row.tokens * dp, "T_logit": logits, "B_micro": self._samples * dp}
        names = ("B_run", "B_slot", "B_admit", "N_decode")
        if sampled is None:  # prompts are cut in chunks: all ranks but the last have as many as the first
            each = self._sampled(0)
            return found | {name: each[name] * self.on.size for name in names}
        return found | {name: sum(one[name] for one in sampled) for name in names}

    @property
    def _samples(self) -> int:
        return len(self.micro) if self.samples is None else self.samples

    def _trained(self, rank: int) -> Mapping[str, int]:
        row = TokenRow(self.micro, sharing(self.config, self.role))
        wanted = row.wanted(self.on.at(rank, "cp"), self.on.at(rank, "sp"))
        chunk = self.config.actor.log_prob_chunk_tokens or wanted
        return {"T": row.local_tokens, "T_logit": min(chunk, wanted), "B_micro": self._samples}

    def _sampled(self, rank: int) -> Mapping[str, int]:
        """Each rank has a scheduler of its own."""
        rollout, response = self.config.rollout, self.config.rollout.max_response_tokens
        start, stop = cut((0, self.config.data.prompts_per_step), self.on.size, rank)
        prompts, samples = stop - start, (stop - start) * rollout.samples_per_prompt
        slots = min(samples, rollout.max_running or samples)
        admitted = min(prompts, -(-slots // rollout.samples_per_prompt))
        return {
            "B_prompt": prompts, "B_run": slots, "B_slot": slots, "B_admit": admitted, "T": admitted * self.config.data.max_prompt_tokens,
            "T_logit": slots, "N_decode": response * -(-samples // slots) if slots else 0,
        }  # fmt: skip
