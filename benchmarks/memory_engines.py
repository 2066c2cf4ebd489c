"""Predicted against measured memory of inference engines and of losses and operators measured on their own.

    python benchmarks/memory_engines.py [--cases FILE] [--json]

FILE: one JSON object a line (tests/data/engines/measured.jsonl). A prediction has one key: `exact` for single tensors,
operators and KV pools whose blocks are known, `steady` for weights and pools at rest, `peak` for allocated peaks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from flowledger.config.engine import Dtype, Engine, Logits, Mesh, Serving
from flowledger.flow.errors import BadInput
from flowledger.plan import kv_cache, serving
from flowledger.plan.arithmetic import integer
from flowledger.plan.engine_weights import replicated_bytes, weight_bytes
from flowledger.plan.job import Job
from flowledger.plan.logits import logits_peak
from flowledger.plan.weights import weights
from flowledger.tables import models
from flowledger.tables.models import Architecture

Row = Mapping[str, Any]
CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "engines" / "measured.jsonl"
GIB, MIB = 2**30, 2**20
A100_WORKSPACES = 2 * 8_519_680  # cuBLAS before Hopper: :4096:2:16:8, one of the forward and one of the backward thread
H100_WORKSPACES = 2 * 32 * MIB
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}
PROMPT_TOKENS = 10  # of litgpt's default prompt
NEW_TOKENS = 50

# Liger's benchmark runs forward and backward over and over, so the gradients of the last round are still there; its
# linear losses build the module of every provider beside the one they measure. N rows, V vocabulary, H hidden, F width,
# C rows of a chunk, W bytes of cuBLAS workspaces, L bytes of the loss's own tensors as the planner has them.


@dataclass(frozen=True)
class Skip:
    """A row that cannot be predicted, and why."""

    reason: str


def predict(row: Row) -> dict[str, int] | Skip:
    """The figure of a row in bytes under one key, or why there is none."""
    name = row.get("framework") or ""
    try:
        if "op" in row:
            return _operator(row)
        if "tensor" in row:
            return _tensor(row)
        if name.startswith("DeepSpeed AutoTP"):
            return {"steady": _auto_tp(row)}
        if name.startswith("litgpt generate"):
            return _litgpt(row)
        if name.startswith(("SGLang", "vLLM")):
            return _served(row)
    except BadInput as error:
        return Skip(str(error))
    return Skip(f"no engine and no operator: {name or 'no framework'}")


def measured(row: Row) -> int:
    """Bytes as published."""
    return int(row.get("value_bytes") or round(row["value_GiB"] * GIB))


def _served(row: Row) -> dict[str, int] | Skip:
    """Weights, or the KV pool: exact from its blocks where those are printed, else from the start-up arithmetic."""
    if "Vision" in row["model"]["name"]:
        return Skip("a profile over dummy images: vision towers are not modelled")
    architecture, mesh = _architecture(row), Mesh(tp=_degree(row))
    kept = kv_cache.bytes_per_token(architecture, mesh, 2)
    if row["quantity"] == "weights":
        return {"steady": _weights(row, architecture, mesh)}
    if row.get("kv_tokens") or row.get("kv_blocks"):
        tokens = row.get("kv_tokens") or row["kv_blocks"] * row.get("kv_block_size", 16)
        return {"exact": tokens * kept}
    share = row.get("gpu_memory_utilization")
    device = row.get("total_gpu_GiB") or _device_gib(row)
    if share is None or device is None:
        return Skip("no share of the device, or no device")
    # vLLM's default share is 0.92 from the versions on whose sampler does not sort
    light = share == 0.92
    dtype: Dtype = "float8" if row["dtypes"].get("param") == "fp8" else "bfloat16"
    settings = Serving(engine="vllm", mesh=mesh, memory_fraction=share, dtype=dtype, block_tokens=1)
    made = serving.engine(architecture, settings, device_bytes=round(device * GIB), light_sampler=light)
    other = _weights(row, architecture, mesh) - made.weights  # four-bit experts
    return {"steady": made.kv_pool - other}


def _weights(row: Row, architecture: Architecture, mesh: Mesh) -> int:
    kind = row["dtypes"].get("param") or "bf16"
    if kind.startswith("mxfp4"):
        return weight_bytes(architecture, mesh, "bfloat16", expert_dtype="int4")
    return weight_bytes(architecture, mesh, "float8" if kind == "fp8" else "bfloat16")


def _auto_tp(row: Row) -> int:
    """Layers cut over the ranks, embedding and positions whole on each; float16."""
    model, tp = row["model"], _degree(row)
    if model["name"].startswith("T5"):  # an encoder and a decoder: only its count and its embedding are known
        whole = model["vocab"] * model["hidden"]
        return int(2 * ((model["params"] - whole) // tp + whole))
    return int(replicated_bytes(_architecture(row), tp))


def _litgpt(row: Row) -> dict[str, int] | Skip:
    """Weights and a cache of prompt and new tokens. NF4 with double quantisation: 4 + 8/64 + 32/(64*256) bits."""
    architecture = _architecture(row)
    cache = kv_cache.slot_bytes(architecture, slots=1, positions=PROMPT_TOKENS + NEW_TOKENS, item=2)
    count = int(row["model"]["params"])
    if not row["dtypes"]["param"].startswith("nf4"):
        return {"peak": 2 * count + cache}
    whole = sum(item.numel for item in weights(architecture) if item.part in ("embed", "head", "norm", "final_norm"))
    largest = max(item.numel for item in weights(architecture) if item.part == "mlp")
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    return {"peak": round((count - whole) * bits / 8) + 2 * whole + cache + 2 * largest}


def _architecture(row: Row) -> Architecture:
    """The model of a row: by the key of its table, else by name."""
    found = models.find(str(row["model"].get("key"))) or models.find(str(row["model"]["name"]))
    return found or models.architecture(row["model"]["name"].split("/")[0])


def _degree(row: Row) -> int:
    return int(row.get("tp") or row.get("parallel", {}).get("tp") or 1)


def _device_gib(row: Row) -> float | None:
    known = {"A100-40GB": 39.49, "A100-80GB": 79.15, "H100": 79.18}
    return next((size for name, size in known.items() if name in str(row.get("hardware", ""))), None)


def _operator(row: Row) -> dict[str, int] | Skip:
    op = row["op"]
    sizes = {key: value for key, value in {**op["config"], **op["x"]}.items() if isinstance(value, int)}
    formula = FORMULAS.get((op["name"], op["provider"]))
    if formula is None:
        return Skip(f"operator {op['name']} of {op['provider']} is not described")
    symbols = _symbols(op["name"], sizes)
    symbols["W"] = A100_WORKSPACES if "A100" in row.get("hardware", "A100") else H100_WORKSPACES
    symbols["sm"] = 108 if "A100" in row.get("hardware", "A100") else 132
    symbols["L"] = LOSSES[op["name"], op["provider"]](symbols) if (op["name"], op["provider"]) in LOSSES else 0
    return {"exact": integer(formula, symbols)}


def _symbols(name: str, sizes: Mapping[str, int]) -> dict[str, int]:
    found = dict(sizes)
    found["H"] = sizes.get("H") or sizes.get("hidden_size", 0)
    found["F"] = sizes.get("intermediate_size", 0)
    found["N"] = sizes.get("BT") or sizes.get("B", 1) * (sizes.get("T") or sizes.get("S") or 1)
    if name == "fused_linear_cross_entropy":
        share = -(-found["N"] // -(-found["V"] // found["H"]))
        found["C"] = 1 << max(0, share - 1).bit_length()
    return found


def _loss(symbols: Mapping[str, int], *, dtype: Dtype, kept: bool = True, **logits: Any) -> int:
    """The planner's own figure of a loss over logits [N, V]."""
    shape = Architecture(
        name="head", layers=1, hidden=symbols.get("H") or 1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=symbols["V"]
    )
    engine = Engine(strategy="fsdp2", param_dtype=dtype, logits=Logits(**logits))
    rows = symbols["N"]
    grad = bool(symbols.get("grad", 1))
    job = Job(architecture=shape, engine=engine, world=1, sequences=1, tokens=rows, longest=rows, gradients=grad)
    return logits_peak(job, rows, symbols["V"], outputs_kept=kept)


