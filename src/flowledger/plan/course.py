"""What one rank does in one step of flowledger's own loop: its rows, its micro-batches, its part of each model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowledger.config import passes
from flowledger.config.schema import RunConfig
from flowledger.flow.mesh import Mesh, cut
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.loop_setting import sharing
from flowledger.plan.rows_of_tokens import Micro, TokenRow
from flowledger.plan.shards import Shards
from flowledger.plan.weight import ADAPTER, Weight
from flowledger.tables.models import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One step of one rank, whose samples and widths are known or taken at their limits."""

    config: RunConfig
    rank: int
    on: Mesh
    models: Mapping[str, tuple[Architecture, Shards]]  # role -> its sizes and pieces
    mini_batches: Sequence[Sequence[Micro]]  # of this data-parallel rank
    own: Mapping[str, Sequence[Sequence[Micro]]] = field(default_factory=dict)  # stage -> where it cuts samples anew
    prompt: int  # S_prompt
    response: int  # S_resp

    @property
    def samples(self) -> int:
        """B."""
        return self.config.samples_per_step

    @property
    def prompts_of_ranks(self) -> list[int]:
        """Prompts that each rank of the world samples: chunks, the last ones shorter."""
        ends = (cut((0, self.config.data.prompts_per_step), self.on.size, rank) for rank in range(self.on.size))
        return [stop - start for start, stop in ends]

    @property
    def samples_of_ranks(self) -> list[int]:
        """Samples that each rank of the world samples."""
        return [prompts * self.config.rollout.samples_per_prompt for prompts in self.prompts_of_ranks]

    @property
    def trained_of_ranks(self) -> list[int]:
        """Rows of each data-parallel rank: equally many."""
        return [self.samples // self.on.degree("dp")] * self.on.degree("dp")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a model, its activations and its gradients."""
        return ITEMSIZE[self.config.model.dtype]

    def itemsize_of(self, weight: Weight) -> int:
        """Bytes of an element of a weight and of its gradient: peft keeps adapters in float32 (plan/own_loop.py)."""
        return ITEMSIZE["float32"] if weight.part == ADAPTER else self.itemsize

    def batches(self, stage: str) -> Sequence[Sequence[Micro]]:
        """Mini-batches of a stage; of a pass that cuts samples anew, one."""
        return self.own.get(stage, self.mini_batches)

    def row(self, micro: Micro, role: str) -> TokenRow:
        """A micro-batch as one row of tokens for a role's model."""
        return TokenRow(micro, sharing(self.config, role))

    def tokens(self, micro: Micro, role: str) -> int:
        """Tokens of a micro-batch that go through the model on this rank: packed, or [B_micro, S] with all padding."""
        if self.config.actor.packed:
            return self.row(micro, role).local_tokens
        return len(micro) * (self.prompt + self.response)

    def wanted(self, micro: Micro, role: str) -> int:
        """Response tokens whose states are on this rank."""
        return self.row(micro, role).wanted(self.on.at(self.rank, "cp"), self.on.at(self.rank, "sp"))

    @property
    def bypasses(self) -> bool:
        return self.config.algorithm.policy_loss == passes.BYPASS
