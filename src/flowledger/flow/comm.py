"""Kinds of communication: what their size in bytes counts, and how much of it crosses a rank's link.

Sizes are those that NCCL's tests call `size`. The traffic is what one rank sends where the algorithm is a ring (or the
pairwise exchange of an all-to-all), which is also the bus bandwidth's factor of nccl-tests, doc/PERFORMANCE.md.
"""

from dataclasses import dataclass
from functools import cache

from flowledger.flow.errors import BadInput


@dataclass(frozen=True, slots=True)
class CommType:
    """One kind. A rank of n sends `passes` times the size, or where `shared` (n - 1) / n of that."""

    name: str
    size: str  # what `bytes` counts
    passes: int
    shared: bool
    aliases: tuple[str, ...] = ()  # torch's functions that do it under another name


_WHOLE, _GATHERED, _SENT = "the tensor", "the gathered output, of all ranks", "what this rank sends to all, itself too"
_PICKLED = "the pickled objects, padded to the longest, and their lengths"

# fmt: off
COMM_TYPES: tuple[CommType, ...] = (
    CommType("all_reduce", _WHOLE, 2, True, ("allreduce", "allreduce_coalesced", "all_reduce_coalesced")),
    CommType("all_gather", _GATHERED, 1, True, (
        "allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "_allgather_base",
        "allgather_into_tensor_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced")),
    CommType("reduce_scatter", "the input, for all ranks", 1, True, (
        "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced")),
    CommType("all_to_all", _SENT, 1, True, ("alltoall", "alltoall_base", "all_to_all_single", "shard_dim_alltoall")),
    CommType("broadcast", _WHOLE, 1, False),
    CommType("reduce", _WHOLE, 1, False),
    CommType("gather", _GATHERED, 1, True),
    CommType("scatter", "the input of the root, for all ranks", 1, True),
    CommType("send", _WHOLE, 1, False, ("isend",)),
    CommType("recv", _WHOLE, 1, False, ("irecv", "recv_anysource")),
    CommType("barrier", "nothing", 0, False, ("monitored_barrier",)),
    CommType("all_gather_object", _PICKLED, 1, True),
    CommType("gather_object", _PICKLED, 1, True),
    CommType("broadcast_object", _PICKLED, 1, False, ("broadcast_object_list",)),
    CommType("scatter_object", _PICKLED, 1, True, ("scatter_object_list",)),
    CommType("send_object", _PICKLED, 1, False, ("send_object_list",)),
    CommType("recv_object", _PICKLED, 1, False, ("recv_object_list",)),
)
# fmt: on


@cache
def _by_name() -> dict[str, CommType]:
    return {name: kind for kind in COMM_TYPES for name in (kind.name, *kind.aliases)}


def comm_type(name: str) -> CommType:
    """The kind of that name, or that one of torch's functions does. Raises BadInput."""
    found = _by_name().get(name)
    if found is None:
        raise BadInput(f"{name!r} is no kind of communication; known are {', '.join(kind.name for kind in COMM_TYPES)}")
    return found


def wire_bytes(name: str, size: int, n: int) -> int:
    """Bytes that one of n ranks sends for a collective of `size` bytes; of recv, what it receives. Raises BadInput."""
    kind = comm_type(name)
    if n < 1 or size < 0:
        raise BadInput(f"{name} of {size} bytes between {n} ranks: there is at least 1 rank, and no size below 0")
    if n == 1:
        return 0
    return -(-kind.passes * size * (n - 1) // n) if kind.shared else kind.passes * size
