"""SP beside CP for one configuration: shapes against the mesh's, sums over ranks, bytes by hand, verdicts by their parts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowledger.config.detect import Asked, read
from flowledger.flow.comm import wire_bytes
from flowledger.plan.ask import Question, make
from flowledger.plan.exchanges import Exchange, exchanges, hardware_of, hiding_rows, operator_rows
from flowledger.plan.job import Job
from flowledger.plan.plan import Plan
from flowledger.plan.sequence import Cut, cuts, degrees_here, names, shapes
from flowledger.plan.sp_vs_cp import compare
from flowledger.tables.gpus import gpu
from flowledger.tables.operators import WAYS

ROOT = Path(__file__).parents[2]
SHARDS = "examples/shards.yaml"
FSDP, MEGATRON = "examples/verl_qwen3_8b_fsdp.sh", "examples/verl_qwen3_235b_megatron.sh"
SP = "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
INPUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (FSDP, ()),
    (FSDP, (f"{SP}4",)),
    (MEGATRON, ()),
    ("examples/tiny.yaml", ()),
    ("examples/tiny.yaml", ("mesh.cp=4", "mesh.tp=2", "mesh.sp=2", "mesh.cp_kind=ring")),
    ("examples/tiny.yaml", ("mesh.cp=2", "mesh.cp_kind=all_to_all")),
    (SHARDS, ()),
)


@cache
def planned(source: str, overrides: tuple[str, ...] = (), device: str | None = "h100") -> Plan:
    return make(read(str(ROOT / source), Asked(overrides=overrides)), Question(gpu=device))


def job_of(plan: Plan) -> Job:
    return plan.jobs[("update_actor", plan.classes[0].name)][1]


def by(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row


@pytest.fixture(params=INPUTS, ids=lambda one: " ".join((Path(one[0]).stem, *one[1])))
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(*request.param)


def test_local_shapes_are_those_of_the_shape_ledger(plan: Plan) -> None:
    """The plan cuts the same tensors by placements on a mesh: another road to the same numbers."""
    found = {row["point"]: row["local_shape"] for row in compare(plan)["shapes"]}
    hidden = [
        row for row in plan.shapes
        if (row.tensor_name, row.stage, row.phase) == ("hidden_states", "update_actor", "forward") and row.dims == "[1, T, H]"
    ]  # fmt: skip
    between = tuple(found["layer input, residual"])
    degree = degrees_here(job_of(plan))["msp"]
    assert hidden and {tuple(row.local_shape) for row in hidden} <= {between, (1, between[1] * degree, between[2])}


def test_the_pieces_of_a_scheme_make_the_whole(plan: Plan) -> None:
    """Elements of all ranks of the group are those of the tensor, where the degree divides; copies are whole multiples."""
    job = job_of(plan)
    document = compare(plan)
    for cut in cuts(job):
        divides = job.tokens % cut.degree == 0 and job.architecture.kv_heads % cut.degree == 0
        for row in document["shapes"] if cut.runs and divides else ():
            if "T_logit" in row["dims"]:
                continue  # which of them are on a rank hangs on where responses begin: planned at the most
            copies = cut.degree * math.prod(row[cut.scheme.name]) / math.prod(row["logical_shape"])
            alone = names(job, cut.alone)["S"] / names(job, degrees_here(job))["S"]  # cp shares no prompts
            assert copies in (alone, cut.degree * alone), row


def test_shapes_by_hand() -> None:
    """Qwen3-235B, 36,864 tokens, tp 4 with sequence parallelism, cp 2: 64 heads and 4 KV heads of 128."""
    document = compare(planned(MEGATRON))
    local = {row["point"]: row["local_shape"] for row in document["shapes"]}
    assert local["layer input, residual"] == [1, 36864 // 8, 4096]
    assert local["input of qkv projection"] == [1, 36864 // 2, 4096]  # gathered over tp, not over cp
    assert local["q in the attention core"] == [1, 36864 // 2, 16, 128]
    assert local["k, v in the core, at once"] == [1, 36864 // 2, 1, 128]
    assert "logits" not in local  # the first of eight pipeline stages


def test_the_head_is_on_the_last_pipeline_stage_and_the_embedding_on_the_first() -> None:
    job = job_of(planned(MEGATRON))
    (cut,) = (cut for cut in cuts(job) if cut.scheme.name == "megatron_sp")
    for at, outer in ((0, {"embedding"}), (3, set()), (7, {"head", "loss"})):
        here = replace(job, pp_rank=at)
        held = {row["operator"] for row in operator_rows(here, cut, None) if row["per"] == "model"}
        assert held == outer
        assert {row["operator"] for row in hiding_rows(here, cut, None) if row["per"] == "model"} == outer
        logits = [row["local_shape"] for row in shapes(here, cuts(here)) if row["point"] == "logits"]
        assert logits == ([[36864 // 2, 151936 // 4]] if at == 7 else [])


ETP = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size="
SMALLER = tuple(
    f"actor_rollout_ref.actor.megatron.{key}"
    for key in (
        "tensor_model_parallel_size=4", "pipeline_model_parallel_size=1", "context_parallel_size=1",
        "expert_model_parallel_size=4", "override_transformer_config.num_layers_in_first_pipeline_stage=null",
        "override_transformer_config.num_layers_in_last_pipeline_stage=null",
    )
)  # fmt: skip


@pytest.mark.parametrize("etp", [None, 1, 2])
def test_experts_are_cut_over_etp_which_is_tp_where_nothing_is_said(etp: int | None) -> None:
    """Qwen3-30B-A3B, 18,432 tokens, tp 4: each tp rank routes 4,608 tokens to 8 experts each, whose width is 768.

    The ranks that share an expert gather what each of them was sent.
    """
    sets = (*SMALLER, "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", f"{ETP}{etp or 'null'}")
    document, shared = compare(planned(MEGATRON, sets)), etp or 4
    local = {row["point"]: row["local_shape"] for row in document["shapes"]}
    assert local["rows at the experts, even routing"] == [4608 * 8 * shared, 2048]
    assert local["inside the experts"] == [4608 * 8 * shared, 768 // shared]
    rows = [row for row in document["rows"] if row["scheme"] == "megatron_sp"]
    gathered = [row["bytes"] for row in rows if row["group"] == "etp" and row["comm_type"] == "all_gather"]
    assert gathered == ([4608 * 8 * shared * 2048 * 2] if shared > 1 else [])
    for row in rows:
        if row["group"] == "ep":
            assert (row["bytes"], row["ranks"], row["used"]) == (4608 * 8 * 2048 * 2, 4, True)


def seen(length: int) -> int:
    """Pairs of a query and a key of one sample under a causal mask, counted out."""
    return sum(range(1, length + 1))


def test_every_scheme_computes_the_same_attention_over_its_ranks(plan: Plan) -> None:
    """Two products, 2 FLOP for each pair and element of a head: 4·pairs·A·D, whoever cuts what."""
    job = job_of(plan)
    model = job.architecture
    samples, shared = job.sequences, job.beside_tokens > 0
    tokens = 48 if shared else -(-job.tokens // samples)
    together = seen(32) + samples * sum(32 + at for at in range(1, 17))  # one prompt of 32, responses of 16 to it
    for row in compare(plan)["rows"]:
        if row["operator"] == "attention core":
            cut = next(cut for cut in cuts(job) if cut.scheme.name == row["scheme"])
            ranks = cut.degrees["tp"] * cut.degrees["sp"] * cut.degrees["cp"]
            pairs = together if shared and cut.degrees["cp"] == 1 else samples * seen(tokens)
            assert row["work"] * ranks == pytest.approx(4 * pairs * model.heads * model.head_dim)


def _own(job: Job, device: str | None = "h100") -> list[tuple[Cut, Exchange]]:
    hardware = hardware_of(job, gpu(device)) if device else None
    return [
        (cut, one) for cut in cuts(job) if cut.runs for one in exchanges(job, cut, hardware) if one.row.scheme != "any"
    ]


def test_pieces_add_up_to_the_work_and_to_the_message(plan: Plan) -> None:
    """A piece for each rank: work of all is the operator's; bytes of those that travel are what the collective sends."""
    job = job_of(plan)
    for cut, one in _own(job):
        exact = job.tokens % (2 * cut.degrees["cp"] * cut.degrees["sp"] * cut.degrees["msp"] * job.sequences) == 0
        for way in WAYS:
            ring = one.ring(way)
            if ring is None or one.chunk is None or not exact:
                continue
            worked_on = {"tp": 1 if way == "backward" else 2}.get(cut.scheme.name, one.ranks)
            assert worked_on * ring.compute_s(one.chunk) == pytest.approx(one.work_s(way))
            travelling = sum((ring.steps + m.waits) * one.at(m.piece, one.chunk) for m in one.messages(way))
            assert travelling == pytest.approx(one.wire(way), abs=1)


