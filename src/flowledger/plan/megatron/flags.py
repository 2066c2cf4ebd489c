"""What a Megatron run does that `Engine` has no word for: dropout, mask tensors, fused kernels, dispatchers.

`MegatronFlags()` is how models are trained after pre-training (no dropout, fused attention, no mask tensor); `flags_of`
reads a command line, whose defaults are those of 2019.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flowledger.config.megatron_args import hybrid_pattern, number, plain
from flowledger.config.megatron_layout import listed
from flowledger.plan.job import Job
from flowledger.tables.gpus import gpu

HOPPER, BLACKWELL = 90, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """Facts beside a Job that change which tensors exist."""

    hidden_dropout: bool = False
    attention_dropout: bool = False
    core: str = "fused"  # attention: fused (cuDNN, or flash-attention 3), flash (flash-attention 2), unfused
    softmax_float32: bool = False  # scores are copied to float32 for torch's own softmax
    attention_mask: bool = False  # the data loader makes a [B, 1, S, S] mask
    native_loss: bool = False  # --cross-entropy-fusion-impl native: its compiled steps do not work in place
    dispatcher: str = "alltoall"  # of tokens to experts: alltoall, allgather, flex
    grouped: bool = True  # one grouped GEMM for all experts of a rank
    weighted_float32: bool = False  # activation * probability in float32 and cast back, not fused
    permute_fused: bool = False
    optimizer_instances: int = 1  # --num-distributed-optimizer-instances
    group: int = 0  # micro-batches of one virtual stage in a row; 0: pp
    overlaps_experts: bool = False  # --overlap-moe-expert-parallel-comm: a compute stream of its own
    communication_overlap: bool = False  # --tp-comm-overlap: user buffers
    offload: tuple[str, ...] = ()  # --offload-modules: their inputs lie on the host until backward
    deferred: int = 0  # --wgrad-deferral-limit: head gradients kept until the pipeline drains
    fsdp: bool = False  # Megatron-FSDP: parameters, gradients and optimizer cut over data parallel
    bert: bool = False  # token types, a dense layer before the head, biases of the head, a binary head
    binary_head: bool = False
    encoder_layers: int = 0  # T5: layers of the encoder, on the same rank
    encoder_tokens: int = 0  # of one sequence
    fp8: str = ""  # recipe
    fp8_params: bool = False
    layer_wise: bool = False  # Muon: whole parameters dealt to data-parallel ranks


def flags_of(args: Mapping[str, object], job: Job) -> MegatronFlags:
    """The flags of a command line on a device. `job` gives the device and whether runs must repeat bit by bit."""
    given = plain(args)
    swiglu = bool(given.get("swiglu"))
    return MegatronFlags(
        hidden_dropout=float(str(given.get("hidden-dropout", 0.1))) > 0,
        attention_dropout=float(str(given.get("attention-dropout", 0.1))) > 0,
        core=core_attention(given, job),
        softmax_float32="no-masked-softmax-fusion" in given
        and bool(given.get("attention-softmax-in-fp32") or given.get("apply-query-key-layer-scaling")),
        attention_mask="no-create-attention-mask-in-dataloader" not in given and not hybrid_pattern(given),
        native_loss=bool(given.get("cross-entropy-loss-fusion")) and given.get("cross-entropy-fusion-impl") != "te",
        dispatcher=str(given.get("moe-token-dispatcher-type", "allgather")),
        grouped=bool(given.get("moe-grouped-gemm")),
        weighted_float32=not swiglu and not given.get("use-fused-weighted-squared-relu"),
        permute_fused=bool(given.get("moe-permute-fusion")),
        optimizer_instances=number(given, "num-distributed-optimizer-instances", 1),
        group=number(given, "microbatch-group-size-per-virtual-pipeline-stage", 0),
        overlaps_experts=bool(given.get("overlap-moe-expert-parallel-comm")),
        communication_overlap=bool(given.get("tp-comm-overlap")),
        offload=tuple(listed(given.get("offload-modules", "")))
        if given.get("fine-grained-activation-offloading")
        else (),
        deferred=number(given, "wgrad-deferral-limit", 0) if given.get("defer-embedding-wgrad-compute") else 0,
        fsdp=bool(given.get("use-megatron-fsdp")),
        bert=bool(given.get("bert")),
        binary_head=bool(given.get("bert")) and not given.get("bert-no-binary-head"),
        encoder_layers=number(given, "encoder-num-layers", 0),
        encoder_tokens=number(given, "encoder-seq-length", 0),
        fp8=str(given.get("fp8-recipe", "delayed")) if given.get("fp8-format") else "",
        fp8_params=bool(given.get("fp8-param-gather")),
        layer_wise=given.get("optimizer") == "muon" and bool(given.get("use-distributed-optimizer")),
    )


def core_attention(given: Mapping[str, object], job: Job) -> str:
    """Which attention kernel Transformer Engine chooses.

    Hopper takes cuDNN's fused one; Ampere, and Blackwell where runs must be deterministic, take flash-attention 2, whose
    output is laid out [B, S, A, D] and copied to [S, B, A*D] for the projection: two tensors of O stay alive.
    Source: transformer_engine/pytorch/attention/dot_product_attention/utils.py get_attention_backend (TE 2.x).
    """
    asked = str(given.get("attention-backend", "auto"))
    if asked == "unfused" or given.get("transformer-impl") == "local":
        return "unfused"
    if asked in ("flash", "fused"):
        return asked
    deterministic = dict(job.environment).get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    sm = compute_capability(job)
    return "flash" if sm < HOPPER or (sm >= BLACKWELL and deterministic) else "fused"


def compute_capability(job: Job) -> int:
    """Ten times the CUDA compute capability of the job's device; Hopper's where it has none."""
    return (gpu(job.device).sm or HOPPER) if job.device else HOPPER
