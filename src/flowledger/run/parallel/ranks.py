"""This process's place in the mesh, and the groups it talks to. One process is a mesh of ones: every group is itself.

Ranks are numbered as in `flow.mesh`: pp slowest, then dp, cp, sp, tp. `ep` rides on dp: of each ep neighbouring dp ranks
every one holds other experts; `edp` is what dp leaves (dp = edp*ep).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowledger.config.engine import Mesh
from flowledger.flow.axes import DENSE, EXPERT, JOINED
from flowledger.run.device import CPU

AXES = EXPERT  # of the device mesh, slowest first

# name -> axes whose ranks form it together
GROUPS: dict[str, tuple[str, ...]] = {
    **{axis: JOINED.get(axis, (axis,)) for axis in (*DENSE, "ep")},
    **JOINED,
    "world": AXES,
}
# Groups in which neighbours talk first: NCCL joins all ranks of a group at its first call, so all of them make one.
NEIGHBOURS = ("pp", "cp")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take part in a collective together, and which of them this process is."""

    name: str
    ranks: tuple[int, ...] = (0,)
    at: int = 0  # this process's place among them
    handle: dist.ProcessGroup | None = None  # None where there is nobody else

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return self.size == 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """The mesh as one process sees it."""

    rank: int = 0
    size: int = 1
    degrees: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    meshes: Mapping[str, DeviceMesh] = field(default_factory=dict)  # of each group, in one dimension
    groups: Mapping[str, Group] = field(default_factory=lambda: {name: Group(name) for name in GROUPS})
    device: torch.device = CPU  # where this process has its tensors
    cp_kind: Literal["ring", "all_to_all"] = "ring"  # how ranks of cp attend together
    vpp: int = 1  # chunks of layers that one rank of pp has

    def group(self, name: str) -> Group:
        """One of GROUPS."""
        return self.groups[name]

    def degree(self, name: str) -> int:
        """How many ranks a group has."""
        return self.groups[name].size

    def at(self, name: str) -> int:
        """This process's place in a group: its coordinate, for a group that is an axis."""
        return self.groups[name].at

    def submesh(self, name: str) -> DeviceMesh | None:
        """The one-dimensional device mesh of a group; None where it is alone."""
        return None if self.groups[name].alone else self.meshes[name]


ALONE = Ranks()


def coordinates(degrees: Mapping[str, int], rank: int) -> dict[str, int]:
    """Axis -> place of a rank; the last of AXES varies fastest."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, degrees[axis])
    return {axis: found[axis] for axis in AXES}


def degrees_of(mesh: Mesh) -> dict[str, int]:
    """Degrees of AXES for a configured mesh, whose ep divides its dp."""
    return {
        "pp": mesh.pp, "edp": mesh.dp // mesh.ep, "ep": mesh.ep, "cp": mesh.cp, "sp": mesh.sp, "tp": mesh.tp,
    }  # fmt: skip


def join(mesh: Mesh, device: torch.device = CPU) -> Ranks:
    """The ranks of this process in a mesh, its process groups made. The default process group must exist where needed."""
    degrees = degrees_of(mesh)
    if prod(degrees.values()) == 1:
        return replace(ALONE, device=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh_of_all = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=AXES)
    meshes = {
        name: mesh_of_all[axes] if len(axes) == 1 else mesh_of_all[axes]._flatten(name) for name, axes in GROUPS.items()
    }
    groups = {name: _group(name, axes, degrees, rank, meshes[name]) for name, axes in GROUPS.items()}
    for name in NEIGHBOURS:
        if device.type == "cuda" and not groups[name].alone:
            dist.all_reduce(torch.zeros(1, device=device), group=groups[name].handle)
    return Ranks(
        rank=rank, size=size, degrees=degrees, meshes=meshes, groups=groups, device=device,
        cp_kind=mesh.cp_kind, vpp=mesh.vpp,
    )  # fmt: skip


def _group(name: str, axes: Sequence[str], degrees: Mapping[str, int], rank: int, mesh: DeviceMesh) -> Group:
    here = coordinates(degrees, rank)
    others = (
        other
        for other in range(prod(degrees.values()))
        if all(at == here[axis] for axis, at in coordinates(degrees, other).items() if axis not in axes)
    )
    ranks = tuple(others)
    if len(ranks) == 1:
        return Group(name, ranks)
    return Group(name, ranks, ranks.index(rank), mesh.get_group())