def test_a_gather_and_a_scatter_move_what_the_all_reduce_of_plain_tp_does() -> None:
    rows = compare(planned(MEGATRON))["rows"]
    sent = [
        row["wire_bytes"] for row in rows
        if row["scheme"] == "megatron_sp" and row["operator"] in ("qkv projection", "output projection")
    ]  # fmt: skip
    assert len(sent) == 2 and sum(sent) == wire_bytes("all_reduce", 18432 * 4096 * 2, 4)


def test_bytes_by_hand() -> None:
    """Qwen3-8B in bfloat16, sp 4, whose ranks have a budget of 18,432 tokens each: 32 heads, 8 KV heads of 128."""
    rows = compare(planned(FSDP, (f"{SP}4",)))["rows"]
    tokens = 18432
    before = by(rows, scheme="ulysses", operator="attention core", when="before")
    after = by(rows, scheme="ulysses", operator="attention core", when="after")
    assert before["bytes"] == tokens * (32 + 2 * 8) * 128 * 2 and after["bytes"] == tokens * 32 * 128 * 2
    assert before["used"] and before["group"] == "sp" and before["ranks"] == 4
    assert (before["forward"][0]["messages"], after["forward"][0]["messages"]) == (3, 1)  # q, k and v
    ring = by(rows, scheme="cp_ring", operator="attention core")
    assert ring["bytes"] == 3 * tokens * 2 * 8 * 128 * 2 and not ring["used"]
    assert by(rows, scheme="ulysses", operator="norm")["runs"] == "local"


