"""Which model and which device a plan is about, and what is said of names that nobody knows."""

import json
from pathlib import Path

import pytest

from flowledger.flow.errors import BadInput
from flowledger.plan.subject import TINY_VOCAB, architecture_of, device_of
from flowledger.plan.weights import count
from flowledger.plan.whatif import changed
from flowledger.run.tiny import SPECIALS
from tests.plan.conftest import planned

TINY = planned("tiny.yaml")
FSDP = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")

# A small Llama in the form of a Hugging Face config.json. Its parameters by hand: embedding and head 2 * 1000 * 64, two
# layers of 4 * 64 * 64 attention, 3 * 64 * 160 MLP and two norms of 64, and a final norm.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
    "tie_word_embeddings": False, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
LLAMA_PARAMETERS = 2 * 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64


def test_the_configured_model_is_found_by_the_last_part_of_its_path() -> None:
    assert FSDP.architecture.name == "Qwen3-8B"
    for path in ("Qwen/Qwen3-8B", "/models/Qwen3-8B", "qwen3-8b", "/models/qwen/Qwen3-8B/"):
        assert architecture_of(changed(FSDP.config, "model.path", path), None).name == "Qwen3-8B"


def test_a_model_that_is_named_goes_before_the_configured_one() -> None:
    assert architecture_of(FSDP.config, "Qwen2.5-7B").layers == 28


def test_a_config_file_or_its_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for named in (tmp_path, tmp_path / "config.json"):
        assert count(architecture_of(FSDP.config, str(named))) == LLAMA_PARAMETERS
    assert count(architecture_of(changed(FSDP.config, "model.path", str(tmp_path)), None)) == LLAMA_PARAMETERS


def test_the_tiny_model_has_the_vocabulary_of_its_tokenizer() -> None:
    assert 256 + len(SPECIALS) == TINY_VOCAB == TINY.architecture.vocab  # the loop's own side of the same fact
    sized = changed(TINY.config, "model.tiny.layers", 5)
    assert architecture_of(sized, None).layers == 5


def test_an_unknown_model_is_one_line_with_the_nearest_name_and_where_it_came_from() -> None:
    with pytest.raises(BadInput, match=r"--model = 'Qwen3-8C'.*did you mean Qwen3-8B"):
        architecture_of(FSDP.config, "Qwen3-8C")
    with pytest.raises(BadInput, match=r"model\.path \(.*verl_qwen3_8b_fsdp\.sh.*\) = 'qwenn3-8b'"):
        architecture_of(changed(FSDP.config, "model.path", "qwenn3-8b"), None)
    with pytest.raises(BadInput, match="no such model"):
        architecture_of(FSDP.config, "~nobody/\x00")


def test_a_device_by_name_by_the_configuration_or_none() -> None:
    assert device_of(None, TINY.config) is None
    assert device_of("cpu", FSDP.config) is None
    device = device_of("h100-80g", TINY.config)
    assert device is not None and device.name == "H100-SXM5-80GB" and 79 * 2**30 < device.memory_bytes < 80 * 2**30
    assert device_of(None, changed(TINY.config, "hardware.gpu", "h200")) is not None
    with pytest.raises(BadInput, match="no device is called 'h1000'"):
        device_of("h1000", TINY.config)
