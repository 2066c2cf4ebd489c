"""The decode step against the models' own full forward, and the refusal of whatever it would compute differently."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from flowledger.config.schema import Rollout
from flowledger.flow.seams import replaced
from flowledger.run import decode, generate
from flowledger.run.cache import SlotCache

V, S = 50, 12
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}

KNOWN: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biases-tied-relu": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="relu"
    ),
    "llama3-rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "one-key-head": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window-in-two-layers": lambda: Qwen2Config(**SIZES, **WINDOW, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3-window-in-two-layers": lambda: Qwen3Config(**SIZES, **WINDOW, max_window_layers=1),
}
UNKNOWN: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: Gemma3TextConfig(**SIZES),
    "granite": lambda: GraniteConfig(**SIZES, residual_multiplier=0.5),
    "gpt2": lambda: GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None),
    "rope-that-depends-on-the-longest": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
}


def made(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model.to(dtype).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def worst(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference of logits from one full forward, ÷ the largest logit: three samples that start 0, 1, 4 steps late."""
    ids = torch.randint(0, V, (3, S), generator=torch.Generator().manual_seed(2))
    truth = model(input_ids=ids, use_cache=False).logits
    decoder = decode.decoder_of(model, positions=S)
    assert decoder is not None
    config: Any = model.config
    kv_cache = SlotCache(config=config, slots=3, positions=S, device=ids.device)
    late, gaps = torch.tensor([0, 1, 4]), []
    for step in range(S):
        running = int((late <= step).sum())
        columns = step - late[:running]
        kv_cache.begin_decode(running)
        logits = decoder.logits(ids[torch.arange(running), columns], kv_cache)
        assert logits.dtype == dtype and logits.shape == (running, V)
        gaps.append((logits - truth[torch.arange(running), columns]).abs().max())
    return float(torch.stack(gaps).max() / truth.abs().max())


@pytest.mark.parametrize("name", KNOWN)
def test_logits_are_those_of_the_whole_sequence(name: str) -> None:
    model = made(KNOWN[name]())
    assert decode.verify(model)
    assert worst(model) < 1e-5


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-6), (torch.bfloat16, 0.03)])
def test_logits_in_other_dtypes(dtype: torch.dtype, most: float) -> None:
    model = made(KNOWN["qwen3"](), dtype)
    assert decode.verify(model)
    assert worst(model, dtype) < most


def test_samples_of_equal_length_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(KNOWN["llama"]())
    assert decode.verify(model)
    monkeypatch.delattr(SlotCache, "decode_mask")
    ids = torch.randint(0, V, (3, S), generator=torch.Generator().manual_seed(2))
    decoder = decode.decoder_of(model, positions=S)
    kv_cache = SlotCache(config=model.config, slots=3, positions=S, device=ids.device)
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
        for column in range(S):
            kv_cache.begin_decode(3)
            assert decoder is not None
            torch.testing.assert_close(decoder.logits(ids[:, column], kv_cache), truth[:, column], atol=1e-4, rtol=0)


@pytest.mark.parametrize("where", [["q_proj", "v_proj"], ["gate_proj", "down_proj", "o_proj", "lm_head"]])
def test_lora_is_computed_and_follows_its_weights(where: list[str]) -> None:
    model = get_peft_model(made(KNOWN["qwen2"]()), LoraConfig(r=2, target_modules=where)).eval()
    assert decode.verify(model)
    plain = worst(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    assert worst(model) < 1e-5 and plain < 1e-5
    with model.disable_adapter():
        assert worst(model) < 1e-5


def test_new_weights_in_the_same_tensors_and_new_tensors_are_both_read() -> None:
    model: Any = made(KNOWN["llama"]())
    assert decode.verify(model)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(3)
    assert worst(model) < 1e-5
    model.model.norm.weight = nn.Parameter(torch.rand(32))
    assert worst(model) < 1e-5


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_architectures_run_themselves(name: str) -> None:
    model = made(UNKNOWN[name]())
    assert not decode.verify(model)
    assert decode.decoder_of(model, positions=S) is None


def _scaled_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.register_forward_hook(lambda _m, _a, out: 2 * out)


def _hook_before(model: Any) -> None:
    model.model.layers[2].register_forward_pre_hook(lambda _m, args: args)


def _own_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)


