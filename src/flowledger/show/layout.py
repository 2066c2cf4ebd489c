"""The layout of a run or a plan, as its ledger tells it: mesh, layers, heads, experts, who trained on which sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.flow.axes import AXES
from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.flow.layout import Layout
from flowledger.flow.mesh import Mesh, mesh
from flowledger.flow.slices import Slices
from flowledger.ledger.reader import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One sample of a step: where it went through the first epoch of the update, and how long it is."""

    micro_batch: tuple[int, int, int]  # dp rank, mini-batch, micro-batch
    group: str | None
    prompt: int
    response: int


def layout(ledger: Ledger, trained: Mapping[int, Trained]) -> Layout:
    """What the manifest says of the job, with the samples as they were dealt; without a recording, chunks of the batch."""
    manifest = ledger.directory.manifest
    actor, sizes = manifest.config.get("actor") or {}, manifest.bindings
    engine = actor.get("engine") or {}
    degrees = engine.get("mesh") or manifest.config.get("mesh") or {}
    on = mesh_of(ledger)
    return Layout(
        on=on, samples=sizes.get("B", 0), heads=sizes.get("A", 0), kv_heads=sizes.get("K", 0), experts=_experts(sizes.get("E", 0), on, degrees),
        stages=_stages(sizes.get("L", 0), on, degrees.get("vpp") or 1, engine),
        dealt={sample: one.micro_batch[0] for sample, one in trained.items()},
        cp_kind="all_to_all" if degrees.get("cp_kind") == "all_to_all" else "ring",
        sequence_parallel=bool(engine.get("sequence_parallel")),
    )  # fmt: skip


def mesh_of(ledger: Ledger) -> Mesh:
    """The mesh that trains."""
    return mesh(**{axis: degree for axis, degree in ledger.directory.manifest.mesh.items() if axis in AXES})


def trained(ledger: Ledger, step: int | None) -> dict[int, Trained]:
    """Sample -> its way through the update of a step (None: the last that has one), in the order of the rows."""
    on = mesh_of(ledger)
    rows = ledger.rows(
        "SELECT r.sample_id, r.trained, m.group_id, m.prompt_length, m.response_length FROM samples r "
        "JOIN samples_merged m USING (source, sample_id, attempt, step) WHERE r.trained IS NOT NULL AND r.step = "
        "coalesce(?, (SELECT max(step) FROM samples WHERE trained IS NOT NULL)) ORDER BY r.process, r.seq",
        [step],
    )
    found: dict[int, Trained] = {}
    for row in rows:
        first = min(row["trained"], key=lambda one: (one["epoch"], one["mini_batch"]))
        if str(row["sample_id"]).isdigit():
            found.setdefault(
                int(row["sample_id"]),
                Trained(
                    micro_batch=(on.at(first["rank"], "dp"), first["mini_batch"], first["micro_batch"]),
                    group=row["group_id"], prompt=row["prompt_length"] or 0, response=row["response_length"] or 0,
                ),
            )  # fmt: skip
    return found


def row_of(ledger: Ledger, samples: Mapping[int, Trained], sample: int, token: int) -> tuple[Slices, int, int]:
    """(the packed row that a token went through the update in, the place of its sample there, the token's place in that).

    Where neighbours share a prompt, its tokens belong to the first of them. Raises BadInput for a token not there, and
    where no sample was recorded.
    """
    if not samples:
        raise BadInput(f"--token {token}: no sample was recorded here, so where tokens went is not known")
    if sample not in samples:
        raise BadInput(
            f"--token {token}: sample {sample} was not trained on in this step, so where its tokens went is not known"
        )
    mine, config = samples[sample], ledger.directory.manifest.config
    if not 0 <= token < mine.prompt + mine.response:
        raise BadInput(f"token {token} is not there; sample {sample} has 0 to {mine.prompt + mine.response - 1}")
    on = mesh_of(ledger)
    actor = config.get("actor") or {}
    shares = bool(actor.get("shared_prompts", True)) and on.degree("cp") == 1
    tp = on.degree("tp") if (actor.get("engine") or {}).get("sequence_parallel") else 1
    beside = {one.micro_batch for one in samples.values() if one.micro_batch[:2] == mine.micro_batch[:2]}
    rows = {at: _row(samples, at, shares=shares) for at in beside}
    row = rows[mine.micro_batch]
    longest = max(
        Slices(lengths=tuple(one.values()), cp=on.degree("cp"), sp=on.degree("sp"), tp=tp).tokens
        for one in rows.values()
    )
    slices = Slices(lengths=tuple(row.values()), at_least=longest if on.degree("pp") > 1 else 0)
    holder = sample
    if shares and token < mine.prompt:
        holder = _leader(samples, list(row), sample)
    elif row[sample] < mine.prompt + mine.response:
        token -= mine.prompt
    return slices, list(row).index(holder), token


def _row(samples: Mapping[int, Trained], at: tuple[int, int, int], *, shares: bool) -> dict[int, int]:
    """Sample -> tokens that it has of its own in the packed row of a micro-batch."""
    found: dict[int, int] = {}
    before: Trained | None = None
    for sample, one in samples.items():
        if one.micro_batch == at:
            shared = shares and before is not None and before.group is not None and one.group == before.group
            found[sample] = one.response + (0 if shared else one.prompt)
            before = one
    return found


def _leader(samples: Mapping[int, Trained], row: list[int], sample: int) -> int:
    """The first of the neighbours in a row that share a sample's prompt."""
    place = row.index(sample)
    while (
        place and samples[row[place - 1]].group is not None and samples[row[place - 1]].group == samples[sample].group
    ):
        place -= 1
    return row[place]


def _experts(experts: int, on: Mesh, degrees: Mapping[str, Any]) -> int:
    """0, not known, where a framework deals experts to ranks in another way than along `ep` of this mesh."""
    return experts if degrees.get("ep", on.degree("ep")) == on.degree("ep") else 0


def _stages(layers: int, on: Mesh, vpp: int, engine: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    if not layers:
        return ()
    first, last = engine.get("layers_in_first_stage"), engine.get("layers_in_last_stage")
    return stage_layers(layers, on.degree("pp"), vpp, first, last, tuple(engine.get("layers_in_stages") or ()))
