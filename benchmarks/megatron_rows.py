"""Published Megatron measurements that come as a table of sizes and degrees, turned into Megatron's own arguments."""

import re
from collections.abc import Mapping
from typing import Any

ZERO = "dist-optimizer"
# What a published recipe sets and the table of measurements does not say.
RECIPES: Mapping[str, Mapping[str, object]] = {
    # NVIDIA-NeMo/Megatron-Bridge recipes/moonlight/moonlight_16b.py, 2026; its gradients are bf16, but the measurement
    # says float32, and only that fits all four runs with 16-bit masters (the default) and GB of 10**9 (what Bridge logs)
    "megatron-bridge/moonlight16b": {
        "--use-precision-aware-optimizer": True,
        "--exp-avg-dtype": "bf16",
        "--cross-entropy-loss-fusion": True,
        "--cross-entropy-fusion-impl": "te",
        "--moe-permute-fusion": True,
    }
}


def arguments(row: Mapping[str, Any]) -> dict[str, object]:
    """Arguments of a row with `model`, `parallel`, `micro_batch`, `seq_len`, `recompute`, `loss_impl`, `flags`."""
    model, parallel = row["model"], row["parallel"]
    return {
        **_model(model, row),
        **_parallel(parallel, int(row.get("world_size") or 1)),
        **_batch(row),
        **_recompute(str(row.get("recompute") or "none")),
        **_kernels(row),
        **(row.get("flags") or {}),
        **next((recipe for name, recipe in RECIPES.items() if str(row["id"]).startswith(name)), {}),
    }


