"""From an observed tensor to its row: what the flow says of that name, and what the tensor itself shows.

The part that depends only on (name, shape, dtype) is made once and copied; a row then costs about two microseconds.
Nothing here reads the content of a tensor except `kept`, and that only on a CPU.
"""

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec

from flowledger.flow.stages import owner_of
from flowledger.flow.tensors import Tensor, fits, form_of, tensor
from flowledger.ledger.rows import TensorRow
from flowledger.record.place import ALONE, Place


class Where(NamedTuple):
    """At which point of a step a tensor is met, and how."""

    stage: str | None
    access: str  # read or write
    within: str | None = None  # a micro-batch, or a decode step: one of flow.tensors' GRAINS
    variant: str | None = None  # of the placements that the flow knows for it


class Templates:
    """Rows by (name, shape, dtype), ready to be copied."""

    def __init__(
        self,
        *,
        bindings: Mapping[str, int],
        rank: int | None,
        rank_count: int | None,
        place: Place = ALONE,
        foreign: bool = False,
        bound: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self._bindings, self._foreign = (
            tuple(bindings.items()),
            foreign,
        )  # foreign: another's loop, with forms of its own
        self._tell_bound = bound
        self._rank, self._rank_count, self._place = rank, rank_count, place
        self._known: dict[tuple[object, ...], TensorRow] = {}

    def bind(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Learn what symbols of dimensions stand for, as the job itself says; returns all that are known."""
        bound = {**dict(self._bindings), **sizes}
        if "B" in sizes and "G" in bound:
            bound["B_prompt"] = bound["B"] // bound["G"]
        if tuple(bound.items()) != self._bindings:
            self._bindings = tuple(bound.items())
            self._known.clear()
            if self._tell_bound is not None:
                self._tell_bound(bound)
        return bound

    def of(self, name: str, value: Any, where: Where) -> TensorRow:
        """`row` of a tensor as it stands."""
        made = self._known.get((name, value.shape, value.dtype, where))
        if made is None:
            return self.row(name, value.shape, value.dtype, value.element_size(), where)
        return made.__copy__()  # type: ignore[no-any-return, attr-defined]  # as in `row`

    def row(self, name: str, shape: Sequence[int], dtype: object, element_size: int, where: Where) -> TensorRow:
        """A fresh row of what this rank holds of a tensor. Raises BadInput for a name that the flow lacks.

        Where the flow cuts the tensor over ranks, its logical shape is left open: one rank cannot know it.
        """
        key = (name, shape, dtype, where)
        made = self._known.get(key)
        if made is None:
            if len(self._known) > 20_000:
                self._known.clear()
            kind = str(dtype).removeprefix("torch.")
            of = self._rank, self._rank_count, self._foreign
            made = _made(name, tuple(shape), kind, element_size, where, self._bindings, *of)
            if mesh := self._place.mesh_of(made.tensor_name, where.stage, where.access):
                made = self._placed(made, name, mesh, where)
            self._known[key] = made
        return made.__copy__()  # type: ignore[no-any-return, attr-defined]  # twice as quick as copy.copy

    def _placed(self, row: TensorRow, name: str, mesh: str, where: Where) -> TensorRow:
        """The row of a plain tensor on one of several ranks: what the flow says of its placement there."""
        share, facts, shape = partial(self._place.share, mesh), tensor(row.tensor_name), tuple(row.local_shape or ())
        bindings = dict(self._bindings)
        form = form_of(name, shape, bindings, within=where.within, share=share, foreign=self._foreign)
        if form is None:  # a sum of storages, a buffer: no part of a whole
            return msgspec.structs.replace(row, placement=[], owner_rank=_own(self._rank))
        placement = facts.placement_of(form)
        if where.variant is not None:
            placement = {axis: facts.variants[where.variant].get(axis, "Replicate()") for axis in placement}
        if not fits(facts, form, shape, bindings, share) and fits(facts, form, shape, bindings):
            placement = {}  # gathered: here for once it is whole
        cut = self._place.cut(mesh, placement)
        sharded = any("Shard" in text for text in cut)
        return msgspec.structs.replace(
            row, dims=form.shape[1:-1], placement=cut,
            padding=None if form.padding == "none" else form.padding, broadcast=form.broadcast,
            logical_shape=None if sharded else row.logical_shape,
            shape_checksum=None if sharded else row.shape_checksum,
            owner_rank=self._place.owners(mesh, placement, own_stage=_of_one_stage(facts, where)),
        )  # fmt: skip

    def cut(self, row: TensorRow, local_shape: Sequence[int], placement: list[str]) -> None:
        """Turn a row into that of a tensor of which this rank holds a part."""
        numel = product(local_shape)
        row.bytes = (row.bytes or 0) // max(1, row.numel or 0) * numel
        row.local_shape, row.numel, row.placement = list(local_shape), numel, placement
        if any("Shard" in word for word in placement):
            row.owner_rank = f"0-{(self._rank_count or 1) - 1}"


def _of_one_stage(facts: Tensor, where: Where) -> bool:
    """Whether the ranks of a pipeline stage have it for themselves: its layers, and what goes through them."""
    return where.within == "micro_batch" or facts.kind in ("param", "grad", "optimizer", "activation")


@lru_cache(maxsize=20_000)  # dynamic batching: every micro-batch may have its own length
def _made(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    size: int,
    where: Where,
    bindings: tuple[tuple[str, int], ...],
    rank: int | None,
    of: int | None,
    foreign: bool,
) -> TensorRow:
    """The row of a tensor of `size` bytes an element, on one of `of` ranks, or in a process that is none of them."""
    facts, form = tensor(name), form_of(name, shape, dict(bindings), within=where.within, foreign=foreign)
    dims = form.shape[1:-1] if form is not None else None
    numel = product(shape)
    return TensorRow(
        rank=rank,
        rank_count=of,
        tensor_name=facts.name,
        dims=dims,
        logical_shape=list(shape),
        local_shape=list(shape),
        padding=form.padding if form is not None and form.padding != "none" else None,
        dtype=dtype,
        numel=numel,
        bytes=numel * size,
        kind=facts.kind,
        mask=facts.mask_of(form),
        broadcast=form.broadcast if form is not None else None,
        owner_rank=_own(rank),
        owner=owner_of(facts.name, where.stage),
        lifetime=facts.lifetime,
        shape_checksum=shape_checksum(facts.name, dims, shape, dtype),
    )


def _own(rank: int | None) -> str | None:
    return None if rank is None else str(rank)


def shape_checksum(name: str, dims: str | None, logical_shape: Sequence[int], dtype: str) -> int:
    """crc32 over name, dims, logical shape and dtype; equal on all ranks of a role."""
    return zlib.crc32(f"{name}|{dims or ''}|{','.join(map(str, logical_shape))}|{dtype}".encode())


def content_checksum(value: Any) -> int:
    """crc32 of the elements in row-major order (of this rank's part)."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(memoryview(flat.view(sys.modules["torch"].uint8).numpy()))


def kept(value: Any) -> int:
    """How many elements of a mask are not 0. Waits for the device, where there is one."""
    return int(value.count_nonzero())


def product(shape: Sequence[int]) -> int:
    """Elements of a shape; 1 for a scalar."""
    total = 1
    for size in shape:
        total *= size
    return total
