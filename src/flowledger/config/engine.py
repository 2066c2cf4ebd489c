"""How a model is held and computed: by a training engine (`Engine`) or an inference engine (`Serving`), and on what.

flowledger's own loop leaves most of it at the default; a foreign framework's configuration is what fills it.
Degrees that are null follow from the world size: dp is what the other axes leave.
"""

from typing import Literal

from pydantic import Field

from flowledger.config.bounds import COUNT, SIZE, TOKENS
from flowledger.config.section import Section
from flowledger.flow.axes import AXES

Dtype = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]
Strategy = Literal["single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "megatron"]
# Units of FSDP2 outside the layers, where the head is not tied to the embedding. tail: the embedding, and final norm with
# head, kept after forward; head: each of both; embedding: that alone, norm and head in the root; root: all in the root.
Outside = Literal["tail", "head", "embedding", "root"]
Pipeline = Literal["gpipe", "1f1b", "interleaved"]
Kernels = Literal["hf", "liger", "te", "local"]  # eager modules, fused ones, Transformer Engine, Megatron's own


class Mesh(Section):
    """Parallel degrees; all 1 on one process."""

    dp: int = Field(1, ge=1, le=2**20)
    tp: int = Field(1, ge=1, le=2**20)
    pp: int = Field(1, ge=1, le=2**20)
    sp: int = Field(1, ge=1, le=2**20)
    cp: int = Field(1, ge=1, le=2**20)
    ep: int = Field(1, ge=1, le=2**20)
    etp: int | None = Field(None, ge=1, le=2**20)  # tensor parallel degree inside experts; null: tp
    vpp: int = Field(1, ge=1, le=2**20)  # virtual pipeline chunks of one rank (interleaved schedule)
    # Keys and values pass around cp ranks, or these exchange heads for tokens; either way samples stand alone, and prompts
    # are not shared (actor.shared_prompts has no effect).
    cp_kind: Literal["ring", "all_to_all"] = "ring"

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model together: tp*pp*cp*sp (ep rides on dp and cp)."""
        return self.tp * self.pp * self.cp * self.sp

    @property
    def degrees(self) -> dict[str, int]:
        """Axis of the mesh -> degree."""
        return {axis: getattr(self, axis) for axis in AXES}


class Recompute(Section):
    """Which activations are thrown away in forward and made again in backward."""

    granularity: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] | None = None  # Megatron, full
    layers: int | None = Field(None, ge=1, le=SIZE)  # uniform: layers of one unit; block: layers that are recomputed
    modules: tuple[str, ...] = ()  # Megatron, selective: core_attn, mlp, moe_act, layernorm, mla_up_proj, moe


class Offload(Section):
    """What lies in host memory while nobody computes with it."""

    param: bool = False
    grad: bool = False
    optimizer: bool = False
    activation: bool = False
    streamed: bool = (
        False  # parameters come unit by unit (FSDP CPUOffload, offload_policy) and never rest on the device
    )
    optimizer_fraction: float = Field(0.0, ge=0, le=1)  # part of the optimizer that steps on the CPU (Megatron)


class Lora(Section):
    """LoRA adapters instead of full weights (peft)."""

    rank: int = Field(8, ge=1, le=SIZE)
    alpha: float = Field(16.0, ge=-1e6, le=1e6)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    dtype: Dtype | None = None  # of the adapters; null: the dtype of the parameters
    extra_trainable: tuple[str, ...] = ()  # modules trained whole beside the adapters


class Optimizer(Section):
    """What an optimizer keeps for a trainable parameter, and what its step allocates."""

    kind: Literal["adamw", "adam", "sgd", "muon", "adamw_8bit", "none"] = "adamw"
    implementation: Literal["foreach", "fused", "loop"] = "foreach"
    master_dtype: Dtype | None = None  # null: no master copy beside the parameters
    moment_dtype: Dtype | None = None  # null: the dtype of what is stepped (master, else parameter)


class Logits(Section):
    """How the vocabulary-wide tensors of the loss are computed."""

    implementation: Literal["full", "chunked", "fused"] = "full"  # fused: no [T, V] tensor at all
    chunk_tokens: int | None = Field(None, ge=1, le=COUNT)
    dtype: Dtype | None = None  # of the logits when the loss reads them; null: the compute dtype
    upcast: bool = False  # a float32 copy is made beside them
    temperature_copy: bool = False  # `logits / temperature` makes a second tensor
    entropy: Literal["none", "full", "chunked"] = "none"  # in the update; log-prob passes have their own
    entropy_grad: bool = False  # of flowledger's own loop: the entropy is in the loss, and backward goes through it
    cross_entropy: Literal["plain", "flash", "te", "parallel"] = "plain"
    kept: bool = True  # names of the trainer hold what backward does not need until the micro-batch ends


class Engine(Section):
    """A training engine: how one model is sharded, in which dtypes, and what is recomputed or offloaded."""

    strategy: Strategy = "single"
    mesh: Mesh | None = None  # null: the run's own mesh
    param_dtype: Dtype = "float32"  # of the stored parameters
    compute_dtype: Dtype | None = None  # null: as stored
    reduce_dtype: Dtype | None = None  # of gradient reduction; null: as stored
    grad_dtype: Dtype | None = None  # of the kept gradients; null: as the parameters
    autocast: bool = False  # torch.autocast over the stored parameters instead of casting whole units
    shard_size: int | None = Field(None, ge=1, le=2**20)  # ranks that share one copy (fsdp_size); null: all
    reshard_after_forward: bool = True
    outside: Outside = "tail"
    forward_prefetch: bool = False
    accumulates_unsharded: bool = False  # gradients of all but the last micro-batch stay whole on each rank
    distributed_optimizer: bool = True  # Megatron
    sequence_parallel: bool = False  # Megatron: norms and residuals cut along the sequence over tp
    # The order of micro-batches in a pipeline: all forward, then all backward; one of each by turns; the same with several
    # chunks of layers a rank (mesh.vpp > 1).
    pipeline: Pipeline = "1f1b"
    layers_in_first_stage: int | None = Field(None, ge=0, le=SIZE)
    layers_in_last_stage: int | None = Field(None, ge=0, le=SIZE)
    layers_in_stages: tuple[int, ...] = ()  # all (virtual) stages one by one, where a layout names them
    gradient_accumulation_fusion: bool = True  # Megatron: wgrad GEMMs add into the gradient buffer
    recompute: Recompute = Recompute()
    offload: Offload = Offload()
    optimizer: Optimizer = Optimizer()
    lora: Lora | None = None
    logits: Logits = Logits()
    attention: Literal["flash", "sdpa", "eager", "fused", "unfused"] = "flash"
    kernels: Kernels = "hf"
    compile: bool = False
    packed: bool = True  # padding is removed before the forward pass
    pads_to_multiple: int = Field(1, ge=1, le=SIZE)  # of the packed length
    expandable_segments: bool = False


class Serving(Section):
    """An inference engine: degrees of one replica, its share of the device, and what is left of it while training."""

    engine: Literal["flowledger", "hf", "vllm", "sglang", "trtllm"] = "flowledger"
    mesh: Mesh = Mesh()  # of one replica
    colocated: bool = True  # on the trainer's devices
    gpus: int | None = Field(None, ge=1, le=2**20)  # where it has its own
    dtype: Dtype | None = None  # of its weights; null: bfloat16, or the policy's where they are shared
    kv_dtype: Dtype | None = None
    memory_fraction: float = Field(0.9, gt=0, le=1)  # gpu_memory_utilization, mem_fraction_static
    max_running: int | None = Field(None, ge=1, le=COUNT)  # max_num_seqs
    max_batched_tokens: int | None = Field(None, ge=1, le=COUNT)
    max_model_tokens: int | None = Field(None, ge=1, le=TOKENS)
    block_tokens: int = Field(16, ge=1, le=SIZE)  # of one KV block
    cuda_graphs: bool = True
    sleeps: bool = True  # weights and KV pool are given back while training (free_cache_engine, sleep mode)
    sync_bucket_bytes: int = Field(2 * 2**30, ge=0, le=2**50)  # of one weight-sync bucket
    sync_buckets: int = Field(1, ge=0, le=16)  # held at once on the sending side


class Hardware(Section):
    """What it runs on. `gpu` is a name of the table of devices, or null: this machine's CPU."""

    gpu: str | None = None
    nodes: int = Field(1, ge=1, le=2**17)
    gpus_per_node: int = Field(1, ge=1, le=1024)

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node
