"""What operators send: the own loop's rows against its planned collectives, backward by framework, what hides behind what."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowledger.config.detect import Asked, read
from flowledger.plan.ask import Question, make
from flowledger.plan.exchanges import exchanges, hardware_of, hiding_rows, operator_rows
from flowledger.plan.job import Job
from flowledger.plan.plan import Plan
from flowledger.plan.sequence import Cut, cuts, names
from flowledger.tables.gpus import gpu
from flowledger.tables.operators import WAYS, communications, operators

ROOT = Path(__file__).parents[2]
SHARDS, MEGATRON = "examples/shards.yaml", "examples/verl_qwen3_235b_megatron.sh"


@cache
def planned(source: str, overrides: tuple[str, ...] = ()) -> Plan:
    return make(read(str(ROOT / source), Asked(overrides=overrides)), Question())


def job_of(plan: Plan) -> Job:
    return plan.jobs[("update_actor", plan.classes[0].name)][1]


def scheme(job: Job, name: str) -> Cut:
    (cut,) = (cut for cut in cuts(job) if cut.scheme.name == name)
    return cut


def by(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row


OWN: tuple[tuple[str, ...], ...] = (
    ("mesh.tp=2",),
    ("mesh.tp=2", "model.dtype=bfloat16"),
    ("mesh.tp=2", "model.path=Qwen/Qwen3-0.6B"),  # norms of heads
    ("mesh.tp=2", "mesh.pp=2"),
    ("mesh.tp=2", "actor.engine.sequence_parallel=true"),
    ("mesh.tp=2", "actor.engine.sequence_parallel=true", "model.path=Qwen/Qwen3-0.6B"),
    ("mesh.tp=2", "actor.engine.sequence_parallel=true", "mesh.pp=2"),
    ("mesh.sp=2",),
    ("mesh.sp=3", "model.tiny.heads=12", "model.tiny.kv_heads=4", "model.tiny.hidden_size=96"),
    ("mesh.cp=2",),
    ("mesh.cp=4", "model.dtype=bfloat16"),
    ("mesh.cp=2", "mesh.sp=2"),
    ("mesh.cp=2", "mesh.cp_kind=all_to_all"),
    ("mesh.cp=2", "mesh.sp=2", "mesh.cp_kind=all_to_all"),
    ("mesh.dp=4", "mesh.ep=2", "model.tiny.experts=4"),
    ("mesh.dp=4", "mesh.ep=2", "mesh.tp=2", "model.tiny.experts=4"),
    ("mesh.dp=4", "mesh.ep=2", "mesh.tp=2", "model.tiny.experts=4", "actor.engine.sequence_parallel=true"),
)


AGAIN = "actor.activation_checkpointing=true"


@pytest.mark.parametrize("sets", [*OWN, *((*sets, AGAIN) for sets in OWN if len(sets) < 3)], ids=" ".join)
def test_rows_times_layers_times_micro_batches_are_the_planned_collectives_of_a_step(sets: tuple[str, ...]) -> None:
    """Of flowledger's own loop, whose recordings its plan is held against: forward and backward, by kind and group."""
    plan = planned(SHARDS, ("mesh.tp=1", *sets))
    for ranks in plan.classes:
        work, job = plan.jobs[("update_actor", ranks.name)]
        used = [cut for cut in cuts(job) if cut.used] or [cuts(job)[0]]  # ep alone cuts no sequence
        rows = [one for cut in used for one in exchanges(job, cut, None) if cut.used and one.row.scheme != "any"]
        rows += [one for one in exchanges(job, used[0], None) if one.row.scheme == "any"]
        found: Counter[tuple[str, str, str]] = Counter()
        for one in rows:
            times = len(ranks.layers) if one.operator.per == "layer" else 1
            for way in WAYS:
                for sent in one.each(way):
                    passes = times * job.micro_batches * work.updates
                    found[way, sent["comm_type"], one.group] += sent["bytes"] * passes
                    if way == "forward":  # and once more where layers are computed again
                        found["backward", sent["comm_type"], one.group] += sent["bytes"] * passes * (one.passes - 1)
        planned_ones: Counter[tuple[str, str, str]] = Counter()
        for talk in plan.communication(ranks):
            inside = talk.group in ("tp", "sp", "cp", "tokens", "ep") and talk.comm_type != "recv"
            if talk.stage == "update_actor" and talk.phase in WAYS and inside:
                planned_ones[talk.phase, talk.comm_type, talk.group] += talk.total
        assert +found == +planned_ones and found


