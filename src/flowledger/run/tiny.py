"""The tiny policy: a few layers with random weights and a tokenizer of single bytes, made on the spot."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from flowledger.config.schema import Tiny
from flowledger.flow.errors import BadInput

SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", *(f"<|reserved_{n}|>" for n in range(5)))  # 256 + 8: a round vocabulary
PAD, BOS, EOS = 256, 257, 258


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, id = byte, then the specials: decode(encode(text)) == text for any text."""
    bytes_to_ids = {letter: byte for byte, letter in enumerate(_letters())}
    inner = Tokenizer(models.BPE(vocab=bytes_to_ids, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIALS[0], bos_token=SPECIALS[1], eos_token=SPECIALS[2],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # a prompt that spells `<|pad|>` holds seven bytes and no padding
    )  # fmt: skip


def causal_lm(sizes: Tiny) -> PreTrainedModel:
    """A Llama of these sizes, or a Qwen3-MoE where they name experts; weights drawn from torch's current random state."""
    settings = config(sizes, vocabulary=256 + len(SPECIALS), pad_id=PAD)
    kind = Qwen3MoeForCausalLM if sizes.experts else LlamaForCausalLM
    return kind(settings).to(torch.float32)


def config(sizes: Tiny | None = None, *, vocabulary: int, pad_id: int, **more: Any) -> PreTrainedConfig:
    """The settings of a tiny Llama or Qwen3-MoE. Raises BadInput where a head has an odd size: rotary positions turn pairs."""
    sizes = sizes or Tiny()
    head = sizes.hidden_size // sizes.heads
    if head % 2:
        raise BadInput(
            f"model.tiny.hidden_size = {sizes.hidden_size} over heads = {sizes.heads} gives heads of size {head}; "
            f"it must be even, use hidden_size = {sizes.heads * (head + 1)}"
        )
    mixture = {
        "num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token, "norm_topk_prob": sizes.experts_per_token > 1,
        "moe_intermediate_size": sizes.ffn_size,
    }  # fmt: skip
    kind, more = (Qwen3MoeConfig, mixture | more) if sizes.experts else (LlamaConfig, more)
    return kind(
        vocab_size=vocabulary, hidden_size=sizes.hidden_size, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, intermediate_size=sizes.ffn_size,
        head_dim=head, max_position_embeddings=4096, tie_word_embeddings=True, use_cache=False,
        pad_token_id=pad_id, bos_token_id=BOS, eos_token_id=EOS, **more,
    )  # fmt: skip


def _letters() -> list[str]:
    """The printable letter by which byte-level tokenizers write each byte 0..255: itself, or one from 256 on."""
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in itself else chr(next(others)) for byte in range(256)]
