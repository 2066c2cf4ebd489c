"""Every row counts exactly: against the classes of `transformers`, against published counts, and against other tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowledger.flow.errors import BadInput
from flowledger.plan.weights import count, per_part
from flowledger.tables.models import Architecture, architecture, find, models
from tests.tables.hugging_face import config_of, counted, shortened, tower

DATA = Path(__file__).parents[1] / "data" / "models"
PATHS: dict[str, str] = json.loads((DATA / "launch_paths.json").read_text(encoding="utf-8"))["paths"]
TOWERS: list[dict[str, Any]] = json.loads((DATA / "towers.json").read_text(encoding="utf-8"))["rows"]
ROWS = tuple(models().values())
# Of each kind of model one is built whole; of the others as many layers as show every kind of layer.
WHOLE = (
    "Llama-3.1-405B",
    "Qwen3-235B-A22B",
    "DeepSeek-V3",
    "Kimi-Linear-48B-A3B",
    "Nemotron-3-Nano-30B-A3B",
    "gemma-3-27b",
    "gpt-oss-120b",
)


def name(row: Architecture) -> str:
    return row.name


def test_the_table_has_what_people_train() -> None:
    assert len(ROWS) >= 65


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_row_says_where_it_comes_from_and_its_sizes_fit_together(row: Architecture) -> None:
    assert row.source
    assert row.heads % row.kv_heads == 0
    assert not row.kinds or len(row.kinds) == row.layers
    assert ("sliding" in row.kinds) == (row.window is not None)
    assert ("linear" in row.kinds) == (row.linear is not None)
    assert row.moe is None or row.moe.topk <= row.moe.experts


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_row_counts_as_transformers_builds_it(row: Architecture) -> None:
    built = row if row.name in WHOLE else shortened(row, 8)
    total, parts = counted(config_of(built))
    assert count(built) == total
    ours = per_part(built)
    assert parts.get("embed") == ours["embed"]
    assert parts.get("experts", 0) == ours.get("experts", 0)
    if not row.single:  # Nemotron-H calls everything a mixer
        assert parts["mixer"] == ours["attention"] + ours.get("linear", 0)


@pytest.mark.parametrize("row", [row for row in ROWS if row.published], ids=name)
def test_a_row_counts_as_its_publisher_says(row: Architecture) -> None:
    assert count(row) == row.published


@pytest.mark.parametrize("case", TOWERS, ids=lambda case: case["model"])
def test_a_language_part_and_its_tower_count_as_the_publisher_says(case: dict[str, Any]) -> None:
    row = replace(architecture(case["model"]), mtp_layers=case["prediction_layers"])
    assert count(row) + tower(case["tower"], case["config"], row.hidden) == case["published"]


@pytest.mark.parametrize(
    ("given", "billions"),
    [
        ("DeepSeek-V3", 671),
        ("Kimi-K2", 1026),
        ("GLM-4.5", 353),  # 355 with the body of its prediction layer
        ("Qwen3-Next-80B-A3B", 80),
        ("Qwen3.5-397B-A17B", 396),
        ("Qwen3.5-122B-A10B", 122),
        ("MiniMax-M2", 229),
        ("ERNIE-4.5-21B-A3B", 22),
    ],
)
def test_a_row_without_an_exact_count_is_as_large_as_its_name_says(given: str, billions: int) -> None:
    assert round(count(architecture(given)) / 1e9) == billions


@pytest.mark.parametrize(("path", "expected"), PATHS.items())
def test_the_paths_of_real_launches_are_found(path: str, expected: str) -> None:
    found = find(path)
    assert found is not None and found.name == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/Qwen3-8B-Instruct-2507", "Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("~/ckpt/qwen2_5_7b_sft/global_step_300/huggingface", "Qwen2.5-7B"),
        ("models--Qwen--Qwen2.5-7B-Instruct/snapshots/a1b2", "Qwen2.5-7B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B-GGUF", "DeepSeek-R1-0528-Qwen3-8B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("zai-org/GLM-4.5-Air-FP8", "GLM-4.5-Air"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("C:\\models\\Qwen3-4B\\", "Qwen3-4B"),
    ],
)
def test_a_fine_tune_keeps_the_sizes_of_its_base(path: str, expected: str) -> None:
    found = find(path)
    assert found is not None and found.name == expected


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "Qwen/Qwen3-Embedding-8B",
        "meta-llama/Llama-Guard-3-8B",
        "microsoft/Phi-4-multimodal-instruct",
        "distilgpt2",
        "my-model",
        "Qwen2.5-Audio-7B",
        "qwen3-72b",
    ],
)
def test_another_model_with_a_like_name_is_not_found(path: str) -> None:
    assert find(path) is None


def test_a_name_resolves_in_any_case_and_an_unknown_one_says_the_nearest() -> None:
    assert architecture("qwen3-8b") is architecture("Qwen3-8B-Base")
    with pytest.raises(BadInput, match="did you mean Qwen3-8B"):
        architecture("Qwen3-8BB")


def test_no_two_rows_share_a_name() -> None:
    names = [alias.casefold() for row in ROWS for alias in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