def test_a_ring_sends_gradients_in_float32_and_once_more_than_keys() -> None:
    """shards.yaml, cp 2: [2, 2 heads, 48 tokens, 16] of 2 samples. Transformer Engine sends both in the model's dtype."""
    block = 2 * 2 * 48 * 16
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        job = job_of(planned(SHARDS, ("mesh.tp=1", "mesh.cp=2", f"model.dtype={dtype}")))
        cut = scheme(job, "cp_ring")
        row = by(list(operator_rows(job, cut, None)), operator="attention core")
        assert (row["bytes"], row["bytes_backward"]) == (block * size, block * size + 2 * block * 4)
        hiding = list(hiding_rows(job, cut, hardware_of(job, gpu("h100"))))
        backward = by(hiding, direction="backward", operator="attention core")
        assert backward["waits"] == 1 and backward["switched_on"] and names(job, cut.degrees)["blocks"] == 3
    job = job_of(planned(MEGATRON))
    ring = by(list(operator_rows(job, scheme(job, "cp_ring"), None)), operator="attention core")
    assert ring["bytes_backward"] == 2 * ring["bytes"] == 2 * ring["bytes_again"]  # its layers are computed again


def test_backward_of_each_framework() -> None:
    """Megatron gathers inputs again, the head's too; DTensor has kept them; plain tp adds up gradients of inputs."""
    megatron = replace(job_of(planned(MEGATRON)), pp_rank=7)
    own = job_of(planned(SHARDS, ("actor.engine.sequence_parallel=true",)))
    plain = job_of(planned(SHARDS))

    def sent(job: Job, name: str, operator: str) -> tuple[list[str], list[str]]:
        row = by(list(operator_rows(job, scheme(job, name), None)), operator=operator)
        return [one["comm_type"] for one in row["forward"]], [one["comm_type"] for one in row["backward"]]

    both = ["all_gather", "reduce_scatter"]
    assert sent(megatron, "megatron_sp", "qkv projection") == (["all_gather"], both)
    assert sent(megatron, "megatron_sp", "head") == (["all_gather"], both)
    assert sent(own, "megatron_sp", "qkv projection") == (["all_gather"], ["reduce_scatter"])
    assert sent(own, "megatron_sp", "MLP up") == (["all_gather"], ["reduce_scatter"])
    assert sent(plain, "tp", "qkv projection") == ([], ["all_reduce"])
    assert sent(plain, "tp", "output projection") == (["all_reduce"], [])
    assert "tp" not in [cut.scheme.name for cut in (*cuts(own), *cuts(megatron))]


def test_float32_is_computed_at_its_own_rate() -> None:
    """H100: 67 TFLOPS of float32, 989 of bfloat16."""
    found = []
    for dtype in ("float32", "bfloat16"):
        job = job_of(planned(SHARDS, (f"model.dtype={dtype}",)))
        rows = list(operator_rows(job, scheme(job, "tp"), hardware_of(job, gpu("h100"))))
        found.append(by(rows, operator="MLP down")["compute_s"])
    assert found[0] / found[1] == pytest.approx(989 / 67)


def test_an_exchange_of_experts_hides_behind_another_micro_batch_going_the_other_way() -> None:
    """Dispatch beside the experts, combine beside attention: forward's beside their backward, and the other way round."""
    job = job_of(planned(MEGATRON))
    cut = scheme(job, "megatron_sp")
    rows = [row for row in operator_rows(job, cut, hardware_of(job, gpu("h100"))) if row["per"] == "layer"]
    work = {row["operator"]: row["compute_s"] for row in rows}
    hiding = [row for row in hiding_rows(job, cut, hardware_of(job, gpu("h100"))) if row["scheme"] == "any"]
    experts = work["experts up"] + work["experts down"]
    forward = by(hiding, operator="MoE dispatch", direction="forward")
    backward = by(hiding, operator="MoE dispatch", direction="backward")
    assert (forward["compute_s"], backward["compute_s"]) == (pytest.approx(2 * experts), pytest.approx(experts))
    assert forward["chunk"] == 36864 // 8 and not forward["switched_on"] and "overlap-moe" in forward["done_by"]
    attention = sum(
        work[name]
        for name in (
            "norm",
            "qkv projection",
            "rotary",
            "attention core",
            "output projection",
            "residual",
            "MoE router",
        )
    )
    forward = by(hiding, operator="MoE combine", direction="forward")
    assert forward["compute_s"] == pytest.approx(2 * attention + 0.5 * work["attention core"])
    alone = by(list(hiding_rows(replace(job, micro_batches=1), cut, None)), operator="MoE combine", direction="forward")
    assert job.micro_batches > 1 and alone["failing"] == ["cannot be pipelined"]


def test_the_table_names_what_exists() -> None:
    known = {one.name for one in operators()}
    for row in communications():
        assert row.operator in known and known.issuperset(row.hidden_by)
        assert bool(row.chunk) == bool(row.share) == any(one.piece for one in (*row.forward, *row.backward))
        assert (row.forward or row.backward) and set(row.always) <= set(WAYS)
        assert row.why and row.why_zh and row.context in ("token", "blocks", "whole")
        assert {*row.again, *row.asked_of, *row.always_by, *row.by} <= {"megatron", "torch", "flowledger"}
