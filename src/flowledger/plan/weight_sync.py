"""What lives while the trained weights go to the inference engine: one whole tensor at a time, in buckets.

The engine has its weights back by then, and no KV pool yet; the trainer's resting states stand beside and are the
caller's. Sources: verl 0.9.1 ActorRolloutRefWorker.update_weights, vllm_rollout/bucketed_weight_transfer.py,
checkpoint_engine/nccl_checkpoint_engine.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flowledger.config.engine import Engine, Lora, Mesh, Serving
from flowledger.plan.engine_weights import weight_bytes
from flowledger.plan.fsdp.adapters import parameters
from flowledger.plan.job import ITEMSIZE
from flowledger.plan.serving import IN_PROCESS, asleep
from flowledger.plan.timeline import Clock, Live
from flowledger.plan.weight import Weight, local_numel
from flowledger.plan.weights import weights
from flowledger.tables.models import Architecture


def lives(
    architecture: Architecture, engine: Engine, serving: Serving, clock: Clock, *, shared: bool = False
) -> list[Live]:
    """The tensors of one weight sync on one rank of the trainer. Ticks `gather` and `send`, or `copy` inside one process.

    `shared`: rollout samples from the policy's own tensors, so that nothing moves.
    """
    if serving.engine in IN_PROCESS:
        return _copied(architecture, engine, serving, clock, shared or serving.engine == "hf")
    gather, send = clock.tick("gather"), clock.tick("send")
    found = [*_gathered(architecture, engine, gather, send), *_buckets(architecture, engine, serving, send)]
    found += _loaded(architecture, engine, gather, send)
    if serving.colocated:
        held = weight_bytes(architecture, serving.mesh, serving.dtype or "bfloat16")
        own = Live(name="params", kind="param", bytes=held, label=f"weights of {serving.engine}", persistent=True)
        found += [own, *(live for live in asleep(serving) if live.kind == "residue")]
    return found


def largest(architecture: Architecture, engine: Engine) -> Weight:
    """The tensor with the most elements among those that are sent; experts go one by one, LoRA sends its adapters."""
    if engine.lora:
        wide = max(weights(architecture), key=lambda weight: max(weight.shape))
        return Weight("lora", wide.part, wide.layer, (max(wide.shape), engine.lora.rank), 0)
    return max(weights(architecture), key=lambda weight: prod(weight.shape))


def _gathered(architecture: Architecture, engine: Engine, gather: int, send: int) -> list[Live]:
    """The largest tensor, whole on every rank: as stored from FSDP and ZeRO-3, in the compute dtype from Megatron."""
    if engine.strategy in ("single", "ddp", "zero1", "zero2"):
        return []  # every rank has it whole
    biggest = largest(architecture, engine)
    megatron = engine.strategy == "megatron"
    item = ITEMSIZE.get((engine.compute_dtype or "bfloat16") if megatron else engine.param_dtype, 2)
    size = prod(biggest.shape) * item
    found = [
        Live(
            name="params", kind="temporary", bytes=size, born=gather, dies=send, label=f"{biggest.name}, whole",
            formula=f"{' * '.join(map(str, biggest.shape))} * {item}",
            source="verl 0.9.1 get_per_tensor_param",
        )
    ]  # fmt: skip
    if megatron and engine.mesh and engine.mesh.tp > 1 and biggest.tp_dim is not None:
        found.append(
            Live(
                name="comm_buffer", kind="comm_buffer", bytes=size, born=gather, dies=gather,
                label=f"shards of {biggest.name} from all tensor-parallel ranks",
                source="mbridge: a list of shards, then their concatenation",
            )
        )  # fmt: skip
    return found


def _buckets(architecture: Architecture, engine: Engine, serving: Serving, send: int) -> list[Live]:
    """Buckets on the sending side; with an engine of its own devices one is filled while another travels."""
    count = serving.sync_buckets if serving.colocated else max(2, serving.sync_buckets)
    if not count or not serving.sync_bucket_bytes:
        return []
    return [
        Live(
            name="comm_buffer", kind="comm_buffer", bytes=serving.sync_bucket_bytes, count=count, dies=send,
            label="buckets of weights on their way", formula="sync_buckets * sync_bucket_bytes",
            source="verl 0.9.1 bucketed_weight_transfer.py: one buffer; nccl_checkpoint_engine.py: two on each side",
        )
    ]  # fmt: skip


def _loaded(architecture: Architecture, engine: Engine, gather: int, send: int) -> list[Live]:
    """Offloaded parameters come back: whole shards with FSDP1, LoRA and Megatron, tensor by tensor with FSDP2."""
    if not engine.offload.param or engine.offload.streamed:
        return []
    mesh = engine.mesh
    item = ITEMSIZE.get(engine.param_dtype, 2)
    if engine.strategy == "megatron":
        tp, pp, ep, etp = (mesh.tp, mesh.pp, mesh.ep, mesh.etp) if mesh else (1, 1, 1, None)
        size = 2 * sum(local_numel(weight, tp, ep, etp) for weight in weights(architecture)) // pp
    else:
        ranks = engine.shard_size or (mesh.dp * mesh.cp * mesh.sp if mesh else 1)
        elements = sum(weight.numel for weight in weights(architecture))
        if engine.strategy == "fsdp2" and not engine.lora:
            elements = prod(largest(architecture, engine).shape)
        size = -(-elements // ranks) * item
    return [
        Live(
            name="params", kind="param", bytes=size, born=gather, dies=send,
            label="offloaded parameters, loaded back to be sent",
            source="verl 0.9.1 engine/fsdp/transformer_impl.py get_per_tensor_param",
        )
    ]  # fmt: skip


def _copied(architecture: Architecture, engine: Engine, serving: Serving, clock: Clock, shared: bool) -> list[Live]:
    """flowledger's own loop: each trainable tensor is compared with the rollout's, then copied over it.

    Where ranks share the policy it is put together first, while the tensor before it still has its name.
    """
    spread = not shared and (engine.mesh or Mesh()).dp * (engine.mesh or Mesh()).model > 1
    gather = clock.tick("gather") if spread else None
    at = clock.tick("copy")
    if shared:
        return []
    dtype, lora = serving.dtype or engine.param_dtype, engine.lora
    held = weight_bytes(architecture, serving.mesh, dtype, padded=False, lora=lora)
    item = ITEMSIZE.get((lora and lora.dtype) or engine.param_dtype, 2)
    tensors = _trained(architecture, lora)
    numel = max(one.numel for one in tensors)
    found = [
        Live(
            name="params", kind="param", bytes=held, label="weights of the rollout's copy of the policy", persistent=True
        ),
        Live(
            name="params", kind="temporary", bytes=8 * numel, born=at, dies=at,
            label="difference of the largest tensor and its square, in float32", formula="2 * 4 * numel",
            source="flowledger run/weights.py",
        ),
    ]  # fmt: skip
    if gather is not None:
        label = "the largest tensor, put together"
        found.append(Live(name="params", kind="temporary", bytes=item * numel, born=at, dies=at, label=label))
        together = item * _together(tensors, engine.mesh or Mesh())
        label = "a tensor, what FSDP left of the next, and all of that: as it arrives, and once more in gloo or joined"
        found.append(
            Live(
                name="params", kind="temporary", bytes=together, born=gather, dies=gather, label=label,
                formula="max(before + numel/tp + 2 * numel) * itemsize",
                source="flowledger run/weights.py; torch 2.13 DTensor: one gather an axis, joined where it cut columns",
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as Hugging Face and peft keep it."""

    numel: int
    cut_by: str | None  # the axis beside FSDP's that cuts it: tp, ep


