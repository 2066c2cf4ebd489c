"""The planned shape ledger against a recording of the loop, and against the laws of sharding."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.dims import parse_shape
from flowledger.flow.mesh import local_shape, mesh
from flowledger.flow.tensors import tensor, tensors
from flowledger.ledger.rows import TensorRow
from flowledger.plan.shapes import RankClass, Setting, shapes, spans
from flowledger.plan.weights import count
from tests.plan.conftest import WATCHED, Witnesses, planned

# Symbols whose value is known only once samples are there; the plan has their greatest value.
DEPENDS_ON_DATA = {"T", "T_logit", "B_admit", "B_run", "N_decode"}

# What the recorder writes and the flow does not declare: (stage, phase or None for any, tensor) -> why.
UNDECLARED = {
    ("old_log_prob", "forward", "new_log_prob"): "one function computes log-probs; here its result is old_log_prob",
    ("ref_log_prob", "forward", "new_log_prob"): "one function computes log-probs; here its result is ref_log_prob",
    ("ref_log_prob", "forward", "entropy"): "the same function returns entropy, which nobody reads here",
    (
        "update_actor",
        "forward",
        "activations",
    ): "recorded as one flat sum of storages a layer, planned as tensors of size H",
}

# What the plan has and the recorder does not see: it watches arguments and results of the loop's functions.
UNSEEN_PHASES = {"backward", "step"}  # autograd and the optimizer read without calling anything that is watched
UNSEEN = {
    ("old_log_prob", "old_log_prob"): "within a micro-batch it is recorded as new_log_prob, see above",
    ("ref_log_prob", "ref_log_prob"): "within a micro-batch it is recorded as new_log_prob, see above",
    ("filter", "reward"): "this configuration keeps every sample, whatever its reward",
    ("advantage", "advantage"): "recorded per sample; the group form lives inside the function",
    ("rollout", "position_ids"): "the rollout counts positions itself",
    ("rollout", "hidden_states"): "the model's inside is not watched while it generates",
    ("rollout", "kv_cache"): "recorded where the cache is made",
    ("rollout", "logits"): "read by the sampling that made them",
    ("update_actor", "rollout_log_prob"): "read where the loss corrects for the rollout's policy",
}
INSIDE = {"1, T", "1, T, H", "B_micro, S, H", "T_logit, V", "T_logit, H"}  # shapes inside forward


def symbols(dims: str) -> set[str]:
    return {symbol for dim in parse_shape(f"[{dims}]") for symbol in dim.symbols}


def recorded(witness: Witnesses) -> list[dict[str, Any]]:
    return witness.ledger.rows(
        "SELECT DISTINCT stage, phase, tensor_name, dims, access, layer, logical_shape, local_shape, dtype, kind "
        f"FROM accesses WHERE step = {WATCHED} AND tensor_name IS NOT NULL AND stage IS NOT NULL"
    )


def undeclared(row: dict[str, Any]) -> bool:
    return (row["stage"], row["phase"], row["tensor_name"]) in UNDECLARED


def candidates(row: dict[str, Any], plan: list[TensorRow]) -> list[TensorRow]:
    """Planned rows for one observed access. Micro-batches are cut, and weights are handed over, before a phase begins."""
    return [
        one
        for one in plan
        if (one.stage, one.tensor_name) == (row["stage"], row["tensor_name"])
        and (one.dims or "").strip("[]") == row["dims"]
        and (one.phase == row["phase"] or one.phase is None or row["phase"] is None)
        and (one.layer == row["layer"] or row["tensor_name"] == "hidden_states")
        and (one.access == row["access"] or reshaped(row))
    ]


def reshaped(row: dict[str, Any]) -> bool:
    """A form that its reader makes of another form of the same tensor: written by the loop, needed according to the plan."""
    form = next((f for f in tensor(row["tensor_name"]).forms if f.shape.strip("[]") == row["dims"]), None)
    return form is not None and (form.source or "").startswith(f"{row['tensor_name']}/")


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_every_recorded_access_was_planned_with_its_shapes(witnesses: Callable[[str], Witnesses], name: str) -> None:
    witness = witnesses(name)
    plan = witness.plan.shapes
    rows = [row for row in recorded(witness) if not undeclared(row)]
    assert len(rows) > 150
    for row in rows:
        found = candidates(row, plan)
        assert found, row
        for one in found:
            assert (one.dtype, one.kind) == (row["dtype"], row["kind"]), row
            if symbols(row["dims"]) & DEPENDS_ON_DATA:
                assert all(a <= b for a, b in zip(row["logical_shape"], one.logical_shape or (), strict=True)), row
            else:
                assert (one.logical_shape, one.local_shape) == (row["logical_shape"], row["local_shape"]), row


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_what_was_planned_and_not_recorded_is_of_a_known_sort(witnesses: Callable[[str], Witnesses], name: str) -> None:
    witness = witnesses(name)
    rows = recorded(witness)
    seen = {(row["stage"], row["tensor_name"], row["dims"]) for row in rows}
    for one in witness.plan.shapes:
        dims = (one.dims or "").strip("[]")
        if (one.stage, one.tensor_name, dims) in seen or (one.stage, one.tensor_name) in UNSEEN:
            continue
        assert (one.phase in UNSEEN_PHASES and one.access == "read") or dims in INSIDE, (
            one.stage,
            one.phase,
            one.tensor_name,
            dims,
        )


def test_the_lists_of_differences_hold_nothing_that_does_not_differ(witnesses: Callable[[str], Witnesses]) -> None:
    both = [witnesses("usual"), witnesses("variant")]
    met = {(row["stage"], row["phase"], row["tensor_name"]) for one in both for row in recorded(one)}
    planned_ = {(row.stage, row.tensor_name) for one in both for row in one.plan.shapes}
    assert set(UNDECLARED) <= met
    assert set(UNSEEN) <= planned_


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_parameters_gradients_and_states_are_planned_layer_by_layer_and_miss_none(
    witnesses: Callable[[str], Witnesses], name: str
) -> None:
    witness = witnesses(name)
    for tensor_name in ("params", "grads", "optimizer_state"):
        of = {
            row.layer: row.numel
            for row in witness.plan.shapes
            if (row.stage, row.tensor_name) == ("update_actor", tensor_name)
        }
        seen = {
            row["layer"]: math.prod(row["logical_shape"])
            for row in recorded(witness)
            if (row["stage"], row["tensor_name"]) == ("update_actor", tensor_name)
        }
        assert of == seen
        assert sum(n or 0 for n in of.values()) == count(witness.plan.architecture)


# ------------------------------------------------------------------------------------------------------------ laws

SIZES = {
    "B_prompt": 6, "G": 4, "B": 24, "B_mini": 12, "B_micro": 6, "B_run": 5, "B_slot": 5, "B_admit": 2, "S_prompt": 7,
    "S_resp": 9, "S": 16, "S_cache": 15, "N_decode": 45, "N_reward": 2, "T": 93, "T_logit": 50, "H": 24, "A": 6, "K": 3,
    "D": 4, "F": 40, "V": 101, "L": 3,
}  # fmt: skip
STAGES = (
    "prompt", "rollout", "reward", "filter", "balance", "old_log_prob", "ref_log_prob", "values", "advantage",
    "update_critic", "update_actor", "weight_sync",
)  # fmt: skip
LAYERS = RankClass(
    name="all", first=0, count=1, layers=(0, 1, 2), layer_elements={0: 101, 1: 102, 2: 103}, outer_elements=57
)


def pieces(text: str) -> list[int]:
    """The ranks that `spans` wrote down, read back."""
    found: list[int] = []
    for part in text.split(", "):
        first, last, stride = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part).groups()  # type: ignore[union-attr]
        found += range(int(first), int(last or first) + 1, int(stride or 1))
    return found


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True).map(sorted))
def test_ranks_are_written_so_that_they_can_be_read_back(ranks: list[int]) -> None:
    text = spans(ranks)
    if not text.endswith("…"):
        assert pieces(text) == ranks


@settings(max_examples=15, deadline=None)
@given(
    degrees=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ("dp", "cp", "sp", "tp")}),
    sizes=st.fixed_dictionaries({name: st.integers(1, 2 * size) for name, size in SIZES.items()}),
    packed=st.booleans(),
)
def test_the_shards_of_all_ranks_add_up_to_the_logical_tensor(
    degrees: dict[str, int], sizes: dict[str, int], packed: bool
) -> None:
    on = mesh(**degrees)
    setting = Setting(stages=STAGES, bindings=sizes, mesh=on, dtypes={}, packed=packed)
    for row in shapes(setting, [LAYERS]):
        form = next(form for form in tensor(row.tensor_name).forms if form.shape == row.dims)
        placements = tensor(row.tensor_name).placement_of(form)
        logical = row.logical_shape or []
        on_all = {rank: local_shape(logical, placements, on, rank) if logical else () for rank in range(on.size)}
        assert tuple(row.local_shape or ()) == on_all[0]
        assert row.owner_rank and row.numel == math.prod(on_all[0])
        if not row.owner_rank.endswith("…"):
            assert sum(math.prod(on_all[rank]) for rank in pieces(row.owner_rank)) == math.prod(logical)


def test_the_ranks_of_a_pipeline_stage_own_what_goes_through_its_layers() -> None:
    """dp 2 cuts tokens and parameters, pp 2 layers: ranks 2 and 3 have the second stage, and of the batch all have parts."""
    first = replace(LAYERS, name="pp0", count=2, layers=(0, 1), is_last=False)
    last = replace(LAYERS, name="pp1", first=2, count=2, layers=(2,), is_first=False)
    setting = Setting(stages=STAGES, bindings=SIZES, mesh=mesh(dp=2, pp=2), dtypes={})
    for rank in (None, 3):
        rows = shapes(setting, [first, last], rank=rank)
        assert {row.owner_rank for row in rows if row.layer == 2} == {"2", "2-3"}  # one of them, where dp does not cut
        logits = {row.owner_rank for row in rows if row.tensor_name == "logits" and row.stage == "update_actor"}
        assert logits == {"2-3"}
        (whole,) = {row.owner_rank for row in rows if row.tensor_name == "loss_mask" and row.stage == "advantage"}
        assert whole == "0-1"
    assert {row.owner_rank for row in shapes(setting, [first, last]) if row.layer in (0, 1)} == {"0", "0-1"}


@given(st.sampled_from(STAGES).flatmap(lambda stage: st.tuples(st.just(stage), st.booleans())))
def test_a_stage_meets_a_tensor_only_when_somebody_has_made_it(case: tuple[str, bool]) -> None:
    left_out, packed = case
    stages = tuple(name for name in STAGES if name != left_out)
    rows = shapes(Setting(stages=stages, bindings=SIZES, mesh=mesh(dp=2), dtypes={}, packed=packed), [LAYERS])
    assert {row.stage for row in rows} <= set(stages)
    for name in {row.tensor_name for row in rows}:
        assert any(place.split("/")[0] in stages for place in tensor(name).written_by)


def test_the_model_sees_packed_tokens_or_padded_ones_and_not_both() -> None:
    for packed, has, lacks in ((True, "[1, T, H]", "[B_micro, S, H]"), (False, "[B_micro, S, H]", "[1, T, H]")):
        rows = shapes(Setting(stages=STAGES, bindings=SIZES, mesh=mesh(), dtypes={}, packed=packed), [LAYERS])
        dims = {row.dims for row in rows if row.stage == "update_actor"}
        assert has in dims and lacks not in dims


def test_one_rank_has_nothing_to_send() -> None:
    for degrees, sends in (({}, False), ({"dp": 2}, True)):
        rows = shapes(Setting(stages=STAGES, bindings=SIZES, mesh=mesh(**degrees), dtypes={}), [LAYERS])
        assert any(row.kind == "comm_buffer" for row in rows) == sends


def test_pipeline_stages_hold_each_layer_once_and_all_parameters_together() -> None:
    plan = planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g")
    classes = plan.classes
    assert Counter(layer for one in classes for layer in one.layers) == Counter(range(94))
    assert [one.first for one in classes] == [128 * index for index in range(8)]
    rows = [
        row for row in plan.shapes if (row.stage, row.tensor_name, row.access) == ("update_actor", "params", "read")
    ]
    assert {row.rank for row in rows} == {one.first for one in classes}
    assert (
        sum(one.outer_elements for one in classes) == 2 * 151936 * 4096 // 4 + 4096
    )  # embedding, head: over tp 4; norm


def test_every_tensor_of_the_flow_that_some_stage_writes_is_planned_when_all_stages_run() -> None:
    every = (*STAGES, "checkpoint", "validate")
    rows = shapes(Setting(stages=every, bindings=SIZES | {"E": 8}, mesh=mesh(dp=2), dtypes={}), [LAYERS])
    missing = set(tensors()) - {row.tensor_name for row in rows}
    assert all(
        not any(symbols(f.shape.strip("[]")) <= SIZES.keys() | {"E", "P"} for f in tensor(n).forms) for n in missing
    ), missing
