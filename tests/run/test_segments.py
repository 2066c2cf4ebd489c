"""Prompts that are packed once for several responses: every number is that of the padded forward, whatever the model."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flowledger.config.engine import Lora
from flowledger.config.schema import Model, Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import forward, models, segments
from flowledger.run.segments import Segment, leaders, segments_of

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),  # biases of queries, keys and values
    "qwen3": ("Qwen3", {"head_dim": 8}),  # norms of queries and keys
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {"bos_token_id": 1, "eos_token_id": 2}),  # one projection for queries, keys and values
    "neox": ("GPTNeoX", {"use_parallel_residual": True}),  # as many key heads as heads
    "gpt2": ("GPT2", {"n_positions": 64}),  # positions are learned
    "granite": ("Granite", {"logits_scaling": 2.0}),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    family, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    forward.use_segments(model)
    return model


def batch(
    prompts: list[list[int]], responses: list[int], holes: dict[int, list[int]] | None = None
) -> dict[str, Tensor]:
    """A micro-batch: left-padded prompts, random responses of these lengths, places of one that others wrote."""
    random, wide, long = torch.Generator().manual_seed(1), max(map(len, prompts)), max(*responses, 1)
    ids = torch.zeros(len(prompts), wide + long, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, wide - len(prompt) : wide] = torch.tensor(prompt)
        ids[row, wide : wide + length] = torch.randint(3, 96, (length,), generator=random)
        mask[row, wide - len(prompt) : wide + length] = 1
    response = mask[:, wide:].clone()
    for row, places in (holes or {}).items():
        response[row, places] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"full_sequence": ids, "attention_mask": mask, "position_ids": positions, "response_mask": response}


A, B, C = [5, 6, 7, 8, 9], [10, 11], [12]
RAGGED = batch([A, A, A, B, C, C, B, A], [3, 6, 1, 4, 6, 6, 2, 5], holes={1: [2, 3], 5: [0, 1]})
EQUAL = batch([A, A, A, A], [7, 7, 7, 7])
ONE_GROUP_AGAIN = batch([B, B, B, B], [2, 0, 3, 3])  # one response is empty; two groups with one prompt are one segment


def taken(model: nn.Module, rows: dict[str, Tensor], **way: bool) -> tuple[forward.Forward, dict[str, Tensor]]:
    """What a forward says, and the gradient of a sum in which every token counts differently."""
    model.zero_grad()
    made = forward.micro_batch_forward(model=model, **rows, temperature=0.8, chunk_tokens=0, entropy_grad=True, **way)
    weights = torch.linspace(0.5, 1.5, made.new_log_prob.numel()).view_as(made.new_log_prob)
    (weights * (made.new_log_prob + 0.1 * made.entropy)).sum().backward()
    return made, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: nn.Module, rows: dict[str, Tensor]) -> None:
    truth, gradients = taken(model, rows, packed=False)
    made, found = taken(model, rows, packed=True, shared_prompts=True)
    for name in ("new_log_prob", "entropy"):
        torch.testing.assert_close(getattr(made, name), getattr(truth, name), atol=2e-5, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).abs().max()) <= 2e-5 * float(gradient.abs().max()) + 1e-6, name


@pytest.mark.parametrize("rows", [RAGGED, EQUAL, ONE_GROUP_AGAIN], ids=["ragged", "equal", "one empty"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_entropy_and_gradients_are_those_of_the_padded_forward(name: str, rows: dict[str, Tensor]) -> None:
    compare(model_of(name), rows)


@settings(max_examples=12, deadline=None)
@given(
    prompts=st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=6),
    data=st.data(),
)
def test_so_they_are_for_any_prompts_and_lengths(prompts: list[list[int]], data: st.DataObject) -> None:
    responses = data.draw(st.lists(st.integers(0, 5), min_size=len(prompts), max_size=len(prompts)))
    compare(MISTRAL, batch(prompts, responses))


MISTRAL = model_of("mistral")


@pytest.mark.parametrize("recompute", [False, True])
def test_with_adapters_and_recomputed_activations(recompute: bool) -> None:
    lora = Lora(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))
    policy = models.load_policy(Model(tiny=Tiny(hidden_size=32, ffn_size=48), lora=lora), seed=0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    forward.use_segments(policy.model)
    if recompute:
        models.recompute_activations(policy.model)
    compare(policy.model, RAGGED)


def seen_by(model: nn.Module, rows: dict[str, Tensor], **way: bool) -> int:
    """Tokens that enter the embedding."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))  # type: ignore[operator]
    try:
        with torch.no_grad():
            forward.micro_batch_forward(model=model, **rows, temperature=1.0, chunk_tokens=0, **way)
    finally:
        hook.remove()
    return counts[0]


