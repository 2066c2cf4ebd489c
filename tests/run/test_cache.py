"""The slot cache: its size by the formula, its masks by hand, its writes against a plain table."""

import pytest
import torch
from transformers import Lfm2Config, LlamaConfig, MistralConfig, Qwen3Config

from flowledger.flow.errors import BadInput
from flowledger.run.cache import FULL, SLIDING, SlotCache, layer_types

SIZES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
}


def cache(config=None, slots=4, positions=6) -> SlotCache:
    config = config or LlamaConfig(**SIZES)
    config._attn_implementation = "sdpa"
    return SlotCache(config=config, slots=slots, positions=positions, device=torch.device("cpu"))


def write(kv_cache: SlotCache, states: torch.Tensor) -> list[torch.Tensor]:
    """What a model does: in every layer, keys as given, values negated. Returns the keys that attention reads."""
    return [kv_cache.update(states + layer, -(states + layer), layer)[0] for layer in range(3)]


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_2_l_slots_k_positions_d_itemsize(dtype, itemsize):
    kv_cache = cache(slots=5, positions=7)
    assert kv_cache.bytes == 0
    kv_cache.begin_decode(1)
    write(kv_cache, torch.ones(1, 2, 1, 8, dtype=dtype))
    assert kv_cache.bytes == 2 * 3 * 5 * 2 * 7 * 8 * itemsize


def test_a_prompt_then_tokens_lie_one_after_the_other_in_their_slot():
    kv_cache = cache()
    kv_cache.begin_prompts(torch.tensor([1, 0]), torch.tensor([2, 1]))
    prompts = torch.arange(2 * 2 * 2 * 8.0).reshape(2, 2, 2, 8)
    assert write(kv_cache, prompts)[0] is not None
    assert kv_cache.begin_decode(2).tolist() == [1, 2]
    step = 100 + torch.arange(2 * 2 * 8.0).reshape(2, 2, 1, 8)
    read = write(kv_cache, step)
    assert read[0].shape == (2, 2, 3, 8)
    for layer in range(3):
        assert torch.equal(read[layer][1], torch.cat([prompts[0], step[1]], dim=1) + layer)
        assert torch.equal(read[layer][0, :, :2], torch.cat([prompts[1, :, :1], step[0]], dim=1) + layer)
        assert torch.equal(kv_cache.layers[layer].values[1, :, :3], -read[layer][1])
    assert kv_cache.lengths.tolist() == [2, 3, 0, 0]


def test_decode_reads_views_and_never_takes_more_memory():
    kv_cache = cache()
    addresses = set()
    for _ in range(6):
        kv_cache.begin_decode(3)
        addresses.add(write(kv_cache, torch.ones(3, 2, 1, 8))[0].data_ptr())
    assert addresses == {kv_cache.layers[0].keys.data_ptr()}


def test_copies_take_the_first_positions_and_their_length():
    kv_cache = cache()
    for token in range(3):
        kv_cache.begin_decode(4)
        write(kv_cache, torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 2, 1, 8) * 10 + token)
    kv_cache.copy(rows=torch.tensor([0, 3]), sources=torch.tensor([2, 2]), lengths=torch.tensor([2, 2]))
    assert kv_cache.lengths.tolist() == [2, 3, 3, 2]
    assert kv_cache.layers[0].keys[:, 0, :2, 0].tolist() == [[20, 21], [10, 11], [20, 21], [20, 21]]
    assert kv_cache.layers[2].values[0, 1, :2, 7].tolist() == [-22, -23]


def test_the_mask_shows_each_sample_its_own_positions():
    kv_cache = cache()
    kv_cache.lengths[:3] = torch.tensor([0, 2, 1])
    kv_cache.begin_decode(3)
    seen = kv_cache.decode_mask(torch.float32)[:, 0, 0] == 0
    assert seen.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]


def test_a_mask_shows_one_position_more_with_each_step_also_after_samples_have_left_and_come():
    kv_cache = cache(positions=8)

    def seen(running: int) -> list[int]:
        kv_cache.begin_decode(running)
        mask = kv_cache.decode_mask(torch.float32)[:, 0, 0]
        assert set(mask.flatten().tolist()) <= {0.0, -torch.inf}
        counts = (mask == 0).sum(1)
        assert ((mask == 0) == (torch.arange(mask.shape[1]) < counts[:, None])).all()
        return counts.tolist()

    kv_cache.lengths[:3] = torch.tensor([0, 2, 1])
    assert [seen(3) for _ in range(3)] == [[1, 3, 2], [2, 4, 3], [3, 5, 4]]
    kv_cache.copy(rows=torch.tensor([1]), sources=torch.tensor([2]), lengths=torch.tensor([4]))
    assert [seen(2) for _ in range(2)] == [[4, 5], [5, 6]]
    kv_cache.begin_prompts(torch.tensor([1]), torch.tensor([2]))
    assert [seen(2) for _ in range(2)] == [[6, 3], [7, 4]]


def test_a_window_hides_what_is_too_far_back():
    kv_cache = cache(MistralConfig(**SIZES, sliding_window=2))
    kv_cache.lengths[:2] = torch.tensor([3, 1])
    kv_cache.begin_decode(2)
    seen = kv_cache.decode_mask(torch.float32)[:, 0, 0] == 0
    # A window of 2 holds the token itself and the one before.
    assert seen.int().tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_layers_of_two_types_get_a_mask_each_once_the_window_is_passed():
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    kv_cache = cache(config)
    assert layer_types(config) == {FULL, SLIDING}
    kv_cache.lengths[:1] = 2
    kv_cache.begin_decode(1)
    assert kv_cache.decode_mask(torch.float32).shape == (1, 1, 1, 3)
    kv_cache.begin_decode(1)
    masks = kv_cache.decode_mask(torch.float32)
    assert (masks[FULL][0, 0, 0] == 0).int().tolist() == [1, 1, 1, 1]
    assert (masks[SLIDING][0, 0, 0] == 0).int().tolist() == [0, 1, 1, 1]


def test_layers_without_keys_and_values_are_refused():
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(BadInput, match="lfm2 has conv layers") as raised:
        cache(config)
    assert "\n" not in str(raised.value)


def test_attention_that_takes_no_mask_is_refused():
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(BadInput, match=r"attn_implementation = 'flash_attention_2'.*'sdpa'"):
        SlotCache(config=config, slots=1, positions=2, device=torch.device("cpu"))
