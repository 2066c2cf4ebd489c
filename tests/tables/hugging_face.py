"""A second implementation of every parameter count: the model classes of `transformers`, built on the meta device.

`config_of` writes a row of the table as the configuration of its model type; `counted` counts what torch registers.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowledger.tables.models import Architecture

# The model type of each row, by the beginning of its name; the first that fits.
MODEL_TYPES = (
    ("Qwen1.5-MoE", "qwen2_moe"),
    ("Qwen2-57B", "qwen2_moe"),
    ("Qwen2", "qwen2"),
    ("QwQ", "qwen2"),
    ("MiniCPM-o", "qwen2"),
    ("MiMo", "qwen2"),
    ("DeepSeek-R1-Distill-Qwen", "qwen2"),
    ("DeepSeek-R1-0528-Qwen3", "qwen3"),
    ("Qwen3-Next", "qwen3_next"),
    ("Qwen3.5-", "qwen3_5_text"),
    ("Qwen3", "qwen3"),
    ("Mixtral", "mixtral"),
    ("gemma-2", "gemma2"),
    ("gemma-3", "gemma3_text"),
    ("glm-4", "glm"),
    ("GLM-4-", "glm4"),
    ("GLM-4.7-Flash", "glm4_moe_lite"),
    ("GLM-4.", "glm4_moe"),
    ("gpt-oss", "gpt_oss"),
    ("phi-1.5", "phi"),
    ("phi-2", "phi"),
    ("Phi", "phi3"),
    ("StableLM", "gpt_neox"),
    ("pythia", "gpt_neox"),
    ("OPT", "opt"),
    ("gpt2", "gpt2"),
    ("DeepSeek-V2", "deepseek_v2"),
    ("DeepSeek-V3", "deepseek_v3"),
    ("Moonlight", "deepseek_v3"),
    ("Kimi-K2", "deepseek_v3"),
    ("Kimi-Linear", "kimi_linear"),
    ("OLMo-2", "olmo2"),
    ("Olmo-3", "olmo3"),
    ("OLMoE", "olmoe"),
    ("SmolLM3", "smollm3"),
    ("Seed-OSS", "seed_oss"),
    ("ERNIE-4.5-0.3B", "ernie4_5"),
    ("ERNIE", "ernie4_5_moe"),
    ("MiniMax-M2", "minimax_m2"),
    ("Nemotron-3", "nemotron_h"),
    ("", "llama"),
)


def model_type(arch: Architecture) -> str:
    found = next(kind for prefix, kind in MODEL_TYPES if arch.name.startswith(prefix))
    moe = {"qwen3": "qwen3_moe", "qwen3_5_text": "qwen3_5_moe_text"}
    return moe.get(found, found) if arch.moe else found


def shortened(arch: Architecture, layers: int) -> Architecture:
    """The first layers of a model: enough to see each kind of layer, where the whole takes long to build."""
    kept = min(layers, arch.layers)
    return replace(
        arch,
        layers=kept,
        kinds=arch.kinds[:kept],
        moe=arch.moe and replace(arch.moe, dense=tuple(i for i in arch.moe.dense if i < kept)),
    )


def config_of(arch: Architecture) -> Any:
    """The `transformers` configuration with the sizes of a row."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = model_type(arch)
    return CONFIG_MAPPING[kind](**(_general(arch) | _special(kind, arch)))


