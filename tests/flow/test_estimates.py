"""The rough estimates against numbers worked out by hand."""

from flowledger.flow.estimates import activation_bytes, kv_bytes, peak_memory


def test_kv_bytes_of_a_known_model_by_hand():
    # Llama-3-8B: 32 layers, 8 key/value heads of 128, bfloat16: 128 KiB a token, hence 1 GiB for 8192 tokens
    one_token = kv_bytes(layers=32, batch_local=1, seq_local=1, kv_heads=8, head_dim=128, bytes_per_element=2)
    assert one_token == 128 * 1024
    assert kv_bytes(layers=32, batch_local=2, seq_local=4096, kv_heads=8, head_dim=128, bytes_per_element=2) == 2**30


def test_activation_bytes_by_hand():
    # 2 layers x 3 tokens x 5 wide x 4 bytes x 1.5
    assert activation_bytes(layers=2, local_tokens=3, hidden_size=5, bytes_per_element=4, factor=1.5) == 180


def test_peak_is_the_sum_of_its_six_parts():
    assert peak_memory(params=1, grads=10, optimizer=100, activations=1000, kv_cache=10_000, buffers=100_000) == 111_111
