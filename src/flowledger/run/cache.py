"""The KV cache of a rollout: one slot for each running sample, allocated once, in the form Hugging Face models call.

Layer by layer it holds keys and values of shape [B_slot, K, S_cache, D]. Slot r belongs to the r-th running sample, is
filled from position 0, and has its own length; the running samples always occupy slots 0..B_run-1, so that attention
works on views. Its size, with L the layers that keep keys and values of their own, is exactly

    bytes = 2 * L * B_slot * K * S_cache * D * itemsize

Memory is taken when the model first writes (it then tells K, D and the dtype), and from then on never grows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flowledger.flow.errors import BadInput

ALIGNED = 16  # elements: a row of a mask starts where attention kernels of GPUs want it
FULL, SLIDING = "full_attention", "sliding_attention"
# Attention code that takes the additive mask that slots of unequal length need.
ATTENTION = ("sdpa", "eager", "flowledger_segments")  # the last is ours: torch's SDPA wherever there is a cache


@dataclass(slots=True)
class Cursor:
    """Where the next write goes; one object shared by all layers of a cache."""

    rows: Tensor  # int64 [B_run], the slots written
    # int64 [B_run], the position written in each, or [B_run, S] for S tokens; None: a whole prompt from position 0
    positions: Tensor | None
    width: int  # positions that attention then reads


@dataclass(slots=True)
class Grown:
    """A mask [B_run, 1, 1, S_cache] that grows with decode steps: 0 on what each sample may see so far, else -inf."""

    mask: Tensor
    starts: Tensor  # int64 [B_run], where the row of each sample starts in memory
    width: int  # of the step it was last made for

    @classmethod
    def at(cls, positions: Tensor, longest: int, dtype: torch.dtype) -> "Grown":
        """The mask of samples whose new tokens are at `positions` [B_run]."""
        row = -(-longest // ALIGNED) * ALIGNED
        starts = torch.arange(0, len(positions) * row, row, device=positions.device)
        return cls(mask=_mask(positions, row, row, dtype), starts=starts, width=0)

    def show(self, positions: Tensor) -> None:
        """From now on each sample sees its token at `positions` [B_run] as well."""
        self.mask.view(-1).index_fill_(0, self.starts + positions, 0)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer: keys and values [B_slot, K, S_cache, D]."""

    is_sliding = False  # a window narrows the mask (see `decode_mask`), not what is kept

    def __init__(self, *, slots: int, positions: int, cursor: Cursor) -> None:
        super().__init__()
        self._slots, self._positions, self._cursor = slots, positions, cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory of the whole layer. Zeros, since a masked position still enters a product with weight 0."""

        def whole(states: Tensor) -> Tensor:
            return states.new_zeros(self._slots, states.shape[1], self._positions, states.shape[3])

        self.keys, self.values = whole(key_states), whole(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B_run, K, S, D] at the cursor; return what attention reads (views in decode)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, width = self._cursor.rows, self._cursor.positions, self._cursor.width
        if positions is None:
            self.keys[rows, :, :width] = key_states
            self.values[rows, :, :width] = value_states
            return key_states, value_states
        if positions.dim() == 2:
            self.keys[rows[:, None], :, positions] = key_states.transpose(1, 2)
            self.values[rows[:, None], :, positions] = value_states.transpose(1, 2)
            return self.keys[rows, :, :width], self.values[rows, :, :width]
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        running = rows.shape[0]
        return self.keys[:running, :, :width], self.values[:running, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; asked for prompts only, as decode brings its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the query: none, as a prompt starts its slot and decode brings its own positions."""
        return 0

    def get_max_length(self) -> int:
        return self._positions


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Slots for `slots` samples of at most `positions` tokens. Raises BadInput for attention that it cannot serve."""

    def __init__(self, *, config: Any, slots: int, positions: int, device: torch.device) -> None:
        self.config = config.get_text_config(decoder=True)
        _check(self.config)
        self._types = layer_types(self.config)
        self.cursor = Cursor(rows=torch.empty(0, dtype=torch.int64, device=device), positions=None, width=0)
        layers = [
            SlotLayer(slots=slots, positions=positions, cursor=self.cursor)
            for _ in range(self.config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)  # tokens kept in each slot
        self._rows = torch.arange(slots, device=device)
        self._ahead: tuple[int, int, bool] | None = None  # of the next decode step: running, width, all of that length
        self._level = False
        self._grown: Grown | None = None  # the mask of this decode step, or of the one before

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values; 0 before the first write."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def begin_prompts(self, rows: Tensor, lengths: Tensor) -> None:
        """The next forward writes whole prompts, padded on the right to the longest, into `rows`."""
        self._ahead = None
        self.cursor.rows, self.cursor.positions, self.cursor.width = rows, None, int(lengths.max())
        self.lengths[rows] = lengths

    def begin_decode(self, running: int) -> Tensor:
        """The next forward writes one token into each of slots 0..running-1; returns its positions [B_run]."""
        positions = self.lengths[:running].clone()
        # From one step to the next nothing has to be asked of the device: every length grows by 1.
        if self._ahead is None or self._ahead[0] != running:
            self._grown = None
            longest = int(positions.max())
            self._ahead = (running, longest + 1, bool((positions == longest).all()))
        _, width, self._level = self._ahead
        self._ahead = (running, width + 1, self._level)
        self.cursor.rows, self.cursor.positions, self.cursor.width = self._rows[:running], positions, width
        self.lengths[:running] += 1
        return positions

    @property
    def shows_all(self) -> bool:
        """Whether each token of this decode step may attend to everything up to the width: no mask is needed then."""
        width = self.cursor.width
        return self._level and not (SLIDING in self._types and self._window(width) < width)

    def begin_answers(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The next forward writes `lengths` [B_run] more tokens into each of `rows`; returns their positions [B_run, S].

        S is the longest; where there are fewer, the last one is written again, to its own place.
        """
        self._ahead = None
        start = self.lengths[rows]
        positions = start[:, None] + up_to(lengths)
        self.cursor.rows, self.cursor.positions, self.cursor.width = rows, positions, int(positions.max()) + 1
        self.lengths[rows] = start + lengths
        return positions

    def decode_mask(self, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """What each new token may attend to, additive [B_run, 1, S, width]; per layer type where these differ.

        S is 1 in a decode step.
        """
        positions, width = self.cursor.positions, self.cursor.width
        assert positions is not None, "decode_mask follows begin_decode or begin_answers"
        window = self._window(width)
        if SLIDING not in self._types or window >= width:
            return self._causal_mask(positions, width, dtype)
        if self._types == {SLIDING}:
            return _mask(positions, width, window, dtype)
        return {FULL: self._causal_mask(positions, width, dtype), SLIDING: _mask(positions, width, window, dtype)}

    def _causal_mask(self, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The mask without a window. From one decode step to the next a sample sees one position more: its own."""
        if positions.dim() == 2:
            return _mask(positions, width, width, dtype)
        if self._grown is None or self._grown.width + 1 != width or self._grown.mask.dtype != dtype:
            self._grown = Grown.at(positions, self.layers[0].get_max_length(), dtype)
        else:
            self._grown.show(positions)
        self._grown.width = width
        return self._grown.mask[..., :width]

    def copy(self, *, rows: Tensor, sources: Tensor, lengths: Tensor) -> None:
        """Copy the first `lengths` positions of each source into the slot in `rows`, which then has that length."""
        self._ahead = None
        self.lengths[rows] = lengths
        width = int(lengths.max())
        for tensor in self._tensors():
            tensor[rows, :, :width] = tensor[sources, :, :width]

    def _window(self, width: int) -> int:
        return self.config.__dict__.get("sliding_window") or width

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]


def layer_types(config: Any) -> set[str]:
    """The attention of the layers, as a set; models without `layer_types` have the same in every layer."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return set(listed)
    if getattr(config, "attention_chunk_size", None) is not None:
        return {"chunked_attention"}
    return {SLIDING} if getattr(config, "sliding_window", None) is not None else {FULL}


def up_to(lengths: Tensor) -> Tensor:
    """0..n-1 for each of `lengths` [B_run], then n-1 again up to the longest: int64 [B_run, S]."""
    return torch.minimum(torch.arange(int(lengths.max()), device=lengths.device), lengths[:, None] - 1)


def _mask(positions: Tensor, width: int, window: int, dtype: torch.dtype) -> Tensor:
    """0 where position j may be read by the query at `positions` [B_run] or [B_run, S]: p - window < j <= p; else -inf."""
    at, columns = positions.view(len(positions), 1, -1, 1), torch.arange(width, device=positions.device)
    hidden = columns > at  # [B_run, 1, S, width]
    if window < width:
        hidden |= columns <= at - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def _check(config: Any) -> None:
    unknown = sorted(layer_types(config) - {FULL, SLIDING})
    if unknown:
        raise BadInput(
            f"model.path: {config.model_type} has {unknown[0]} layers; a rollout can keep only full_attention and "
            "sliding_attention; take a model that has no others, such as Llama, Qwen3 or Gemma3"
        )
    attention = config._attn_implementation
    if attention not in ATTENTION:
        raise BadInput(
            f"attn_implementation = {attention!r} takes no mask per slot, which a rollout needs; load with 'sdpa'"
        )
