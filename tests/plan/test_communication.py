"""Planned collectives against those that every rank recorded, to the byte, and against sums by hand."""

import time
from collections import Counter
from typing import Any

import pytest

from flowledger.flow.mesh import mesh
from flowledger.ledger.rows import SpanRow
from flowledger.plan.communication import by_ranks, communication, summed
from flowledger.plan.document import document
from flowledger.plan.talk import named, peers_of
from tests.plan.conftest import planned
from tests.plan.spread_runs import CASES, config, module, recorded


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_recorded_bytes(name: str) -> None:
    ranks = recorded(name)
    for rows in ranks:
        assert sum(isinstance(row, SpanRow) and row.span_kind == "comm" for row in rows) > 30
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


# mesh and what else is set -> the parts that the collectives of its ranks come in, by hand
PARTS = {
    "responses end on the last sp rank": (
        ("mesh.tp=2", "mesh.sp=2", "actor.engine.sequence_parallel=true", "actor.old_log_prob=true"),
        ["sp 0", "sp 1"],
    ),
    "nobody sums over a head that is not cut": (("mesh.sp=2", "mesh.cp=2"), ["all"]),
    "264 words over 16 are 17 each, and 9": (
        ("mesh.tp=16", "mesh.dp=2", "model.tiny.heads=16", "model.tiny.kv_heads=16", "data.prompts_per_step=32"),
        ["tp 0-14", "tp 15"],
    ),
    "3 prompts on 4 ranks": (
        ("mesh.dp=2", "mesh.cp=2", "data.prompts_per_step=3", "actor.mini_batch_prompts=1"),
        ["ranks 0-2", "dp 1, cp 1"],
    ),
    "stages, and within them prompts": (
        ("mesh.pp=2", "mesh.sp=2", "data.prompts_per_step=3", "actor.mini_batch_prompts=3"),
        ["pp0", "pp1, sp 0", "pp1, sp 1"],
    ),
    "both ends send the gradient of their piece of the tied weight": (
        ("mesh.pp=2", "mesh.dp=16", "data.prompts_per_step=32", "actor.mini_batch_prompts=4"),
        ["pp0, dp 0-14", "pp0, dp 15", "pp1, dp 0-14", "pp1, dp 15"],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_rows_of_a_part_are_those_of_each_of_its_ranks(name: str) -> None:
    settings, parts = PARTS[name]
    plan = planned("tiny.yaml", *settings)
    assert [ranks.label for ranks, _ in plan.talks] == parts
    rows = document(plan, shapes=False)["communication"]
    found = {part: [{**row, "ranks": None} for row in rows if row["ranks"] == part] for part in parts}
    of_each = [
        [{"ranks": None, **row} for row in summed(communication(plan.course(rank)))]
        for rank in range(plan.setting.mesh.size)
    ]
    for ranks, _ in plan.talks:
        assert of_each[ranks.first] == found[ranks.label] and of_each.count(found[ranks.label]) == ranks.count
    assert sum(ranks.count for ranks, _ in plan.talks) == plan.setting.mesh.size


def test_the_parts_are_recorded_bytes() -> None:
    """Two tp ranks of the first slice of a row, which has prompts mostly, and two of the second; 3 prompts on 4 ranks."""
    settings = config("tp2").model_copy(update={"mesh": config("sp2").mesh.model_copy(update={"tp": 2})})
    rows = module("forked").ranks(4, module("shapes_agree").rows_of_step, settings)
    step = module("shapes_agree").Step(settings, rows)
    parts = by_ranks(step.course, step.plan.setting.mesh, step.plan.classes)
    assert [(ranks.label, ranks.count) for ranks, _ in parts] == [("sp 0", 2), ("sp 1, tp 0", 1), ("sp 1, tp 1", 1)]
    due = [
        {(row["stage"], row["group"], row["comm_type"]): row["bytes"] for row in summed(talks)} for _, talks in parts
    ]
    assert due[0]["update_actor", "tp", "all_reduce"] != due[1]["update_actor", "tp", "all_reduce"]
    for rank, part in enumerate((0, 0, 1, 2)):
        sent = Counter[Any]()
        for row in rows[rank]:
            if isinstance(row, SpanRow) and row.span_kind == "comm" and row.end_ns is not None and not row.step:
                sent[row.stage, row.group, row.comm_type] += row.bytes or 0
        assert sent == due[part]


def test_ten_thousand_ranks_come_in_a_few_parts() -> None:
    plan = planned(
        "tiny.yaml", "mesh.dp=640", "mesh.tp=2", "mesh.sp=2", "mesh.pp=4", "model.tiny.layers=4",
        "actor.engine.sequence_parallel=true", "data.prompts_per_step=10240", "actor.mini_batch_prompts=2560",
    )  # fmt: skip
    started = time.process_time()
    found = plan.talks
    assert time.process_time() - started < 3
    assert sum(ranks.count for ranks, _ in found) == 10_240 and len(found) < 10


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ("model.tiny.layers=6 actor.micro_batch.samples=1", 1),  # recorded once an optimizer step between the ends
        (
            "model.tiny.layers=3 actor.micro_batch.samples=1",
            0,
        ),  # the pass before ends in the same layer, which is there
        ("model.tiny.layers=6 actor.old_log_prob=false actor.mini_batch_prompts=4 actor.micro_batch.samples=8", 0),
    ],
)
def test_a_stage_between_the_ends_gathers_a_layer_in_vain(settings: str, times: int) -> None:
    plan = planned("tiny.yaml", "mesh.pp=3", "mesh.dp=2", *settings.split())
    for ranks in plan.classes:
        layers = plan.course(ranks.first).models["actor"][1]
        found = [one for one in plan.communication(ranks) if one.what == "a layer, gathered in vain"]
        steps = len(plan.course(0).mini_batches) * plan.config.actor.epochs
        assert sum(one.count for one in found) == (times * steps if ranks.name == "pp1" else 0)
        assert all(one.bytes == 4 * layers.whole(ranks.first, ranks.layers[-1]) for one in found)
