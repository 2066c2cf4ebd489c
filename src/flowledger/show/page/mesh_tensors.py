"""Which part of each tensor every rank holds, and whether the parts give the whole: none missing, none twice.

A part is, for each dimension, the intervals of the logical tensor that stand one after another on the rank. Where ranks
recorded what they held, parts are laid out by those sizes; a plan's follow from its placements alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Mesh, mesh
from flowledger.flow.placements import parse_placement
from flowledger.flow.rank_classes import spans
from flowledger.flow.stages import mesh_of, stages
from flowledger.flow.tensors import tensors
from flowledger.ledger.assemble import meshes_of
from flowledger.show.page import mesh_parts
from flowledger.show.page.book import Book, Rows, Text, text

NO_TENSORS = text(
    "No tensor is known here: shapes and placements are known at record.level=tensors and above.",
    "此处没有张量：record.level=tensors 及以上才有形状与放置。",
)
# Of each tensor at each place the first micro-batch and layer; of that every rank's row. Writes before reads.
FIRST = """
WITH placed AS (
    SELECT source, role, stage, phase, tensor_name, layer, dims, logical_shape, local_shape, placement, bytes, padding, access, rank,
        rank_count, seq, dense_rank() OVER here AS nth, count(DISTINCT layer) OVER (PARTITION BY source, role, stage, phase, tensor_name, dims, placement, access) AS layers
    FROM accesses WHERE local_shape IS NOT NULL AND (source = 'plan' OR step IS NOT DISTINCT FROM $step) AND (rank IS NULL OR $few OR list_contains($ranks, rank))
    WINDOW here AS (PARTITION BY source, role, stage, phase, tensor_name, dims, placement, access
        ORDER BY layer NULLS LAST, epoch NULLS FIRST, mini_batch NULLS FIRST, micro_batch NULLS FIRST))