def _subclass(model: Any) -> None:
    norm = model.model.norm
    norm.__class__ = type("Mine", (type(norm),), {})


def _one_more_child(model: Any) -> None:
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)


CHANGES = [_scaled_norm, _hook_before, _own_forward, _subclass, _one_more_child]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_from_outside_runs_itself_before_and_after_the_check(change: Callable[[Any], None]) -> None:
    model, late = made(KNOWN["llama"]()), made(KNOWN["llama"]())
    change(model)
    assert not decode.verify(model)
    assert decode.verify(late)
    change(late)
    assert decode.decoder_of(late, positions=S) is None


def test_a_prompt_that_is_learned_is_no_wrapper_it_knows() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert not decode.verify(get_peft_model(made(KNOWN["llama"]()), config))


def test_logits_that_differ_are_noticed() -> None:
    """A class of known name that computes something else: only the numbers can tell."""
    model: Any = made(KNOWN["llama"]())
    kind = type(model.model.norm)
    with replaced([(f"{kind.__module__}:LlamaMLP.forward", lambda original: lambda self, x: 1.01 * original(self, x))]):
        assert not decode.verify(model)
    assert decode.decoder_of(model, positions=S) is None
    assert decode.verify(model)


def test_a_copy_has_to_be_verified_for_itself() -> None:
    model = made(KNOWN["llama"]())
    assert decode.verify(model)
    assert decode.decoder_of(copy.deepcopy(model), positions=S) is None


def test_verifying_leaves_the_mode_of_training_alone() -> None:
    model = made(KNOWN["llama"]()).train()
    assert decode.verify(model) and model.training


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-window-in-two-layers"])
@pytest.mark.parametrize("settings", [{}, {"max_running": 2}, {"temperature": 0.3, "top_k": 7, "top_p": 0.9}])
def test_a_whole_generation_says_the_same_with_it(name: str, settings: dict[str, Any]) -> None:
    """Slots are shared and moved, prompts have 1 to 7 tokens, some responses stop early."""
    model = made(KNOWN[name]())

    def said() -> generate.Generated:
        return generate.generate(
            model=model, settings=Rollout(samples_per_prompt=3, max_response_tokens=9, **settings), stop_ids=(4, 7, 9),
            uniform=torch.rand(12, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
            prompt_ids=torch.arange(28).view(4, 7),
            prompt_length=torch.tensor([7, 1, 4, 5]), sample_id=torch.arange(12), pad_id=0,
        )  # fmt: skip

    own = said()
    assert decode.verify(model)
    ours = said()
    assert torch.equal(own.response_ids, ours.response_ids)
    assert torch.equal(own.finish_reason, ours.finish_reason)
    assert torch.equal(own.generation_metadata, ours.generation_metadata)
    torch.testing.assert_close(own.rollout_log_prob, ours.rollout_log_prob, atol=1e-4, rtol=0)
    assert len(set(ours.finish_reason.tolist())) == 2


def test_tokens_pass_the_embedding_as_a_module() -> None:
    """Who counts tokens with a hook on the input embedding sees those of every decode step."""
    model: Any = made(KNOWN["llama"]())
    assert decode.verify(model)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: seen.append(args[0].numel()))
    with torch.no_grad():
        decoder = decode.decoder_of(model, positions=S)
        assert decoder is not None
        kv_cache = SlotCache(config=model.config, slots=3, positions=S, device=torch.device("cpu"))
        kv_cache.begin_decode(3)
        decoder.logits(torch.tensor([1, 2, 3]), kv_cache)
    assert seen == [3]
