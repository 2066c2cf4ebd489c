"""The stages of an RL step, one row each; `stages.toml` beside this file holds the rows.

What a stage reads, writes and frees is not written there: it follows from the tensors (their producer, readers and
release). The place of a stage in the step follows in turn: `order()` sorts the stages by who reads what another has
written, and a test holds that the table is written in such an order.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.tensors import stage_of, tensors

ROLES = ("actor", "rollout", "ref", "critic", "reward")
PHASES = ("forward", "loss", "backward", "step", "load", "offload")
GRAINS = ("prompt", "group", "sample", "token", "micro_batch", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. `reads` of an earlier step's result are written `name@previous`."""

    name: str
    role: str
    phases: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]
    works_on: tuple[str, ...]  # grains it handles one at a time: prompt, group, sample, token, micro_batch, model
    aggregates: str  # over what it sums or averages, and into what
    aggregates_zh: str
    purpose: str
    purpose_zh: str
    optional: bool = False
    mesh: str = "train"  # whose ranks hold its batch: those that train, or `rollout`'s
    reads_on: str | None = (
        None  # whose ranks hold what it reads, where it moves the batch from these to those of `mesh`
    )


@cache
def stages() -> Mapping[str, Stage]:
    """Every stage by name, in the order of a step."""
    text = files("flowledger.flow").joinpath("stages.toml").read_text(encoding="utf-8")
    listed = ("phases", "works_on")
    return {
        raw["name"]: Stage(**{**raw, **{key: tuple(raw[key]) for key in listed}, **_access(raw["name"])})
        for raw in tomllib.loads(text)["stage"]
    }


def stage(name: str) -> Stage:
    """The row of one stage. Raises BadInput with the nearest known name."""
    rows = stages()
    if name not in rows:
        raise BadInput(f"no stage is called {name!r}{nearest(name, rows)}")
    return rows[name]


def mesh_of(tensor_name: str, stage_name: str | None, access: str | None = None) -> str:
    """The mesh that a tensor lies on where a stage reads or writes it: its own, else the stage's; `train` if neither says.

    `access`: read or write; None counts as write.
    """
    own = tensors()[tensor_name].mesh if tensor_name in tensors() else None
    where = stages().get(stage_name or "")
    if own or where is None:
        return own or "train"
    return where.reads_on if where.reads_on and access == "read" else where.mesh


def owner_of(tensor_name: str, stage_name: str | None) -> str:
    """role@stage that frees a tensor which a stage meets, or keeps it for good.

    What lives no longer than a stage is that stage's own; of the weights of several models each role has its own.
    """
    row, where = tensors()[tensor_name], stages().get(stage_name or "")
    if where is None or row.lifetime == "step" or (row.lifetime == "persistent" and not row.also_written_by):
        return row.owner
    makers = [name for name in map(stage_of, row.written_by) if stages()[name].role == where.role]
    return f"{where.role}@{makers[0] if makers and row.lifetime == 'persistent' else where.name}"


def order(rows: Iterable[Stage] | None = None) -> tuple[str, ...]:
    """Stage names sorted so that every tensor is written before it is read; ties keep the order of the rows.

    A stage waits for the producer of what it reads. What lives shorter than the step (gradients, logits, the KL of its
    own loss) a stage that writes it too has made for itself, and waits for nobody. Raises AssertionError when reads and writes form a circle: such a table describes no step.
    """
    return _sorted(tuple(stages().values() if rows is None else rows))


@lru_cache(maxsize=64)
def _sorted(listed: tuple[Stage, ...]) -> tuple[str, ...]:
    needs = {row.name: _writers_before(row, listed) for row in listed}
    done: list[str] = []
    while len(done) < len(listed):
        ready = next((name for name, before in needs.items() if name not in done and before <= set(done)), None)
        if ready is None:
            raise AssertionError(f"stages.toml: a circle among {sorted(set(needs) - set(done))}")
        done.append(ready)
    return tuple(done)


def _writers_before(row: Stage, rows: Iterable[Stage]) -> set[str]:
    read = (tensors()[name] for name in row.reads if "@" not in name)
    handed = (one for one in read if one.name not in row.writes or one.lifetime == "step")
    return {stage_of(one.producer) for one in handed} & {other.name for other in rows} - {row.name}


def _access(name: str) -> dict[str, tuple[str, ...]]:
    """What a stage reads, writes and frees, in the order of the tensors."""
    rows = tensors().values()
    reads = [
        row.name + ("@previous" if place.endswith("@previous") else "")
        for row in rows
        for place in row.readers
        if stage_of(place) == name
    ]
    return {
        "reads": tuple(dict.fromkeys(reads)),
        "writes": tuple(row.name for row in rows if name in map(stage_of, row.written_by)),
        "frees": tuple(row.name for row in rows if name in map(stage_of, row.released_by)),
    }
