"""What a trace covers. Everything else is refused in one line, before a model is built."""

from flowledger.flow.errors import BadInput
from flowledger.plan.job import Job

NEEDS = '--trace needs torch and transformers; pip install "flowledger[run]"'  # for who imports plan.trace
COVERED = ("single", "ddp", "fsdp2")
DTYPES = ("float32", "bfloat16", "float16")


def refuse(job: Job) -> None:
    """Raises BadInput for a job that no trace covers, with all that it does not."""
    engine, mesh, optimizer = job.engine, job.mesh, job.engine.optimizer
    beyond = [name for name in ("pp", "cp", "sp", "ep") if getattr(mesh, name) > 1]
    found = {
        f"strategy {engine.strategy}": engine.strategy not in COVERED,
        f"param_dtype {engine.param_dtype}": engine.param_dtype not in DTYPES,
        **{f"{name} {getattr(mesh, name)}": True for name in beyond},
        "linear attention": job.architecture.linear is not None,  # its kernels need a GPU; torch's stand-in is larger
        "LoRA": engine.lora is not None,
        "autocast": engine.autocast and engine.strategy != "fsdp2",  # over cast units it changes the loss only
        "torch.compile": engine.compile,
        f"{engine.kernels} kernels": engine.kernels != "hf",
        f"recompute {engine.recompute.granularity}": engine.recompute.granularity == "selective",
        "padded batches": not engine.packed and job.sequences > 1,
        "a value head": job.head != "lm",
        "activation offload": engine.offload.activation,
        "streamed offload": engine.offload.streamed or engine.offload.optimizer_fraction > 0,
        f"optimizer {optimizer.kind}": job.gradients and optimizer.kind not in ("adam", "adamw"),
        "a master copy": job.gradients and optimizer.master_dtype is not None,
        "tp without fsdp2": mesh.tp > 1 and engine.strategy != "fsdp2",
        "a shard group smaller than the world": engine.strategy == "fsdp2" and job.shard * mesh.tp != job.world,
    }
    outside = [name for name, holds in found.items() if holds]
    if outside:
        raise BadInput(
            f"--trace does not cover {', '.join(outside)}; it runs transformers' decoders on one device, under DDP and "
            "under FSDP2 with tp, packed, with AdamW; leave --trace out"
        )
    heads = job.architecture.kv_heads
    if heads % mesh.tp:
        raise BadInput(
            f"--trace: tp {mesh.tp} does not divide the {heads} key-value heads of {job.architecture.name}; use a tp that does"
        )
