"""Where a recording process stands in the meshes of its job, and what share of a tensor it should hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowledger.flow.mesh import Mesh, local_shape
from flowledger.flow.stages import mesh_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank, and the meshes of the job by name: `train`, and `rollout` where that is another."""

    rank: int = 0
    meshes: Mapping[str, Mesh] = field(default_factory=dict)

    def mesh_of(self, name: str, stage: str | None) -> str:
        """The name of the mesh that a tensor lies on in a stage; "" where one process is all there is."""
        if not self.meshes:
            return ""
        found = mesh_of(name, stage)
        return found if found in self.meshes else "train"

    def share(self, mesh: str, placement: Mapping[str, str], dim: int, size: int) -> int:
        """What this rank holds of a dimension of `size`."""
        cuts = {axis: "Shard(0)" for axis, text in placement.items() if text == f"Shard({dim})"}
        return local_shape((size,), cuts, self.meshes[mesh], self.rank)[0]

    def cut(self, mesh: str, placement: Mapping[str, str]) -> list[str]:
        """`axis: Shard(d)` for every axis along which ranks do not hold the same."""
        degrees = dict(self.meshes[mesh].degrees)
        return [
            f"{axis}: {text}" for axis, text in placement.items() if degrees.get(axis, 1) > 1 and text != "Replicate()"
        ]


ALONE = Place()