def _trained(architecture: Architecture, lora: Lora | None) -> list[Tensor]:
    """In the order of the model. The experts of a layer are one tensor, and so are gate and up of them."""
    held = weights(architecture)
    if lora:
        return [Tensor(one.numel, None) for one in parameters(held, lora)]
    found: dict[object, Tensor] = {}
    for one in held:
        key = (one.layer, ("down" if "down" in one.name else "gate and up") if one.expert else one.name)
        before = found[key].numel if key in found else 0
        found[key] = Tensor(before + one.numel, "ep" if one.expert else None if one.tp_dim is None else "tp")
    return list(found.values())


def _together(tensors: Sequence[Tensor], mesh: Mesh) -> int:
    """Most elements alive while one tensor after another is put together: FSDP's axis first, then tp or ep.

    A gather has what it was given, what it makes and for a moment as much again: inside gloo, or joined where columns were
    cut. Then a pipeline's stage sends a copy.
    """
    most = before = 0
    for one in tensors:
        degree = {"tp": mesh.tp, "ep": mesh.ep}.get(one.cut_by or "", 1)
        fsdp = mesh.dp * mesh.cp * mesh.sp // (mesh.ep if one.cut_by == "ep" else 1)
        left = one.numel // degree if fsdp > 1 and degree > 1 else 0
        gathered = 2 * one.numel if fsdp > 1 or degree > 1 else one.numel * (mesh.pp > 1)
        most, before = max(most, before + left + gathered), one.numel
    return most
