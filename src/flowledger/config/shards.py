"""What a mesh asks of a run of our own loop: of its processes, its batches and its model. Refused before anything is loaded.

Sizes of a model that is not described by a file beside it are known only when it is loaded; `check_sizes` is asked again
then.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowledger.config.engine import Engine
from flowledger.config.model_file import read_model
from flowledger.config.ways import MOST_PROCESSES, Changes, Fault, changed, divisors, nearest, told, world
from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.tables.models import Architecture, find

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

WORLD = ("dp", "tp", "pp", "cp", "sp")  # axes whose degrees make the number of processes; ep divides dp
TINY, CATALOGUED = "tiny", ("smollm2-135m",)
TINY_LAYERS = "model.tiny.layers"
START = "start"  # critic.path: the policy as it starts

# symbol of a size -> what it counts, and the axes that cut it one after another
CUT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "A": ("attention heads", ("tp", "sp")),
    "K": ("key/value heads", ("tp",)),
    "F": ("FFN channels", ("tp",)),
    "E": ("experts", ("ep",)),
}


def check(config: "RunConfig", processes: int) -> None:
    """Raise BadInput where the mesh does not fit `processes`, the batches, the other settings, or the model's sizes."""
    known = dict(_known_sizes(config))
    try:
        _processes(config, processes)
        _rules(config, known)
    except Fault as fault:
        raise told(fault, config, processes, _works(known, processes)) from None


def check_sizes(config: "RunConfig", sizes: Mapping[str, int], *, key: str = "model.path") -> None:
    """Raise BadInput where the mesh cannot cut a model of these sizes (by symbol: L, A, K, F, E)."""
    processes = world(config)
    try:
        _sizes(config, sizes, key)
    except Fault as fault:
        raise told(fault, config, processes, _works({key: sizes}, processes)) from None


def _rules(config: "RunConfig", known: Mapping[str, Mapping[str, int]]) -> None:
    """Raise BadInput where the mesh can be on no number of processes."""
    _axes(config)
    _batches(config)
    _settings(config)
    _engines(config)
    for key, sizes in known.items():
        _sizes(config, sizes, key)


def _works(known: Mapping[str, Mapping[str, int]], processes: int) -> Callable[["RunConfig", Changes], bool]:
    """Whether a configuration with changes passes all rules, for models of `known` sizes."""

    def works(config: "RunConfig", changes: Changes) -> bool:
        mended, sizes = changed(config, changes), dict(known)
        if TINY_LAYERS in changes:
            sizes |= {key: {**of, "L": changes[TINY_LAYERS]} for key, of in known.items() if _path(config, key) == TINY}
        try:
            _rules(mended, sizes)
        except BadInput:
            return False
        return world(mended) <= max(MOST_PROCESSES, processes)

    return works


def _sizes(config: "RunConfig", sizes: Mapping[str, int], key: str) -> None:
    mesh = config.mesh
    for symbol, (what, axes) in CUT.items():
        if symbol == "A" and mesh.cp_kind == "all_to_all":
            axes = (*axes, "cp")
        if symbol in sizes:
            _divides(config, sizes[symbol], f"the {sizes[symbol]} {what} of {key}", axes)
    if mesh.ep > 1 and not sizes.get("E"):
        raise Fault(f"mesh.ep = {mesh.ep}{_place(config, 'ep')} and {key} has no experts", [{"mesh.ep": 1}])
    for role, engine in _engines_of(config, key).items():
        _stages(config, role, engine, sizes["L"], key)


def _processes(config: "RunConfig", processes: int) -> None:
    mesh, asked = config.mesh, world(config)
    if asked == processes:
        return
    names = [axis for axis in WORLD if getattr(mesh, axis) > 1] or ["dp"]
    degrees = "*".join(f"mesh.{axis}" for axis in names)
    there = "there is 1 process" if processes == 1 else f"there are {processes} processes"
    dp = processes // mesh.model
    fits: list[Changes] = [{"mesh.dp": dp}] if processes % mesh.model == 0 else []
    others: list[Changes] = [{**one, "mesh.ep": ep} for one in fits for ep in nearest(mesh.ep, divisors(dp))]
    others += ({"mesh.dp": n} for n in nearest(dp, range(1, max(MOST_PROCESSES, processes) + 1)))
    raise Fault(f"{degrees} = {asked}{_place(config, names[0])} and {there}", [{}], fits, otherwise=others)


def _axes(config: "RunConfig") -> None:
    mesh = config.mesh
    if mesh.dp % mesh.ep:
        raise Fault(
            f"mesh.ep = {mesh.ep}{_place(config, 'ep')} does not divide mesh.dp = {mesh.dp} (of ep neighbouring dp ranks "
            "each holds other experts)",
            [{"mesh.ep": n} for n in nearest(mesh.ep, divisors(mesh.dp))],
        )
    if mesh.vpp > 1 and mesh.pp == 1:
        raise Fault(
            f"mesh.vpp = {mesh.vpp}{_place(config, 'vpp')} cuts the layers of pipeline stages, and mesh.pp = 1",
            [{"mesh.vpp": 1}],
        )


