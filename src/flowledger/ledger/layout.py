"""The layout of a job as its manifest tells it, and the classes of ranks with equal shares of everything."""

from collections.abc import Mapping
from typing import Any

from flowledger.flow.axes import DEGREES
from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.flow.layout import Layout
from flowledger.flow.mesh import Mesh, mesh
from flowledger.flow.rank_classes import Cut
from flowledger.flow.rank_classes import rank_classes as classes_of_cuts

OWN_LOOP = "flowledger"  # the framework whose ranks all sample


def layout(config: Mapping[str, Any], degrees: Mapping[str, int], bindings: Mapping[str, int]) -> Layout:
    """What each rank works on. The batch is dealt in chunks: who trained on which sample only a recording tells.

    config: as the manifest has it; degrees: of the mesh that trains, with etp where experts are folded; bindings: sizes of symbols.
    """
    engine = (config.get("actor") or {}).get("engine") or {}
    asked = engine.get("mesh") or config.get("mesh") or {}
    on = mesh(**{axis: degree for axis, degree in degrees.items() if axis in DEGREES})
    return Layout(
        on=on, samples=bindings.get("B", 0), heads=bindings.get("A", 0), kv_heads=bindings.get("K", 0),
        experts=_experts(bindings.get("E", 0), on, asked),
        stages=_stages(bindings.get("L", 0), on, asked.get("vpp") or 1, engine),
        cp_kind="all_to_all" if asked.get("cp_kind") == "all_to_all" else "ring",
        sequence_parallel=bool(engine.get("sequence_parallel")),
    )  # fmt: skip


def rank_classes(
    framework: str, config: Mapping[str, Any], degrees: Mapping[str, int], bindings: Mapping[str, int]
) -> dict[str, list[int]]:
    """Class -> its ranks, which have equally many layers, heads, experts and samples.

    Of flowledger's own loop also equal parts of the vocabulary, and as many prompts to sample: those are cut over all ranks.
    A configuration that does not come to a layout (its layers do not divide) has one class.
    """
    try:
        made = layout(config, degrees, bindings)
    except BadInput:
        return {}
    own = framework == OWN_LOOP
    vocabulary = bindings.get("V", 0) if own else 0
    numbers = ((made.heads, "tp"), (made.experts, "ep"), (made.samples, "dp"), (vocabulary, "tp"))
    cuts: list[Cut] = [((number,), {axis: "Shard(0)"}) for number, axis in numbers]
    shares = _sampled(made.on.size, bindings.get("B_prompt", 0) if own else 0)
    found: dict[str, list[int]] = {}
    for one in classes_of_cuts(made.on, cuts, made.stages):
        ranks = one.ranks(made.on)
        for prompts, sampling in shares.items():
            if mine := [rank for rank in ranks if rank in sampling]:
                found[_named(one.name, "" if len(shares) == 1 else prompts)] = mine
    return found


def _sampled(world: int, prompts: int) -> dict[str, range]:
    """`2 prompts` -> the ranks that sample so many: cut over all of them as torch.chunk does."""
    each = -(-prompts // world)
    if each * world == prompts:
        return {"": range(world)}
    whole, rest = divmod(prompts, each)
    ends = [(each, whole), (rest, whole + min(rest, 1)), (0, world)]
    found, start = {}, 0
    for number, end in ends:
        if start < end:
            found[f"{number} prompt{'s' * (number != 1)}"] = range(start, end)
        start = max(start, end)
    return found


def _named(name: str, share: str) -> str:
    return ", ".join(part for part in ("" if name == "all" else name, share) if part) or "all"


def _experts(experts: int, on: Mesh, degrees: Mapping[str, Any]) -> int:
    """0, not known, where a framework deals experts to ranks in another way than along `ep` of this mesh."""
    return experts if degrees.get("ep", on.degree("ep")) == on.degree("ep") else 0


def _stages(layers: int, on: Mesh, vpp: int, engine: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    if not layers:
        return ()
    first, last = engine.get("layers_in_first_stage"), engine.get("layers_in_last_stage")
    return stage_layers(layers, on.degree("pp"), vpp, first, last, tuple(engine.get("layers_in_stages") or ()))
