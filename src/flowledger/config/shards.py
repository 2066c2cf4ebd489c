"""What a mesh asks of a run of our own loop: of its processes, its batches and its model. Refused before anything is loaded.

Sizes of a model that is not described by a file beside it are known only when it is loaded; `check_sizes` is asked again
then.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowledger.config.model_file import read_model
from flowledger.flow.errors import BadInput, nearest_divisor
from flowledger.tables.models import Architecture, find

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

WORLD = ("dp", "tp", "pp", "cp", "sp")  # axes whose degrees make the number of processes; ep divides dp
TINY, CATALOGUED = "tiny", ("smollm2-135m",)

# symbol of a size -> what it counts, and the axes that cut it one after another
CUT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "A": ("attention heads", ("tp", "sp")),
    "K": ("key/value heads", ("tp",)),
    "F": ("FFN channels", ("tp",)),
    "E": ("experts", ("ep",)),
}


def check(config: "RunConfig", processes: int) -> None:
    """Raise BadInput where the mesh does not fit `processes`, the batches, the other settings, or the model's sizes."""
    _processes(config, processes)
    _batches(config)
    _settings(config)
    for key, sizes in _known_sizes(config):
        check_sizes(config, sizes, key=key)


def check_sizes(config: "RunConfig", sizes: Mapping[str, int], *, key: str = "model.path") -> None:
    """Raise BadInput where the mesh cannot cut a model of these sizes (by symbol: L, A, K, F, E)."""
    mesh = config.mesh
    for symbol, (what, axes) in CUT.items():
        if symbol == "A" and mesh.cp_kind == "all_to_all":
            axes = (*axes, "cp")
        if symbol in sizes:
            _divides(config, sizes[symbol], f"the {sizes[symbol]} {what} of {key}", axes)
    if mesh.ep > 1 and not sizes.get("E"):
        raise BadInput(f"mesh.ep = {mesh.ep}{_place(config, 'ep')} and {key} has no experts; use mesh.ep = 1")
    _stages(config, sizes["L"], key)


def _processes(config: "RunConfig", processes: int) -> None:
    mesh = config.mesh
    asked = mesh.dp * mesh.model
    if asked != processes:
        names = [axis for axis in WORLD if getattr(mesh, axis) > 1] or ["dp"]
        degrees = "*".join(f"mesh.{axis}" for axis in names)
        there = "there is 1 process" if processes == 1 else f"there are {processes} processes"
        ways = f"use --nproc {asked}"
        if processes % mesh.model == 0:
            ways += f" or mesh.dp = {processes // mesh.model}"
        raise BadInput(f"{degrees} = {asked}{_place(config, names[0])} and {there}; {ways}")
    if mesh.dp % mesh.ep:
        raise BadInput(
            f"mesh.ep = {mesh.ep}{_place(config, 'ep')} does not divide mesh.dp = {mesh.dp} (of ep neighbouring dp ranks "
            f"each holds other experts); use mesh.ep = {nearest_divisor(mesh.ep, of=mesh.dp)}"
        )
    if mesh.vpp > 1 and mesh.pp == 1:
        raise BadInput(
            f"mesh.vpp = {mesh.vpp}{_place(config, 'vpp')} cuts the layers of pipeline stages, and mesh.pp = 1; "
            "use mesh.vpp = 1"
        )


def _batches(config: "RunConfig") -> None:
    group, dp = config.rollout.samples_per_prompt, config.mesh.dp
    prompts = {"actor": config.mini_batch_prompts}
    if config.critic is not None:
        prompts["critic"] = config.critic.mini_batch_prompts or config.mini_batch_prompts
    for role, count in prompts.items():
        if count * group % dp:
            raise BadInput(
                f"{role}.mini_batch_prompts * rollout.samples_per_prompt = {count}*{group} = {count * group} samples "
                f"are not divisible by mesh.dp = {dp}{_place(config, 'dp')}; "
                f"use mesh.dp = {nearest_divisor(dp, of=count * group)}"
            )


def _settings(config: "RunConfig") -> None:
    """What a mesh leaves no choice in."""
    cutting = _larger(config, ("pp", "cp", "sp"))
    if cutting and not config.actor.packed:
        raise BadInput(
            f"actor.packed = false ({config.source_of('actor.packed')}) and {cutting}: "
            "only packed passes are cut along layers and tokens; use actor.packed = true"
        )
    everything = _larger(config, WORLD)
    if everything and config.rollout.weights == "shared":
        raise BadInput(
            f"rollout.weights = shared ({config.source_of('rollout.weights')}) and {everything}: a rank holds shards of "
            "the policy only, and rollout needs it whole; use rollout.weights = copy"
        )
    inside = _larger(config, ("tp", "pp", "ep"))
    if inside and config.model.lora is not None:
        axis = inside.partition(" ")[0]
        raise BadInput(
            f"model.lora ({config.source_of('model.lora')}) and {inside}: adapters are not cut inside a model; "
            f"use {axis} = 1 and more mesh.dp, or model.lora = null"
        )


