"""Megatron-LM's command line as an `Architecture` and an `Engine`: `{"--num-layers": 12, "--bf16": True, …}`.

Defaults are those of Megatron-LM's argument parser (megatron/training/arguments.py, Megatron-Core 0.13 to 0.16): what a
command line does not say is filled in here as the parser does it. `-` and `_` in names are the same; leading dashes are optional.
"""

from collections.abc import Mapping

from flowledger.config.engine import Dtype, Engine, Logits, Mesh, Offload, Optimizer, Recompute
from flowledger.config.megatron_layout import hybrid_kinds, hybrid_letters, listed, moe_pattern, stages_of
from flowledger.flow.errors import BadInput
from flowledger.tables.constants import constant
from flowledger.tables.models import Architecture, Linear, Mla, Moe

Args = Mapping[str, object]
# Which constant of tables/constants_megatron.toml says how many words a tokenizer has.
TOKENIZERS = {
    "GPT2BPETokenizer": "megatron.vocab.gpt2",
    "BertWordPieceCase": "megatron.vocab.bert_cased",
    "BertWordPieceLowerCase": "megatron.vocab.bert_uncased",
    "Llama2Tokenizer": "megatron.vocab.llama2",
    "GPTSentencePieceTokenizer": "megatron.vocab.gpt_sentencepiece",
}


