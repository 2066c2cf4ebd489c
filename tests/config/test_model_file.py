"""Sizes are read from a `config.json` as publishers write it and as `transformers` saves it; bad ones get one clear line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.model_file import read_model
from flowledger.flow.errors import BadInput
from flowledger.plan.weights import count
from flowledger.tables.models import Architecture, architecture, models
from tests.tables.hugging_face import config_of, counted

DATA = Path(__file__).parents[1] / "data" / "models"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def sizes(row: Architecture) -> Architecture:
    """What a file can say of a row."""
    return replace(row, name="", source="", dtype="", aliases=(), published=None)


def written(directory: Path, data: object) -> Path:
    file = directory / "config.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data, default=str), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_file_that_a_publisher_wrote_gives_the_row(tmp_path: Path, name: str) -> None:
    read = read_model(written(tmp_path, PUBLISHED[name]["config"]))
    assert sizes(read) == sizes(architecture(name))


# Baichuan 13B has no class in transformers; a Llama stands in for it, which has positions.
@pytest.mark.parametrize(
    "row", [row for row in models().values() if row.positions != "none" or row.single], ids=lambda row: row.name
)
def test_the_file_that_transformers_saves_gives_the_row_back(tmp_path: Path, row: Architecture) -> None:
    written(tmp_path, config_of(row).to_dict())
    assert sizes(read_model(tmp_path)) == sizes(row)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
        ("granite", {"attention_bias": True}),
        ("helium", {"mlp_bias": True, "head_dim": 16}),
        ("smollm3", {"attention_bias": True, "no_rope_layers": [1, 1, 0]}),
        ("mistral", {"head_dim": 24, "sliding_window": 128}),
        ("ministral3", {"head_dim": 24}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
        ("qwen2_moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
        ("qwen3", {"attention_bias": True, "head_dim": 32}),
        ("qwen3_moe", {**MOE, "num_experts": 4, "mlp_only_layers": [1], "head_dim": 16}),
        (
            "qwen3_next",
            {**MOE, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 40, "num_hidden_layers": 5},
        ),
        ("qwen3_next", {**MOE, **DELTA, "num_experts": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
        ("qwen3_5_text", {**DELTA, "num_hidden_layers": 5, "tie_word_embeddings": True}),
        ("qwen3_5_moe_text", {**MOE, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 40}),
        ("gemma", {"attention_bias": True, "head_dim": 32}),
        ("gemma2", {"attention_bias": True, "head_dim": 32}),
        ("gemma3_text", {"head_dim": 32, "num_hidden_layers": 7}),
        ("glm", {"attention_bias": True, "head_dim": 16}),
        ("glm4", {"attention_bias": True, "head_dim": 16}),
        ("glm4_moe", {**MOE, "n_routed_experts": 4, "n_shared_experts": 2, "use_qk_norm": True, "head_dim": 16}),
        ("deepseek_v2", {**MOE, **MLA, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}),
        ("deepseek_v2", {**MOE, **MLA, "q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 1}),
        (
            "deepseek_v3",
            {**MOE, **MLA, "n_routed_experts": 4, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
        ),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}),
        ("olmo2", {"attention_bias": True}),
        ("olmo3", {"num_hidden_layers": 5}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("phi", {}),
        ("phi3", {"tie_word_embeddings": True}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("ernie4_5", {"use_bias": True, "head_dim": 32}),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "num_hidden_layers": 4}),
        ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        ("starcoder2", {"use_bias": True}),
        ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
        ("stablelm", {"use_qkv_bias": True}),
        ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value)[:60],
)
def test_every_option_of_a_model_type_counts_as_transformers_counts_it(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = CONFIG_MAPPING[kind](**{**LLAMA, **more, **tokens, "model_type": kind})
    total, _ = counted(config)
    assert count(read_model(written(tmp_path, config.to_dict()))) == total


def test_an_unknown_type_with_the_usual_keys_is_read_as_a_llama_and_says_so(tmp_path: Path) -> None:
    known = read_model(written(tmp_path, LLAMA))
    unknown = read_model(written(tmp_path, {**LLAMA, "model_type": "brandnew"}))
    assert count(unknown) == count(known)
    assert "'brandnew' is not known" in unknown.source and "not known" not in known.source


def test_the_name_is_what_the_file_says_else_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my-sft"
    directory.mkdir()
    written(directory, LLAMA)
    assert read_model(directory).name == "my-sft"
    written(directory, {**LLAMA, "_name_or_path": "someone/their-model"})
    assert read_model(directory / "config.json").name == "their-model"


def test_an_outer_file_says_whether_the_head_is_tied(tmp_path: Path) -> None:
    nested = {
        "model_type": "qwen3_vl",
        "text_config": {**LLAMA, "model_type": "qwen3_vl_text"},
        "tie_word_embeddings": True,
    }
    assert read_model(written(tmp_path, nested)).tied
    nested["tie_word_embeddings"] = False
    assert not read_model(written(tmp_path, nested)).tied


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ("{", ["config.json:1", "not JSON"]),
        ("[1]", ["expected an object", "list"]),
        ({**LLAMA, "hidden_size": "64"}, ["hidden_size = '64'", "whole number"]),
        ({**LLAMA, "num_hidden_layers": True}, ["num_hidden_layers = True", "whole number"]),
        ({**LLAMA, "num_attention_heads": -4}, ["num_attention_heads = -4", "whole number"]),
        ({**LLAMA, "tie_word_embeddings": "yes"}, ["tie_word_embeddings = 'yes'", "true or false"]),
        ({**LLAMA, "layer_types": "full"}, ["layer_types", "list of words"]),
        ({**LLAMA, "layer_types": ["full_attention", "odd", "odd"]}, ["'odd'", "known are"]),
        ({**LLAMA, "mlp_only_layers": ["a"], "num_experts": 4}, ["mlp_only_layers", "whole numbers"]),
        ({**LLAMA, "num_experts": 4}, ["missing num_experts_per_tok"]),
        ({**LLAMA, "hidden_size": None}, ["missing hidden_size"]),
        ({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}, ["missing num_hidden_layers"]),
        (
            {"model_type": "qwen33", "hidden_size": 64},
            ["'qwen33' is not known", "did you mean qwen3", "num_attention_heads"],
        ),
        ({"architectures": ["X"]}, ["hidden_size", "vocab_size"]),
        ({**LLAMA, "model_type": "bert"}, ["'bert'", "encoder"]),
        ({**LLAMA, "model_type": "odd", "is_encoder_decoder": True}, ["encoder"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["num_key_value_heads = 3", "divide the 4"]),
        ({**LLAMA, **MOE, "num_experts": 1}, ["2 experts a token", "only 1"]),
        ({**LLAMA, "layer_types": ["full_attention"] * 2}, ["2 layers are listed", "has 3"]),
        ({**LLAMA, "num_hidden_layers": 10**6}, ["num_hidden_layers = 1000000", "4096"]),
        ("[" * 100_000, ["config.json"]),
        ('{"hidden_size": ' + "9" * 5000 + "}", ["config.json"]),
        ({**LLAMA, "kv_lora_rank": 16}, ["missing qk_nope_head_dim"]),
        ({**LLAMA, "layer_types": ["linear_attention"] * 3}, ["linear-attention", "not known"]),
    ],
)
def test_a_file_that_cannot_work_gets_one_clear_line(tmp_path: Path, data: object, parts: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        read_model(written(tmp_path, data))
    text = str(caught.value)
    assert "\n" not in text and str(tmp_path) in text
    assert [part for part in parts if part not in text] == []


def test_a_missing_file_a_directory_without_one_and_bytes_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_model(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"config\.json does not exist"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not text"):
        read_model(tmp_path)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 4), max_size=4),
)


@given(
    key=st.sampled_from(sorted({key for row in PUBLISHED.values() for key in row["config"]})),
    value=JUNK,
    name=st.sampled_from(sorted(PUBLISHED)),
)
@settings(deadline=None, max_examples=300)
def test_whatever_stands_in_one_key_the_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object, name: str
) -> None:
    file = written(tmp_path_factory.getbasetemp(), {**PUBLISHED[name]["config"], key: value})
    try:
        assert count(read_model(file)) > 0
    except BadInput as error:
        assert str(file) in str(error)