def _stages(config: "RunConfig", layers: int, key: str) -> None:
    """Layers of the pipeline's stages: told one by one, for the first and the last, or equally many (Megatron's rule)."""
    mesh, engine = config.mesh, config.actor.engine
    if mesh.pp == 1:
        return
    degrees, stages, told = (mesh.pp, mesh.vpp), mesh.pp * mesh.vpp, engine.layers_in_stages
    place = f"mesh.pp*mesh.vpp = {mesh.pp}*{mesh.vpp} = {stages} stages{_place(config, 'pp')}"
    if told:
        if len(told) != stages or sum(told) != layers or min(told) < 1:
            raise BadInput(
                f"actor.engine.layers_in_stages = {list(told)}: {place} of at least one layer each share the "
                f"{layers} layers of {key}; use {_even(layers, stages) if layers >= stages else _ways(layers, *degrees)}"
            )
        return
    ends = [n for n in (engine.layers_in_first_stage, engine.layers_in_last_stage) if n is not None]
    rest, among = layers - sum(ends), stages - len(ends)
    if rest != 0 if among == 0 else rest < among or rest % among:
        what = (
            f"{rest} of the {layers} layers of {key}, beside those of the named stages,"
            if ends
            else f"the {layers} layers of {key}"
        )
        raise BadInput(f"{place} do not share {what} equally; use {_ways(layers, *degrees)}")


def _ways(layers: int, pp: int, vpp: int) -> str:
    """The nearest number of stages that share the layers equally, and stages told one by one, as far as there are any."""
    even = [n for n in range(1 + (vpp > 1), layers + 1) if layers % (n * vpp) == 0]
    ways = [f"mesh.pp = {n}" for n in sorted(even, key=lambda n: abs(n - pp))[:1]]
    if layers >= pp * vpp:
        ways.append(f"actor.engine.layers_in_stages = {_even(layers, pp * vpp)}")
    return " or ".join(ways or ["mesh.pp = 1 and mesh.vpp = 1"])


def _divides(config: "RunConfig", size: int, what: str, axes: tuple[str, ...]) -> None:
    """Raise BadInput, about the first axis that does not divide what those before it have left."""
    degrees = {axis: getattr(config.mesh, axis) for axis in axes if getattr(config.mesh, axis) > 1}
    left = size
    for axis, degree in degrees.items():
        if left % degree:
            product = "*".join(f"mesh.{name}" for name in degrees)
            values = "*".join(str(degree) for degree in degrees.values())
            raise BadInput(
                f"{product} = {values}{_place(config, axis)} does not divide {what}; "
                f"use mesh.{axis} = {nearest_divisor(degree, of=left)}"
            )
        left //= degree


def _known_sizes(config: "RunConfig") -> Iterator[tuple[str, dict[str, int]]]:
    """The sizes of the models that the mesh cuts, as far as they are known without loading them."""
    paths = {"model.path": config.model.path}
    if config.critic is not None and config.critic.path != "start":
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        if path == TINY:
            tiny = config.model.tiny
            sizes = {"L": tiny.layers, "A": tiny.heads, "K": tiny.kv_heads, "F": tiny.ffn_size}
            yield key, sizes | ({"E": tiny.experts} if tiny.experts else {})
        elif (model := _described(path)) is not None:
            sizes = {"L": model.layers, "A": model.heads, "K": model.kv_heads, "F": model.ffn}
            yield key, sizes | ({"E": model.moe.experts} if model.moe else {})


def _described(path: str) -> Architecture | None:
    if path in CATALOGUED:
        return find(path)
    with suppress(BadInput, OSError, RuntimeError):  # what is wrong with it, loading says
        return read_model(Path(path).expanduser() / "config.json")
    return None


def _larger(config: "RunConfig", axes: tuple[str, ...]) -> str:
    """`mesh.pp = 2, mesh.sp = 2`: those of the axes that have more than one rank; an empty string where none has."""
    return ", ".join(f"mesh.{axis} = {getattr(config.mesh, axis)}" for axis in axes if getattr(config.mesh, axis) > 1)


def _even(layers: int, stages: int) -> list[int]:
    """Layers of stages that differ by one at most, the longer ones first."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _place(config: "RunConfig", axis: str) -> str:
    """` (run.yaml:12)`, where the degree of an axis was set."""
    source = config.source_of(f"mesh.{axis}")
    return "" if source.startswith("default") else f" ({source})"
