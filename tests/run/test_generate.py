"""Generation against the models' own full forward, against Hugging Face's greedy search, and against its own laws."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flowledger.config.schema import Rollout
from flowledger.flow.errors import BadInput
from flowledger.flow.words import FINISH_REASONS
from flowledger.run import generate

V, G = 50, 3
LENGTHS = torch.tensor([7, 1, 4, 5])
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3-window": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gemma3-window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=ALTERNATING)),
    # Soft caps on attention and logits: only the eager attention has them.
    "gemma2-softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=4, final_logit_softcapping=2.0, attn_implementation="eager")
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)  # so that tokens depend on their context, not only on chance
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return made("llama")


def prompts() -> Tensor:
    """[4, 7], left-padded with 0 to the lengths above."""
    ids = torch.randint(1, V, (4, 7), generator=torch.Generator().manual_seed(2))
    return ids.masked_fill(torch.arange(7) < 7 - LENGTHS[:, None], 0)


def rollout(
    model: nn.Module, *, stop_ids=(), seed=0, abort=None, answer=None, clock=lambda: 0.0, **settings
) -> generate.Generated:
    asked = Rollout(**{"samples_per_prompt": G, "max_response_tokens": 9, **settings})
    shape, random = (4 * asked.samples_per_prompt, asked.max_response_tokens), torch.Generator().manual_seed(seed)
    return generate.generate(
        model=model,
        settings=asked,
        stop_ids=stop_ids,
        uniform=torch.rand(shape, dtype=torch.float64, generator=random),
        prompt_ids=prompts(),
        prompt_length=LENGTHS,
        sample_id=100 + torch.arange(4 * G),
        pad_id=0,
        abort=abort,
        answer=answer,
        clock=clock,
    )


def reasons(result: generate.Generated) -> list[str]:
    return [FINISH_REASONS[reason] for reason in result.finish_reason.tolist()]


def responses(result: generate.Generated) -> list[list[int]]:
    lengths = result.attention_mask.sum(1).tolist()
    return [ids[:length] for ids, length in zip(result.response_ids.tolist(), lengths, strict=True)]


def without_cache(model: nn.Module, sample: int, response: list[int], temperature: float) -> Tensor:
    """Log-probs of a response by one plain forward over prompt and response."""
    prompt = prompts()[sample // G, 7 - int(LENGTHS[sample // G]) :]
    sequence = torch.cat([prompt, torch.tensor(response, dtype=torch.int64)])
    with torch.no_grad():
        log_probs = (model(sequence[None], use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, sequence[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_running", [None, 2])
def test_log_probs_are_those_of_a_forward_without_cache(name, max_running):
    model = made(name)
    result = rollout(model, temperature=0.8, stop_ids=(5, 6, 7, 8), max_running=max_running)
    assert result.rollout_log_prob.dtype == torch.float32
    assert (result.rollout_log_prob[result.response_mask == 0] == 0).all()
    for sample, response in enumerate(responses(result)):
        expected = without_cache(model, sample, response, 0.8)
        torch.testing.assert_close(result.rollout_log_prob[sample, : len(response)], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def whole(llama) -> generate.Generated:
    """All samples beside one another."""
    return rollout(llama, stop_ids=(5, 6, 7, 8))


@pytest.mark.parametrize("max_running", [1, 3, 5, 11, 12, 40])
def test_what_a_sample_says_does_not_depend_on_how_many_run_beside_it(llama, whole, max_running):
    assert len(set(whole.response_mask.sum(1).tolist())) > 2, "responses of different lengths, else this shows little"
    narrow = rollout(llama, stop_ids=(5, 6, 7, 8), max_running=max_running)
    assert responses(narrow) == responses(whole)
    assert reasons(narrow) == reasons(whole)


def test_the_seed_decides_and_the_group_differs(llama):
    assert responses(rollout(llama, seed=4)) == responses(rollout(llama, seed=4))
    assert responses(rollout(llama, seed=4)) != responses(rollout(llama, seed=5))
    first_group = responses(rollout(llama, seed=4))[:G]
    assert len({tuple(response) for response in first_group}) == G


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-window"])
def test_at_a_tiny_temperature_it_is_the_greedy_search_of_hugging_face(name):
    model = made(name)
    ids, mask = prompts(), (torch.arange(7) >= 7 - LENGTHS[:, None]).long()
    greedy = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9, pad_token_id=0)[:, 7:]
    result = rollout(model, temperature=1e-6)
    assert torch.equal(result.response_ids, greedy.repeat_interleave(G, dim=0))


def test_running_counts_add_up_to_the_sampled_tokens_and_nobody_waits_at_the_end(llama):
    result = rollout(llama, stop_ids=(5, 6, 7, 8), max_running=5)
    running, waiting = result.generation_metadata.T
    assert int(running.sum()) == int(result.response_mask.sum())
    assert (running[0], waiting[0], waiting[-1]) == (5, 12 - 5, 0)
    assert (waiting.diff() <= 0).all()
    assert (running[waiting > 0] == 5).all(), "a slot stayed empty while samples waited"


def watched(monkeypatch) -> tuple[list[dict], list[dict]]:
    """The keyword arguments of every prefill and decode step, caught from outside as the recorder does it."""
    seen: dict[str, list[dict]] = {"prefill": [], "decode_step": []}
    for name, calls in seen.items():
        original = getattr(generate, name)

        def wrapper(*, calls=calls, original=original, **arguments):
            calls.append(arguments)
            return original(**arguments)

        monkeypatch.setattr(generate, name, wrapper)
    return seen["prefill"], seen["decode_step"]


@pytest.mark.parametrize("max_running", [None, 1, 2, 4])
def test_each_prompt_is_prefilled_once_whatever_the_slots(llama, monkeypatch, max_running):
    prefills, steps = watched(monkeypatch)
    result = rollout(llama, max_running=max_running)
    lengths = [length for call in prefills for length in call["prompt_length"].tolist()]
    assert lengths == LENGTHS.tolist()
    assert [(call["running"], call["waiting"]) for call in steps] == list(
        map(tuple, result.generation_metadata.tolist())
    )


@pytest.mark.parametrize(("max_running", "slots"), [(None, 12), (5, 5), (40, 12)])
def test_the_cache_has_exactly_the_bytes_of_the_formula(llama, monkeypatch, max_running, slots):
    _, steps = watched(monkeypatch)
    rollout(llama, max_running=max_running)
    cached = steps[-1]["kv_cache"]
    # 2 * L * B_slot * K * (longest prompt + longest response - 1) * D * itemsize
    assert cached.bytes == 2 * 3 * slots * 2 * (7 + 9 - 1) * 8 * 4
    assert cached.layers[0].keys[:, :, -1].any(), "the last position is never used"


def test_a_stop_token_ends_its_response_and_is_part_of_it(llama):
    free = responses(rollout(llama))
    stop = free[0][3]
    result = rollout(llama, stop_ids=(stop,))
    for sample, response in enumerate(responses(result)):
        end = free[sample].index(stop) + 1 if stop in free[sample] else 9
        assert response == free[sample][:end]
        assert reasons(result)[sample] == ("stop" if stop in free[sample] else "length")
    assert responses(rollout(llama, stop_token_ids=(stop,))) == responses(result)
    assert (result.response_ids[result.response_mask == 0] == 0).all(), "padding is pad_id"


def test_the_response_is_as_wide_as_the_longest_one(llama):
    everything = tuple(range(V))
    result = rollout(llama, stop_ids=everything)
    assert result.response_ids.shape == (12, 1)
    assert set(reasons(result)) == {"stop"}
    assert rollout(llama, max_response_tokens=1).response_ids.shape == (12, 1)


def test_a_time_limit_of_zero_gives_empty_responses(llama):
    result = rollout(llama, timeout_s=0, max_running=5)
    assert set(reasons(result)) == {"timeout"}
    assert result.response_ids.shape == (12, 1)
    assert int(result.response_mask.sum()) == 0
    assert result.generation_metadata.shape == (0, 2)


def test_time_counts_from_the_admission_and_what_was_said_is_kept(llama):
    """The clock advances by 1 s at each reading: one at an admission, one before each decode step."""
    free = responses(rollout(llama))
    ticks = itertools.count()
    result = rollout(llama, timeout_s=3.5, max_running=6, clock=lambda: float(next(ticks)))
    # Admitted at 0, read at 1, 2, 3, 4: three tokens; then the next six samples likewise.
    assert set(reasons(result)) == {"timeout"}
    assert responses(result) == [response[:3] for response in free]
    assert result.generation_metadata.tolist() == [[6, 6]] * 3 + [[6, 0]] * 3


def test_a_sample_can_be_aborted_by_its_id_and_text(llama):
    free = responses(rollout(llama))
    asked: list[tuple[int, list[int]]] = []

    def abort(sample_id: int, response: list[int]) -> bool:
        asked.append((sample_id, response))
        return (sample_id == 104 and len(response) == 2) or sample_id == 107

    result = rollout(llama, abort=abort, max_running=4)
    kept = {4: 2, 7: 0}
    assert responses(result) == [response[: kept.get(sample, 9)] for sample, response in enumerate(free)]
    assert [sample for sample, reason in enumerate(reasons(result)) if reason == "abort"] == [4, 7]
    assert int(result.response_mask[7].sum()) == 0
    assert (104, free[4][:2]) in asked


def test_all_samples_aborted_is_a_result_like_any_other(llama):
    result = rollout(llama, abort=lambda sample_id, response: True)
    assert set(reasons(result)) == {"abort"}
    assert int(result.response_mask.sum()) == 0


def test_the_model_is_left_as_it_was_and_results_can_enter_a_graph(llama):
    model = copy.deepcopy(llama).train()
    result = rollout(model)
    assert model.training
    weight = torch.ones(1, requires_grad=True)
    (result.rollout_log_prob * weight).sum().backward()
    assert weight.grad is not None


def test_an_empty_prompt_is_refused(llama):
    with pytest.raises(BadInput, match="prompt 1 of this step has no tokens"):
        generate.generate(
            model=llama,
            settings=Rollout(samples_per_prompt=1),
            stop_ids=(),
            uniform=torch.zeros(2, 32, dtype=torch.float64),
            prompt_ids=torch.zeros(2, 3, dtype=torch.int64),
            prompt_length=torch.tensor([3, 0]),
            sample_id=torch.arange(2),
            pad_id=0,
        )


def test_nan_weights_are_refused_with_the_sample_and_the_position(llama):
    broken = copy.deepcopy(llama)
    broken.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(BadInput, match="logits of sample 100 are not finite at response position 0"):
        rollout(broken)


def test_a_lora_model_is_sampled_through_its_adapters(llama):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        copy.deepcopy(llama), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    result = rollout(adapted)
    expected = without_cache(adapted, 0, responses(result)[0], 1.0)
    torch.testing.assert_close(result.rollout_log_prob[0], expected, atol=1e-5, rtol=1e-5)
    assert responses(result) != responses(rollout(llama))


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def raises(error: BaseException) -> Callable[[int, list[int]], bool]:
    def abort(sample_id: int, response: list[int]) -> bool:
        raise error

    return abort


@pytest.mark.parametrize(
    ("abort", "says"),
    [
        (raises(ValueError("no good")), r"'abort' raised ValueError: no good for sample 100 after 0 tokens"),
        (raises(SystemExit(3)), r"raised SystemExit: 3 for sample 100"),
        (raises(SpeechlessError()), r"raised SpeechlessError: \(its own message raised RuntimeError\) for sample 100"),
        (lambda: True, r"raised TypeError: .* for sample 100"),
        (lambda sample_id, response: torch.zeros(2), r"returned a Tensor for sample 100; it must return True or False"),
        (lambda sample_id, response: "no", r"returned a str for sample 100"),
    ],
)
def test_an_abort_function_that_cannot_be_used_is_named_with_its_sample(llama, abort, says):
    with pytest.raises(BadInput, match=rf"^rollout\.abort_function = .*{says}"):
        rollout(llama, abort=abort)


def test_truth_values_of_numpy_and_torch_are_understood(llama):
    assert set(reasons(rollout(llama, abort=lambda sample_id, response: torch.tensor(True)))) == {"abort"}
    assert "abort" not in reasons(rollout(llama, abort=lambda sample_id, response: None))


EVERYTHING = tuple(range(V))  # as stop tokens: every turn is one token
CHATS = {"stop_ids": tuple(range(20)), "max_turns": 4, "max_response_tokens": 14, "seed": 3}


def echo(index: int, turn: list[int]) -> list[int] | None:
    """1 to 4 tokens that depend on the sample and on its turn; now and then the end."""
    return None if sum(turn) % 7 == 0 else [(sum(turn) + index + k) % V for k in range(1 + (index + len(turn)) % 4)]


@pytest.mark.parametrize("name", MODELS)
def test_after_an_answer_log_probs_are_still_those_of_a_forward_without_cache(name):
    model = made(name)
    result = rollout(model, answer=echo, temperature=0.8, max_running=5, **CHATS)
    sampled = result.response_mask.bool()
    assert int((result.attention_mask - result.response_mask).sum()) > 15, "few answers, else this shows little"
    assert (result.rollout_log_prob[~sampled] == 0).all()
    for sample, response in enumerate(responses(result)):
        own = sampled[sample, : len(response)]
        expected = without_cache(model, sample, response, 0.8)[own]
        torch.testing.assert_close(result.rollout_log_prob[sample][sampled[sample]], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_running", [1, 4, 7])
def test_a_conversation_does_not_depend_on_those_that_run_beside_it(llama, max_running):
    whole = rollout(llama, answer=echo, **CHATS)
    narrow = rollout(llama, answer=echo, max_running=max_running, **CHATS)
    assert responses(narrow) == responses(whole)
    assert torch.equal(narrow.response_mask, whole.response_mask)
    assert reasons(narrow) == reasons(whole)
    assert set(reasons(whole)) == {"stop", "length"}


def test_what_is_answered_comes_out_of_no_decode_step(llama):
    result = rollout(llama, answer=echo, max_running=5, **CHATS)
    assert int(result.generation_metadata[:, 0].sum()) == int(result.response_mask.sum())
    lengths = result.attention_mask.sum(1)
    last = result.response_mask.gather(1, lengths[:, None] - 1)
    assert bool((last == 1).all()), "a response ends with a token of the policy"


@pytest.mark.parametrize(
    ("room", "turns", "mask", "reason"),
    [
        (9, 3, [1, 0, 0, 1, 0, 0, 1], "stop"),  # the third turn is the last: nobody is asked
        (7, 3, [1, 0, 0, 1, 0, 0, 1], "stop"),  # it just fits
        (6, 3, [1, 0, 0, 1], "length"),  # the second answer would leave no room for a token
        (3, 3, [1], "length"),
        (9, 1, [1], "stop"),
    ],
)
def test_an_answer_is_taken_where_a_turn_and_a_token_are_left(llama, room, turns, mask, reason):
    asked: list[tuple[int, list[int]]] = []

    def answer(index: int, turn: list[int]) -> list[int]:
        asked.append((index, turn))
        return [9, 8]

    result = rollout(llama, answer=answer, stop_ids=EVERYTHING, max_turns=turns, max_response_tokens=room)
    assert result.response_mask.tolist() == [mask] * 12
    assert result.attention_mask.tolist() == [[1] * len(mask)] * 12
    assert set(reasons(result)) == {reason}
    answered = result.response_mask == 0
    assert result.response_ids[answered].tolist() == [9, 8] * (int(answered.sum()) // 2)
    assert all(len(turn) == 1 for _, turn in asked), "the environment is given the turn alone"


def test_without_answers_a_conversation_is_a_response(llama):
    plain = rollout(llama, stop_ids=(5, 6, 7, 8))
    for silent in (lambda index, turn: None, None):
        result = rollout(llama, stop_ids=(5, 6, 7, 8), answer=silent, max_turns=3)
        assert responses(result) == responses(plain)
        assert torch.equal(result.response_mask, result.attention_mask)
        assert reasons(result) == reasons(plain)


def test_an_answer_without_tokens_lets_the_policy_go_on(llama):
    free = rollout(llama)
    result = rollout(llama, stop_ids=EVERYTHING, answer=lambda index, turn: [], max_turns=9)
    assert responses(result) == responses(free)
    torch.testing.assert_close(result.rollout_log_prob, free.rollout_log_prob)
    assert set(reasons(result)) == {"stop"}


def test_turns_are_those_in_which_the_policy_spoke_answered_with_tokens_or_none(llama):
    def answer(index: int, turn: list[int]) -> list[int] | None:
        return [[], [9, 8], None][index % 3]

    def ends(sample_id: int, response: list[int]) -> bool:
        return sample_id >= 109 and len(response) >= (3 if sample_id == 110 else 0)

    result = rollout(llama, stop_ids=EVERYTHING, answer=answer, abort=ends, max_turns=3)
    # The last three: nothing said at all, an answer that nobody took up, nothing said at all.
    assert result.turns.tolist() == [3, 3, 1] * 3 + [0, 1, 0]


def test_an_answer_takes_time_from_its_own_sample_alone(llama):
    now = [0.0]

    def slow(index: int, turn: list[int]) -> list[int]:
        now[0] += 2.0 if index < 6 else 0.0
        return [9, 8]

    talk = {"stop_ids": EVERYTHING, "answer": slow, "max_turns": 3}
    result = rollout(llama, timeout_s=1.5, clock=lambda: now[0], **talk)
    assert reasons(result) == ["timeout"] * 6 + ["stop"] * 6
    assert result.turns.tolist() == [1] * 6 + [3] * 6


def test_abort_and_time_limit_cut_a_conversation_and_keep_what_was_said(llama):
    def seen(sample_id: int, response: list[int]) -> bool:
        return sample_id == 104 and len(response) == 3

    talk = {"stop_ids": EVERYTHING, "answer": lambda index, turn: [9, 8], "max_turns": 3}
    result = rollout(llama, abort=seen, **talk)
    assert result.response_mask[4].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert result.attention_mask[4].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert reasons(result) == ["abort" if sample == 4 else "stop" for sample in range(12)]
    ticks = itertools.count()
    late = rollout(llama, timeout_s=1.5, clock=lambda: float(next(ticks)), **talk)
    assert set(reasons(late)) == {"timeout"}
    assert late.response_mask.tolist() == [[1, 0, 0]] * 12
