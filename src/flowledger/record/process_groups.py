"""Process groups by name: the axis whose ranks they are, as the job or its device mesh calls it, else the ranks."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

_OF_MESH = "mesh_"  # torch's device mesh describes the group of a dimension so


class ProcessGroups:
    """Names and global ranks of process groups. `axes`: the name of each set of ranks that the job has a name for."""

    def __init__(self, axes: Mapping[tuple[int, ...], str]) -> None:
        self._axes = axes
        self._known: dict[str, tuple[str, list[int]]] = {}

    def of(self, group: Any) -> tuple[str, list[int]]:
        """Name and ranks of a process group, or of the one that torch knows by this name."""
        key = group if isinstance(group, str) else group.group_name
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look(group)
        return found

    def _look(self, group: Any) -> tuple[str, list[int]]:
        torch = sys.modules["torch.distributed.distributed_c10d"]
        if isinstance(group, str):
            group = torch._resolve_process_group(group)
        ranks = list(torch.get_process_group_ranks(group))
        described = str(group.group_desc)
        of_mesh = described.removeprefix(_OF_MESH) if described.startswith(_OF_MESH) else ""
        return self._axes.get(tuple(ranks)) or of_mesh or ranks_text(ranks), ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3` of neighbouring ranks, `0,2` of others."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and list(ranks) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, ranks))
