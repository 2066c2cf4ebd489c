"""The parameters of linear-attention and state-space mixers: what stands in the place of attention in hybrid models."""

from collections.abc import Iterator

from flowledger.plan.weight import Weight
from flowledger.tables.models import Linear


def linear_layer(linear: Linear, hidden: int) -> Iterator[Weight]:
    """The parameters of one mixer. Raises KeyError for a kind that is none of gated_deltanet, mamba2, kda."""
    mixers = {"gated_deltanet": _gated_deltanet, "mamba2": _mamba2, "kda": _kda}
    for name, shape, tp_dim in mixers[linear.kind](linear, hidden):
        yield Weight(name, "linear", None, shape, tp_dim)


Rows = Iterator[tuple[str, tuple[int, ...], int | None]]


def _gated_deltanet(linear: Linear, hidden: int) -> Rows:
    """Gated DeltaNet as in Qwen3-Next: queries and keys of key_heads, values and gate of value_heads."""
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    yield "in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), 0
    yield "in_proj_ba.weight", (2 * linear.value_heads, hidden), 0
    yield "conv1d.weight", (2 * keys + values, 1, linear.conv_kernel), 0
    yield "A_log", (linear.value_heads,), 0
    yield "dt_bias", (linear.value_heads,), 0
    yield "norm.weight", (linear.value_dim,), None
    yield "out_proj.weight", (hidden, values), 1


def _mamba2(linear: Linear, hidden: int) -> Rows:
    """Mamba-2: value_heads heads of value_dim, a state of key_dim, B and C in `groups` groups."""
    inner, states = linear.value_heads * linear.value_dim, 2 * linear.groups * linear.key_dim
    yield "in_proj.weight", (2 * inner + states + linear.value_heads, hidden), 0
    yield "conv1d.weight", (inner + states, 1, linear.conv_kernel), 0
    yield "conv1d.bias", (inner + states,), 0
    yield "A_log", (linear.value_heads,), 0
    yield "D", (linear.value_heads,), 0
    yield "dt_bias", (linear.value_heads,), 0
    yield "norm.weight", (inner,), 0
    yield "out_proj.weight", (hidden, inner), 1


def _kda(linear: Linear, hidden: int) -> Rows:
    """Kimi Delta Attention: three short convolutions, a decay of every channel and a gate, both of low rank."""
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        yield f"{name}_proj.weight", (width, hidden), 0
        yield f"{name}_conv1d.weight", (width, 1, linear.conv_kernel), 0
    yield "A_log", (linear.key_heads,), 0
    yield "dt_bias", (keys,), 0
    for name, width in (("f", keys), ("g", values)):
        yield f"{name}_a_proj.weight", (linear.value_dim, hidden), None
        yield f"{name}_b_proj.weight", (width, linear.value_dim), 0
    yield "b_proj.weight", (linear.value_heads, hidden), 0
    yield "o_norm.weight", (linear.value_dim,), None
    yield "o_proj.weight", (hidden, values), 1