def counted(config: Any) -> tuple[int, dict[str, int]]:
    """All numbers of a model that are saved, a shared tensor once; and those of each kind of module.

    A router's correction term is a buffer in `transformers`, and a part of the published files.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.named_buffers() if "correction_bias" in name}
    parts: dict[str, int] = {}
    for name, tensor in tensors.items():
        part = _part(name)
        parts[part] = parts.get(part, 0) + tensor.numel()
    return sum(parts.values()), parts


def tower(kind: str, sizes: Mapping[str, Any], hidden: int) -> int:
    """The parameters of a vision tower that hands its patches to a language model of this width."""
    import torch
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
    from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl
    from transformers.models.siglip import configuration_siglip, modeling_siglip

    config: Any
    model: Any
    projector = 0
    if kind == "siglip":  # Gemma 3 puts a norm and a matrix behind it
        config, model = configuration_siglip.SiglipVisionConfig(**sizes), modeling_siglip.SiglipVisionModel
        projector = sizes["hidden_size"] * (hidden + 1)
    else:
        config, model = {
            "qwen2_5_vl": (
                configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig,
                modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
            ),
            "qwen3_vl": (configuration_qwen3_vl.Qwen3VLVisionConfig, modeling_qwen3_vl.Qwen3VLVisionModel),
            "qwen3_5": (configuration_qwen3_5.Qwen3_5VisionConfig, modeling_qwen3_5.Qwen3_5VisionModel),
        }[kind]
        config = config(out_hidden_size=hidden, **sizes)
    with torch.device("meta"):
        return projector + sum(tensor.numel() for tensor in model(config).parameters())


def _part(name: str) -> str:
    """Mixers, experts and embedding, as `transformers` names them; the rest under `other`."""
    for part, words in (
        ("mixer", ("self_attn.", ".attn.", ".attention.", "linear_attn.")),
        ("experts", ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")),
        ("embed", ("embed_tokens.", ".wte.", "embed_in.", ".embeddings.")),
    ):
        if any(word in name for word in words) and "shared_expert" not in name:
            return part
    return "other"


def _general(arch: Architecture) -> dict[str, Any]:
    return {
        "vocab_size": arch.vocab,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "max_position_embeddings": arch.max_positions,
        "tie_word_embeddings": arch.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _special(kind: str, arch: Architecture) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if arch.mla is None:
        found["head_dim"] = arch.head_dim
    if arch.kinds and kind != "nemotron_h":
        names = {"full": "full_attention", "sliding": "sliding_attention", "linear": "linear_attention"}
        found["layer_types"] = [names[item] for item in arch.kinds]
    if arch.window:
        found["sliding_window"] = arch.window
    if kind in ("llama", "qwen3", "glm", "glm4", "glm4_moe", "gpt_oss", "seed_oss"):
        found["attention_bias"] = arch.qkv_bias
    if arch.moe is not None:
        found |= _moe(kind, arch)
    if arch.mla is not None:
        mla = arch.mla
        found |= {"q_lora_rank": mla.q_lora, "kv_lora_rank": mla.kv_lora, "qk_nope_head_dim": mla.qk_nope}
        found |= {"qk_rope_head_dim": mla.qk_rope, "v_head_dim": mla.v}
    if arch.linear is not None:
        found |= _linear(kind, arch)
    more: Mapping[str, dict[str, Any]] = {
        "gpt2": {
            "n_positions": arch.max_positions,
            "n_inner": arch.ffn,
            "n_embd": arch.hidden,
            "n_layer": arch.layers,
            "n_head": arch.heads,
        },
        "opt": {
            "ffn_dim": arch.ffn,
            "word_embed_proj_dim": arch.hidden,
            "max_position_embeddings": arch.max_positions - 2,
        },
        "glm4_moe": {"use_qk_norm": arch.qk_norm == "head"},
    }
    return found | more.get(kind, {})


def _moe(kind: str, arch: Architecture) -> dict[str, Any]:
    assert arch.moe is not None
    moe = arch.moe
    shared = moe.shared_ffn // moe.ffn
    first_dense = len(moe.dense)
    if kind == "ernie4_5_moe":
        return {
            "moe_num_experts": moe.experts,
            "moe_k": moe.topk,
            "moe_intermediate_size": moe.ffn,
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": first_dense,
            "moe_layer_end_index": arch.layers - 1,
        }
    found: dict[str, Any] = {"num_experts_per_tok": moe.topk, "moe_intermediate_size": moe.ffn}
    if kind in ("mixtral", "gpt_oss", "minimax_m2", "olmoe"):
        found["intermediate_size"] = moe.ffn
    named = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "minimax_m2": "num_local_experts"}
    routed = ("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "nemotron_h")
    found["n_routed_experts" if kind in routed else named.get(kind, "num_experts")] = moe.experts
    if kind in routed:
        found |= {"n_shared_experts": shared, "first_k_dense_replace": first_dense, "n_group": 1, "topk_group": 1}
    if kind in ("kimi_linear", "glm4_moe_lite"):
        types = ["sparse" if arch.is_moe(layer) else "dense" for layer in range(arch.layers)]
        found |= {"num_shared_experts": shared, "mlp_layer_types": types}
    elif moe.shared_ffn and kind not in routed:
        found["shared_expert_intermediate_size"] = moe.shared_ffn
    return found


def _linear(kind: str, arch: Architecture) -> dict[str, Any]:
    assert arch.linear is not None
    linear = arch.linear
    if kind == "nemotron_h":
        assert arch.moe is not None
        names = {"linear": "linear_attention", "full": "full_attention", "feed_forward": "moe"}
        return {
            "layers_block_type": [names[item] for item in arch.kinds],
            "mamba_num_heads": linear.value_heads,
            "mamba_head_dim": linear.value_dim,
            "ssm_state_size": linear.key_dim,
            "n_groups": linear.groups,
            "conv_kernel": linear.conv_kernel,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": arch.moe.shared_ffn,
        }
    if kind == "kimi_linear":
        return {
            "linear_num_heads": linear.key_heads,
            "linear_head_dim": linear.key_dim,
            "linear_conv_kernel_dim": linear.conv_kernel,
        }
    return {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_kernel,
    }
