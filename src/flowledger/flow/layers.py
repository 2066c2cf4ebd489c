"""Which layers are on which pipeline rank: dealt evenly, or as explicit stages, with one chunk a rank or several."""

from collections.abc import Sequence

from flowledger.flow.errors import BadInput


def stage_layers(
    layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    explicit: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """The layers of each pipeline rank, as Megatron-Core deals them: chunk c of pp*vpp belongs to rank c mod pp.

    `first` and `last` are the layers of a whole end rank (all its chunks); `explicit` names the layers of every chunk
    in order. Raises BadInput where they do not come to `layers`, or do not divide.
    """
    sizes = list(explicit) or _chunk_sizes(layers, pp, vpp, first, last)
    if len(sizes) != pp * vpp or sum(sizes) != layers:
        raise BadInput(
            f"pipeline layout = {sizes}: it must name pp*vpp = {pp * vpp} stages with {layers} layers together; "
            f"it names {len(sizes)} with {sum(sizes)}"
        )
    ranks: list[list[int]] = [[] for _ in range(pp)]
    start = 0
    for chunk, size in enumerate(sizes):
        ranks[chunk % pp] += range(start, start + size)
        start += size
    return tuple(tuple(rank) for rank in ranks)


def _chunk_sizes(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    if pp == 1:
        first = last = None
    middle_ranks = pp - (first is not None) - (last is not None)
    middle = layers - (first or 0) - (last or 0)
    per_rank = middle // middle_ranks if middle_ranks else 0
    of_rank = [per_rank] * pp
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    if middle < 0 or (middle_ranks and middle % middle_ranks) or (not middle_ranks and middle):
        hint = f"first {first}, last {last}, " if first is not None or last is not None else ""
        raise BadInput(
            f"pipeline stages: {layers} layers, pp = {pp}: {hint}{max(middle, 0)} layers do not divide among "
            f"{middle_ranks} stages; use a pp that divides them, or other layers in the first or last stage"
        )
    if any(size % vpp for size in of_rank):
        raise BadInput(f"pipeline stages: {of_rank} layers of a rank do not divide among vpp = {vpp} chunks")
    return [size // vpp for _ in range(vpp) for size in of_rank]
