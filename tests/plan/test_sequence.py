"""SP beside CP for one configuration: shapes against the mesh's, sums over ranks, bytes by hand, verdicts by their parts."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowledger.config.detect import Asked, read
from flowledger.flow.comm import wire_bytes
from flowledger.plan.ask import Question, make
from flowledger.plan.exchanges import exchanges
from flowledger.plan.job import Job
from flowledger.plan.overlap import Hardware
from flowledger.plan.plan import Plan
from flowledger.plan.sequence import Cut, cuts, degrees_here, names
from flowledger.plan.sp_vs_cp import compare
from flowledger.tables.gpus import gpu
from flowledger.tables.operators import communications, operators

ROOT = Path(__file__).parents[2]
FSDP, MEGATRON = "examples/verl_qwen3_8b_fsdp.sh", "examples/verl_qwen3_235b_megatron.sh"
SP = "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
INPUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (FSDP, ()),
    (FSDP, (f"{SP}4",)),
    (MEGATRON, ()),
    ("examples/tiny.yaml", ()),
    ("examples/tiny.yaml", ("mesh.cp=4", "mesh.tp=2", "mesh.sp=2", "mesh.cp_kind=ring")),
    ("examples/tiny.yaml", ("mesh.cp=2", "mesh.cp_kind=all_to_all")),
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
            copies = cut.degree * math.prod(row[cut.scheme.name]) / math.prod(row["logical_shape"])
            assert copies in (1, cut.degree), row


def test_shapes_by_hand() -> None:
    """Qwen3-235B, 36,864 tokens, tp 4 with sequence parallelism, cp 2: 64 heads and 4 KV heads of 128."""
    document = compare(planned(MEGATRON))
    local = {row["point"]: row["local_shape"] for row in document["shapes"]}
    assert local["layer input, residual"] == [1, 36864 // 8, 4096]
    assert local["input of qkv projection"] == [1, 36864 // 2, 4096]  # gathered over tp, not over cp
    assert local["q in the attention core"] == [1, 36864 // 2, 16, 128]
    assert local["k, v in the core, at once"] == [1, 36864 // 2, 1, 128]
    assert local["logits"] == [1, 36864 // 2, 151936 // 4]
    ring = by(document["schemes"], scheme="cp_ring")
    assert ring["first_rank"] == [[0, 4607], [13824, 18431]]  # quarters 0 and 3 of a sample of 18,432
    assert ring["last_rank"] == [[4608, 9215], [9216, 13823]]
    assert by(document["schemes"], scheme="megatron_sp")["last_rank"] == [[13824, 18431]]


def test_every_scheme_computes_the_same_attention_over_its_ranks(plan: Plan) -> None:
    """Two products over the causal half of s² pairs, 2 FLOP each: 2·s²·A·D a sample, whoever cuts what."""
    job = job_of(plan)
    model = job.architecture
    samples, tokens = job.sequences, -(-job.tokens // job.sequences)
    whole = 2.0 * samples * tokens**2 * model.heads * model.head_dim
    for row in compare(plan)["rows"]:
        if row["operator"] == "attention core":
            cut = next(cut for cut in cuts(job) if cut.scheme.name == row["scheme"])
            ranks = cut.degrees["tp"] * cut.degrees["sp"] * cut.degrees["cp"]
            assert row["work"] * ranks == pytest.approx(whole)


def _own(job: Job, hardware: Hardware) -> list[tuple[Cut, Any]]:
    return [
        (cut, one) for cut in cuts(job) if cut.runs for one in exchanges(job, cut, hardware) if one.row.scheme != "any"
    ]


def test_pieces_add_up_to_the_operator_and_to_the_message(plan: Plan) -> None:
    """A piece for each rank: work of all is the operator's; bytes of those that travel are the ring's traffic."""
    job = job_of(plan)
    for cut, one in _own(job, Hardware(gpu("h100"), 8)):
        exact = job.tokens % (cut.degrees["cp"] * cut.degrees["sp"] * cut.degrees["msp"] * job.sequences) == 0
        if one.cut and exact:
            work = next(row.work for row in operators() if row.name == one.row.operator)
            assert one._at(one.row.chunk_work, one.chunk) * one.ranks == pytest.approx(one._at(work, 0))
            travelling = one._at(one.row.chunk_bytes, one.chunk) * (one.ranks - 1)
            assert travelling == pytest.approx(wire_bytes(one.row.comm_type, one.bytes, one.ranks))


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
    ring = by(rows, scheme="cp_ring", operator="attention core")
    assert ring["bytes"] == 3 * tokens * 2 * 8 * 128 * 2 and not ring["used"]
    assert by(rows, scheme="ulysses", operator="norm")["runs"] == "local"


def test_kv_heads_fewer_than_ranks_are_repeated() -> None:
    """8 KV heads over sp 16: each rank gets one of them, so 16 are sent."""
    job = job_of(planned(FSDP, (f"{SP}4",)))
    (cut,) = (cut for cut in cuts(job) if cut.scheme.name == "ulysses")
    bound = names(job, {**cut.degrees, "sp": 16})
    assert bound["kv_sent"] == 2 * 16 * 128 and bound["kv_core"] == 2 * 128


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
    job, hardware = job_of(planned(MEGATRON)), Hardware(gpu("h100"), 8)
    rows = {(row["operator"], row["direction"]): row for row in compare(planned(MEGATRON))["hiding"]}
    for _, one in _own(job, hardware):
        row = rows[(one.row.operator, "forward")]
        if one.cut and row["needs_bytes_per_s"]:
            link = one.link()
            time = link.latency_s() + one._at(one.row.chunk_bytes, one.chunk) / row["needs_bytes_per_s"]
            assert time == pytest.approx(row["compute_s"])


def test_without_a_device_there_are_bytes_and_no_times() -> None:
    document = compare(planned("examples/tiny.yaml", device=None))
    assert document["hardware"] is None and document["chunks"] == [] and "no device" in document["notes"][0]
    assert all(row["compute_s"] is None and row["comm_s"] is None for row in document["hiding"])
    assert {row["verdict"] for row in document["hiding"]} == {None, "exposed"}


def test_the_table_names_what_exists() -> None:
    known = {one.name for one in operators()}
    for row in communications():
        assert row.operator in known and (row.hidden_by or row.operator) in known
        assert bool(row.chunk) == bool(row.chunk_bytes) == bool(row.chunk_work)
        assert row.why and row.why_zh and row.context in ("token", "blocks", "whole")
