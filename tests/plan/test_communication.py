"""Planned collectives against those that every rank recorded, to the byte, and against sums by hand."""

from collections import Counter
from typing import Any

import pytest

from flowledger.flow.mesh import mesh
from flowledger.ledger.rows import SpanRow
from flowledger.plan.document import document
from flowledger.plan.talk import named, peers_of
from tests.plan.conftest import planned
from tests.plan.spread_runs import CASES, config, module, recorded


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_recorded_bytes(name: str) -> None:
    ranks = recorded(name)
    for rows in ranks:
        assert sum(isinstance(row, SpanRow) and row.span_kind == "comm" for row in rows) > 50
    assert module("shapes_agree").bytes_wrong(config(name), ranks) == []


@pytest.mark.parametrize("name", CASES)
def test_as_many_are_planned_as_were_recorded(name: str) -> None:
    """Of groups whose collectives are not fused: FSDP gathers experts' two weights at once, planned as three."""
    step = module("shapes_agree").Step(config(name), recorded(name))
    for rank, rows in enumerate(recorded(name)):
        planned_, seen = Counter[Any](), Counter[Any]()
        for one in module("shapes_agree").communication(step.course(rank)):
            planned_[one.stage, one.phase, one.comm_type, one.group] += one.count
        for row in rows:
            if isinstance(row, SpanRow) and row.span_kind == "comm" and row.end_ns is not None and not row.step:
                seen[row.stage, row.phase, row.comm_type, row.group] += 1
        same = {key for key in planned_.keys() | seen.keys() if key[0] != "weight_sync"}
        assert {key: planned_[key] for key in same} == {key: seen[key] for key in same}


def test_a_byte_too_many_is_found() -> None:
    ranks = [list(rows) for rows in recorded("tp2")]
    at, row = next(
        (at, row) for at, row in enumerate(ranks[0]) if isinstance(row, SpanRow) and row.comm_type == "all_reduce"
    )
    ranks[0][at] = other = row.__copy__()  # type: ignore[attr-defined]  # as a struct has it
    other.bytes += 1
    (line,) = module("shapes_agree").bytes_wrong(config("tp2"), ranks)
    assert line.startswith(f"rank 0 {row.stage}/")


def test_fsdp_by_hand() -> None:
    # tiny.yaml's model on two ranks: each unit gathered for forward and backward, its gradient reduced, a micro-batch
    plan = planned("tiny.yaml", "mesh.dp=2", "actor.mini_batch_prompts=2", "data.prompts_per_step=2")
    (ranks,) = plan.classes
    found = {(one.what, one.phase): one for one in plan.communication(ranks) if one.stage == "update_actor"}
    numel = {
        layer: sum(w.numel for w in plan.setting.shards["actor"].weights if w.layer == layer) for layer in (0, None)
    }
    micro_batches = sum(map(len, plan.course(0).mini_batches)) * plan.config.actor.epochs
    layers = plan.architecture.layers
    assert found["a layer, gathered", "forward"].bytes == 4 * numel[0]
    assert found["a layer, gathered", "forward"].count == layers * micro_batches
    assert found["gradients of what no layer owns", "backward"].total == 4 * numel[None] * micro_batches


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}, {"cp": 2, "sp": 2}, {"dp": 4, "ep": 2}])
def test_a_group_has_the_first_name_of_its_ranks(degrees: dict[str, int]) -> None:
    on = mesh(**degrees)
    names = {group: named(on, group) for group in ("world", "shards", "tokens", "ep", "tp")}
    for group, name in names.items():
        assert all(peers_of(on, group, rank) == peers_of(on, name, rank) for rank in range(on.size))
        assert len(peers_of(on, group, 0)) == len(set(peers_of(on, group, 0)))
    assert {"dp2": "dp", "tp2": "world", "sp2": "tokens", "ep2": "dp"}[
        "".join(map(str, list(degrees.items())[-1]))
    ] == names["world"]


def test_the_document_sums_them_and_one_process_has_none() -> None:
    plan = planned("tiny.yaml", "mesh.dp=2", "actor.mini_batch_prompts=2", "data.prompts_per_step=2")
    (ranks,) = plan.classes
    rows = document(plan, shapes=False)["communication"]
    assert sum(row["bytes"] for row in rows) == sum(one.total for one in plan.communication(ranks)) > 0
    spans = [row for row in plan.rows() if isinstance(row, SpanRow)]
    assert sum(row.bytes or 0 for row in spans) == sum(row["bytes"] for row in rows)
    assert {tuple(row.peer_ranks or ()) for row in spans} == {(0, 1)}
    assert document(planned("tiny.yaml"), shapes=False)["communication"] == []