def test_a_prompt_enters_once_for_its_neighbours() -> None:
    model = model_of("llama")
    assert seen_by(model, RAGGED, packed=True, shared_prompts=True) == 33 + len(A) + len(B) + len(C) + len(B) + len(A)
    assert seen_by(model, RAGGED, packed=True, shared_prompts=False) == int(RAGGED["attention_mask"].sum())
    assert seen_by(model, RAGGED, packed=False, shared_prompts=True) == RAGGED["attention_mask"].numel()


def test_leaders_are_the_first_of_neighbours_with_the_same_tokens_and_padding() -> None:
    prompts = torch.tensor([[0, 1, 2], [9, 1, 2], [0, 1, 2], [1, 1, 2], [1, 1, 2], [0, 1, 2]])
    valid = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]]).bool()
    assert leaders(prompts, valid).tolist() == [0, 0, 0, 3, 3, 5]  # what stands under padding does not count
    assert leaders(prompts[:1], valid[:1]).tolist() == [0]


def test_short_responses_attend_together_and_long_ones_where_they_are_equally_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "TOGETHER", 3)
    made = segments_of([0, 0, 0, 0, 4, 5, 5], [3, 3, 3, 3, 1, 2, 2], [4, 6, 6, 5, 2, 1, 0])
    assert made.rows == (Segment(3, (4, 6, 6, 5)), Segment(1, (2,)), Segment(2, (1, 0)))
    assert made.pieces == [7, 12, 5, 3, 3]
    monkeypatch.setattr(segments, "TOGETHER", 18)
    again = segments_of([0, 0, 0, 0], [3, 3, 3, 3], [4, 6, 6, 5])
    assert again.pieces == [7, 17]


def test_long_responses_of_mixed_lengths_are_those_of_the_padded_forward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "TOGETHER", 0)
    compare(MISTRAL, RAGGED)


def odd(shared_only: bool) -> nn.Module:
    """A model whose queries, keys and values depend on what stands before them in the row, as convolutions would."""
    model = model_of("llama")
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    original = decoder.embed_tokens.forward

    def mixed(ids: Tensor) -> Tensor:
        made: Tensor = original(ids)
        packed = len(ids) == 1 and ids.shape[1] > 6
        return made + 0.5 * made.roll(1, 1) if packed and (ids.shape[1] < 18 or not shared_only) else made

    decoder.embed_tokens.forward = mixed
    return model


def test_a_model_that_only_shared_prompts_get_wrong_is_refused_with_the_key_to_turn_off() -> None:
    with pytest.raises(BadInput, match=r"shared prompts differs .* set actor\.shared_prompts = false"):
        forward.check_forward(odd(shared_only=True), 96)
    forward.check_forward(odd(shared_only=True), 96, shared_prompts=False)


def test_a_model_that_packing_gets_wrong_runs_padded() -> None:
    with pytest.raises(BadInput, match=r"the packed forward differs .* set actor\.packed = false"):
        forward.check_forward(odd(shared_only=False), 96)
    forward.check_forward(odd(shared_only=False), 96, packed=False)