FROM placed WHERE nth = 1
QUALIFY row_number() OVER (PARTITION BY source, role, stage, phase, tensor_name, dims, placement, access, rank ORDER BY seq) = 1
ORDER BY role, stage, phase, tensor_name, dims, placement, access, rank, seq
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What the parts of all tensors have in common: meshes, and the ranks that are drawn, each with those that it stands for."""

    meshes: Mapping[str, Mesh]
    classes: Mapping[int, Sequence[int]]  # first rank of a class -> its ranks, as the manifest has them
    drawn: Mapping[int, Sequence[int]]


SAME = ("tensor_name", "dims", "role", "stage", "phase", "access")


def tensors_of(
    book: Book, step: int | None, drawn: Mapping[int, Sequence[int]]
) -> tuple[list[dict[str, Any]], list[Text]]:
    """One entry for each tensor and way of lying on the ranks; `also`: the other places where it lies so."""
    few = all(len(ranks) == 1 for ranks in drawn.values())
    rows = book.shown(FIRST, {"step": step, "ranks": list(drawn), "few": few})
    if not rows:
        return [], [NO_TENSORS]
    one = {"train": Mesh(), "rollout": Mesh()}
    named = (book.ledger.directory.manifest.rank_classes or {}).values()
    meshes = meshes_of(book.ledger.mesh) or one
    if rows[0]["source"] == "plan" and (engines := _engines((book.planned or book.ledger).directory.manifest.config)):
        meshes = {**meshes, "rollout": engines}
    job = Job(meshes, {ranks[0]: ranks for ranks in named if ranks}, drawn)
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault((*(str(row[name]) for name in SAME), str(row["placement"])), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: -1 if row["rank"] is None else row["rank"])
    return _alike(sorted((_entry(job, group) for group in groups.values()), key=_order)), []


def _engines(config: Mapping[str, Any]) -> Mesh | None:
    """The mesh of the inference engines that a plan was made for: dp counts their replicas. None where ranks that train sample."""
    rollout, hardware = config.get("rollout") or {}, config.get("hardware") or {}
    serving = rollout.get("serving") or {}
    if serving.get("engine") in (None, "flowledger", "hf"):
        return None
    tp, pp = (int((serving.get("mesh") or {}).get(axis) or 1) for axis in ("tp", "pp"))
    gpus = serving.get("gpus") or (hardware.get("nodes") or 1) * (hardware.get("gpus_per_node") or 1)
    return mesh(dp=max(1, int(gpus) // (tp * pp)), tp=tp, pp=pp)


def _order(entry: Mapping[str, Any]) -> tuple[int, bool, int]:
    """As a step meets them; where a tensor is made before where it is read."""
    names, places = list(tensors()), list(stages())
    stage = entry["stage"]
    return (
        names.index(entry["tensor_name"]) if entry["tensor_name"] in names else len(names),
        entry["access"] != "write",
        places.index(stage) if stage in places else len(places),
    )


def _alike(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries that lie on the ranks in one way are one: the first, with the places of the others."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        place = entry["at"]
        same = ("tensor_name", "dims", "logical_shape", "placement", "mesh", "parts")
        kept = found.setdefault(str([entry[name] for name in same]), entry)
        if kept is not entry and place != kept["at"] and place not in kept["also"]:
            kept["also"].append(place)
    return list(found.values())


def _entry(job: Job, rows: Rows) -> dict[str, Any]:
    """One access to one tensor, on all ranks that have it."""
    row, holders = rows[0], _holders(job, rows)
    lies_on, lie, parts, logical, why = _laid(job, rows, [rank for rank in holders if rank in job.drawn])
    rule = (
        mesh_parts.law(lie, logical, parts, holders, counted=row["dims"] == "P")
        if parts and logical is not None
        else None
    )
    return {
        "tensor_name": row["tensor_name"], "role": row["role"], "stage": row["stage"], "access": row["access"],
        "at": row["stage"] if not row["phase"] else f"{row['stage']}/{row['phase']}", "also": [],
        "source": row["source"], "layer": row["layer"], "layers": row["layers"],
        "dims": row["dims"].split(", ") if row["dims"] else [], "logical_shape": logical, "placement": row["placement"] or [],
        "mesh": lies_on, "bytes": row["bytes"], "holders": len(holders),
        "cut": [[axis, dim, lie.on.degree(axis)] for axis, dim in lie.cuts(len(row["local_shape"]))] if parts else [],
        "partial": [axis for axis, text in lie.placement.items() if parse_placement(text).kind == "Partial"],
        "parts": _grouped(parts), "why": why, "law": rule,
        "as_held": bool(parts) and logical is not None and not mesh_parts.is_even(lie, logical, parts),
        "lines": mesh_parts.lines(lie, logical, holders[0]) if parts and logical and len(parts) < len(holders) else None,
    }  # fmt: skip


Laid = tuple[str, mesh_parts.Lie, dict[int, mesh_parts.Part], tuple[int, ...] | None, Text | None]


def _laid(job: Job, rows: Rows, drawn: Sequence[int]) -> Laid:
    """(mesh, how it lies there, rank -> part, logical shape, why there are no parts). Frameworks may sample on the mesh that trains."""
    row = rows[0]
    logical = tuple(row["logical_shape"]) if row["logical_shape"] is not None else None
    local = {one["rank"] or 0: tuple(one["local_shape"]) for one in rows if (one["rank"] or 0) in drawn}
    refused: list[Laid] = []
    for name in dict.fromkeys((mesh_of(row["tensor_name"], row["stage"], row["access"]), "train")):
        lie = mesh_parts.Lie(
            on=job.meshes[name], placement=_placements(row["placement"]), packed=_padding(row) == "packed"
        )
        try:
            parts, whole = mesh_parts.parts(lie, logical, local, drawn, planned=row["source"] == "plan")
        except BadInput as error:
            refused.append((name, lie, {}, logical, text(f"It cannot be drawn: {error}.", f"无法绘制：{error}。")))
        else:
            return name, lie, parts, whole, None
    return refused[0]


def _placements(listed: Sequence[str] | None) -> dict[str, str]:
    """Axis -> placement, of `dp: Shard(0)`; one without an axis is of a job of one process."""
    pairs = [one.partition(": ") for one in listed or ()]
    return {axis: placement for axis, _, placement in pairs if placement}


def _holders(job: Job, rows: Rows) -> list[int]:
    """The ranks that have it: those that recorded it, a class where its first rank did, or those that a plan's row speaks for."""
    if rows[0]["source"] != "plan":
        return sorted({rank for row in rows for rank in job.drawn.get(row["rank"] or 0, ())})
    held: set[int] = set()
    for row in rows:
        first, count = row["rank"] or 0, row["rank_count"] or 1
        members = job.classes.get(first, ())
        held.update(members if len(members) == count else range(first, first + count))
    return sorted(held)


def _padding(row: Mapping[str, Any]) -> str | None:
    if row["padding"]:
        return str(row["padding"])
    known = tensors().get(row["tensor_name"])
    forms = (*known.forms, *known.foreign) if known else ()
    return next((form.padding for form in forms if form.shape == f"[{row['dims']}]"), None)


def _grouped(parts: Mapping[int, mesh_parts.Part]) -> list[dict[str, Any]]:
    """Each part once, with the ranks that hold it."""
    found: dict[mesh_parts.Part, list[int]] = {}
    for rank, part in parts.items():
        found.setdefault(part, []).append(rank)
    return [
        {"ranks": spans(ranks), "members": ranks, "box": part, "local_shape": mesh_parts.shape_of(part),
         "elements": prod(mesh_parts.shape_of(part))}
        for part, ranks in found.items()
    ]  # fmt: skip
