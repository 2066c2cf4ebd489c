"""One model at work on one kind of rank: what every memory figure of a plan is computed from.

A `Job` is made from a RunConfig (one for each role and stage) or from a published measurement (the benchmarks do that),
so that what is scored there is what a user gets here.
"""

from dataclasses import dataclass

from flowledger.config.engine import Engine, Mesh
from flowledger.tables.models import Architecture

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its engine, and the micro-batch that goes through it.

    `tokens` are those of one micro-batch on one data-parallel rank, before cp and sp cut them: sequences*longest with
    padding, the packed sum without.
    """

    architecture: Architecture
    engine: Engine
    world: int  # ranks that work on this model together
    gpus_per_node: int = 8
    device: str | None = None  # a name of the table of devices; null: CPU
    sequences: int
    tokens: int
    longest: int  # tokens of the longest sequence
    micro_batches: int = 1  # of one optimizer step
    gradients: bool = True  # false: a pass under no_grad (log-probs, values)
    head: str = "lm"  # lm, value (one number a token), none
    logit_tokens: int | None = None  # tokens whose logits are computed; null: all of `tokens`
    beside_tokens: int = 0  # prompts and responses that attention joins for each sample which shares its prompt
    pp_rank: int = 0
    last: "Job | None" = None  # the last micro-batch of the step, where it is smaller than those before it
    own_loop: bool = False  # flowledger's own; else what its engine says
    environment: tuple[tuple[str, str], ...] = ()  # variables that change memory (CUBLAS_WORKSPACE_CONFIG, …)

    @property
    def mesh(self) -> Mesh:
        return self.engine.mesh or Mesh()

    @property
    def dp(self) -> int:
        """Data-parallel degree: what tp, pp, cp and sp leave of the world."""
        return max(1, self.world // self.mesh.model)

    @property
    def shard(self) -> int:
        """Ranks that share one copy of what is sharded: FSDP shards over all but tp and pp; so does ZeRO."""
        whole = max(1, self.world // (self.mesh.tp * self.mesh.pp))
        return min(self.engine.shard_size or whole, whole)

    @property
    def expert_shard(self) -> int:
        """Ranks that share the optimizer state of one expert (Megatron): world / (pp*etp*ep)."""
        mesh = self.mesh
        return max(1, self.world // (mesh.pp * (mesh.etp or mesh.tp) * mesh.ep))

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on this rank: cut by cp and by Ulysses sp, not by Megatron's sequence parallelism."""
        return -(-self.tokens // (self.mesh.cp * self.mesh.sp))
