"""A plan as a document: plain values, the ledger's own names, and sums that hold."""

import json
import math
from typing import Any

import pytest

from flowledger.flow.kinds import KINDS
from flowledger.ledger.rows import FindingRow, TensorRow, columns
from flowledger.plan.document import document
from flowledger.plan.plan import Plan
from tests.plan.conftest import planned

PLANS = {
    "tiny": planned("tiny.yaml"),
    "fsdp": planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g", lengths="p50=900,p99=7000,max=8192"),
    "megatron": planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g"),
}


def values(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [leaf for inner in found.values() for leaf in values(inner)]
    if isinstance(found, list | tuple):
        return [leaf for inner in found for leaf in values(inner)]
    return [found]


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


def test_it_is_json_without_nan_and_comes_back_the_same(plan: Plan) -> None:
    made = document(plan)
    text = json.dumps(made, allow_nan=False)
    assert json.loads(text) == json.loads(json.dumps(json.loads(text)))
    assert all(isinstance(leaf, str | int | float | bool | None) for leaf in values(made))
    assert not any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in values(made))


def test_bytes_are_integers_and_kinds_add_up(plan: Plan) -> None:
    for row in document(plan, shapes=False)["rows"]:
        assert all(isinstance(row[key], int) for key in (*KINDS, "allocated", "reserved", "host_used", "after"))
        assert sum(row[kind] for kind in KINDS) == row["allocated"]
        assert sum(one["bytes"] for one in row["tensors"]) <= row["allocated"]


def test_shapes_and_checks_have_the_names_of_the_ledger(plan: Plan) -> None:
    made = document(plan)
    known = set(columns(TensorRow)) - {"seq", "t_ns"}
    for row in made["shapes"]:
        assert set(row) == known | {"common_bug", "common_bug_zh"}
        assert all(isinstance(row[key], list) for key in ("logical_shape", "local_shape"))
    assert all(set(row) == set(columns(FindingRow)) - {"seq", "t_ns"} for row in made["checks"])
    assert made["shapes"] and made["checks"] and made["lifetimes"] and made["survives"]


def test_without_shapes_the_long_tables_are_left_out(plan: Plan) -> None:
    made = document(plan, shapes=False)
    assert not {"shapes", "lifetimes", "survives"} & made.keys()
    assert {key: value for key, value in document(plan).items() if key in made} == made


def test_the_summary_is_that_of_the_rows(plan: Plan) -> None:
    made = document(plan, shapes=False)
    summary = made["summary"]
    worst = max(max(row["allocated"], row["reserved"]) for row in made["rows"])
    assert max(summary["peak_allocated"], summary["peak_reserved"]) == worst
    assert summary["peak_host"] == max(row["host_used"] for row in made["rows"])
    assert summary["starts"] == (not any(row["verdict"] == "fail" for row in made["checks"]))
    if summary["limit"] is not None:
        assert summary["free"] == summary["limit"] - worst
        assert summary["fits"] == (summary["free"] >= 0 and made["engine"]["fits"])


def test_the_rough_forms_stand_beside_what_was_planned(plan: Plan) -> None:
    rows = {row["name"]: row for row in document(plan, shapes=False)["estimates"]}
    assert set(rows) == {"activation_bytes", "kv_bytes", "peak_memory"}
    for row in rows.values():
        assert row["deviation"] is None or row["deviation"] == pytest.approx(row["estimate"] / row["planned"] - 1)


def test_the_cache_of_the_own_loop_is_exactly_the_rough_form() -> None:
    """`kv_bytes` says of itself that it is exact for a cache of fixed slots, and the own loop has one."""
    (row,) = [row for row in document(PLANS["tiny"], shapes=False)["estimates"] if row["name"] == "kv_bytes"]
    assert (
        row["estimate"] == row["planned"] == 2 * 12 * 47 * 2 * 16 * 2 * 4
    )  # layers, slots, positions, heads, dim, k and v, bytes


def test_the_model_and_the_device_are_named(plan: Plan) -> None:
    summary = document(plan, shapes=False)["summary"]
    assert (summary["model"], summary["world"], summary["gpu"]) in {
        ("tiny", 1, None), ("Qwen3-8B", 8, "H100-SXM5-80GB"), ("Qwen3-235B-A22B", 1024, "H100-SXM5-80GB"),
    }  # fmt: skip
