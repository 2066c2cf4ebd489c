"""One planned collective, and the groups in which ranks talk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowledger.flow.axes import EXPERT, JOINED
from flowledger.flow.mesh import Mesh

# Groups by name, as recordings name them: where two are the same ranks, the first name is theirs.
GROUPS: dict[str, tuple[str, ...]] = {
    "pp": ("pp",), "dp": JOINED["dp"], "ep": ("ep",), "cp": ("cp",), "sp": ("sp",), "tp": ("tp",),
    "tokens": JOINED["tokens"], "shards": JOINED["shards"], "expert_shards": JOINED["expert_shards"],
    "world": EXPERT,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Collectives that are alike. `bytes` is the size of one as `flow.comm` counts it."""

    stage: str | None
    phase: str | None
    what: str
    comm_type: str
    group: str
    bytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count


@dataclass(frozen=True, slots=True)
class Speaker:
    """Makes the collectives of one place in a step. Who is alone in a group says nothing there."""

    on: Mesh
    stage: str | None
    phase: str | None = None

    def size(self, name: str) -> int:
        """Ranks of a group."""
        size = 1
        for axis in GROUPS[name]:
            size *= self.on.degree(axis)
        return size

    def say(self, what: str, comm_type: str, group: str, size: int, count: int = 1) -> Iterator[Talk]:
        """So many collectives of this size."""
        if self.size(group) > 1 and count:
            yield Talk(
                stage=self.stage, phase=self.phase, what=what, comm_type=comm_type, group=named(self.on, group),
                bytes=size, count=count,
            )  # fmt: skip

    def gather(self, what: str, group: str, rows: Sequence[int], width: int) -> Iterator[Talk]:
        """Rows of `width` bytes of every rank, put together on all; each sends as many as the rank that has most."""
        yield from self.say(what, "all_gather", group, self.size(group) * max(rows) * width)


def peers_of(on: Mesh, group: str, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's group, itself included."""
    here = on.expert_coordinates(rank)
    return on.ranks({axis: range(on.degree(axis)) if axis in GROUPS[group] else (at,) for axis, at in here.items()})


def named(on: Mesh, group: str) -> str:
    """The first name of the ranks of a group."""
    mine = _axes(on, group)
    return next(name for name in GROUPS if _axes(on, name) == mine)


def _axes(on: Mesh, group: str) -> frozenset[str]:
    return frozenset(axis for axis in GROUPS[group] if on.degree(axis) > 1)
