"""What a Megatron rank holds whatever it computes: parameters, gradient buffer, optimizer states, workspaces, buffers.

bf16 with the distributed optimizer: 2 + 4 + 12/D bytes a parameter (docs/user-guide/features/dist_optimizer.md); without
it 18; fp16 keeps a float32 copy of the gradients beside (20). The rest are tensors that some module never lets go of.
"""

from dataclasses import replace

from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.megatron.allocator import unsplit
from flowledger.plan.megatron.flags import BLACKWELL, HOPPER, compute_capability
from flowledger.plan.megatron.rank import Held, Rank
from flowledger.plan.timeline import Live
from flowledger.tables.constants import constant

MOMENTS = "moments"
EARLY_MOMENTS = "moments (Megatron-FSDP makes them before the first step)"
KEPT_INPUTS = "pipeline inputs kept by the model, and their gradients"
WIDE_GRADS = "float32 copy of the gradients (made by the optimizer, freed by zero_grad)"
BACKWARD_WORKSPACE = "cuBLAS workspace of the backward thread"
MASTERS = {4: "float32 master weights", 2: "what bf16 parameters lack of float32 masters"}
DIST = "megatron/core/optimizer/distrib_optimizer.py"


def states(rank: Rank) -> list[Live]:
    """Parameters, gradients and optimizer states on the device; with `gradients` off the parameters alone."""
    engine, job = rank.job.engine, rank.job
    grad = ITEMSIZE[engine.grad_dtype or engine.param_dtype]
    cut = rank.flags.fsdp
    found = [_live("params", "param", _parameters(rank), "parameters", f"{ITEMSIZE[engine.param_dtype]}*P")]
    if adapters := rank.adapters:
        size = sum(held.total for held in adapters) * ITEMSIZE[engine.param_dtype]
        found.append(_live("params", "param", size, "adapters", "e*r*(in + out)"))
    if not job.gradients or engine.optimizer.kind == "none":
        return found
    trained = round(sum(_share(held, cut, rank) for held in rank.trained))
    found.append(_live("grads", "grad", grad * trained, "gradient buffer", f"{grad}*P"))
    if engine.param_dtype == "float16" and not engine.distributed_optimizer and grad < 4:
        found.append(_live("grads", "grad", 4 * trained, WIDE_GRADS, "4*P"))
    return found + _optimizer(rank)


def _parameters(rank: Rank) -> int:
    """Bytes of the stored parameters. With fp8 parameters matrices take a byte; Hopper keeps a transposed copy too."""
    size = ITEMSIZE[rank.job.engine.param_dtype]
    whole = size * sum(_share(held, rank.flags.fsdp, rank) for held in rank.held)
    if rank.flags.fp8_params and not rank.flags.fsdp:
        copies = 2 if _is_hopper(rank.job) else 1
        whole -= (size - copies) * sum(held.total for held in rank.held if held.matrix)
    return round(whole)


def _optimizer(rank: Rank) -> list[Live]:
    engine = rank.job.engine
    cut = engine.distributed_optimizer or rank.flags.fsdp
    moment = ITEMSIZE[engine.optimizer.moment_dtype or "float32"]
    kept = 1 - engine.offload.optimizer_fraction
    masters = 0 if engine.param_dtype == "float32" else ITEMSIZE[engine.optimizer.master_dtype or "float32"]
    mine = dealt(rank) if rank.flags.layer_wise else [(held, _share(held, cut, rank)) for held in rank.trained]
    share = sum(part for _, part in mine)
    moments = sum(part * _moments(held, engine.optimizer.kind) for held, part in mine)
    form = "P/D" if cut else "P"
    found = [
        _live(
            "params",
            "optimizer",
            round(masters * share * kept),
            MASTERS.get(masters, "master weights"),
            f"{masters}*{form}",
        ),
        _live(
            "optimizer_state",
            "optimizer",
            round(moment * moments * kept),
            EARLY_MOMENTS if rank.flags.fsdp else MOMENTS,
            f"{2 * moment}*{form}",
        ),
    ]
    if kept < 1:
        on_host = round((masters * share + moment * moments) * (1 - kept))
        live = _live("optimizer_state", "optimizer", on_host, "states that step on the CPU", "12*P/D*fraction")
        found.append(replace(live, host=True))
    return [live for live in found if live.bytes]