def environment(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Golden runs in deterministic mode set cuBLAS's workspace; others leave it to torch."""
    if not (row.get("flags") or {}).get("--deterministic-mode"):
        return ()
    return (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"))


def _model(model: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, object]:
    moe, mla = model.get("moe"), model.get("mla")
    heads = model["heads"]
    extra = 1 if str(model.get("vocab_pad_rule", "")).startswith("NullTokenizer +1") else 0
    modern = model.get("norm") == "rmsnorm" and model.get("mlp") == "swiglu"  # these runs switch dropout off
    positions = model.get("position") or ("rope" if model.get("norm") == "rmsnorm" else "learned_absolute")
    found: dict[str, object] = {
        "--num-layers": model["layers"],
        "--hidden-size": model["hidden"],
        "--num-attention-heads": heads,
        "--group-query-attention": (model.get("kv_heads") or heads) != heads,
        "--num-query-groups": model.get("kv_heads"),
        "--kv-channels": model.get("head_dim"),
        "--ffn-hidden-size": model.get("ffn"),
        "--vocab-size": model["vocab"] + extra if model.get("vocab") else None,
        "--untie-embeddings-and-output-weights": not model.get("tied_embeddings"),
        "--swiglu": model.get("mlp") == "swiglu",
        "--squared-relu": model.get("mlp") == "squared_relu",
        "--normalization": "RMSNorm" if model.get("norm") == "rmsnorm" else "LayerNorm",
        "--disable-bias-linear": not model.get("linear_bias"),
        "--position-embedding-type": positions,
        "--qk-layernorm": bool(model.get("qk_norm")),
        "--mtp-num-layers": model.get("mtp_layers"),
        "--hidden-dropout": 0.0 if modern or _cp(row) > 1 else 0.1,
        "--attention-dropout": 0.0 if modern or _cp(row) > 1 else 0.1,
    }
    return found | (_moe(moe, model) if moe else {}) | (_mla(mla) if mla else {})


def _moe(moe: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, object]:
    shared = moe.get("shared_ffn") or (moe.get("shared") or 0) * (moe.get("moe_ffn") or 0)
    dense = moe.get("first_dense")
    frequency = moe.get("layer_freq") or (f"([0]*{dense}+[1]*{model['layers'] - dense})" if dense else 1)
    return {
        "--num-experts": moe["experts"],
        "--moe-router-topk": moe["topk"],
        "--moe-ffn-hidden-size": moe.get("moe_ffn"),
        "--moe-shared-expert-intermediate-size": shared or None,
        "--moe-layer-freq": frequency,
        "--moe-token-dispatcher-type": moe.get("dispatcher") or "alltoall",
        "--moe-grouped-gemm": moe.get("grouped_gemm", True),
        "--moe-router-dtype": "fp32",
    }


def _mla(mla: Mapping[str, Any]) -> dict[str, object]:
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": mla.get("q_lora"),
        "--kv-lora-rank": mla["kv_lora"],
        "--qk-head-dim": mla["qk_nope"],
        "--qk-pos-emb-head-dim": mla["qk_rope"],
        "--v-head-dim": mla["v"],
    }


def _parallel(parallel: Mapping[str, Any], world: int) -> dict[str, object]:
    vpp = parallel.get("vpp")
    tp, pp, ep = (parallel.get(axis) or 1 for axis in ("tp", "pp", "ep"))
    alone = 1 if parallel.get("etp") is None and tp * pp * ep > world else parallel.get("etp")
    return {
        "--tensor-model-parallel-size": parallel.get("tp") or 1,
        "--pipeline-model-parallel-size": parallel.get("pp") or 1,
        "--context-parallel-size": parallel.get("cp") or 1,
        "--expert-model-parallel-size": parallel.get("ep") or 1,
        "--expert-tensor-parallel-size": alone,
        "--num-virtual-stages-per-pipeline-rank": vpp if vpp and vpp > 1 else None,
        "--sequence-parallel": parallel.get("sp"),
        "--use-distributed-optimizer": "none" not in str(parallel.get("zero") or ZERO),
    }


def _batch(row: Mapping[str, Any]) -> dict[str, object]:
    parallel, micro = row["parallel"], row.get("micro_batch")
    world = row.get("world_size") or 1
    dp = parallel.get("dp") or max(1, world // ((parallel.get("tp") or 1) * (parallel.get("pp") or 1) * _cp(row)))
    return {
        "--micro-batch-size": micro,
        "--global-batch-size": (micro or 1) * dp * (row.get("num_microbatches") or 1),
        "--seq-length": row.get("seq_len"),
        "--bf16": True,
        "--optimizer": "muon" if "muon" in f"{row.get('optimizer')} {row['model'].get('name')}" else "adam",
    }


def _recompute(text: str) -> dict[str, object]:
    if text.startswith("full"):
        number = re.search(r"n=(\d+)", text)
        method = "block" if "block" in text else "uniform"
        return {
            "--recompute-granularity": "full",
            "--recompute-method": method,
            "--recompute-num-layers": number[1] if number else 1,
        }
    if text.startswith("none"):
        return {}
    words = re.findall(r"[a-z_]+", text.removeprefix("selective"))
    return {"--recompute-granularity": "selective", "--recompute-modules": words}


def _kernels(row: Mapping[str, Any]) -> dict[str, object]:
    loss, attention = str(row.get("loss_impl") or ""), str(row.get("attention") or "")
    fused = "fused CE" in loss or "TE fused" in loss
    compute = str((row.get("dtypes") or {}).get("compute") or "")
    golden = str(row["id"]).startswith("megatron/")
    return {
        "--cross-entropy-loss-fusion": fused,
        "--cross-entropy-fusion-impl": "native" if "native" in loss else "te",
        "--attention-backend": "unfused" if attention == "unfused" else "flash" if attention == "flash" else None,
        "--no-create-attention-mask-in-dataloader": not golden,
        "--transformer-impl": "transformer_engine",
        "--fp8-format": "hybrid" if compute.startswith("fp8") else None,
        "--fp8-recipe": compute.removeprefix("fp8").strip() or None,
    }


def _cp(row: Mapping[str, Any]) -> int:
    return int(row["parallel"].get("cp") or 1)
