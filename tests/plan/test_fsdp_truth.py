"""Timelines of one process against torch itself: bytes that layers save, and peaks of whole steps, on CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flowledger.config.engine import Engine, Optimizer, Recompute
from flowledger.config.model_file import read_model
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.fsdp.layers import Pass, decoder_layer, forward
from flowledger.plan.job import Job
from flowledger.plan.timeline import Clock, Timeline
from flowledger.tables.models import Architecture
from tests.plan.fsdp_runs import architecture, causal_lm, checkpointed, decoder_step, saved_bytes

TOKENS = 256
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaModel", "LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 192}),
    "qwen2": ("Qwen2Model", "Qwen2Config", {"num_key_value_heads": 2, "intermediate_size": 192}),
    "qwen3": ("Qwen3Model", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192}),
    "olmo2": ("Olmo2Model", "Olmo2Config", {"num_key_value_heads": 2, "intermediate_size": 192}),
    "gemma3": (
        "Gemma3TextModel", "Gemma3TextConfig",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192, "sliding_window": 4096},
    ),
    "neox": ("GPTNeoXModel", "GPTNeoXConfig", {"intermediate_size": 256, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi": ("PhiModel", "PhiConfig", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "qwen3_moe": (
        "Qwen3MoeModel", "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8,
            "num_experts_per_tok": 2, "mlp_only_layers": [],
        },
    ),
}  # fmt: skip


def job(shape: Architecture, dtype: torch.dtype, *, tokens: int = TOKENS, gradients: bool = True, **engine: Any) -> Job:
    settings = {"param_dtype": str(dtype).removeprefix("torch."), "attention": "sdpa", **engine}
    return Job(
        architecture=shape, engine=Engine.model_validate(settings), world=1, sequences=1, tokens=tokens, longest=tokens,
        head="none", gradients=gradients,
    )  # fmt: skip


def planned(shape: Architecture, dtype: torch.dtype, **more: Any) -> Timeline:
    return fsdp.timeline(job(shape, dtype, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_saves_what_torch_saves(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_class, config_class, more = FAMILIES[name]
    sizes = []
    for layers in (2, 3):
        settings = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "pad_token_id": 0, **more}
        config = getattr(transformers, config_class)(num_hidden_layers=layers, attn_implementation="sdpa", **settings)
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config).to(dtype).train()
        sizes.append(saved_bytes(model, torch.randint(1, 100, (1, 128))))
    config.save_pretrained(tmp_path)
    shape = read_model(tmp_path / "config.json")
    run = Pass(job(shape, dtype, tokens=128), Clock())
    layer = decoder_layer(run.job, 1)
    forward(run, layer, "forward", saves=True)
    # Gemma casts its norm's weights (no activation), Qwen3-MoE keeps eight offsets of four bytes
    slack = {"gemma3": 1152, "qwen3_moe": 32}.get(name, 0)
    assert sizes[1] - sizes[0] - layer.saved == slack


@pytest.mark.parametrize(("hidden", "heads", "keys", "ffn"), [(64, 4, 2, 192), (128, 4, 4, 344), (96, 6, 2, 256)])
def test_the_closed_form_of_qwen2(hidden: int, heads: int, keys: int, ffn: int) -> None:
    """20*T*H + 8*T*F + 4*T*K*D + 4*T*A + 8*T, measured under FakeTensor with a difference of 0 bytes."""
    shape = architecture(hidden=hidden, heads=heads, kv_heads=keys, head_dim=hidden // heads, ffn=ffn, qkv_bias=True)
    run = Pass(job(shape, torch.bfloat16), Clock())
    layer = decoder_layer(run.job, 0)
    forward(run, layer, "forward", saves=True)
    closed = 20 * TOKENS * hidden + 8 * TOKENS * ffn + 4 * TOKENS * keys * (hidden // heads) + 4 * TOKENS * heads
    assert layer.saved == closed + 8 * TOKENS


SHAPES = {
    "llama": architecture(),
    "deep": architecture(layers=4),
    "wide heads": architecture(heads=16, head_dim=32, kv_heads=4),
    "qwen3": architecture(qk_norm="head"),
    "every head its keys": architecture(kv_heads=4),
    "large": architecture(hidden=256, ffn=1024),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_of_a_step(name: str, dtype: torch.dtype) -> None:
    truth = decoder_step(causal_lm(SHAPES[name], dtype), TOKENS)
    plan = planned(SHAPES[name], dtype, optimizer=Optimizer(implementation="loop"))
    assert plan.peak().bytes == pytest.approx(truth.peak, rel=5e-4)
    assert sum(live.bytes for live in plan.lives if live.persistent) == truth.resting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_peak_with_checkpoints(dtype: torch.dtype) -> None:
    shape = SHAPES["deep"]
    truth = decoder_step(checkpointed(causal_lm(shape, dtype)), TOKENS)
    plan = planned(shape, dtype, recompute=Recompute(granularity="full"))
    assert plan.peak().bytes == pytest.approx(truth.peak, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_peak_of_eager_attention(dtype: torch.dtype) -> None:
    truth = decoder_step(causal_lm(SHAPES["llama"], dtype, "eager"), TOKENS)
    assert planned(SHAPES["llama"], dtype, attention="eager").peak().bytes == pytest.approx(truth.peak, rel=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["deep", "wide heads"])
def test_the_peak_without_gradients(name: str, dtype: torch.dtype) -> None:
    truth = decoder_step(causal_lm(SHAPES[name], dtype), TOKENS, gradients=False)
    assert planned(SHAPES[name], dtype, gradients=False).peak().bytes == pytest.approx(truth.peak, rel=3e-3)


def test_the_peak_under_autocast() -> None:
    truth = decoder_step(causal_lm(SHAPES["llama"], torch.float32), TOKENS, autocast=True)
    plan = planned(SHAPES["llama"], torch.float32, autocast=True, compute_dtype="bfloat16")
    assert plan.peak().bytes == pytest.approx(truth.peak, rel=1e-2)


@pytest.mark.parametrize("how", ["foreach", "fused", "loop"])
def test_what_the_optimizer_step_allocates(how: str) -> None:
    """So few tokens that the optimizer's instant is the peak."""
    shape = architecture(hidden=256, ffn=1024)
    truth = decoder_step(causal_lm(shape, torch.float32), 2, foreach=how == "foreach", fused=how == "fused")
    made = job(shape, torch.float32, tokens=2, optimizer=Optimizer(implementation=how))
    on_gpu = Job(
        **{name: getattr(made, name) for name in made.__slots__} | {"device": "any"}
    )  # foreach is for GPUs only
    assert fsdp.timeline(on_gpu).peak().bytes == pytest.approx(truth.peak, rel=5e-3)


def test_every_row_names_its_source() -> None:
    from flowledger.plan.saved import rows

    assert not [row.label for row in rows() if not row.source]
    assert json.dumps(sorted({row.life for row in rows()})) == '["backward", "forward", "saved"]'
