"""Keys and values: published pools to the last printed digit, and laws that hold for any model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from flowledger.config.engine import Mesh, Serving
from flowledger.plan import kv_cache
from flowledger.run.cache import SlotCache
from flowledger.tables.models import Architecture, Linear, Mla, architecture

GIB = 2**30
ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/engines/measured.jsonl").read_text().splitlines()
]
SMALL = Architecture(name="small", layers=4, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=512)


@pytest.mark.parametrize(
    ("model", "tp", "tokens", "gib"),
    [
        ("Qwen2.5-32B", 2, 3947 * 16, 7.71),  # vllm-project/vllm#15815
        ("DeepSeek-R1-Distill-Qwen-14B", 2, 81536, 7.465),  # vllm-project/vllm#13061, the rank with least
        ("Qwen3-235B-A22B", 4, 367404, 16.46),  # vllm-project/vllm#21348, SGLang: keys 8.23 and values 8.23
        ("Llama-2-7B", 1, 7449 * 16, 58.19531),  # vllm-project/vllm#2031
    ],
)
def test_pools_that_engines_printed(model: str, tp: int, tokens: int, gib: float) -> None:
    each = kv_cache.bytes_per_token(architecture(model), Mesh(tp=tp))
    assert tokens * each == pytest.approx(gib * GIB, rel=1e-3)


def test_one_head_is_copied_not_cut() -> None:
    cut = kv_cache.bytes_per_token(SMALL, Mesh(tp=4))
    assert cut == 2 * 4 * 1 * 8 * 2
    assert kv_cache.bytes_per_token(SMALL, Mesh(tp=8)) == cut
    assert kv_cache.bytes_per_token(SMALL, Mesh()) == 4 * cut


def test_latent_of_mla_is_whole_on_every_rank() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 numbers, 70 272 bytes a token in bfloat16 (DeepSeek-V2, section 2.1.4)."""
    deepseek = architecture("DeepSeek-V3")
    assert kv_cache.bytes_per_token(deepseek, Mesh()) == 61 * 576 * 2
    assert kv_cache.bytes_per_token(deepseek, Mesh(tp=8)) == 61 * 576 * 2


def test_windows_end_and_states_do_not_grow() -> None:
    hybrid = replace(
        SMALL, kinds=("full", "sliding", "linear", "linear"), window=100,
        linear=Linear(kind="gated_deltanet", key_heads=2, value_heads=4, key_dim=16, value_dim=8, conv_kernel=4),
    )  # fmt: skip
    token = 2 * 4 * 8 * 2
    state = (
        4 * 16 * 8 * 4 + (2 * 2 * 16 + 4 * 8) * 3 * 2
    )  # the recurrent state in float32, three inputs of each channel
    for tokens in (50, 100, 1000):
        found = kv_cache.sequence_bytes(hybrid, Mesh(), 2, tokens)
        assert found == tokens * token + min(tokens, 100) * token + 2 * state


def test_the_own_cache_has_these_bytes() -> None:
    """flowledger's SlotCache, filled by a model of transformers' own configuration."""
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
        intermediate_size=96, vocab_size=512,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    cache = SlotCache(config=config, slots=3, positions=20, device=torch.device("cpu"))
    cache.begin_prompts(torch.tensor([0]), torch.tensor([5]))
    for layer in range(4):
        cache.update(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8), layer)
    assert cache.bytes == kv_cache.slot_bytes(SMALL, slots=3, positions=20, item=4)


models_ = st.builds(
    lambda layers, heads, window: replace(
        SMALL, layers=layers, kv_heads=heads, kinds=tuple("full" if layer % 2 else "sliding" for layer in range(layers)), window=window
    ),
    st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300),
)  # fmt: skip


@given(models_, st.sampled_from([1, 2, 4]), st.integers(0, 10**9), st.integers(1, 500))
def test_capacity_and_need_agree(model: Architecture, tp: int, available: int, tokens: int) -> None:
    serving = Serving(engine="vllm", mesh=Mesh(tp=tp))
    count = kv_cache.capacity(model, serving, available, tokens=tokens)
    assert kv_cache.needed(model, serving, sequences=count, tokens=tokens) <= available
    assert kv_cache.needed(model, serving, sequences=count + 1, tokens=tokens) > available


@given(models_, st.integers(0, 10**9), st.integers(1, 64))
def test_a_pool_is_whole_blocks_and_leaves_less_than_one(model: Architecture, available: int, block: int) -> None:
    pool = kv_cache.pool(model, Serving(engine="vllm", block_tokens=block), available)
    assert pool.bytes == pool.blocks * block * pool.bytes_per_token <= available
    assert available - pool.bytes < block * pool.bytes_per_token
    assert pool.tokens == pool.blocks * block


@given(models_, st.integers(1, 5))
def test_pipeline_stages_hold_all_layers_and_the_fullest_counts(model: Architecture, pp: int) -> None:
    if pp > model.layers:
        return
    whole = kv_cache.bytes_per_token(model, Mesh())
    stage = kv_cache.bytes_per_token(model, Mesh(pp=pp))
    assert whole / pp <= stage <= -(-model.layers // pp) * whole // model.layers


def test_kept_dtype() -> None:
    assert kv_cache.itemsize(Serving(kv_dtype="float8")) == 1
    assert kv_cache.itemsize(Serving(dtype="float8")) == 2
    assert kv_cache.itemsize(Serving(dtype="float32")) == 4


def test_mla_keeps_no_values() -> None:
    latent = replace(SMALL, mla=Mla(q_lora=None, kv_lora=32, qk_nope=8, qk_rope=4, v=8))
    assert kv_cache.bytes_per_token(latent, Mesh(), 1) == 4 * (32 + 4)
