"""Where a recording process stands in the meshes of its job, and what share of a tensor it should hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowledger.flow.dims import Dim
from flowledger.flow.mesh import Mesh, authoritative
from flowledger.flow.rank_classes import spans
from flowledger.flow.shares import share
from flowledger.flow.stages import mesh_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank, and the meshes of the job by name: `train`, and `rollout` where that is another."""

    rank: int = 0
    meshes: Mapping[str, Mesh] = field(default_factory=dict)

    def mesh_of(self, name: str, stage: str | None, access: str) -> str:
        """The name of the mesh that a tensor lies on where a stage reads or writes it; "" where one process is all there is."""
        if not self.meshes:
            return ""
        found = mesh_of(name, stage, access)
        return found if found in self.meshes else "train"

    def share(self, mesh: str, placement: Mapping[str, str], at: int, dim: Dim, bindings: Mapping[str, int]) -> int:
        """What this rank holds of dimension number `at`, whose symbols are bound."""
        return share(dim, at, placement, bindings, self.meshes[mesh], self.rank, mesh=mesh)

    def cut(self, mesh: str, placement: Mapping[str, str]) -> list[str]:
        """`axis: Shard(d)` for every axis along which ranks do not hold the same."""
        degrees = dict(self.meshes[mesh].degrees)
        return [
            f"{axis}: {text}" for axis, text in placement.items() if degrees.get(axis, 1) > 1 and text != "Replicate()"
        ]

    def owners(self, mesh: str, placement: Mapping[str, str], *, own_stage: bool) -> str:
        """The ranks whose pieces together are the tensor, `0` or `0-3`; `own_stage`: the ranks of this one's pipeline stage."""
        on = self.meshes[mesh]
        first = on.rank({"pp": on.at(self.rank, "pp")}) if own_stage else 0
        return spans([first + rank for rank in authoritative(placement, on)])


ALONE = Place()
