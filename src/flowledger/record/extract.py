"""From an observed tensor to its row: what the flow says of that name, and what the tensor itself shows.

What the flow says depends on a shape only where a form asks for a size: it is worked out once for all shapes that are
alike in that, however many lengths come by, and copied; a row then costs some microseconds.
Nothing here reads the content of a tensor except `kept`, and that only on a CPU.
"""

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
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


class _Alike:
    """The tensors of one name, dtype, place and number of dimensions: rows by the sizes that the flow asks for there."""

    def __init__(self, sizes: Sequence[frozenset[int]]) -> None:
        self._sizes = sizes  # of each dimension, those that tell one form from another
        self.rows: dict[tuple[int, ...], TensorRow] = {}

    def sign(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape without the sizes that no form asks for."""
        return tuple([size if size in asked else -1 for size, asked in zip(shape, self._sizes, strict=True)])


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
        self._alike: dict[tuple[object, ...], _Alike] = {}

    def bind(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Learn what symbols of dimensions stand for, as the job itself says; returns all that are known."""
        bound = {**dict(self._bindings), **sizes}
        if "B" in sizes and "G" in bound:
            bound["B_prompt"] = bound["B"] // bound["G"]
        if tuple(bound.items()) != self._bindings:
            self._bindings = tuple(bound.items())
            self._known.clear()
            self._alike.clear()
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
            if len(self._known) > 20_000:  # dynamic batching: every micro-batch may have its own length
                self._known.clear()
            made = self._known[key] = self._sized(name, tuple(shape), dtype, element_size, where)
        return made.__copy__()  # type: ignore[no-any-return, attr-defined]  # twice as quick as copy.copy

    def _sized(self, name: str, shape: tuple[int, ...], dtype: object, size: int, where: Where) -> TensorRow:
        """The row of a shape that comes by for the first time."""
        key = (name, len(shape), dtype, where)
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = _Alike(self._asked(name, len(shape), where))
        sign = alike.sign(shape)
        model = alike.rows.get(sign)
        if model is None:
            model = alike.rows[sign] = self._made(name, shape, str(dtype).removeprefix("torch."), where)
        row: TensorRow = model.__copy__()  # type: ignore[attr-defined]  # as in `row`
        numel = product(shape)
        row.local_shape, row.numel, row.bytes = list(shape), numel, numel * size
        if row.logical_shape is not None:
            row.logical_shape = list(shape)
            row.shape_checksum = shape_checksum(row.tensor_name, row.dims, shape, row.dtype or "")
        return row

    def _asked(self, name: str, dims: int, where: Where) -> list[frozenset[int]]:
        """The sizes that forms of so many dimensions ask for at each, of the whole tensor and of this rank's share."""
        facts, bindings = tensor(name), dict(self._bindings)
        mesh, asked = self._place.mesh_of(facts.name, where.stage, where.access), [set[int]() for _ in range(dims)]
        for form in (*facts.forms, *facts.foreign):
            bound = enumerate(form.dims if len(form.dims) == dims else ())
            for at, dim in ((at, dim) for at, dim in bound if dim.symbols <= bindings.keys()):
                asked[at].add(dim.resolve(bindings))
                if mesh:
                    asked[at].add(self._place.share(mesh, facts.placement_of(form), at, dim, bindings))
        return [frozenset(sizes) for sizes in asked]

    def _made(self, name: str, shape: tuple[int, ...], dtype: str, where: Where) -> TensorRow:
        """The row of a tensor, but for what its sizes come to."""
        facts = tensor(name)
        form = form_of(name, shape, dict(self._bindings), within=where.within, foreign=self._foreign)
        made = TensorRow(
            rank=self._rank, rank_count=self._rank_count, tensor_name=facts.name,
            dims=form.shape[1:-1] if form is not None else None, logical_shape=list(shape), dtype=dtype,
            padding=form.padding if form is not None and form.padding != "none" else None, kind=facts.kind,
            mask=facts.mask_of(form), broadcast=form.broadcast if form is not None else None,
            owner_rank=_own(self._rank), owner=owner_of(facts.name, where.stage), lifetime=facts.lifetime,
            local_shape=list(shape),
        )  # fmt: skip
        mesh = self._place.mesh_of(facts.name, where.stage, where.access)
        return self._placed(made, name, mesh, where) if mesh else made

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
    if value.is_cpu and (numpy := sys.modules.get("numpy")) is not None:  # which takes half as long as torch
        with suppress(RuntimeError, TypeError):  # of a class or a dtype that numpy does not know
            return int(numpy.count_nonzero(value.numpy()))
    return int(value.count_nonzero())


def product(shape: Sequence[int]) -> int:
    """Elements of a shape; 1 for a scalar."""
    total = 1
    for size in shape:
        total *= size
    return total
