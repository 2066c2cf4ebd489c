"""What each rank holds of a planned tensor: ranks with equal pieces together, found without looking at each of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from flowledger.flow.mesh import Mesh, authoritative, local_shape
from flowledger.flow.rank_classes import rank_classes, spans
from flowledger.flow.tensors import Form, Tensor
from flowledger.plan.setting import RankClass, Setting

Shape = tuple[int, ...]
Placements = tuple[tuple[str, str], ...]  # of every axis


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor on ranks that hold equal pieces of it."""

    first: int
    count: int
    logical: Shape
    local: Shape
    placement: tuple[str, ...]  # `axis: Shard(0)` of the axes along which ranks differ
    owners: str  # the ranks whose pieces together are the tensor


def of_tensor(
    row: Tensor, form: Form, where: str, ranks: RankClass, setting: Setting, sizes: Mapping[str, int], only: int | None
) -> Iterator[Held]:
    """A tensor whose dims are resolved with `sizes`, on these ranks of the mesh `where`; `only`: on this one of them."""
    logical = tuple(dim.resolve(sizes) for dim in form.dims)
    on, placements = setting.mesh_of(where), _placements(row, form, setting)
    if setting.engines is not None and on is setting.engines.on and row.kind == "kv_cache":
        on = setting.engines.of_heads()
    known = set(setting.local(where, ranks.first)) if setting.local else set()
    given = any(dim.symbols & known for dim in form.dims)
    if only is not None:
        alike: tuple[tuple[int, int], ...] = ((only, 1),)
    elif ranks.count < on.size:
        alike = ((ranks.first, ranks.count),)
    elif given:
        alike = _given(on, sizes) if on is setting.rollout else _of_tokens(on)
    else:
        alike = _alike(on, logical, placements)
    cut, owners = _cut(on, placements), _owners(placements, on, ranks.first)
    for first, count in alike:
        local = _local(logical, placements, on, first)
        if given and setting.local is not None:
            mine = {**sizes, **setting.local(where, first)}
            if _along_sequence(row, form, setting):
                mine["T"] //= on.degree("tp")
            local = _with(local, form, placements, mine, known)
        yield Held(first, count, logical, local, cut, owners)


def of_parameters(
    row: Tensor, role: str, ranks: RankClass, setting: Setting, layer: int | None, only: int | None
) -> Iterator[Held]:
    """The parameters of one layer, or (null) of what no layer owns: of gradients and states those that are trained.

    On the ranks that sample each has all of them.
    """
    shards = setting.shards[role].trained if row.kind in ("grad", "optimizer") else setting.shards[role]
    if not shards.held(ranks.first, layer):
        return
    if setting.rollout is not None and row.mesh == "rollout":
        whole = (sum(one.numel for one in shards.weights if one.layer == layer),)
        yield Held(*((only, 1) if only is not None else (0, setting.rollout.size)), whole, whole, (), "0")
        return
    placements = tuple(row.placement_of().items())
    cut, within = _cut(setting.mesh, placements), tuple(one for one in placements if one[0] != "pp")
    for first, count in ((only, 1),) if only is not None else shards.classes(layer, ranks.first):
        logical, local = (shards.whole(first, layer),), (shards.local(first, layer),)
        owners = _owners(within, setting.mesh, ranks.first)
        yield Held(first, count, logical, local, cut, owners)


def together(row: Tensor, form: Form, setting: Setting, sizes: Mapping[str, int], only: int | None) -> Held:
    """A tensor of which every rank has all, put together from the pieces of the others."""
    logical = tuple(dim.resolve(sizes) for dim in form.dims)
    return Held(*((only, 1) if only is not None else (0, setting.mesh.size)), logical, logical, (), "0")


def _placements(row: Tensor, form: Form, setting: Setting) -> Placements:
    found = row.placement_of(form)
    if _along_sequence(row, form, setting):
        found["tp"] = found["cp"]
    return tuple(found.items())


def _along_sequence(row: Tensor, form: Form, setting: Setting) -> bool:
    """Whether Megatron's sequence parallelism cuts it over tp too: the residual stream of a packed row."""
    return setting.sequence_parallel and row.kind == "activation" and form.name in ("packed", "saved")


def _with(local: Shape, form: Form, placements: Placements, sizes: Mapping[str, int], known: set[str]) -> Shape:
    """The same with sizes that are known of this rank, along the dimensions that are cut."""
    cut = {text for _, text in placements}
    return tuple(
        dim.resolve(sizes) if dim.symbols & known and f"Shard({at})" in cut else size
        for at, (dim, size) in enumerate(zip(form.dims, local, strict=True))
    )


def _given(on: Mesh, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    return _alike(on, (sizes["B_prompt"],), (("dp", "Shard(0)"),))


def _of_tokens(on: Mesh) -> tuple[tuple[int, int], ...]:
    """Ranks of one place along cp and sp: all of them have as many tokens, not all as many of a response."""
    ways = [(cp, sp) for cp in range(on.degree("cp")) for sp in range(on.degree("sp"))]
    return tuple((on.rank({"cp": cp, "sp": sp}), on.size // len(ways)) for cp, sp in ways)


@lru_cache(maxsize=4096)
def _alike(on: Mesh, logical: Shape, placements: Placements) -> tuple[tuple[int, int], ...]:
    found = rank_classes(on, [(logical, dict(placements))] if logical else [])
    return tuple((one.first, one.count) for one in found)


@lru_cache(maxsize=4096)
def _local(logical: Shape, placements: Placements, on: Mesh, rank: int) -> Shape:
    return local_shape(logical, dict(placements), on, rank) if logical else ()


@lru_cache(maxsize=256)
def _cut(on: Mesh, placements: Placements) -> tuple[str, ...]:
    degrees = dict(on.degrees)
    return tuple(f"{axis}: {text}" for axis, text in placements if degrees.get(axis, 1) > 1 and text != "Replicate()")


@lru_cache(maxsize=256)
def _owners(placements: Placements, on: Mesh, rank: int) -> str:
    """Of the ranks of a pipeline stage, where `rank` is one of them: of a tensor that pp does not cut, this stage has one too."""
    stage = on.rank({"pp": on.at(rank, "pp")})
    return spans([stage + one for one in authoritative(dict(placements), on)])