def test_kv_heads_fewer_than_ranks_are_repeated() -> None:
    """8 KV heads: over sp 16 each rank gets one, and 16 are sent; over sp 3 each gets 8 of 24, over sp 6 4 of 24."""
    job = job_of(planned(FSDP, (f"{SP}4",)))
    (cut,) = (cut for cut in cuts(job) if cut.scheme.name == "ulysses")
    for sp, sent, each in ((4, 8, 2), (16, 16, 1), (3, 24, 8), (6, 24, 4)):
        bound = names(job, {**cut.degrees, "sp": sp})
        assert bound["kv_sent"] == 2 * sent * 128 and bound["kv_core"] == 2 * each * 128 and bound["k_core"] == each


def test_the_verdict_is_the_conjunction_of_the_four_parts(plan: Plan) -> None:
    rows = compare(plan)["hiding"]
    assert rows
    for row in rows:
        parts = (row["splits_by_chunk"], row["global_context"] != "whole", row["pipelined"], row["holds"] is not False)
        assert (row["verdict"] != "exposed") == all(parts)
        assert len(row["failing"]) == parts.count(False)
        if row["verdict"] == "hidden":
            assert row["compute_s"] >= row["comm_s"] and row["exposed_s"] == 0
            assert row["chunk"] >= row["break_even_chunk"]
        else:
            assert row["exposed_s"] > 0
        # what nobody has switched on goes in one piece, and is exposed whole
        wanted = row["exposed_s"] if row["switched_on"] else _whole_s(plan, row)
        assert row["exposed_here_s"] == pytest.approx(wanted)


def _whole_s(plan: Plan, row: dict[str, Any]) -> float:
    job = job_of(plan)
    hardware = hardware_of(job, gpu("h100"))
    same = (row["operator"], row["when"], row["group"])
    for cut in cuts(job):
        for one in exchanges(job, cut, hardware) if cut.runs else ():
            if row["scheme"] == one.row.scheme and same == (one.row.operator, one.row.when, one.group):
                whole = one.whole_s(row["direction"])
                assert whole is not None
                return whole
    raise AssertionError(row)


def test_an_exchange_of_heads_fails_by_its_context_and_a_ring_only_by_the_inequality() -> None:
    rows = compare(planned(FSDP, (f"{SP}4",)))["hiding"]
    for row in rows:
        if row["operator"] == "attention core":
            whole = row["scheme"] in ("ulysses", "cp_all_to_all")
            assert ("needs global context at once" in row["failing"]) == whole
    short = compare(planned("examples/tiny.yaml", ("mesh.cp=2",)))["hiding"]
    ring = by(short, scheme="cp_ring", operator="attention core", direction="forward")
    assert ring["failing"] == ["T_compute(chunk) < T_comm(chunk)"]  # 12 tokens do not hide a handshake


def test_the_bandwidth_that_is_asked_for_makes_both_times_equal() -> None:
    job = job_of(planned(MEGATRON))
    for cut, one in _own(job):
        rows = hiding_rows(job, cut, hardware_of(job, gpu("h100")))
        found = {(row["operator"], row["when"], row["direction"]): row for row in rows}
        row, ring = found[one.row.operator, one.row.when, "forward"], one.ring("forward")
        if ring and one.chunk and row["needs_bytes_per_s"]:
            size = one.at(one.messages("forward")[0].piece, one.chunk)
            assert ring.comm_s(0) + size / row["needs_bytes_per_s"] == pytest.approx(row["compute_s"])


def test_without_a_device_there_are_bytes_and_no_times() -> None:
    document = compare(planned("examples/tiny.yaml", device=None))
    assert document["hardware"] is None and document["chunks"] == [] and "no device" in document["notes"][0]
    assert all(row["compute_s"] is None and row["comm_s"] is None for row in document["hiding"])
    assert {row["verdict"] for row in document["hiding"]} == {None, "exposed"}
    assert all(row["exposed_here_s"] is None for row in document["hiding"])
