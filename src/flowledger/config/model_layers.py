"""Which layers of a `config.json` are what: full, sliding or linear attention; routed or dense feed-forward."""

from flowledger.config.model_values import Values
from flowledger.flow.errors import BadInput
from flowledger.tables.model_types import ModelType
from flowledger.tables.models import KINDS, Linear

# What configurations call a kind of layer.
NAMES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "moe": "feed_forward",
    "mlp": "feed_forward",
}
LETTERS = {"M": "linear", "*": "full", "E": "feed_forward", "-": "feed_forward"}  # of `hybrid_override_pattern`

MOST_LAYERS = 2**12


def kinds_of(values: Values, row: ModelType, layers: int | None) -> tuple[str, ...]:
    """The kind of each layer: from a list, from a pattern, from a period, else what the type does."""
    if layers is not None and layers > MOST_LAYERS:
        raise BadInput(f"{values.file}: {row.keys['layers'][0]} = {layers}: no model has more than {MOST_LAYERS}")
    named = tuple(_named(values, word) for word in values.words("layer_types") or values.words("layers_block_type"))
    letters = str(values.first(["hybrid_override_pattern"]) or "")
    listing = named or tuple(LETTERS[letter] for letter in letters if letter in LETTERS)
    if listing:
        if layers is not None and len(listing) < layers:
            raise BadInput(f"{values.file}: kinds of {len(listing)} layers are listed: the model has {layers}")
        return listing[:layers]
    if layers is None:
        return ()
    listed = values.data.get("linear_attn_config")
    if isinstance(listed, dict):  # Kimi Linear counts its layers from 1
        full = Values(values.file, listed).numbers("full_attn_layers")
        return tuple("full" if layer + 1 in full else "linear" for layer in range(layers))
    pattern = _pattern(values, row, layers)
    return tuple(KINDS[pattern[layer % len(pattern)]] for layer in range(layers))


def _named(values: Values, word: str) -> str:
    if word not in NAMES:
        raise BadInput(f"{values.file}: layer_types: {word!r} is no known kind of layer; known are {', '.join(NAMES)}")
    return NAMES[word]


def _pattern(values: Values, row: ModelType, layers: int) -> str:
    """One period of kinds. A window on its own makes every layer slide; `use_sliding_window: false` takes it back, and
    one as long as the longest sequence cuts nothing."""
    window, longest = values.count(["sliding_window"]), values.count(row.keys["max_positions"])
    cuts = window is not None and (longest is None or window < longest)
    windowed = cuts and values.data.get("use_sliding_window") is not False
    period = values.count(["full_attention_interval"])
    if period is not None:
        return "L" * (period - 1) + "F"
    period = values.count(["sliding_window_pattern", "_sliding_window_pattern"])
    if period is not None and windowed:
        return "S" * (period - 1) + "F"
    if row.pattern and (windowed or "S" not in row.pattern):
        return row.pattern
    if windowed and values.flag(["use_sliding_window"]):  # Qwen 2 and 3: only the upper layers slide
        first = min(layers, values.count(["max_window_layers"]) or 0)
        return "F" * first + "S" * (layers - first)
    return "S" if windowed else "F"


def feed_forward_layers(values: Values, layers: int, kinds: tuple[str, ...]) -> frozenset[int]:
    """The layers whose feed-forward is a mixture of experts, in the words of whoever wrote the file."""
    everything = range(layers)
    blocks = values.words("layers_block_type") or tuple(str(values.first(["hybrid_override_pattern"]) or ""))
    if blocks:
        return frozenset(layer for layer, block in enumerate(blocks) if block in ("moe", "E"))
    named = values.words("mlp_layer_types")
    if named:
        return frozenset(layer for layer, word in enumerate(named[:layers]) if word == "sparse")
    first = values.count(["first_k_dense_replace", "moe_layer_start_index"]) or 0
    last = values.data.get("moe_layer_end_index")
    end = layers if not isinstance(last, int) or last < 0 else last + 1
    step = values.count(["decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"]) or 1
    # Qwen and ERNIE count layers from 1 (a step of 2 means layers 1, 3, …), DeepSeek from 0.
    shift = 0 if "moe_layer_freq" in values.data else 1
    plain = values.numbers("mlp_only_layers")
    return frozenset(i for i in everything if first <= i < end and (i + shift) % step == 0 and i not in plain)


def linear_of(values: Values, row: ModelType) -> Linear:
    """The sizes of the mixer that stands in the place of attention in linear layers."""
    if row.linear == "gated_deltanet":
        return Linear(
            kind=row.linear,
            key_heads=values.needed(["linear_num_key_heads"]),
            value_heads=values.needed(["linear_num_value_heads"]),
            key_dim=values.needed(["linear_key_head_dim"]),
            value_dim=values.needed(["linear_value_head_dim"]),
            conv_kernel=values.needed(["linear_conv_kernel_dim"]),
        )
    if row.linear == "kda":
        inner = values.data.get("linear_attn_config")
        inner = Values(values.file, inner if isinstance(inner, dict) else values.data)
        heads, width = inner.needed(["linear_num_heads", "num_heads"]), inner.needed(["linear_head_dim", "head_dim"])
        kernel = inner.needed(["linear_conv_kernel_dim", "short_conv_kernel_size"])
        return Linear(
            kind="kda", key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv_kernel=kernel
        )
    if row.linear == "mamba2":
        heads = values.needed(["mamba_num_heads"])
        return Linear(
            kind="mamba2",
            key_heads=heads,
            value_heads=heads,
            key_dim=values.needed(["ssm_state_size"]),
            value_dim=values.needed(["mamba_head_dim"]),
            conv_kernel=values.needed(["conv_kernel"]),
            groups=values.count(["n_groups"]) or 1,
        )
    raise BadInput(
        f"{values.file}: model_type = {values.data.get('model_type')!r}: its linear-attention layers are not known"
    )
