"""The planned shape ledger: every tensor of the flow, in every stage that reads or writes it, on every rank class.

Shapes come from the dims of the flow and the values of its symbols, local ones from its placements and the mesh. Nothing
here knows of the loop: where plan and recording agree, they do so as independent witnesses.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import msgspec

from flowledger.flow.mesh import Mesh, authoritative, local_shape
from flowledger.flow.stages import order, stage
from flowledger.flow.tensors import Form, Tensor, stage_of, tensor, tensors
from flowledger.ledger.rows import TensorRow
from flowledger.plan.job import ITEMSIZE

MICRO = frozenset({"B_micro", "T", "T_logit"})  # a form with one of these is that of one micro-batch
ROLLOUT_ONLY = frozenset({"B_run", "B_admit", "N_decode"})
GENERATING = ("rollout", "validate")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that hold shards of equal shape: one pipeline stage. `first` stands for all of them."""

    name: str
    first: int
    count: int
    layers: tuple[int, ...]  # of the model, on each of these ranks
    is_first: bool = True  # holds the embedding
    is_last: bool = True  # holds the head
    outer_elements: int = 0  # parameters of the rank that no layer owns: embedding, final norm, head
    layer_elements: Mapping[int, int] | None = None  # parameters of each of its layers on the rank, before dp cuts them


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What shapes are resolved with."""

    stages: tuple[str, ...]  # that this configuration runs
    bindings: Mapping[str, int]
    mesh: Mesh
    dtypes: Mapping[str, str]  # role -> dtype that its model computes in; `param/<role>`: in which it is stored
    packed: bool = True  # the model sees packed tokens
    unused: frozenset[tuple[str, str]] = frozenset()  # (stage, tensor) that the settings leave out: a KL of weight 0
    unwritten: frozenset[tuple[str, str]] = frozenset()  # …, that the stage only reads: a mask without rejection


def shapes(setting: Setting, classes: Sequence[RankClass], kind: str | None = None) -> list[TensorRow]:
    """One row an access, form and rank class, in the order of the flow. `kind`: tensors of this memory kind alone."""
    found: list[TensorRow] = []
    places = [name for name in order() if name in setting.stages]
    for at, name in enumerate(places):
        for row in tensors().values():
            if kind in (None, row.kind) and _is_there(row, name, setting, places[: at + 1]):
                for place, form, access in _met(row, name, setting):
                    for ranks in _that_differ(row, form, place, classes):
                        found += _rows(row, form, place, access, ranks, setting)
    for number, one in enumerate(found):
        one.seq = number
        one.t_ns = number
    return found


def _is_there(row: Tensor, name: str, setting: Setting, so_far: Sequence[str]) -> bool:
    """Whether somebody has made it: a stage that runs no later, and for buffers of collectives more than one rank."""
    makers = setting.stages if row.lifetime == "persistent" else so_far
    made = any(stage_of(place) in makers for place in row.written_by)
    alone = row.kind == "comm_buffer" and setting.mesh.size == 1
    return made and not alone and (name, row.name) not in setting.unused


def _met(row: Tensor, name: str, setting: Setting) -> Iterator[tuple[str, Form, str]]:
    """(place, form, access): where a stage that cuts micro-batches is handed a tensor of the step, it meets both forms."""
    seen: set[tuple[str, str, str]] = set()
    writes = (name, row.name) not in setting.unwritten
    for place, access in _places(row, name):
        if access == "write" and not writes:
            continue
        forms = [form for form in row.forms if possible(row, form, name, access, packed=setting.packed)]
        micro = [form for form in forms if MICRO & _symbols(form)]
        whole = [form for form in forms if form not in micro]
        within = micro if "/" in place and micro else forms
        met = [(place, form) for form in within]
        if within is micro and _handed(row, name, access, writes=writes):
            met += [(name, form) for form in whole]
        for at, form in met:
            if (at, form.name, access) not in seen:
                seen.add((at, form.name, access))
                yield at, form, access


def possible(row: Tensor, form: Form, name: str, access: str, *, packed: bool) -> bool:
    """Whether a stage can meet a tensor in this form.

    A form that is reshaped from another of the same tensor is read, never written. What is as wide as a response
    exists from the rollout on, what is as wide as prompts alone until the rollout. Micro-batches are cut by the stages that
    work on them, and the model sees packed or padded tokens, not both.
    """
    symbols = _symbols(form)
    made_of_itself = (form.source or "").startswith(f"{row.name}/")
    cut = bool(MICRO & symbols) and _cuts(name)  # whoever writes within a micro-batch writes the small form first
    if form.name == "model" or (access == "write" and made_of_itself and not cut):
        return False
    if symbols & ROLLOUT_ONLY:
        return name in (*GENERATING, "prompt")
    if MICRO & symbols and not _cuts(name) and (row.kind == "batch" or "B_micro" in symbols):
        return False
    if ("B_micro" in symbols and row.kind == "activation" and _has_packed(row) and packed) or (
        "T" in symbols and not packed
    ):
        return False
    responds = bool(symbols & {"S_resp", "S"})
    if name == "prompt":
        return not responds
    if (
        name == "rollout"
        and stage_of(row.producer) == "prompt"
        and "G" in {s for one in row.forms for s in _symbols(one)}
    ):
        return responds == (access == "write") or not symbols & {"S_prompt", "S_resp"}
    if name == "rollout" and any("B_run" in _symbols(one) for one in row.forms):
        return False  # it has a form of its own there
    return name in GENERATING or "S_prompt" not in symbols or responds


def _cuts(name: str) -> bool:
    one = stage(name)
    return "forward" in one.phases and "micro_batch" in one.works_on


def _handed(row: Tensor, name: str, access: str, *, writes: bool) -> bool:
    """Whether the whole tensor passes the stage's border: made elsewhere and read here, or made here and read elsewhere."""
    if row.lifetime != "step" or row.kind != "batch" or not _cuts(name):
        return False
    if access == "read":
        return not writes or name not in {stage_of(place) for place in row.written_by}
    return any(stage_of(reader) != name for reader in row.readers)