def architecture_of(args: Args) -> Architecture:
    """The model that a Megatron command line builds. Raises BadInput where a needed size is missing or no number."""
    given = plain(args)
    hidden, layers = number(given, "hidden-size"), layer_count(given)
    heads = number(given, "num-attention-heads")
    bias = not given.get("disable-bias-linear")
    moe = _moe(given, layers)
    pattern = hybrid_pattern(given)
    return Architecture(
        name=str(given.get("name", "megatron")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number(given, "num-query-groups", heads) if given.get("group-query-attention") else heads,
        head_dim=number(given, "kv-channels", hidden // heads),
        ffn=feed_forward(given),
        vocab=padded_vocab(given),
        tied=not given.get("untie-embeddings-and-output-weights"),
        mlp=_activation(given),
        norm="rmsnorm" if given.get("normalization") == "RMSNorm" else "layernorm",
        qk_norm="head" if given.get("qk-layernorm") and not given.get("multi-latent-attention") else "none",
        qkv_bias=bias or bool(given.get("add-qkv-bias")),
        o_bias=bias,
        mlp_bias=bias,
        positions=_positions(given),
        max_positions=number(given, "max-position-embeddings", number(given, "seq-length", 0)),
        kinds=hybrid_kinds(pattern) if pattern else (),
        single=bool(pattern),
        norms_per_layer=1 if pattern else 2,
        moe=moe,
        mla=_mla(given),
        linear=_mamba(given, hidden) if pattern else None,
        mtp_layers=number(given, "mtp-num-layers", 0),
    )


def engine_of(args: Args, world: int | None = None) -> Engine:
    """The engine that a Megatron command line sets up; `world` (ranks in all) fills in the data-parallel degree."""
    given = plain(args)
    chunks, mesh = _mesh(given, world)
    half = dtype_of(given)
    return Engine(
        strategy="megatron",
        mesh=mesh,
        param_dtype=half,
        grad_dtype=_grad_dtype(given, half),
        reduce_dtype=_grad_dtype(given, half),
        distributed_optimizer=bool(given.get("use-distributed-optimizer")) and given.get("optimizer") != "muon",
        sequence_parallel=bool(given.get("sequence-parallel")) and mesh.tp > 1,
        layers_in_first_stage=number(given, "decoder-first-pipeline-num-layers", 0) or None,
        layers_in_last_stage=number(given, "decoder-last-pipeline-num-layers", 0) or None,
        layers_in_stages=chunks,
        gradient_accumulation_fusion=not given.get("no-gradient-accumulation-fusion"),
        recompute=_recompute(given),
        offload=Offload(optimizer_fraction=_fraction(given)),
        optimizer=_optimizer(given, half),
        logits=Logits(cross_entropy="te" if _fused_by_te(given) else "parallel"),
        attention="unfused" if given.get("attention-backend") == "unfused" else "flash",
        kernels="local" if given.get("transformer-impl") == "local" else "te",
        packed=bool(given.get("rl-use-sequence-packing") or given.get("use-packed-sequence")),
    )


def _mesh(given: Args, world: int | None) -> tuple[tuple[int, ...], Mesh]:
    """(layers of every chunk, where they are not dealt evenly; degrees)."""
    tp, cp = number(given, "tensor-model-parallel-size", 1), number(given, "context-parallel-size", 1)
    pp = number(given, "pipeline-model-parallel-size", 1)
    chunks, vpp = stages_of(given, layer_count(given), pp)
    return chunks, Mesh(
        dp=max(1, (world or 1) // (tp * pp * cp)),
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        ep=number(given, "expert-model-parallel-size", 1),
        etp=number(given, "expert-tensor-parallel-size", 0) or None,
    )


def _optimizer(given: Args, half: Dtype) -> Optimizer:
    named = str(given.get("optimizer", "adam"))
    return Optimizer(
        kind="muon" if "muon" in named else "sgd" if named == "sgd" else "adam",
        implementation="fused",
        master_dtype=master_dtype(
            half,
            aware=bool(given.get("use-precision-aware-optimizer")),
            on_host=bool(given.get("optimizer-cpu-offload")),
            main=str(given.get("main-params-dtype", "fp32")),
        ),
        moment_dtype=_moment_dtype(given),
    )


def _fused_by_te(given: Args) -> bool:
    return bool(given.get("cross-entropy-loss-fusion")) and given.get("cross-entropy-fusion-impl") == "te"


def plain(args: Args) -> dict[str, object]:
    """The arguments without dashes in front and with `-` inside their names; what is False or None is left out."""
    named = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    return {key: value for key, value in named.items() if value is not None and value is not False}


def number(given: Args, key: str, default: int | None = None) -> int:
    """A whole number of the command line. Raises BadInput without it or where it is none."""
    value = given.get(key, default)
    if value is None:
        raise BadInput(f"Megatron arguments: --{key} is not given; name it, no default stands for it")
    try:
        return int(str(value))
    except ValueError as error:
        raise BadInput(f"Megatron arguments: --{key} = {value!r} is no whole number") from error


def layer_count(given: Args) -> int:
    """Transformer layers; the decoder's of an encoder-decoder; the letters of a hybrid pattern."""
    pattern = hybrid_pattern(given)
    if pattern:
        return len(hybrid_kinds(pattern))
    return number(given, "num-layers" if "num-layers" in given else "decoder-num-layers")


def hybrid_pattern(given: Args) -> str:
    """`M-M*E…`: one letter a layer (Mamba-2, attention, feed-forward, experts); empty for other models."""
    return str(given.get("hybrid-override-pattern") or given.get("hybrid-layer-pattern") or "")


def feed_forward(given: Args) -> int:
    """--ffn-hidden-size, else 4*H, and of gated layers 2/3 of that, cut to a multiple of 64."""
    hidden = number(given, "hidden-size")
    return number(given, "ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if given.get("swiglu") else 4 * hidden)


def dtype_of(given: Args) -> Dtype:
    return "bfloat16" if given.get("bf16") else "float16" if given.get("fp16") else "float32"


def vocabulary(given: Args) -> int:
    """Words before padding. Raises BadInput where neither --vocab-size nor a tokenizer with a known one is named."""
    kind = str(given.get("tokenizer-type", "GPT2BPETokenizer"))
    if "vocab-size" in given:
        return number(given, "vocab-size")
    if kind not in TOKENIZERS:
        raise BadInput(f"Megatron arguments: --vocab-size is not given, and --tokenizer-type {kind} has no known size")
    return int(constant(TOKENIZERS[kind])) + number(given, "vocab-extra-ids", 0)


def padded_vocab(given: Args) -> int:
    """Rows of the embedding: the vocabulary up to a multiple of --make-vocab-size-divisible-by * tp."""
    unit = number(given, "make-vocab-size-divisible-by", 128) * number(given, "tensor-model-parallel-size", 1)
    return -(-vocabulary(given) // unit) * unit


def _activation(given: Args) -> str:
    gated = "swiglu" if given.get("swiglu") else ""
    return gated or ("squared_relu" if given.get("squared-relu") else "gelu")


def _positions(given: Args) -> str:
    kind = str(given.get("position-embedding-type", "learned_absolute"))
    if kind == "rope" or given.get("use-rotary-position-embeddings"):
        return "rope"
    return "none" if kind == "none" else "learned"


def _grad_dtype(given: Args, half: Dtype) -> Dtype:
    """bf16 accumulates gradients in float32 unless told otherwise; fp16 keeps them in its own dtype."""
    wide = given.get("accumulate-allreduce-grads-in-fp32") or half == "float32"
    return "float32" if wide or (half == "bfloat16" and not given.get("grad-reduce-in-bf16")) else half


def _recompute(given: Args) -> Recompute:
    kind = str(given.get("recompute-granularity", "none"))
    return Recompute(
        granularity="full" if kind == "full" else "selective" if kind == "selective" else "none",
        method="block" if given.get("recompute-method") == "block" else "uniform" if kind == "full" else None,
        layers=number(given, "recompute-num-layers", 1) if kind == "full" else None,
        modules=tuple(listed(given.get("recompute-modules", "core_attn"))) if kind == "selective" else (),
    )


def master_dtype(half: Dtype, *, aware: bool, on_host: bool, main: str = "fp32") -> Dtype | None:
    """float32; 16 bits where the precision-aware optimizer steps bf16 parameters: it keeps what they lack of float32.

    `on_host`: the optimizers of `optimizer_cpu_offload` step float32 copies. `main`: main_params_dtype.
    Source: megatron/core/optimizer/optimizer_config.py store_param_remainders (on unless told otherwise, with
    Transformer Engine 2.1 or newer), transformer_engine/pytorch/optimizers/fused_adam.py.
    """
    if half == "float32":
        return None
    short = main == "fp16" or half == "bfloat16"
    return "float16" if aware and short and not on_host else "float32"


def _moment_dtype(given: Args) -> Dtype | None:
    """--exp-avg-dtype of the precision-aware optimizer; null: float32."""
    named = str(given.get("exp-avg-dtype", "fp32")) if given.get("use-precision-aware-optimizer") else "fp32"
    return {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}.get(named)  # type: ignore[return-value]  # each is a Dtype


def _fraction(given: Args) -> float:
    if not given.get("optimizer-cpu-offload"):
        return 0.0
    return float(str(given.get("optimizer-offload-fraction", 1.0)))


def _moe(given: Args, layers: int) -> Moe | None:
    if "num-experts" not in given:
        return None
    letters = hybrid_letters(hybrid_pattern(given))
    sparse = (
        tuple(letter == "E" for letter in letters)
        if letters
        else moe_pattern(str(given.get("moe-layer-freq", 1)), layers)
    )
    return Moe(
        experts=number(given, "num-experts"),
        topk=number(given, "moe-router-topk", 2),
        ffn=number(given, "moe-ffn-hidden-size", feed_forward(given)),
        shared_ffn=number(given, "moe-shared-expert-intermediate-size", 0),
        shared_gate=bool(given.get("moe-shared-expert-gate")),
        dense=tuple(layer for layer in range(layers) if layer < len(sparse) and not sparse[layer]),
        router_bias=bool(given.get("moe-router-enable-expert-bias")),
        expert_bias=not given.get("disable-bias-linear"),
    )


def _mla(given: Args) -> Mla | None:
    if not given.get("multi-latent-attention"):
        return None
    return Mla(
        q_lora=number(given, "q-lora-rank", 0) or None,
        kv_lora=number(given, "kv-lora-rank", 32),
        qk_nope=number(given, "qk-head-dim", 128),
        qk_rope=number(given, "qk-pos-emb-head-dim", 64),
        v=number(given, "v-head-dim", 128),
    )


def _mamba(given: Args, hidden: int) -> Linear:
    """Mamba-2 as Megatron-Core builds it: expansion 2, 8 groups, state 128, heads of 64, a convolution of 4."""
    dim = number(given, "mamba-head-dim", 64)
    heads = number(given, "mamba-num-heads", 2 * hidden // dim)
    return Linear(
        kind="mamba2",
        key_heads=heads,
        value_heads=heads,
        key_dim=number(given, "mamba-state-dim", 128),
        value_dim=dim,
        conv_kernel=4,
        groups=number(given, "mamba-num-groups", 8),
    )