def _batches(config: "RunConfig") -> None:
    group, dp = config.rollout.samples_per_prompt, config.mesh.dp
    prompts = {"actor": config.mini_batch_prompts}
    if config.critic is not None:
        prompts["critic"] = config.critic.mini_batch_prompts or config.mini_batch_prompts
    for role, count in prompts.items():
        if count * group % dp:
            raise Fault(
                f"{role}.mini_batch_prompts * rollout.samples_per_prompt = {count}*{group} = {count * group} samples "
                f"are not divisible by mesh.dp = {dp}{_place(config, 'dp')}",
                [{"mesh.dp": n} for n in nearest(dp, divisors(count * group))],
            )


def _settings(config: "RunConfig") -> None:
    """What a mesh leaves no choice in."""
    parallel = (
        f"{role}.sequence_parallel = true with mesh.tp = {config.mesh.tp}"
        for role, engine in _roles(config).items()
        if engine.sequence_parallel
    )
    tokens = ", ".join(parallel) if config.mesh.tp > 1 else ""
    cutting = ", ".join(part for part in (_larger(config, ("pp", "cp", "sp")), tokens) if part)
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
        whole = {f"mesh.{axis}": 1 for axis in ("tp", "pp", "ep") if getattr(config.mesh, axis) > 1}
        raise Fault(
            f"model.lora ({config.source_of('model.lora')}) and {inside}: adapters are not cut inside a model",
            [{**whole, "mesh.dp": config.mesh.dp * config.mesh.tp * config.mesh.pp}, whole],
            [{"model.lora": None}],
        )


def _engines(config: "RunConfig") -> None:
    """What the engines of policy and critic must agree on with the mesh."""
    pp, vpp = config.mesh.pp, config.mesh.vpp
    for role, engine in _roles(config).items():
        pipeline = f"{role}.pipeline = {engine.pipeline} ({config.source_of(f'{role}.pipeline')})"
        if engine.mesh is not None:
            raise BadInput(
                f"{role}.mesh ({config.source_of(f'{role}.mesh')}): policy, reference and critic lie on one mesh; "
                f"use {role}.mesh = null, and mesh for all of them"
            )
        if pp > 1 and engine.pipeline == "interleaved" and vpp == 1:
            raise Fault(
                f"{pipeline} and mesh.vpp = 1: the interleaved order is that of several chunks of layers a rank",
                [{f"{role}.pipeline": "1f1b"}, _ordered(config, "1f1b")],
            )
        if engine.pipeline != "interleaved" and vpp > 1:
            raise Fault(
                f"{pipeline} and mesh.vpp = {vpp}{_place(config, 'vpp')}: several chunks of layers a rank go through in the "
                "interleaved order",
                [{f"{role}.pipeline": "interleaved"}, _ordered(config, "interleaved"), {"mesh.vpp": 1}],
            )


def _ordered(config: "RunConfig", pipeline: str) -> Changes:
    """All engines in this order, as far as they are not."""
    other = {
        role
        for role, engine in _roles(config).items()
        if (engine.pipeline == "interleaved") != (pipeline == "interleaved")
    }
    return {f"{role}.pipeline": pipeline for role in _roles(config) if role in other}


def _stages(config: "RunConfig", role: str, engine: Engine, layers: int, key: str) -> None:
    """Layers of the pipeline's stages: told one by one, for the first rank and the last, or equally many (Megatron's rule)."""
    mesh, explicit = config.mesh, engine.layers_in_stages
    if _shared(layers, mesh.pp, mesh.vpp, engine):
        return
    place = f"mesh.pp*mesh.vpp = {mesh.pp}*{mesh.vpp} = {mesh.pp * mesh.vpp} stages{_place(config, 'pp')}"
    named = {"layers_in_first_stage": engine.layers_in_first_stage, "layers_in_last_stage": engine.layers_in_last_stage}
    ends = {name: count for name, count in named.items() if count is not None}
    beside = " and ".join(f"{role}.{name} = {count}" for name, count in ends.items())
    fewer, even = _fewer(config, layers), _even_stages(config, role, layers)
    if explicit:
        raise Fault(
            f"{role}.layers_in_stages = {list(explicit)}: {place} share the {layers} layers of {key}, each but the first and the "
            "last at least one",
            even or fewer,
        )
    rest, equally = layers - sum(ends.values()), "equally" if mesh.vpp == 1 else "in equal chunks"
    if rest < 0:
        name, count = max(ends.items(), key=lambda end: end[1])
        less: list[Changes] = [{f"{role}.{name}": n} for n in nearest(count, range(layers + 1))]
        exceeds = "exceed" if len(ends) > 1 else "exceeds"
        raise Fault(f"{beside} {exceeds} the {layers} layers of {key}", less, otherwise=[*even, *fewer])
    what = f"{rest} of the {layers} layers of {key}, beside {beside}," if ends else f"the {layers} layers of {key}"
    longer: list[Changes] = []
    if layers < mesh.pp * mesh.vpp and _path(config, key) == TINY:
        longer = [{TINY_LAYERS: mesh.pp * mesh.vpp}]
    raise Fault(f"{place} do not share {what} {equally}", longer, fewer, even)


