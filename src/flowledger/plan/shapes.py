"""The planned shape ledger: every tensor of the flow, in every stage that reads or writes it, on every rank class.

Shapes come from the dims of the flow and the values of its symbols, local ones from its placements and the mesh. Nothing
here knows of the loop: where plan and recording agree, they do so as independent witnesses.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import msgspec

from flowledger.flow.rank_classes import spans
from flowledger.flow.stages import mesh_of, order, stage
from flowledger.flow.tensors import Form, Tensor, stage_of, tensor, tensors
from flowledger.ledger.rows import TensorRow
from flowledger.plan import local_shapes
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.local_shapes import Held
from flowledger.plan.setting import RankClass, Setting

__all__ = ["RankClass", "Setting", "shapes", "spans"]

MICRO = frozenset({"B_micro", "T", "T_logit"})  # a form with one of these is that of one micro-batch
ROLLOUT_ONLY = frozenset({"B_run", "B_admit", "N_decode"})
GENERATING = ("rollout", "validate")


def shapes(
    setting: Setting, classes: Sequence[RankClass], kind: str | None = None, *, rank: int | None = None
) -> list[TensorRow]:
    """One row an access, form and class of ranks with equal pieces, in the order of the flow.

    `kind`: tensors of this memory kind alone; `rank`: on this rank alone.
    """
    found: list[TensorRow] = []
    places = [name for name in order() if name in setting.stages]
    for at, name in enumerate(places):
        here = setting.at(name)
        present = _present(here.classes or classes, rank)
        for row in tensors().values():
            if kind in (None, row.kind) and _is_there(row, name, here, places[: at + 1]):
                for place, form, access in _met(row, name, here):
                    for ranks in _that_differ(row, form, place, access, present, here):
                        found += _rows(row, form, place, access, ranks, here, rank)
                    if _together(row, name, here):
                        found += _whole(row, form, place, access, here, rank)
    for number, one in enumerate(found):
        one.seq = number
        one.t_ns = number
    return found


def _present(classes: Sequence[RankClass], rank: int | None) -> Sequence[RankClass]:
    """The classes that a rank is in, or all of them."""
    return [one for one in classes if rank is None or one.first <= rank < one.first + one.count]


def _is_there(row: Tensor, name: str, setting: Setting, so_far: Sequence[str]) -> bool:
    """Whether somebody has made it: a stage that runs no later, and for buffers of collectives more than one rank."""
    makers = setting.stages if row.lifetime == "persistent" else so_far
    made = any(stage_of(place) in makers for place in tensor(setting.stand_ins.get(row.name, row.name)).written_by)
    alone = row.kind == "comm_buffer" and setting.mesh.size == 1
    return made and not alone and (name, row.name) not in setting.unused


def _met(row: Tensor, name: str, setting: Setting) -> Iterator[tuple[str, Form, str]]:
    """(place, form, access): where a stage that cuts micro-batches is handed a tensor of the step, it meets both forms.

    What ranks that sample have made and ranks that train read is written once more by `balance`, which moves it.
    """
    if name == "balance" and _is_moved(row, setting):
        yield name, next(form for form in row.forms if not MICRO & _symbols(form) and _as_wide(form, row)), "write"
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


def _is_moved(row: Tensor, setting: Setting) -> bool:
    """Whether its rows go from who has sampled them to who trains on them. What groups are read of is put together there."""
    if setting.rollout is None or row.kind != "batch" or not setting.rollout.size > 1:
        return False
    cut = all(row.placement_of(form)["dp"] != "Replicate()" for form in row.forms)
    later = {stage_of(reader) for reader in row.readers} - {"balance"}
    return (
        cut
        and stage(stage_of(row.producer)).mesh == "rollout"
        and any(stage(name).mesh != "rollout" for name in later & set(setting.stages))
    )


def _as_wide(form: Form, row: Tensor) -> bool:
    """Whether it is the widest form: of a tensor that a prompt begins and its responses complete, the completed one."""
    widest = max((len({"S_prompt", "S_resp"} & _symbols(one)), "G" in _symbols(one)) for one in row.forms)
    return (len({"S_prompt", "S_resp"} & _symbols(form)), "G" in _symbols(form)) == widest


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


def _that_differ(
    row: Tensor, form: Form, place: str, access: str, classes: Sequence[RankClass], setting: Setting
) -> Sequence[RankClass]:
    """The pipeline stages with rows of their own. What no layer owns is alike on all of them: one row for all.

    Log-probs and losses are those of the last one. Ranks that sample have every layer.
    """
    samples = mesh_of(row.name, stage_of(place), access) == "rollout"
    if samples and setting.engines is not None:
        whole = replace(classes[0], name="all", first=0, count=setting.engines.on.size)
        parts = (
            replace(whole, first=first, count=count, layers=held) for first, count, held in setting.engines.stages()
        )
        return [*parts] if _per_layer(form) else [whole]
    if setting.rollout is not None and samples:
        layers = tuple(range(setting.bindings.get("L", 0)))
        return [replace(classes[0], name="all", first=0, count=setting.rollout.size, layers=layers)]
    if _per_layer(form):
        return classes
    if "/" in place and (row.name == "logits" or (setting.rollout is not None and _of_the_head(row, form))):
        return [ranks for ranks in classes if ranks.is_last]
    return [replace(classes[0], name="all", first=0, count=sum(ranks.count for ranks in classes))]


def _of_the_head(row: Tensor, form: Form) -> bool:
    """What the output head and the loss make of a micro-batch."""
    return (
        row.kind in ("activation", "temporary")
        and form.name in ("micro", "logit", "scalar")
        and row.name != "grad_norm"
    )


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


def _rows(
    row: Tensor, form: Form, place: str, access: str, ranks: RankClass, setting: Setting, rank: int | None
) -> Iterator[TensorRow]:
    """The rows of one access: one, or one a layer for what each layer has, and one for the parameters outside layers."""
    name = place.partition("/")[0]
    where, role = mesh_of(row.name, name, access), stage(name).role
    served = setting.engines is not None and where == row.mesh == "rollout" and _counts_parameters(form)
    exact = not served and _counts_parameters(form) and row.kind != "comm_buffer" and role in setting.shards
    parts: list[int | None] = list(ranks.layers) if _per_layer(form) else [None]
    if _counts_parameters(form) and (exact or served or ranks.outer_elements):
        parts.append(None)
    sizes = _sizes(setting, name)
    made: dict[object, list[TensorRow]] = {}  # by the pieces: layers of one kind are alike
    for layer in parts:
        if exact:
            held = list(local_shapes.of_parameters(row, role, ranks, setting, layer, rank))
        else:
            if served and setting.engines is not None:
                sizes["P"] = setting.engines.elements(layer)
            elif layer is not None and ranks.layer_elements is not None:
                sizes["P"] = ranks.layer_elements.get(layer, 0)
            elif layer is None and _counts_parameters(form):
                sizes["P"] = ranks.outer_elements
            if not all(dim.symbols <= sizes.keys() for dim in form.dims):
                continue
            held = list(local_shapes.of_tensor(row, form, where, ranks, setting, sizes, rank))
        key = tuple(held)
        if key not in made:
            made[key] = [_row(row, form, place, access, one, setting, layer) for one in held]
            yield from made[key]
        else:
            yield from (msgspec.structs.replace(one, layer=layer) for one in made[key])


def _together(row: Tensor, name: str, setting: Setting) -> bool:
    """Whether a stage puts a tensor together on every rank: estimators look at all samples of a group and of the step."""
    whole = setting.rollout is not None and name == "advantage" and setting.mesh.degree("dp") > 1
    return whole and row.lifetime in ("step", "stage") and row.kind in ("batch", "temporary")


def _whole(row: Tensor, form: Form, place: str, access: str, setting: Setting, rank: int | None) -> Iterator[TensorRow]:
    sizes, cut = _sizes(setting, stage_of(place)), row.placement_of(form)["dp"] != "Replicate()"
    if cut and not MICRO & _symbols(form) and all(dim.symbols <= sizes.keys() for dim in form.dims):
        yield _row(row, form, place, access, local_shapes.together(row, form, setting, sizes, rank), setting, None)


def _sizes(setting: Setting, name: str) -> dict[str, int]:
    sizes = dict(setting.bindings)
    if name in GENERATING:  # a prefill of all that is admitted, one logit row a slot
        sizes |= {"T": sizes.get("B_admit", 0) * sizes.get("S_prompt", 0), "T_logit": sizes.get("B_run", 0)}
    return sizes


def _row(
    row: Tensor, form: Form, place: str, access: str, held: Held, setting: Setting, layer: int | None
) -> TensorRow:
    name, _, phase = place.partition("/")
    role = stage(name).role
    dtype = _dtype(row, role, setting)
    elements, local = prod(held.local), list(held.local)
    mask = tensor(row.mask) if row.mask else None
    return TensorRow(
        t_ns=0, step=1, role=role, stage=name, phase=phase or None, rank=held.first, rank_count=held.count,
        tensor_name=row.name, layer=layer, dims=form.shape, logical_shape=list(held.logical), local_shape=local,
        placement=list(held.placement),
        padding=None if form.padding == "none" else form.padding, dtype=dtype, numel=elements,
        bytes=elements * ITEMSIZE[dtype], kind=row.kind, mask=row.mask if form.padding != "packed" else None,
        mask_shape=list(local) if mask and form.padding != "packed" else None, broadcast=form.broadcast,
        owner_rank=held.owners, owner=row.owner, lifetime=row.lifetime, access=access,
        shape_checksum=zlib.crc32(f"{row.name}|{form.shape}|{list(held.logical)}|{dtype}".encode()),
    )  # fmt: skip


def _dtype(row: Tensor, role: str, setting: Setting) -> str:
    if row.dtype != "model":
        return row.dtype
    kept = row.kind in ("param", "grad") and row.name != "updated_params"
    return setting.dtypes.get(f"param/{role}" if kept else role, "float32")
