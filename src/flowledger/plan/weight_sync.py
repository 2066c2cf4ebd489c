"""What lives while the trained weights go to the inference engine: one whole tensor at a time, in buckets.

The engine has its weights back by then, and no KV pool yet; the trainer's resting states stand beside and are the
caller's. Sources: verl 0.9.1 ActorRolloutRefWorker.update_weights, vllm_rollout/bucketed_weight_transfer.py,
checkpoint_engine/nccl_checkpoint_engine.py.
"""

from math import prod

from flowledger.config.engine import Engine, Mesh, Serving
from flowledger.plan.engine_weights import weight_bytes
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

    Where ranks share the policy it is put together first, and is there while it is compared.
    """
    at = clock.tick("copy")
    if shared:
        return []
    dtype = serving.dtype or engine.param_dtype
    held = weight_bytes(architecture, serving.mesh, dtype, padded=False)
    numel = prod(largest(architecture, engine).shape) if engine.lora else _largest_tensor(architecture)
    mesh = engine.mesh or Mesh()
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
    if mesh.dp * mesh.model > 1:
        size, label = ITEMSIZE.get(engine.param_dtype, 2) * numel, "the largest tensor, put together"
        found.append(Live(name="params", kind="temporary", bytes=size, born=at, dies=at, label=label))
    return found


def _largest_tensor(architecture: Architecture) -> int:
    """Elements of the largest tensor as Hugging Face keeps it: experts of a layer are one, and so are gate and up."""
    found: dict[object, int] = {}
    for weight in weights(architecture):
        key = (weight.layer, weight.name)
        if weight.expert:
            key = (weight.layer, "down" if "down" in weight.name else "gate and up")
        found[key] = found.get(key, 0) + weight.numel
    return max(found.values())