def _shared(layers: int, pp: int, vpp: int, engine: Engine) -> bool:
    """Whether the stages share all layers. The first embeds and the last has the head: these may be told to have no layer."""
    if pp == 1:
        return True
    first, last, told = engine.layers_in_first_stage, engine.layers_in_last_stage, engine.layers_in_stages
    try:
        ranks = stage_layers(layers, pp, vpp, first, last, told)
    except BadInput:
        return False
    sizes = told or tuple(len(ranks[chunk % pp]) // vpp for chunk in range(pp * vpp))
    least = (first is None and not told, *[1] * (len(sizes) - 2), last is None and not told)
    return all(size >= few for size, few in zip(sizes, least, strict=True))


def _fewer(config: "RunConfig", layers: int) -> list[Changes]:
    """Other numbers of stages, the nearest first: of ranks, then without chunks, then one."""
    pp, vpp = config.mesh.pp, config.mesh.vpp
    ways: list[Changes] = [{"mesh.pp": n} for n in nearest(pp, range(1 + (vpp > 1), layers + 1)) if n != pp]
    order = _ordered(config, "1f1b")
    return [*ways, *([{"mesh.vpp": 1, **order}, {"mesh.pp": 1, "mesh.vpp": 1, **order}] if vpp > 1 else [])]


def _even_stages(config: "RunConfig", role: str, layers: int) -> list[Changes]:
    """Stages told one by one, for this model or for all, where there are enough layers."""
    stages = config.mesh.pp * config.mesh.vpp
    if layers < stages:
        return []
    sizes = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))  # the longer ones first
    return [{f"{role}.layers_in_stages": sizes}, {f"{one}.layers_in_stages": sizes for one in _roles(config)}]


def _divides(config: "RunConfig", size: int, what: str, axes: tuple[str, ...]) -> None:
    """Raise BadInput, about the first axis that does not divide what those before it have left."""
    degrees = {axis: getattr(config.mesh, axis) for axis in axes if getattr(config.mesh, axis) > 1}
    left = size
    for axis, degree in degrees.items():
        if left % degree:
            product = "*".join(f"mesh.{name}" for name in degrees)
            values = "*".join(str(degree) for degree in degrees.values())
            raise Fault(
                f"{product} = {values}{_place(config, axis)} does not divide {what}",
                [{f"mesh.{axis}": n} for n in nearest(degree, divisors(left))],
            )
        left //= degree


def _roles(config: "RunConfig") -> dict[str, Engine]:
    """Key -> engine of each model that is trained, where it is said."""
    critic = {} if config.critic is None or config.critic.engine is None else {"critic.engine": config.critic.engine}
    return {"actor.engine": config.actor.engine} | critic


def _engines_of(config: "RunConfig", key: str) -> dict[str, Engine]:
    """The same of those models that have the sizes of the one at `key`."""
    roles, copied = _roles(config), config.critic is not None and config.critic.path == START
    if key == "model.path":
        return {role: engine for role, engine in roles.items() if role == "actor.engine" or copied}
    return dict([list(roles.items())[-1]])


def _known_sizes(config: "RunConfig") -> Iterator[tuple[str, dict[str, int]]]:
    """The sizes of the models that the mesh cuts, as far as they are known without loading them."""
    paths = {"model.path": config.model.path}
    if config.critic is not None and config.critic.path != START:
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        if path == TINY:
            tiny = config.model.tiny
            sizes = {"L": tiny.layers, "A": tiny.heads, "K": tiny.kv_heads, "F": tiny.ffn_size}
            yield key, sizes | ({"E": tiny.experts} if tiny.experts else {})
        elif (model := _described(path)) is not None:
            sizes = {"L": model.layers, "A": model.heads, "K": model.kv_heads, "F": model.ffn}
            yield key, sizes | ({"E": model.moe.experts} if model.moe else {})


def _path(config: "RunConfig", key: str) -> str | None:
    """The path of a model by its key: model.path, critic.path."""
    return config.model.path if key == "model.path" or config.critic is None else config.critic.path


def _described(path: str) -> Architecture | None:
    if path in CATALOGUED:
        return find(path)
    with suppress(BadInput, OSError, RuntimeError):  # what is wrong with it, loading says
        return read_model(Path(path).expanduser() / "config.json")
    return None


def _larger(config: "RunConfig", axes: tuple[str, ...]) -> str:
    """`mesh.pp = 2, mesh.sp = 2`: those of the axes that have more than one rank; an empty string where none has."""
    return ", ".join(f"mesh.{axis} = {getattr(config.mesh, axis)}" for axis in axes if getattr(config.mesh, axis) > 1)


def _place(config: "RunConfig", axis: str) -> str:
    """` (run.yaml:12)`, where the degree of an axis was set."""
    source = config.source_of(f"mesh.{axis}")
    return "" if source.startswith("default") else f" ({source})"
