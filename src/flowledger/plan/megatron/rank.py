"""One rank of a Megatron job: which layers and parameters it holds, and the symbols that tables are written in."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from flowledger.plan.fsdp.adapters import adapters
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.megatron.flags import MegatronFlags
from flowledger.plan.saved import Kept
from flowledger.plan.weights import Weight, local_numel, stage_layers, weights
from flowledger.tables.models import Architecture, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters of one tensor on this rank: `count` tensors of `numel` elements each, sharded over `shard` ranks."""

    part: str
    numel: int
    count: int
    expert: bool
    shard: int
    matrix: bool  # two-dimensional and inside a layer: what Muon steps
    layer: int | None = None
    fuses: bool = False  # one parameter with the one before it in Megatron (keys and values with queries, up with gate)

    @property
    def total(self) -> int:
        return self.numel * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A Job and its flags, resolved for `job.pp_rank`."""

    job: Job
    flags: MegatronFlags
    chunks: tuple[tuple[int, ...], ...]  # layers of each virtual stage of this rank
    held: tuple[Held, ...]
    adapters: tuple[Held, ...]  # LoRA
    symbols: dict[str, object] = field(hash=False)
    words: frozenset[str]  # flags of tables/activations*.toml that hold here
    memo: dict[tuple[str, str], list[Kept]] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def first(self) -> bool:
        return self.job.pp_rank == 0

    @property
    def last(self) -> bool:
        return self.job.pp_rank == self.job.mesh.pp - 1

    @property
    def trained(self) -> tuple[Held, ...]:
        """The parameters that have gradients and optimizer states."""
        return self.adapters or self.held

    def value(self, symbol: str) -> int:
        number = self.symbols[symbol]
        assert isinstance(number, int)
        return number

    def is_moe(self, layer: int) -> bool:
        return self.job.architecture.is_moe(layer)


@lru_cache(maxsize=64)
def rank_of(job: Job, flags: MegatronFlags) -> Rank:
    """Raises BadInput where layers do not divide among the pipeline stages."""
    chunks = _chunks(job)
    layers = {layer for chunk in chunks for layer in chunk}
    return Rank(
        job=job,
        flags=flags,
        chunks=chunks,
        held=_held(job, flags, layers),
        adapters=_adapters(job, flags, layers),
        symbols=_symbols(job, flags),
        words=_words(job, flags),
    )


def _chunks(job: Job) -> tuple[tuple[int, ...], ...]:
    engine, mesh = job.engine, job.mesh
    explicit = engine.layers_in_stages
    mine = stage_layers(
        job.architecture.layers, mesh.pp, mesh.vpp, engine.layers_in_first_stage, engine.layers_in_last_stage, explicit
    )[job.pp_rank]
    sizes = explicit[job.pp_rank :: mesh.pp] if explicit else (len(mine) // mesh.vpp,) * mesh.vpp
    found, start = [], 0
    for size in sizes:
        found.append(mine[start : start + size])
        start += size
    return tuple(found)


def _held(job: Job, flags: MegatronFlags, layers: set[int]) -> tuple[Held, ...]:
    """Every parameter tensor of the rank. A tied embedding lies on both end stages, each with states of its own."""
    mesh = job.mesh
    first, last = job.pp_rank == 0, job.pp_rank == mesh.pp - 1
    dense_shard = max(1, job.world // (mesh.tp * mesh.pp) // flags.optimizer_instances)
    expert_shard = max(1, job.expert_shard // flags.optimizer_instances)
    found = []
    for weight in _near(job.architecture, job.head, frozenset(layers)):
        if not _is_here(weight, job, layers, first, last):
            continue
        number = -(-weight.count // mesh.ep) if weight.expert else weight.count
        elements = local_numel(weight, mesh.tp, mesh.ep, mesh.etp)
        found.append(
            Held(
                part=weight.part,
                numel=elements // number,
                count=number,
                expert=weight.expert,
                shard=expert_shard if weight.expert else dense_shard,
                matrix=len(weight.shape) == 2 and weight.part not in ("embed", "positions", "head"),
                layer=weight.layer,
                fuses=weight.name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))
                and not (job.architecture.branches == 1 and weight.name.endswith("up_proj.weight")),
            )
        )
    return (*found, *_further(job, flags, dense_shard))


@lru_cache(maxsize=64)
def _near(architecture: Architecture, head: str, layers: frozenset[int]) -> tuple[Weight, ...]:
    """The weights of these layers and those outside layers, in the order of the model."""
    return tuple(one for one in weights(architecture, head=head) if one.layer is None or one.layer in layers)


# Megatron-Bridge's names of fused projections, in those of plan/weights.
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def _adapters(job: Job, flags: MegatronFlags, layers: set[int]) -> tuple[Held, ...]:
    """The LoRA adapters of the rank's layers, sharded like the weights they belong to."""
    lora = job.engine.lora
    if lora is None:
        return ()
    names = tuple(name for target in lora.target_modules for name in FUSED.get(target, (target,)))
    plain = replace(
        job, engine=job.engine.model_copy(update={"lora": lora.model_copy(update={"target_modules": names})})
    )
    mine = tuple(weight for weight in weights(job.architecture, head=job.head) if weight.layer in layers)
    shard = max(1, job.world // (job.mesh.tp * job.mesh.pp) // flags.optimizer_instances)
    return tuple(
        Held(
            part="adapter", numel=one.numel // one.count, count=one.count, expert=one.expert, matrix=True,
            shard=job.expert_shard if one.expert else shard,
        )
        for one in adapters(plain, mine)
    )  # fmt: skip


def _further(job: Job, flags: MegatronFlags, shard: int) -> tuple[Held, ...]:
    """Parameters of models that are no plain decoder: BERT's heads and token types, T5's encoder and cross-attention."""
    arch, tp = job.architecture, job.mesh.tp
    hidden = arch.hidden
    first, last = job.pp_rank == 0, job.pp_rank == job.mesh.pp - 1
    sizes: list[tuple[str, int, int]] = []
    if flags.bert:
        sizes += [("embed", 2 * hidden, 1)] * first
        sizes += [("head", hidden * hidden, 1), ("head", hidden, 3), ("head", arch.vocab // tp, 1)] * last
        sizes += [("head", hidden * hidden, 1), ("head", 3 * hidden, 1)] * (last and flags.binary_head)
    if flags.encoder_layers:
        wide, ffn = arch.heads * arch.head_dim // tp, arch.ffn // tp
        attention = [
            ("attention", 3 * wide * hidden, 1),
            ("attention", wide * hidden, 1),
            ("attention", 3 * wide + hidden, 1),
        ]
        mlp = [("mlp", ffn * hidden, 2), ("mlp", ffn + hidden, 1)]
        encoder = [(part, size, number * flags.encoder_layers) for part, size, number in [*attention, *mlp]]
        cross = [(part, size, number * arch.layers) for part, size, number in attention]
        norms = [("norm", 2 * hidden, 2 * flags.encoder_layers + arch.layers + 1), ("head", arch.vocab // tp, 1)]
        sizes += [*encoder, *cross, *norms]
    return tuple(
        Held(
            part=part, numel=size, count=number, expert=False, shard=shard, matrix=size > 4 * hidden and part != "head"
        )
        for part, size, number in sizes
    )


def _is_here(weight: Weight, job: Job, layers: set[int], first: bool, last: bool) -> bool:
    if weight.layer is not None:
        return weight.layer in layers
    if weight.part == "embed":
        repeated = (job.architecture.tied and job.head == "lm") or job.architecture.mtp_layers > 0
        return first or (last and repeated)
    return first if weight.part == "positions" else last


def _symbols(job: Job, flags: MegatronFlags) -> dict[str, object]:
    """Sizes local to one rank. T tokens after cp, U after sequence parallelism too; R tokens at local experts."""
    arch, mesh, engine = job.architecture, job.mesh, job.engine
    tp, etp = mesh.tp, mesh.etp or mesh.tp
    tokens = job.local_tokens
    norm_tokens = -(-tokens // tp) if engine.sequence_parallel else tokens
    longest = min(job.longest, job.tokens)
    moe, mla, linear = arch.moe, arch.mla, arch.linear
    heads = max(1, arch.heads // tp)
    return {
        "T": tokens,
        "U": norm_tokens,
        "e": ITEMSIZE[engine.compute_dtype or engine.param_dtype],
        "q": 1 if flags.fp8 else ITEMSIZE[engine.compute_dtype or engine.param_dtype],
        "H": arch.hidden,
        "A": heads,
        "K": max(1, arch.kv_heads // tp),
        "D": arch.head_dim,
        "F": -(-arch.ffn // tp),
        "B": arch.branches,
        "S2": heads * job.sequences * longest * -(-longest // mesh.cp),
        "E": moe.experts if moe else 0,
        "X": max(1, (moe.experts if moe else 0) // mesh.ep),
        "k": moe.topk if moe else 0,
        "R": norm_tokens * moe.topk * etp if moe else 0,
        "G": norm_tokens * mesh.ep * etp if moe else 0,
        "Fe": -(-moe.ffn // etp) if moe else 0,
        "Fs": -(-moe.shared_ffn // tp) if moe else 0,
        "Lq": (mla.q_lora or 0) if mla else 0,
        "Lkv": mla.kv_lora if mla else 0,
        "Dn": mla.qk_nope if mla else 0,
        "Dr": mla.qk_rope if mla else 0,
        "Dv": mla.v if mla else arch.head_dim,
        "Z": -(-_mixer_width(linear) // tp) if linear else 0,
        "I": -(-linear.value_heads * linear.value_dim // tp) if linear else 0,
        "V": -(-arch.vocab // tp),
        "tp": tp,
        "mask": job.sequences * longest * longest // mesh.cp,
    }


def _mixer_width(linear: Linear) -> int:
    """Width of the first projection of a linear mixer: values and gate, keys and queries (B and C), and rates."""
    inner = linear.value_heads * linear.value_dim
    keys = linear.groups * linear.key_dim if linear.kind == "mamba2" else linear.key_heads * linear.key_dim
    return 2 * inner + 2 * keys + linear.value_heads


def _words(job: Job, flags: MegatronFlags) -> frozenset[str]:
    arch, mesh, engine = job.architecture, job.mesh, job.engine
    named = {
        "layernorm": arch.norm == "layernorm",
        "dropout": flags.hidden_dropout,
        "attention_dropout": flags.attention_dropout,
        "flash": flags.core == "flash",
        "fused": flags.core == "fused",
        "unfused": flags.core == "unfused" or engine.attention == "unfused",
        "softmax_float32": flags.softmax_float32 and ITEMSIZE[engine.compute_dtype or engine.param_dtype] < 4,
        "sp": engine.sequence_parallel,
        "tp": mesh.tp > 1,
        "cp": mesh.cp > 1,
        "qk_norm": arch.qk_norm != "none",
        "gate": arch.attention_gate,
        "gelu": arch.mlp == "gelu",
        "q_lora": bool(arch.mla and arch.mla.q_lora),
        "mamba2": bool(arch.linear and arch.linear.kind == "mamba2"),
        "learned": arch.positions == "learned",
        "rope": arch.positions == "rope",
        "grouped": flags.grouped,
        "allgather": flags.dispatcher == "allgather",
        "weighted_float32": flags.weighted_float32,
        "permute_fused": flags.permute_fused,
        "shared": bool(arch.moe and arch.moe.shared_ffn),
        "several_experts": bool(arch.moe and arch.moe.experts > mesh.ep),
        "exchange": mesh.ep > 1,
        "expert_tp": (mesh.etp or mesh.tp) > 1,
        "bert": flags.bert,
        "encoder": flags.encoder_tokens > 0,
        "accumulation_fusion": engine.gradient_accumulation_fusion,
        "tied": arch.tied,
        "fp8": bool(flags.fp8),
    }
    selective = engine.recompute.modules if engine.recompute.granularity == "selective" else ()
    dropped = {f"recompute_{module}" for module in selective} | {f"offload_{module}" for module in flags.offload}
    return frozenset(word for word, holds in named.items() if holds) | dropped
