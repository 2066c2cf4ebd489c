"""Log-probs are those of the model's own forward: packed or padded, in chunks of any size, with or without checkpointing."""

import pytest
import torch

from flowledger.config.schema import Model, Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import forward, models, segments

TINY = Model(tiny=Tiny(hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48))


def batch(vocabulary: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Three sequences of different lengths, left-padded prompts, right-padded responses with a hole (a tool's tokens)."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (3, 12), generator=random)
    attention = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 12, [0] + [1] * 7 + [0] * 4])
    response = attention[:, 5:].clone()
    response[1, 2:4] = 0
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return {"full_sequence": ids, "attention_mask": attention, "position_ids": positions, "response_mask": response}


def run(model: torch.nn.Module, tensors: dict[str, torch.Tensor], **options: object) -> forward.Forward:
    settings = {"temperature": 0.7, "packed": True, "chunk_tokens": 0} | options
    return forward.micro_batch_forward(model=model, **tensors, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def policy() -> models.Policy:
    made = models.load_policy(TINY, seed=0)
    forward.use_segments(made.model)
    return made


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunk", [0, 1, 5, 1000])
def test_log_probs_and_entropy_equal_the_models_own_forward_sequence_by_sequence(
    policy, packed: bool, chunk: int
) -> None:
    tensors = batch(policy.sizes["V"])
    with torch.no_grad():
        compare(policy, tensors, run(policy.model, tensors, packed=packed, chunk_tokens=chunk))


def compare(policy: models.Policy, tensors: dict[str, torch.Tensor], made: forward.Forward) -> None:
    for row in range(3):
        real = tensors["attention_mask"][row].bool()
        ids = tensors["full_sequence"][row][real][None]
        log_probs = (policy.model(input_ids=ids).logits[0].float() / 0.7).log_softmax(-1)
        token = log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        first = int(real.nonzero()[0])
        for column in range(7):
            if tensors["response_mask"][row, column]:
                at = 5 + column - first - 1  # the row that predicts this token
                assert float(made.new_log_prob[row, column]) == pytest.approx(float(token[at]), abs=2e-5)
                entropy = -(log_probs[at].exp() * log_probs[at]).sum()
                assert float(made.entropy[row, column]) == pytest.approx(float(entropy), abs=2e-5)
            else:
                assert made.new_log_prob[row, column] == 0


def gradients(model: torch.nn.Module, tensors: dict[str, torch.Tensor], **options: object) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(model, tensors, **options).new_log_prob.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{"packed": False}, {"chunk_tokens": 4}, {"chunk_tokens": 4, "packed": False}])
def test_gradients_do_not_depend_on_packing_or_chunks(policy, options: dict[str, object]) -> None:
    tensors = batch(policy.sizes["V"], seed=1)
    want, got = gradients(policy.model, tensors), gradients(policy.model, tensors, **options)
    for name, gradient in want.items():
        assert float((got[name] - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max()), name


def test_chunks_keep_no_logits_of_the_whole_batch_for_backward(policy) -> None:
    tensors = batch(policy.sizes["V"])
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        run(policy.model, tensors, chunk_tokens=2)
    assert max(saved) <= max(p.numel() for p in policy.model.parameters())
    tokens = int(tensors["response_mask"].sum())
    assert tokens * policy.sizes["V"] not in saved


def test_a_window_narrower_than_a_segment_masks_what_lies_outside() -> None:
    q = torch.randn(1, 2, 6, 4)
    alone = segments.segments_of([0], [2], [4])
    windowed, _ = segments.segment_attention(torch.nn.Identity(), q, q, q, None, segments=alone, sliding_window=2)
    scores = (q @ q.transpose(-1, -2)) / 2.0
    at = torch.arange(6)
    allowed = (at[:, None] >= at) & (at[:, None] - at < 2)
    by_hand = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ q
    torch.testing.assert_close(windowed, by_hand.transpose(1, 2))


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(policy) -> None:
    head = policy.model.lm_head
    original = policy.model.forward

    def odd(*args: object, **kwargs: object) -> object:
        made = original(*args, **kwargs)
        made.logits = made.logits * 1.5
        return made

    policy.model.forward = odd
    try:
        with pytest.raises(BadInput, match="differs from the model's own log-probs"):
            forward.check_forward(policy.model, policy.sizes["V"])
    finally:
        policy.model.forward = original
    assert policy.model.lm_head is head
    forward.check_forward(policy.model, policy.sizes["V"])
