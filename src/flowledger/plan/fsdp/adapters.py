"""LoRA adapters: their parameters, and what their projections keep for backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowledger.config.engine import Lora
from flowledger.plan.fsdp.symbols import computes_in
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.weight import ADAPTER, Weight
from flowledger.plan.weights import local_numel

STEP_OF = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_a_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "q_b_proj": "qkv",
    "kv_b_proj": "qkv",
    "o_proj": "o_proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
ALL_LINEAR = tuple(STEP_OF)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The pair A [rank, in], B [out, rank] of one linear layer (or `count` of them, one an expert)."""

    module: str
    inputs: int
    outputs: int
    rank: int
    count: int
    expert: bool

    @property
    def numel(self) -> int:
        """rank * (in + out), for each."""
        return self.count * self.rank * (self.inputs + self.outputs)


def targets(job: Job) -> tuple[str, ...]:
    """Module names that get adapters. `all-linear` means every projection."""
    return () if job.engine.lora is None else named(job.engine.lora)


def named(lora: Lora) -> tuple[str, ...]:
    """The same of these settings."""
    modules = lora.target_modules
    return ALL_LINEAR if any(one.replace("_", "-") == "all-linear" for one in modules) else modules


def module_of(weight: Weight) -> str:
    """The module whose weight this is; empty for what is no linear layer's weight."""
    linear = len(weight.shape) == 2 and weight.name.endswith(".weight")
    return weight.name.removesuffix(".weight").rpartition(".")[2] if linear else ""


def parameters(held: Sequence[Weight], lora: Lora) -> Iterator[Weight]:
    """A [rank, in] and B [out, rank] of each linear layer that gets adapters, as peft names them."""
    wanted = set(named(lora))
    for weight in held:
        if module_of(weight) in wanted and not weight.expert:
            outputs, inputs = weight.shape
            for name, shape in (("lora_A", (lora.rank, inputs)), ("lora_B", (outputs, lora.rank))):
                yield Weight(weight.name.replace(".weight", f".{name}.weight"), ADAPTER, weight.layer, shape)


def adapters(job: Job, layer: tuple[Weight, ...]) -> list[Adapter]:
    """The adapters of the weights of one layer; on a tp rank the cut dimension is cut."""
    lora = job.engine.lora
    wanted = set(targets(job))
    if lora is None:
        return []
    found = []
    for weight in layer:
        name = module_of(weight)
        if name not in wanted:
            continue
        outputs, inputs = weight.shape
        if weight.tp_dim is not None and not weight.expert:
            share = local_numel(weight, job.mesh.tp) / weight.numel
            outputs, inputs = (
                (round(outputs * share), inputs) if weight.tp_dim == 0 else (outputs, round(inputs * share))
            )
        number = -(-weight.count // job.mesh.ep) if weight.expert else weight.count
        found.append(Adapter(name, inputs, outputs, lora.rank, number, weight.expert))
    return found


def itemsize(job: Job) -> int:
    """Bytes of one adapter number as stored."""
    lora = job.engine.lora
    named = lora.dtype if lora and lora.dtype else job.engine.param_dtype
    return ITEMSIZE.get(named) or computes_in(job.engine)


def computed_itemsize(job: Job) -> int:
    """Bytes of one adapter number in the products: wider only where no unit is cast before it computes (peft).

    FSDP2 casts where it has a dtype to cast to (_fsdp_param.py init_dtype_attrs); FSDP1 and ZeRO-3 gather one flat dtype.
    """
    engine = job.engine
    flat = engine.strategy in ("fsdp1", "zero3") or (engine.strategy == "fsdp2" and engine.compute_dtype is not None)
    return computes_in(engine) if flat else max(itemsize(job), computes_in(engine))


def saved_bytes(job: Job, adapter: Adapter, tokens: int) -> int:
    """What one adapter keeps: its input, cast where the adapter is wider, and the narrow product [T, rank].

    peft 0.21 tuners/lora/layer.py _cast_input_dtype: every module casts its own input.
    """
    size, wide = computed_itemsize(job), computed_itemsize(job) > computes_in(job.engine)
    own = size * tokens * adapter.inputs if wide else 0
    return own + size * tokens * adapter.rank


def shares_input(job: Job, step: str) -> bool:
    """Whether adapters make this step keep its (uncast) input although its weights are frozen."""
    if computed_itemsize(job) > computes_in(job.engine):
        return False
    return any(STEP_OF.get(name) == step for name in targets(job))