def _share(held: Held, cut: bool, rank: Rank) -> float:
    return -(-held.total // held.shard) if cut else held.total


def dealt(rank: Rank) -> list[tuple[Held, float]]:
    """Whole parameters dealt to data-parallel ranks, smallest first, there and back; those of the last rank.

    Source: megatron/core/optimizer/layer_wise_optimizer.py shard_params. Queries, keys and values are one parameter
    there, and so are gate and up.
    """
    found: list[tuple[Held, float]] = []
    for expert in (False, True):
        single = [held for held in _fused(rank.held) for _ in range(held.count) if held.expert == expert]
        ranks = max((held.shard for held in single), default=1)
        order = [*range(ranks), *reversed(range(ranks))]
        for place, held in enumerate(sorted(single, key=lambda one: one.numel)):
            if order[place % len(order)] == ranks - 1:
                found.append((held, held.numel))
    return found


def _fused(held: tuple[Held, ...]) -> list[Held]:
    found: list[Held] = []
    for one in held:
        if found and one.fuses and found[-1].layer == one.layer and found[-1].part == one.part:
            found[-1] = replace(found[-1], numel=found[-1].numel + one.numel)
        else:
            found.append(one)
    return found


def _moments(held: Held, kind: str) -> int:
    """Moments of one parameter: two of Adam, one of SGD with momentum, one of Muon's matrices."""
    if kind == "muon":
        return 1 if held.matrix else 2
    return {"sgd": 1, "none": 0}.get(kind, 2)


def workspaces(rank: Rank) -> list[Live]:
    """Scratch memory that libraries keep: cuBLAS's for each thread that calls it, Transformer Engine's own."""
    job = rank.job
    if not job.device:
        return []
    blas = cublas_workspace(job)
    hopper = not _is_ampere(job)
    engine = round(constant("megatron.te_workspace.hopper" if hopper else "megatron.te_workspace.ampere"))
    moe = job.architecture.moe
    te = job.engine.kernels == "te" or moe is not None
    found = [_live("temporary", "residue", blas, "cuBLAS workspace of the main thread", "")]
    if job.gradients:
        found.append(_live("temporary", "residue", blas, BACKWARD_WORKSPACE, ""))
    if te:
        copies = round(constant("megatron.te_overlap_streams")) if rank.flags.communication_overlap else 1
        found.append(_live("temporary", "residue", copies * engine, "Transformer Engine's GEMM workspace", ""))
    if moe is not None and rank.flags.grouped and job.engine.kernels == "te":
        streams = round(constant("megatron.te_streams"))
        found.append(_live("temporary", "residue", engine * streams, "workspaces of grouped GEMMs", "4 streams"))
    if rank.flags.fp8 and not rank.flags.fp8_params:
        copies = 2 if _is_hopper(job) else 1
        size = copies * sum(held.total for held in rank.held if held.matrix)
        found.append(_live("params", "param", size, "fp8 copies of the weights (Hopper: transposed too)", ""))
    if rank.flags.overlaps_experts:
        found.append(_live("temporary", "residue", blas, "cuBLAS workspace of the expert stream", ""))
    return found


def cublas_workspace(job: Job) -> int:
    """Bytes of one cuBLAS workspace: CUBLAS_WORKSPACE_CONFIG (`:KiB:count` pairs), else torch's default of the device.

    Runs that must repeat bit by bit set `:4096:8`: torch's deterministic mode asks for it. On Blackwell the default
    depends on torch's version (32 MiB in newer ones); golden runs held 32 where Transformer Engine had to be
    deterministic, and 8 in most others.
    """
    text = dict(job.environment).get("CUBLAS_WORKSPACE_CONFIG", "")
    parts = [int(word) for word in text.split(":") if word.isdigit()]
    if parts and len(parts) % 2 == 0:
        return 1024 * sum(size * number for size, number in zip(parts[::2], parts[1::2], strict=True))
    deterministic = dict(job.environment).get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    large = _is_hopper(job) or (deterministic and not _is_ampere(job))
    return round(constant("megatron.cublas_workspace.hopper" if large else "megatron.cublas_workspace.other"))


def _is_hopper(job: Job) -> bool:
    return HOPPER <= compute_capability(job) < BLACKWELL


def _is_ampere(job: Job) -> bool:
    return compute_capability(job) < HOPPER


def buffers(rank: Rank) -> list[Live]:
    """Tensors that modules hold on to between micro-batches: gather buffers, pipeline inputs, dummy gradients."""
    found = [_live("comm_buffer", "comm_buffer", _global_buffer(rank), "Megatron's global memory buffer", "")]
    if rank.flags.encoder_layers and rank.job.engine.kernels == "local":
        scores = 4 * rank.value("A") * rank.job.sequences * rank.flags.encoder_tokens**2
        found.append(_live("comm_buffer", "comm_buffer", scores, "float32 buffer of encoder scores", "4*A*B*S*S"))
    if rank.flags.communication_overlap:
        number = round(constant("megatron.user_buffers"))
        size = number * rank.value("e") * rank.value("T") * rank.value("H")
        found.append(_live("comm_buffer", "comm_buffer", size, "user buffers of overlapped collectives", "16*e*T*H"))
    if rank.job.gradients:
        found.append(kept_inputs(rank))
        if rank.job.engine.gradient_accumulation_fusion and not rank.adapters:
            found.append(_live("grads", "temporary", _dummies(rank), "dummy weight gradients", "e * distinct shapes"))
    return [live for live in found if live.bytes]


def kept_inputs(rank: Rank) -> Live:
    """The last input of each chunk, received from the stage before, and its gradient: `decoder.input_tensor` stays."""
    received = len(rank.chunks) - rank.first
    bytes_ = 2 * received * boundary(rank) if rank.job.mesh.pp > 1 else 0
    return _live("activations", "comm_buffer", bytes_, KEPT_INPUTS, "2*v*e*U*H")


def boundary(rank: Rank) -> int:
    """Bytes of the tensor that goes from one pipeline stage to the next."""
    return rank.value("e") * rank.value("U") * rank.value("H")


def _global_buffer(rank: Rank) -> int:
    """The largest user of the buffer named "mpu": gathers of sequence parallelism, of the all-gather dispatcher, and the
    scores of Megatron's own attention (megatron/core/utils.py GlobalMemoryBuffer; dot_product_attention.py)."""
    e, hidden, words = rank.value("e"), rank.value("H"), rank.words
    users = [0]
    if "sp" in words and (rank.last or rank.job.engine.kernels == "local"):
        users.append(e * rank.value("T") * hidden)
    if rank.job.architecture.moe is not None and "allgather" in words and rank.value("G") > rank.value("U"):
        users.append(e * rank.value("G") * hidden)
    if rank.job.engine.kernels == "local" and "unfused" in words:
        users.append(e * rank.value("S2"))
        users.append(e * rank.value("A") * rank.job.sequences * rank.flags.encoder_tokens**2)
    return max(users)


def _dummies(rank: Rank) -> int:
    """Transformer Engine caches one dummy gradient for each shape of weight; fused accumulation fills the real one."""
    if rank.job.engine.kernels != "te":
        return 0
    head = rank.value("V") * rank.value("H") if rank.last and rank.job.head == "lm" else 0
    return rank.value("e") * sum(linear_shapes(rank) | {head})


def linear_shapes(rank: Rank) -> set[int]:
    """Elements of each distinct weight of a linear layer on this rank, as Megatron fuses them (qkv, gate‖up)."""
    a, k, d, dv, hidden = (rank.value(name) for name in ("A", "K", "D", "Dv", "H"))
    b, f = rank.value("B"), rank.value("F")
    arch = rank.job.architecture
    layers = [layer for chunk in rank.chunks for layer in chunk]
    shapes = {a * dv * hidden} if layers else set()
    if arch.mla is None:
        shapes |= {(a + 2 * k) * d * hidden} if layers else set()
    else:
        lq, lkv, dn, dr = (rank.value(name) for name in ("Lq", "Lkv", "Dn", "Dr"))
        shapes |= {lq * hidden, a * (dn + dr) * (lq or hidden), (lkv + dr) * hidden, a * (dn + dv) * lkv}
    if any(not rank.is_moe(layer) for layer in layers):
        shapes |= {b * f * hidden, f * hidden}
    if any(rank.is_moe(layer) for layer in layers):
        fe, fs = rank.value("Fe"), rank.value("Fs")
        shapes |= {b * fe * hidden, fe * hidden, b * fs * hidden, fs * hidden}
    return shapes - {0}


def gathered(rank: Rank) -> list[Live]:
    """Megatron-FSDP: embedding and head whole while micro-batches run, and two layers (one at work, one ahead)."""
    size = ITEMSIZE[rank.job.engine.param_dtype]
    outside = sum(held.total for held in rank.held if held.layer is None)
    layers: dict[int, int] = {}
    for held in rank.held:
        if held.layer is not None:
            layers[held.layer] = layers.get(held.layer, 0) + held.total
    parts = (("embedding and head, gathered", outside, 1), ("a layer, gathered", max(layers.values(), default=0), 2))
    return [
        replace(_live("params", "comm_buffer", size * number, label, "e*P of the unit"), count=count, persistent=False)
        for label, number, count in parts
    ]


def in_segments(rank: Rank) -> bool:
    """Whether the allocator works in segments of fixed size; expandable segments have no end to leave a rest at."""
    config = dict(rank.job.environment).get("PYTORCH_CUDA_ALLOC_CONF", "")
    expandable = rank.job.engine.expandable_segments or "expandable_segments:True" in config
    return rank.job.device is not None and not expandable


def slack(rank: Rank) -> Live:
    """Rests of blocks around the float32 states of the optimizer, which are allocated one by one.

    Masters are made in fresh segments. Moments are made after the first step, half of them in blocks that activations
    left behind, whose rests are large enough to be split off (the half is a judgement; it moves 0.3 % of small runs).
    """
    job = rank.job
    found = 0
    if in_segments(rank) and job.gradients and job.engine.optimizer.kind != "none":
        cut = job.engine.distributed_optimizer or rank.flags.fsdp
        single = [held for held in _fused(rank.trained) for _ in range(held.count)]
        sizes = [4 * round(_share(held, cut, rank) / held.count) for held in single]
        found = unsplit(sizes) + unsplit(size for size in sizes for _ in range(2)) // 2
    return _live("temporary", "residue", found, "rests of blocks that the allocator could not split", "")


def _live(name: str, kind: str, bytes_: int, label: str, formula: str) -> Live:
    return Live(
        name=name,
        kind=kind,
        bytes=bytes_,
        label=label,
        formula=formula,
        source=DIST if "P" in formula else "",
        persistent=True,
    )