def _has_packed(row: Tensor) -> bool:
    return any(form.padding == "packed" for form in row.forms)


def _symbols(form: Form) -> set[str]:
    return {symbol for dim in form.dims for symbol in dim.symbols}


def _that_differ(row: Tensor, form: Form, place: str, classes: Sequence[RankClass]) -> Sequence[RankClass]:
    """The rank classes with rows of their own. What no layer owns is alike on all pipeline stages: one row for all."""
    if row.name == "logits" and "/" in place:
        return [ranks for ranks in classes if ranks.is_last]
    if _per_layer(form):
        return classes
    return [replace(classes[0], name="all", count=sum(ranks.count for ranks in classes))]


def _per_layer(form: Form) -> bool:
    return form.name == "layer" or _counts_parameters(form)


def _counts_parameters(form: Form) -> bool:
    return "P" in _symbols(form)


def _places(row: Tensor, name: str) -> Iterator[tuple[str, str]]:
    """(place, access) of a tensor within one stage."""
    for place in row.written_by:
        if stage_of(place) == name:
            yield place.partition("@")[0], "write"
    for place in row.readers:
        if stage_of(place) == name:
            yield place.partition("@")[0], "read"


def _rows(row: Tensor, form: Form, place: str, access: str, ranks: RankClass, setting: Setting) -> Iterator[TensorRow]:
    """The rows of one access: one, or one a layer for what each layer has, and one for the parameters outside layers."""
    parts: list[int | None] = list(ranks.layers) if _per_layer(form) else [None]
    if _counts_parameters(form) and ranks.outer_elements:
        parts.append(None)
    names = dict(setting.bindings)
    if stage(place.partition("/")[0]).name in GENERATING:  # a prefill of all that is admitted, one logit row a slot
        names |= {"T": names.get("B_admit", 0) * names.get("S_prompt", 0), "T_logit": names.get("B_run", 0)}
    made: dict[int | None, TensorRow] = {}  # by the one symbol that differs between layers
    for layer in parts:
        if layer is not None and ranks.layer_elements is not None:
            names["P"] = ranks.layer_elements[layer]
        elif layer is None and _counts_parameters(form):
            names["P"] = ranks.outer_elements
        if not all(dim.symbols <= names.keys() for dim in form.dims):
            continue
        like = made.get(names.get("P"))
        if like is None:
            logical = tuple(dim.resolve(names) for dim in form.dims)
            like = made[names.get("P")] = _row(row, form, place, access, ranks, setting, logical, layer)
            yield like
        else:
            yield msgspec.structs.replace(like, layer=layer)


def _row(
    row: Tensor, form: Form, place: str, access: str, ranks: RankClass, setting: Setting,
    logical: tuple[int, ...], layer: int | None,
) -> TensorRow:  # fmt: skip
    name, _, phase = place.partition("/")
    role = stage(name).role
    placements = tuple(row.placement_of(form).items())
    local, owners = _local(logical, placements, setting.mesh, ranks.first)
    dtype = _dtype(row, role, setting)
    elements = _product(local)
    mask = tensor(row.mask) if row.mask else None
    return TensorRow(
        t_ns=0, step=1, role=role, stage=name, phase=phase or None, rank=ranks.first, rank_count=ranks.count,
        tensor_name=row.name, layer=layer, dims=form.shape, logical_shape=list(logical), local_shape=list(local),
        placement=[f"{axis}: {text}" for axis, text in placements if dict(setting.mesh.degrees).get(axis, 1) > 1],
        padding=None if form.padding == "none" else form.padding, dtype=dtype, numel=elements,
        bytes=elements * ITEMSIZE[dtype], kind=row.kind, mask=row.mask if form.padding != "packed" else None,
        mask_shape=list(local) if mask and form.padding != "packed" else None, broadcast=form.broadcast,
        owner_rank=owners, owner=row.owner, lifetime=row.lifetime, access=access,
        shape_checksum=zlib.crc32(f"{row.name}|{form.shape}|{list(logical)}|{dtype}".encode()),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _local(
    logical: tuple[int, ...], placements: tuple[tuple[str, str], ...], mesh: Mesh, rank: int
) -> tuple[tuple[int, ...], str]:
    """(shape on this rank, the ranks whose pieces together are the tensor)."""
    return local_shape(logical, dict(placements), mesh, rank) if logical else (), _owners(placements, mesh)


@lru_cache(maxsize=256)
def _owners(placements: tuple[tuple[str, str], ...], mesh: Mesh) -> str:
    return spans(authoritative(dict(placements), mesh))


def spans(ranks: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8; with a stride (`0-1016:8`) where every eighth rank is one."""
    if len(ranks) > 2 and len({b - a for a, b in pairwise(ranks)}) == 1:
        stride = ranks[1] - ranks[0]
        return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in pieces[:8]]
    return ", ".join([*named, "…"] if len(pieces) > 8 else named)


def _dtype(row: Tensor, role: str, setting: Setting) -> str:
    if row.dtype != "model":
        return row.dtype
    kept = row.kind in ("param", "grad") and row.name != "updated_params"
    return setting.dtypes.get(f"param/{role}" if kept else role, "float32")


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
