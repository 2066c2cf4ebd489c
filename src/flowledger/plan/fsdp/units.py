"""The units that FSDP and ZeRO gather and reduce as one: each layer, and what stands outside the layers.

A unit counts elements on one rank of the tensor group, before data-parallel ranks cut it.
"""

from dataclasses import dataclass, field

from flowledger.plan.fsdp.adapters import adapters
from flowledger.plan.fsdp.layers import Layer
from flowledger.plan.job import Job
from flowledger.plan.weight import Weight
from flowledger.plan.weights import local_numel, stage_layers, weights


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit: elements that stay frozen, that train, and the adapters among the latter."""

    name: str
    layer: int | None
    base: int  # elements of the model
    frozen: int  # of those, not trained
    added: int  # elements of adapters
    largest: int  # elements of the largest trained tensor
    linear: int = 0  # elements in linear layers inside the decoder, which 4-bit loading narrows
    steps: dict[str, int] = field(default_factory=dict)  # step of the layer -> trained elements
    joined: tuple[str, ...] = ()  # names of the units that this one is made of
    away: int = 0  # elements of experts that other expert-parallel ranks gather, though each keeps a shard of all

    @property
    def gathered(self) -> int:
        """Elements of this rank while the unit computes."""
        return self.base + self.added - self.away

    @property
    def parts(self) -> tuple[str, ...]:
        """The names under which its gradients are made."""
        return self.joined or (self.name,)

    @property
    def trained(self) -> int:
        return self.base - self.frozen + self.added


def joined(one: Unit, other: Unit) -> Unit:
    """Two units that are gathered and reduced as one."""
    return Unit(
        "root", None, one.base + other.base, one.frozen + other.frozen, one.added + other.added,
        max(one.largest, other.largest), one.linear + other.linear, {}, (one.name, other.name), one.away + other.away,
    )  # fmt: skip


STEPS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_a_proj": "qkv",
    "q_b_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "kv_b_proj": "qkv",
    "o_proj": "o_proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "router": "router",
}


MODULES = {"layernorm": "norm", "plain_up": "up", "mla": "qkv"}


def gradient_shares(unit: Unit, layer: Layer) -> dict[str, int]:
    """Step of a layer -> trained elements whose gradient its backward makes; norms share what norms have."""
    modules = [MODULES.get(step.module, step.module) for step in layer.steps]
    return {
        step.name: unit.steps.get(module, 0) // modules.count(module)
        for step, module in zip(layer.steps, modules, strict=True)
    }


def local_layers(job: Job) -> tuple[int, ...]:
    """The layers of this pipeline rank."""
    engine, mesh = job.engine, job.mesh
    return stage_layers(
        job.architecture.layers, mesh.pp, mesh.vpp, engine.layers_in_first_stage, engine.layers_in_last_stage,
        engine.layers_in_stages,
    )[job.pp_rank]  # fmt: skip


def is_first(job: Job) -> bool:
    return job.pp_rank == 0


def is_last(job: Job) -> bool:
    return job.pp_rank == job.mesh.pp - 1


def layer_units(job: Job) -> list[Unit]:
    """One unit a layer, in the order of the forward pass."""
    by_layer: dict[int, list[Weight]] = {}
    for weight in weights(job.architecture, head=job.head):
        if weight.layer is not None and weight.part != "mtp":
            by_layer.setdefault(weight.layer, []).append(weight)
    return [_unit(job, f"layer {layer}", layer, tuple(by_layer[layer])) for layer in local_layers(job)]


def outer_units(job: Job) -> tuple[Unit | None, Unit | None]:
    """What stands before the layers and after them. A tied head is the embedding: it counts once, with the first."""
    before: list[Weight] = []
    after: list[Weight] = []
    for weight in weights(job.architecture, head=job.head):
        if weight.layer is None:
            (before if weight.part in ("embed", "positions") else after).append(weight)
    tied = job.architecture.tied and job.head == "lm"
    if tied and is_last(job) and not is_first(job):
        after += before
    first = _unit(job, "embedding", None, tuple(before)) if is_first(job) else None
    last = _unit(job, "head", None, tuple(after)) if is_last(job) else None
    return first, last


def _unit(job: Job, name: str, layer: int | None, held: tuple[Weight, ...]) -> Unit:
    mesh, lora = job.mesh, job.engine.lora
    sizes = {weight: local_numel(weight, mesh.tp, mesh.ep, mesh.etp) for weight in held}
    # FSDP cuts experts over the ranks that expert parallelism leaves: a share of ep of them, of world / ep ranks
    sharded = job.engine.strategy in ("fsdp1", "fsdp2", "zero3")
    away = sum(local_numel(weight, mesh.tp, 1, mesh.etp) - size for weight, size in sizes.items()) if sharded else 0
    base = sum(sizes.values()) + away
    linear = sum(
        size
        for weight, size in sizes.items()
        if layer is not None and len(weight.shape) == 2 and weight.part != "router"
    )
    if lora is None:
        steps: dict[str, int] = {}
        for weight, size in sizes.items():
            step = _step_of(weight)
            steps[step] = steps.get(step, 0) + size
        return Unit(name, layer, base, 0, 0, max(sizes.values(), default=0), linear, steps, (), away)
    pairs = adapters(job, held)
    extra = [weight for weight in held if _module(weight) in lora.extra_trainable]
    whole = sum(sizes[weight] for weight in extra)
    added = sum(pair.numel for pair in pairs)
    largest = max([sizes[weight] for weight in extra] + [pair.rank * pair.outputs for pair in pairs], default=0)
    return Unit(name, layer, base, base - whole, added, largest, linear, {"qkv": added + whole}, (), away)


def _module(weight: Weight) -> str:
    return weight.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def _step_of(weight: Weight) -> str:
    if weight.expert:
        return "experts"
    if weight.part == "shared_expert":
        return "shared"
    return STEPS.get(_module(weight), "norm")
