"""The three rough estimates of memory, and the one among them that is exact.

All results are bytes of one rank. Sizes that are cut on the mesh are given as the rank's own (`local_`).
"""


def activation_bytes(*, layers: int, local_tokens: int, hidden_size: int, bytes_per_element: int, factor: float) -> int:
    """layers * local_tokens * hidden_size * bytes_per_element * factor, rounded down.

    `local_tokens` counts the tokens of one micro-batch on this rank (padding included where the forward pass computes
    it). `factor` says how many tensors of size H a layer saves per token: about 2 with full activation checkpointing
    (its input, and the share of the one layer that is recomputed), 15 to 35 without, more with long attention maps.
    """
    return int(layers * local_tokens * hidden_size * bytes_per_element * factor)


def kv_bytes(
    *, layers: int, batch_local: int, seq_local: int, kv_heads: int, head_dim: int, bytes_per_element: int
) -> int:
    """layers * batch_local * seq_local * kv_heads * head_dim * 2 * bytes_per_element: keys and values, exactly.

    Exact for a cache that holds `batch_local` slots of `seq_local` positions. `layers` and `kv_heads` are the rank's
    own (kv_heads / tp, but at least 1: a head that cannot be cut further is copied).
    """
    return layers * batch_local * seq_local * kv_heads * head_dim * 2 * bytes_per_element


def peak_memory(*, params: int, grads: int, optimizer: int, activations: int, kv_cache: int, buffers: int) -> int:
    """params + grads + optimizer + activations + kv_cache + buffers.

    An upper bound of what these six explain: it adds up parts that need not be alive at the same instant (a KV cache is
    usually gone before the update), and leaves out temporaries and what the allocator holds in reserve.
    """
    return params + grads + optimizer + activations + kv_cache + buffers
