"""What persists in data-parallel training outside Megatron: parameters, gradients, optimizer states, by strategy.

FSDP and ZeRO-3 cut all three over the shard group, ZeRO-2 gradients and states, ZeRO-1 states; DDP and a single process
nothing. Sources: torch.distributed.fsdp, DeepSpeed runtime/zero, Rajbhandari et al. 2020 (arXiv 1910.02054) section 5.
"""

from math import ceil

from flowledger.plan.fsdp.adapters import itemsize as adapter_itemsize
from flowledger.plan.fsdp.symbols import computes_in
from flowledger.plan.fsdp.units import Unit, layer_units, outer_units
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.timeline import Live
from flowledger.tables.constants import constant

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "muon": 1, "adamw_8bit": 2, "none": 0}
SHARDED = ("fsdp1", "fsdp2", "zero3")
SPLITS_STATES = (*SHARDED, "zero1", "zero2")
SPLITS_GRADS = (*SHARDED, "zero2")


def cut(job: Job, strategies: tuple[str, ...]) -> int:
    """Ranks that share one copy of what these strategies cut."""
    return job.shard if job.engine.strategy in strategies else 1


def units(job: Job) -> list[Unit]:
    """All units of this rank, in the order of the forward pass."""
    first, last = outer_units(job)
    return [*([first] if first else []), *layer_units(job), *([last] if last else [])]


def shard_of(elements: int, ranks: int) -> int:
    """Elements of one shard, padded to equal shards."""
    return -(-elements // ranks)


def param_bytes(job: Job, held: list[Unit]) -> int:
    """Parameters as they rest: base weights in their dtype, adapters in theirs, cut where the strategy cuts them."""
    ranks, dtype = cut(job, SHARDED), job.engine.param_dtype
    added = sum(shard_of(unit.added, ranks) for unit in held) * adapter_itemsize(job)
    if (
        dtype == "int4"
    ):  # bitsandbytes: linear layers of the decoder in 4 bits with a scale a block, the rest in 2 bytes
        linear = sum(shard_of(unit.linear, ranks) for unit in held)
        rest = sum(shard_of(unit.base - unit.linear, ranks) for unit in held)
        return ceil(linear * constant("nf4_bytes_per_weight")) + rest * computes_in(job.engine) + added
    return sum(shard_of(unit.base, ranks) for unit in held) * ITEMSIZE[dtype] + added


def grad_itemsize(job: Job) -> int:
    """Bytes of one kept gradient number: as stored parameters (adapters: as adapters) unless configured."""
    if job.engine.lora is not None:
        return adapter_itemsize(job)
    return ITEMSIZE[job.engine.grad_dtype or job.engine.param_dtype]


def grad_bytes(job: Job, unit: Unit) -> int:
    """Kept gradients of one unit on this rank, after reduction."""
    return shard_of(unit.trained, cut(job, SPLITS_GRADS)) * grad_itemsize(job)


def unsharded_grad_bytes(job: Job, unit: Unit) -> int:
    """Whole gradients of a unit that wait for the last micro-batch: FSDP1 in the compute dtype, FSDP2 in the reduce dtype."""
    engine = job.engine
    named = (engine.reduce_dtype if engine.strategy == "fsdp2" else engine.compute_dtype) or engine.compute_dtype
    return unit.trained * ITEMSIZE[named or engine.param_dtype]


def keeps_unsharded(job: Job) -> bool:
    """Whether gradients of all but the last micro-batch stay whole on each rank."""
    return job.engine.accumulates_unsharded and job.micro_batches > 1 and job.engine.strategy in SHARDED


def master_bytes(job: Job, held: list[Unit]) -> int:
    """Copies of the parameters in another dtype that the optimizer steps."""
    master = job.engine.optimizer.master_dtype
    if master is None or not job.gradients:
        return 0
    return _stepped(job, held) * ITEMSIZE[master]


def moment_bytes(job: Job, held: list[Unit]) -> int:
    """Moments of the optimizer (two for Adam), in their own dtype or that of what is stepped."""
    optimizer = job.engine.optimizer
    return _stepped(job, held) * MOMENTS[optimizer.kind] * moment_itemsize(job)


def moment_itemsize(job: Job) -> int:
    """Bytes of one moment number."""
    optimizer = job.engine.optimizer
    if optimizer.kind == "adamw_8bit":
        return 1
    if optimizer.moment_dtype or optimizer.master_dtype:
        return ITEMSIZE[optimizer.moment_dtype or optimizer.master_dtype or "float32"]
    return adapter_itemsize(job) if job.engine.lora is not None else ITEMSIZE[job.engine.param_dtype]


def step_temporary_bytes(job: Job, held: list[Unit]) -> int:
    """What the optimizer step allocates: foreach the square roots of all second moments, a loop two or three of one tensor.

    torch/optim/adam.py: `_multi_tensor_adam` (exp_avg_sq_sqrt), `_single_tensor_adam` (sqrt, then its quotient); foreach
    is not the default on a CPU. Fused kernels and DeepSpeed's FusedAdam allocate nothing.
    """
    optimizer = job.engine.optimizer
    size, ranks = moment_itemsize(job), cut(job, SPLITS_STATES)
    if job.engine.strategy.startswith("zero"):  # DeepSpeed: float32 gradients of the partition, then its own kernel
        return 4 * _stepped(job, held) if optimizer.master_dtype == "float32" else 0
    if optimizer.kind not in ("adamw", "adam") or optimizer.implementation == "fused":
        return 0
    if optimizer.implementation == "loop" or job.device is None:
        return size * max(_loop_temporaries(job, unit) * -(-unit.largest // ranks) for unit in held)
    return size * _stepped(job, held)


def _loop_temporaries(job: Job, unit: Unit) -> int:
    """The root, its quotient, and the quotient of the tensor before: as large where equal tensors follow each other."""
    alike = unit.layer is not None and not job.architecture.mlp_bias and job.engine.lora is None
    return 3 if alike else 2


def _stepped(job: Job, held: list[Unit]) -> int:
    ranks = cut(job, SPLITS_STATES)
    return sum(shard_of(unit.trained, ranks) for unit in held)


def persistent(job: Job, held: list[Unit], *, working: bool) -> list[Live]:
    """Parameters, master copies and moments. `working`: during a stage that computes with them (else: resting).

    While the model works its offloaded parameters are on the device (unless they are streamed), and so is an offloaded
    optimizer while it trains.
    """
    offload = job.engine.offload
    params_away = offload.streamed or (offload.param and not working)
    states_away = (
        offload.streamed or (offload.optimizer and not (working and job.gradients)) or offload.optimizer_fraction >= 1
    )
    lives = [_live("params", "param", param_bytes(job, held), "parameters", params_away)]
    if job.gradients:
        lives += [
            _live("params", "param", master_bytes(job, held), "master copy of the parameters", states_away),
            _live("optimizer_state", "optimizer", moment_bytes(job, held), "moments of the optimizer", states_away),
        ]
    return [live for live in lives if live.bytes]


def _live(name: str, kind: str, size: int, label: str, host: bool) -> Live:
    return Live(
        name=name,
        kind=kind,
        bytes=size,
        label=label,
        host=host,
        persistent=True,
        formula="elements / shard * itemsize",
        source="torch.distributed.fsdp; DeepSpeed runtime/zero; arXiv 1910.02054",
    )