LOSSES: dict[tuple[str, str], Callable[[Mapping[str, int]], int]] = {
    ("cross_entropy", "liger"): lambda s: _loss(s, dtype="float32", cross_entropy="flash"),
    ("cross_entropy", "huggingface"): lambda s: _loss(s, dtype="float32"),
    ("fused_linear_cross_entropy", "huggingface"): lambda s: _loss(s, dtype="bfloat16", kept=False),
}
FORMULAS = {
    ("cross_entropy", "liger"): "L + 21*N",  # targets, losses, mask, targets under the mask
    ("cross_entropy", "huggingface"): "L + 4*N*V + 8*N",
    ("fused_linear_cross_entropy", "huggingface"): "L + 6*V*H + 4*N*H + 8*N + W",
    # weights of two modules, gradient, new gradient; input, gradient, new gradient; the chunk of before, of now, in float32
    ("fused_linear_cross_entropy", "liger"): "8*V*H + 6*N*H + 8*C*V + 12*N + W",
    # the input, the gradient that came, the one that is kept, the output, the gradient that is made; four rows of weights
    ("rms_norm", "liger"): "10*M*H + 4*sm*H + 16*H",
    ("rms_norm", "huggingface"): "22*M*H + 16*H",
    # gate, up and product; input, output, both gradients, and three while the input's gradient is added up
    ("swiglu", "liger"): "max(6*N*F + 14*N*H, 8*N*F + 8*N*H) + 14*F*H + W",
    # the activation of gate and three gradients of that width beside them
    ("swiglu", "huggingface"): "14*N*F + 8*N*H + 12*F*H + W",
    # leaf, its gradient, log-probs, targets, and two gradients; torch: three terms of the loss instead
    ("kl_div", "liger"): "24*N*V",
    ("kl_div", "torch"): "28*N*V",
    # both modules hold a policy and a reference head; gradient, sum, and that of one sample; logits of one sample
    ("fused_linear_grpo_loss_token", "liger"): "14*V*H + 2*T*V + 8*N*H + 12*N + W",
    ("fused_linear_grpo_loss_token", "torch"): "16*N*V + 10*V*H + 6*N*H + 16*N + W",
    ("megatron_cross_entropy", "liger"): "8*N*V + 20*N",
    ("megatron_cross_entropy", "megatron-fused"): "12*N*V + 21*N",
    ("megatron_cross_entropy", "megatron-unfused"): "8*N*V + 21*N",
    ("megatron_cross_entropy", "torch"): "14*N*V + 21*N",
}


