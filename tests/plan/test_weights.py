"""Parameters tensor by tensor: how ranks share them, which layers a stage holds, and what heads and predictors add."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.plan.weights import PARTS, Weight, count, local_numel, per_part, stage_layers, weights
from flowledger.tables.models import Architecture, architecture, models
from tests.tables.hugging_face import config_of, shortened

DATA = Path(__file__).parents[1] / "data" / "models"
PREDICTORS = json.loads((DATA / "prediction_layers.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", models().values(), ids=lambda row: row.name)
def test_parts_and_layers_cover_every_weight_once(row: Architecture) -> None:
    found = weights(row)
    assert {weight.part for weight in found} <= set(PARTS)
    assert sum(per_part(row).values()) == count(row) == sum(weight.numel for weight in found)
    assert {weight.layer for weight in found if weight.layer is not None} == set(range(row.layers))
    names = [(weight.layer, weight.name) for weight in found]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "published", "own_embedding"), PREDICTORS)
def test_a_prediction_layer_is_what_published_files_hold_beyond_the_model(
    name: str, published: int, own_embedding: bool
) -> None:
    row = architecture(name)
    copies = 2 * row.vocab * row.hidden if own_embedding else 0
    assert count(replace(row, mtp_layers=1)) + copies == published


def test_two_prediction_layers_are_twice_one() -> None:
    row = architecture("DeepSeek-V3")
    one, two = (per_part(replace(row, mtp_layers=number))["mtp"] for number in (1, 2))
    assert two == 2 * one
    assert round(one / 1e9, 1) == 11.6  # its report: 11.5 billion of its own, beside a shared embedding and head


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-30B-A3B", "OPT-125m"])
def test_a_value_model_counts_as_a_token_classifier_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoModelForTokenClassification

    row = shortened(architecture(name), 2)
    if name == "OPT-125m":  # no such class; the head is one linear layer all the same
        assert sum(item.numel for item in weights(row, head="value")) == count(row) + row.hidden + 1
        return
    config = config_of(row)
    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config)
    assert sum(item.numel for item in weights(row, head="value")) == sum(p.numel() for p in model.parameters())


def test_heads_differ_by_the_head_alone_and_another_head_is_refused() -> None:
    row = architecture("Qwen3-8B")
    body = sum(item.numel for item in weights(row, head="none"))
    assert count(row) - body == row.vocab * row.hidden
    assert count(architecture("Qwen3-4B")) == sum(item.numel for item in weights(architecture("Qwen3-4B"), head="none"))
    with pytest.raises(BadInput, match="lm, value or none"):
        weights(row, head="reward")


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Mixtral-8x7B", "Seed-OSS-36B", "SmolLM3-3B", "ERNIE-4.5-0.3B"]
)
def test_dimensions_are_cut_where_the_tensor_parallel_plan_of_transformers_cuts_them(name: str) -> None:
    row = architecture(name)
    plan = config_of(row).base_model_tp_plan
    cuts = {"colwise": 0, "rowwise": 1, "colwise_rep": 0, "embedding_rowwise": 0}
    ours = {weight.name.removesuffix(".weight"): weight.tp_dim for weight in weights(row) if weight.layer == 0}
    compared = 0
    for module, style in plan.items():
        last = module.rpartition(".")[2]
        if style in cuts and last in ours:
            compared += 1
            assert ours[last] == cuts[style], module
    assert compared >= 4


@pytest.mark.parametrize(
    "name", ["Qwen3-32B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-120b", "Qwen3-Next-80B-A3B", "gemma-3-27b"]
)
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, None), (2, 1, None), (2, 2, 1), (2, 4, 2)])
def test_what_is_cut_adds_up_over_the_ranks(name: str, tp: int, ep: int, etp: int | None) -> None:
    for weight in weights(architecture(name)):
        ranks = ep * (etp or tp) if weight.expert else tp
        whole = ep if weight.expert else 1  # ranks whose shares add up where a tensor is not cut
        local = local_numel(weight, tp, ep, etp)
        assert local * (whole if weight.tp_dim is None else ranks) == weight.numel, weight


def test_keys_are_copied_where_there_are_fewer_heads_than_ranks() -> None:
    row = architecture("Qwen3-30B-A3B")  # 4 heads of keys
    keys = next(weight for weight in weights(row) if weight.name == "k_proj.weight")
    assert local_numel(keys, tp=4) == local_numel(keys, tp=8) == row.head_dim * row.hidden


@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    dim=st.sampled_from([None, 0, 1]),
    number=st.integers(1, 64),
    tp=st.integers(1, 16),
    ep=st.integers(1, 16),
)
def test_no_rank_holds_less_than_its_share_or_more_than_all(
    shape: tuple[int, int], dim: int | None, number: int, tp: int, ep: int
) -> None:
    weight = Weight("w", "experts", 0, shape, dim, expert=True, count=number)
    local = local_numel(weight, tp, ep)
    assert prod(shape) * number / (ep * (tp if dim is not None else 1)) <= local <= weight.numel
    assert local_numel(weight, 1, 1) == weight.numel


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # As the comments of Megatron-Core's `get_transformer_layer_offset` lay 8 layers on 2 ranks with 4 and 2 chunks.
        ({"layers": 8, "pp": 2, "vpp": 4}, ((0, 2, 4, 6), (1, 3, 5, 7))),
        ({"layers": 8, "pp": 2, "vpp": 2}, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ({"layers": 6, "pp": 1}, ((0, 1, 2, 3, 4, 5),)),
        ({"layers": 8, "pp": 4}, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ({"layers": 8, "pp": 3, "last": 2}, ((0, 1, 2), (3, 4, 5), (6, 7))),
        ({"layers": 7, "pp": 3, "first": 1}, ((0,), (1, 2, 3), (4, 5, 6))),
        ({"layers": 7, "pp": 2, "first": 4, "last": 3}, ((0, 1, 2, 3), (4, 5, 6))),
        ({"layers": 12, "pp": 3, "vpp": 2, "first": 2, "last": 4}, ((0, 6), (1, 2, 3, 7, 8, 9), (4, 5, 10, 11))),
        ({"layers": 4, "pp": 2, "explicit": (3, 1)}, ((0, 1, 2), (3,))),
        ({"layers": 4, "pp": 2, "vpp": 2, "explicit": (1, 2, 1, 0)}, ((0, 3), (1, 2))),
        ({"layers": 2, "pp": 3, "first": 0, "last": 1}, ((), (0,), (1,))),
    ],
)
def test_layers_are_dealt_to_ranks_as_megatron_deals_them(
    arguments: dict[str, int], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert stage_layers(**arguments) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"layers": 7, "pp": 2}, "do not divide"),
        ({"layers": 8, "pp": 4, "vpp": 3}, "vpp = 3"),
        ({"layers": 8, "pp": 2, "first": 5, "last": 4}, "do not divide"),
        ({"layers": 8, "pp": 3, "first": 7, "last": 4}, "do not divide"),
        ({"layers": 8, "pp": 2, "explicit": (4, 5)}, "8 layers together"),
        ({"layers": 8, "pp": 2, "explicit": (4, 2, 2)}, "2 stages"),
    ],
)
def test_a_layout_that_does_not_come_out_is_refused(arguments: dict[str, int], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        stage_layers(**arguments)  # type: ignore[arg-type]


@given(
    pp=st.integers(1, 16),
    vpp=st.integers(1, 4),
    each=st.integers(1, 5),
    first=st.integers(0, 4),
    last=st.integers(0, 4),
)
def test_every_layer_stands_on_one_rank(pp: int, vpp: int, each: int, first: int, last: int) -> None:
    ends = (first * vpp, last * vpp) if pp > 2 else (None, None)
    layers = sum(end or 0 for end in ends) + each * vpp * (pp - 2 if pp > 2 else pp)
    ranks = stage_layers(layers, pp, vpp, *ends)
    assert len(ranks) == pp
    assert sorted(layer for rank in ranks for layer in rank) == list(range(layers))