def _tensor(row: Row) -> dict[str, int] | Skip:
    """A single allocation, or the peak of one loss over logits."""
    shape, what = row["tensor"], row["id"].rsplit("/", 1)[-1]
    if "shape" in shape:
        elements = 1
        for size in shape["shape"]:
            elements *= size
        return {"exact": elements * sum(ITEM[dtype] for dtype in shape["dtype"].split("+"))}
    rows = shape.get("tokens") or shape["B"] * shape["T"]
    symbols = {"N": rows, "V": shape["vocab"] if "vocab" in shape else shape["V"], "T": shape.get("T", rows)}
    symbols |= {"H": shape.get("hidden", 1), "grad": 0}
    found = _known(row, what, shape, symbols)
    return found if isinstance(found, Skip) else {"exact": found}


def _known(row: Row, what: str, shape: Row, symbols: dict[str, int]) -> int | Skip:
    grads = {**symbols, "grad": 1}
    impl = str(shape.get("impl", ""))
    if "bytes_per_element" in shape:  # lm_head, float(), cross_entropy, backward
        softcap = 2 * symbols["N"] * symbols["V"] if "softcap" in row["notes"] else 0  # tanh in bfloat16, kept
        return _loss(grads, dtype="bfloat16", upcast=True) + softcap
    if impl == "naive log_softmax":
        return _loss(symbols, dtype="float32")
    if impl == "logsumexp per row":
        return _loss(symbols, dtype="float32", chunk_tokens=symbols["T"])
    if impl in PROJECTED:
        # The figures called GB are GiB: one GEMM is 12*N*V + 4*V*H + 6*N*H = 47.55 GiB to the last digit.
        fused = _loss(grads, dtype="bfloat16", implementation="fused") if impl == "liger" else 0
        return round(integer(PROJECTED[impl], {**symbols, "W": H100_WORKSPACES, "L": fused}) / GIB * 1e9)
    if what == "trl3678":  # float32 logits, and one sample: in bfloat16, log-probs, probabilities and their product
        return 44_000_000 + 4 * symbols["N"] * symbols["V"] + 14 * symbols["T"] * symbols["V"]
    if shape.get("dtype") in ITEM:
        return symbols["N"] * symbols["V"] * ITEM[shape["dtype"]]
    return Skip("a difference between two code paths whose tensors are not named")


PROJECTED = {
    "one-gemm": "12*N*V + 4*V*H + 6*N*H",
    "liger": "L + 4*V*H + 4*N*H + W",  # beside the planner's: the weight, its gradient, the input and its gradient
    "cce": "6*V*H + 6*N*H + W",
    # a float32 copy of the weight for each chunk of 256, kept for backward
    "chunked-default": "2*V*H*(8 + 2*(N // 256)) + 6*N*H + W",
}


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each row, worst first."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cases", type=Path, default=CASES)
    asked.add_argument("--json", action="store_true")
    options = asked.parse_args(arguments)
    rows = [json.loads(line) for line in options.cases.read_text(encoding="utf-8").splitlines()]
    found: list[tuple[float, str, str]] = []
    for row in rows:
        made = predict(row)
        if isinstance(made, Skip):
            found.append((-1.0, row["id"], f"skipped: {made.reason}"))
            continue
        (key, value), truth = next(iter(made.items())), measured(row)
        error = value / truth - 1
        equal = abs(value - truth) <= max(0.001 * truth, MIB)
        sign = "equal" if equal else ""
        found.append(
            (abs(error), row["id"], f"{key:7} {value / GIB:9.4f} GiB  measured {truth / GIB:9.4f}  {error:+.3%} {sign}")
        )
    for _, name, line in sorted(found, reverse=True):
        print(f"{name[:72]:72} {line}")
    scored = [error for error, _, _ in found if error >= 0]
    if options.json:
        print(
            json.dumps(
                {
                    "rows": len(rows),
                    "scored": len(scored),
                    "median": sorted(scored)[len(scored) // 2],
                    "max": max(scored),
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
