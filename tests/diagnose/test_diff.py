"""A plan beside a run: one launch agrees with itself, another setting does not, and every judgement is checked by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowledger.config.foreign import Reading
from flowledger.config.schema import RunConfig
from flowledger.diagnose import planned, sizes
from flowledger.diagnose.came_true import NOT_REACHED, OPEN, REFUTED, TRUE, Course, outcomes
from flowledger.diagnose.diff import Diff, diff, document, verdict
from flowledger.diagnose.shape_pairs import join
from flowledger.diagnose.sizes import EQUAL, EXPLAINED, UNEQUAL, Leeway, Seen, judge
from flowledger.flow.errors import BadInput
from flowledger.ledger import directory, manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, Row, SpanRow, TensorRow
from flowledger.ledger.writer import Writer
from flowledger.plan.ask import Question, make
from flowledger.plan.document import document as planned_document
from tests.plan import spread_runs
from tests.run.worlds import config

# Two prompts of three samples each, responses of at most 8 tokens, micro-batches of two.
SAME = {
    "steps": 2, "ref": {"path": "start"}, "algorithm": {"kl_coef": 0.1}, "actor": {"micro_batch": {"samples": 2}},
}  # fmt: skip


def launch(**changes: Any) -> RunConfig:
    made = dict(SAME)
    for section, value in changes.items():
        made[section] = {**made.get(section, {}), **value} if isinstance(value, dict) else value
    return config(**made)


def beside(made: RunConfig, run: Ledger) -> Diff:
    """The plan of a configuration beside a run."""
    return diff(planned.read(planned_document(make(Reading(config=made), Question())), "it"), run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rewards_here: None) -> Iterator[Ledger]:
    """Two steps of one process, watched operator by operator."""
    path = tmp_path_factory.mktemp("diff") / "alone"
    spread_runs.module("shapes_agree").record(launch(), path)
    with Ledger(path) as ledger:
        yield ledger


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, rewards_here: None) -> Iterator[Ledger]:
    """The same on two data-parallel ranks, three prompts for both: rank 0 samples eight responses, rank 1 four."""
    path = tmp_path_factory.mktemp("diff") / "two"
    made = spread_runs.config("dp2")
    spread_runs.module("forked").ranks(2, spread_runs.module("shapes_agree").record, made, path)
    with Ledger(path) as ledger:
        yield ledger


# ------------------------------------------------------------------------------------------------------ the same launch


def test_a_run_and_the_plan_of_its_launch_agree(alone: Ledger) -> None:
    found = beside(launch(), alone)
    assert found.agrees and found.counts[UNEQUAL] == 0 and found.only_recorded == []
    assert verdict(found).startswith(f"plan and run agree: {found.counts[EQUAL]} shapes equal")
    forms = {(pair.stage, pair.tensor_name, pair.dims): pair for pair in found.pairs}
    equal = forms["rollout", "response_ids", "B_prompt*G, S_resp"]
    assert (equal.outcome, equal.planned.local_shape, equal.largest) == (
        EQUAL,
        [6, 8],
        (6, 8),
    )  # 2 prompts * 3, 8 tokens
    shorter = forms["prompt", "prompt_ids", "B_prompt, S_prompt"]
    assert shorter.outcome == EXPLAINED and shorter.planned.local_shape == [2, 32] and shorter.largest[1] < 32
    assert shorter.why == (f"prompts have at most {shorter.largest[1]} tokens, the limit is 32",)
    assert forms["update_actor", "new_log_prob", "B_micro, S_resp"].largest == (2, 8)


def test_two_ranks_with_uneven_parts_agree_rank_by_rank(two: Ledger) -> None:
    found = beside(spread_runs.config("dp2"), two)
    assert found.agrees, [(pair.stage, pair.tensor_name, pair.why) for pair in found.pairs if pair.outcome == UNEQUAL]
    sampled = [pair for pair in found.pairs if (pair.stage, pair.tensor_name) == ("rollout", "response_ids")]
    assert {pair.ranks: pair.largest[0] for pair in sampled} == {"0": 8, "1": 4}
    assert {tuple(pair.planned.logical_shape or ()) for pair in sampled} == {(12, 8)}
    assert [row["tensor_name"] for row in found.only_recorded] == ["kl_loss"]  # no reference, and no KL is planned


def test_what_is_only_planned_has_a_reason(alone: Ledger) -> None:
    why = {(row["stage"], row["tensor_name"], row["dims"]): row["why"] for row in beside(launch(), alone).only_planned}
    assert all(why.values())
    assert why["update_actor", "full_sequence", "1, T"].startswith("met there in another form, [B_micro, ")
    assert why["update_actor", "activations", "1, T, H"].startswith("recorded as sums")
    assert "it was seen in" in why["filter", "reward", "B_prompt*G"]


def test_a_tensor_that_is_planned_for_operators_is_missed_where_none_was_watched(tmp_path: Path) -> None:
    rows = [
        span("rollout"),
        span("update_actor"),
        TensorRow(
            tensor_name="advantages",
            stage="update_actor",
            step=0,
            dims="B_micro, S_resp",
            local_shape=[2, 8],
            dtype="float32",
        ),
    ]
    told = plan(
        shapes=[
            shape("hidden_states", "update_actor", "[1, T, H]", [1, 16, 32]),
            shape("values", "values", "[B_prompt*G, S_resp]", [6, 8]),
        ]
    )
    found = compare(told, book(tmp_path / "run", rows))
    assert [row["why"] for row in found.only_planned] == [
        "seen only in steps that are watched operator by operator", "flowledger has no such stage that is watched",
    ]  # fmt: skip
    assert [row["why"] for row in found.only_recorded] == ["no part of this plan"]
    assert found.no_peaks.endswith("no step was watched operator by operator (record.ops_every, --ops-every)")
    cut = compare(told, book(tmp_path / "cut", rows, state="crashed"))
    assert cut.only_planned[1]["why"] == "the run did not come to this stage"


def test_a_run_without_tensors_has_no_shape_and_no_memory(tmp_path: Path) -> None:
    told = plan(shapes=[shape("advantages", "update_actor", "[B_micro, S_resp]", [2, 8])])
    found = compare(told, book(tmp_path / "run", [span("update_actor")], level="steps"))
    assert [row["why"] for row in found.only_planned] == ["tensors are not recorded at level steps"]
    assert found.no_peaks == "the run was recorded at level steps, without memory by kind"
    assert found.agrees and verdict(found) == "nothing that plan and run both have differs, and no shape is in both"


# ------------------------------------------------------------------------------------------------------- another launch


def test_another_group_size_is_unequal_wherever_samples_are_counted(alone: Ledger) -> None:
    found = beside(launch(rollout={"samples_per_prompt": 4, "max_response_tokens": 8}), alone)
    assert ("G", 4, 3) in found.settings and ("B_prompt*G", 8, 6) in found.settings and not found.agrees
    of_samples = [pair for pair in found.pairs if "B_prompt*G" in pair.dims]
    assert len(of_samples) > 20 and {pair.outcome for pair in of_samples} == {UNEQUAL}
    assert {pair.outcome for pair in found.pairs if pair.dims == "P"} == {EQUAL}
    assert verdict(found).startswith("plan and run differ: ") and "G 4 planned and 3 in the run" in verdict(found)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"actor": {"micro_batch": {"samples": 3}}}, "B_micro is at most 2, planned is 3"),
        ({"actor": {"micro_batch": {"samples": 1}}}, "B_micro is at most 2, planned is 1"),
        ({"actor": {"packed": False}}, "in the form [1, T, H], planned is [B_micro, S, H]"),
        ({"actor": {"log_prob_chunk_tokens": 4}}, "T_logit is up to 16, above the planned limit of 4"),
        ({"rollout": {"max_response_tokens": 16, "samples_per_prompt": 3}}, "the limit of S_resp is 16 in the plan and 8 in the run"),
        ({"rollout": {"max_running": 4, "samples_per_prompt": 3, "max_response_tokens": 8}}, "B_slot is at most 6, planned is 4"),
        ({"model": {"dtype": "bfloat16"}}, "dtype float32, planned bfloat16"),
    ],
)  # fmt: skip
def test_another_setting_is_unequal_where_it_acts(alone: Ledger, changes: dict[str, Any], first: str) -> None:
    found = beside(launch(**changes), alone)
    assert not found.agrees
    assert first in {word for pair in found.pairs if pair.outcome == UNEQUAL for word in pair.why}


def test_another_mesh_is_unequal_and_said_first(alone: Ledger, two: Ledger) -> None:
    found = beside(launch(mesh={"dp": 2}), alone)
    assert found.settings[0] == ("mesh.dp", 2, 1) and not found.agrees
    one = spread_runs.config("dp2").model_copy(update={"mesh": launch().mesh})
    found = beside(one, two)
    assert found.settings[0] == ("mesh.dp", 1, 2)
    parts = [pair for pair in found.pairs if (pair.stage, pair.dims) == ("old_log_prob", "B_prompt*G, S_resp")]
    assert parts and {pair.outcome for pair in parts} == {UNEQUAL}  # 6 of 12 samples on each rank, 12 planned


def test_the_mesh_is_that_of_the_ranks_where_a_process_beside_them_has_made_the_run(alone: Ledger, two: Ledger) -> None:
    made = two.directory
    two.directory = replace(made, manifest=structs.replace(made.manifest, mesh={"dp": 1}))  # as a launcher knows it
    try:
        found = beside(spread_runs.config("dp2"), two)
    finally:
        two.directory = made
    assert found.settings == [] and found.manifest["mesh"]["dp"] == 2


def test_a_plan_of_another_model_or_framework_is_bad_input(alone: Ledger) -> None:
    tiny = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}
    with pytest.raises(
        BadInput, match="different models: H is 64 in the plan and 32 in the run, D is 16 in the plan and 8"
    ):
        beside(launch(model={"tiny": tiny}), alone)
    with pytest.raises(BadInput, match="different models: L is 3 in the plan and 2 in the run"):
        beside(launch(model={"tiny": {**tiny, "hidden_size": 32, "layers": 3}}), alone)
    with pytest.raises(BadInput, match=r"the plan is of trl and .*alone of flowledger"):
        diff(plan(framework="trl"), alone)


# -------------------------------------------------------------------------------------------------- one size, by hand


def seen(dims: str, low: Sequence[int], high: Sequence[int] | None = None, **known: Any) -> Seen:
    facts: dict[str, Any] = {
        "stage": "update_actor", "tensor_name": "response_ids", "access": "read", "layer": None, "rank": 0, "placement": None,
        "dtype": "int64", "padding": None, "logical": None,
    }  # fmt: skip
    return Seen(dims=dims, smallest=tuple(low), largest=tuple(high or low), **facts | known)


def row(dims: str, local: Sequence[int], logical: Sequence[int] | None = None, **known: Any) -> TensorRow:
    facts: dict[str, Any] = {"tensor_name": "response_ids", "dtype": "int64", "kind": "batch"}
    return TensorRow(dims=f"[{dims}]", local_shape=list(local), logical_shape=list(logical or local), **facts | known)


B = "B_prompt*G, S_resp"
FOREIGN = Leeway(named=False, pads=True, group=3, longest=88)


@pytest.mark.parametrize(
    ("one", "other", "leeway", "outcome", "word"),
    [
        (row(B, [6, 8]), seen(B, [6, 8]), Leeway(), EQUAL, ""),
        (row(B, [6, 8]), seen(B, [6, 5], [6, 7]), Leeway(), EXPLAINED, "responses have at most 7 tokens, the limit is 8"),
        (row(B, [6, 8]), seen(B, [6, 5], [6, 8]), Leeway(), EXPLAINED, "S_resp is 8, its limit, where it is full, else down to 5"),
        (row(B, [6, 8]), seen(B, [6, 9]), Leeway(), UNEQUAL, "S_resp is up to 9, above the planned limit of 8"),
        (row(B, [6, 22]), seen(B, [6, 24]), FOREIGN, EXPLAINED, "22 padded to a multiple of 4"),
        (row(B, [6, 22]), seen(B, [6, 24]), Leeway(), UNEQUAL, "S_resp is up to 24, above the planned limit of 22"),
        (row(B, [6, 8]), seen(B, [5, 8], [6, 8]), Leeway(), UNEQUAL, "B_prompt*G is 5 to 6, planned is 6"),
        (row("B_micro", [4]), seen("B_micro", [2], [4]), Leeway(), EXPLAINED, "B_micro is 4 where it is full, else down to 2"),
        (row("B_micro", [4]), seen("B_micro", [2]), Leeway(), UNEQUAL, "B_micro is at most 2, planned is 4"),
        (row("B_micro", [4]), seen("B_micro", [2]), Leeway(dropped=1), UNEQUAL, "B_micro is at most 2, planned is 4"),
        (row("B_micro", [4]), seen("B_micro", [2]), Leeway(dropped=2), EXPLAINED, "2 samples were dropped, micro-batches have at most 2"),
        (row("B_micro", [4]), seen("B_micro", [6]), Leeway(dynamic=frozenset({"update_actor"})), EXPLAINED, "micro-batches are filled with tokens: 6 samples in one"),
        (row("B_prompt, S_prompt", [2, 8]), seen("B_prompt, S_prompt", [6, 8]), FOREIGN, EXPLAINED, "each prompt stands there 3 times, once for each of its samples"),
        (row("B_prompt", [2]), seen("B_prompt", [4]), FOREIGN, UNEQUAL, "B_prompt is 4, planned is 2"),
        (row(B, [6, 8]), seen(B, [6, 8], dtype="int32"), Leeway(), EXPLAINED, "dtype int32, planned int64"),
        (row("P", [9], tensor_name="params", kind="param", dtype="bfloat16"), seen("P", [9], tensor_name="params", dtype="float32"), Leeway(), UNEQUAL, "dtype float32, planned bfloat16"),
        (row(B, [6, 8], padding="right"), seen(B, [6, 7], padding="jagged"), FOREIGN, EXPLAINED, "jagged: each sample has its own length instead of padding"),
        (row("B_micro, S_resp", [4, 24]), seen("B_micro, S_resp", [4, 36], [4, 52], padding="jagged"), FOREIGN, EXPLAINED, "over whole samples, prompts too: at most 52 tokens of 88"),
        (row("B_micro, S_resp", [4, 24]), seen("B_micro, S_resp", [4, 90], padding="jagged"), FOREIGN, UNEQUAL, "S_resp is up to 90, above the planned limit of 24"),
        (row(B, [3, 8], [6, 8]), seen(B, [6, 8], rank=None), FOREIGN, EXPLAINED, "whole in a process that is no rank, not cut"),
        (row(B, [3, 8], [6, 8]), seen(B, [6, 8], logical=(6, 8)), Leeway(), EXPLAINED, "whole on each rank, not cut"),
        (row(B, [3, 8], [6, 8]), seen(B, [6, 8], logical=(12, 8)), Leeway(), UNEQUAL, "B_prompt*G is 6, planned is 3"),
        (row("B_micro", [2], [4]), seen("B_micro", [4], logical=(8,)), Leeway(), UNEQUAL, "B_micro is at most 4, planned is 2"),
        (row(B, [6, 8]), seen(B, [1, 8], rank=None), FOREIGN, EXPLAINED, "handed on in parts, 1 of 6 at a time"),
        (row(B, [3, 8], [6, 8], placement=["dp: Shard(0)"]), seen(B, [3, 8], placement=("tp: Shard(0)",)), Leeway(), UNEQUAL, "placed tp: Shard(0), planned dp: Shard(0)"),
        (row(B, [3, 8], [6, 8], placement=["dp: Shard(0)"]), seen(B, [3, 8], placement=()), FOREIGN, EQUAL, ""),
        (row("T_logit", [4], [12], placement=["sp: Shard(0)"]), seen("T_logit", [9]), Leeway(), EXPLAINED, "fewer tokens than the limit: 9 of 12"),
        (row("T_logit", [4], [12], placement=["dp: Shard(0)"]), seen("T_logit", [9]), Leeway(), UNEQUAL, "T_logit is up to 9, above the planned limit of 4"),
        (row("S_prompt + S_resp", [40]), seen("S_prompt + S_resp", [30]), Leeway(), EXPLAINED, "samples have at most 30 tokens, the limit is 40"),
        (row("S_resp", [8]), seen("S_resp", [4]), Leeway(limits={"S_resp": (8, 4)}), UNEQUAL, "the limit of S_resp is 8 in the plan and 4 in the run"),
    ],
)  # fmt: skip
def test_one_size(one: TensorRow, other: Seen, leeway: Leeway, outcome: str, word: str) -> None:
    judged = judge(one, other, leeway)
    assert judged.outcome == outcome
    assert word in judged.why if word else judged.why == ()


def test_every_symbol_that_data_decide_has_words() -> None:
    assert all("{seen}" in text and "{planned}" in text for text in sizes.UP_TO.values())


def test_a_part_on_the_wrong_rank_is_unequal() -> None:
    """Eight samples were planned for rank 0 and four for rank 1."""
    parts = [
        row(B, [size, 8], [12, 8], stage="rollout", rank=rank, rank_count=1, placement=["dp: Shard(0)"])
        for rank, size in ((0, 8), (1, 4))
    ]  # fmt: skip
    for sizes_of_ranks, outcome in (((8, 4), EQUAL), ((4, 8), UNEQUAL)):
        there = [
            seen(B, [size, 8], stage="rollout", rank=rank, placement=("dp: Shard(0)",))
            for rank, size in enumerate(sizes_of_ranks)
        ]
        assert {(pair.ranks, pair.outcome) for pair in join(parts, there, Leeway()).pairs} == {
            ("0", outcome),
            ("1", outcome),
        }


# ----------------------------------------------------------------------------- plans and runs that are written by hand


def plan(*, framework: str = "flowledger", shapes: Sequence[dict[str, Any]] = (), **parts: Any) -> planned.Planned:
    summary = {"framework": framework, "model": "any", "world": 1, "mesh": {"dp": 1}}
    told = {
        "schema": 1,
        "verb": "plan",
        "run": "hand",
        "summary": summary,
        "chain": [],
        "checks": [],
        "rows": [],
        "shapes": list(shapes),
    }
    return planned.read(told | parts, "it")


def shape(name: str, stage: str, dims: str, local: Sequence[int], **known: Any) -> dict[str, Any]:
    facts = {
        "tensor_name": name,
        "stage": stage,
        "dims": dims,
        "local_shape": list(local),
        "logical_shape": list(local),
    }
    return facts | {"dtype": "float32", "rank": 0, "rank_count": 1, "placement": [], "access": "write"} | known


def span(stage: str | None, number: int = 0, ended: bool = True) -> SpanRow:
    return SpanRow(
        id=number,
        event="whole" if ended else "begin",
        name=stage or "step",
        span_kind="stage",
        stage=stage,
        step=0,
        start_ns=0,
        end_ns=9 if ended else None,
    )


def book(path: Path, rows: Sequence[Row], *, state: str = "closed", **known: Any) -> Path:
    made = directory.create(path, manifest.Manifest(run="hand", **known))
    ink = Writer(made.part("actor", 0, device=known.get("device", "cpu")))
    for number, one in enumerate(rows):
        one.rank = 0
        if isinstance(one, SpanRow):
            one.id = number
        ink.put(one)
    ink.close()
    made.close(state)
    return path


def compare(told: planned.Planned, run: Path) -> Diff:
    with Ledger(run) as ledger:
        return diff(told, ledger)


def test_forms_of_another_framework_are_matched_by_their_sizes_and_not_by_guessed_names(tmp_path: Path) -> None:
    """As a run of TRL's trainer had them: 16 rows of prompts, and a mask whose dimensions were guessed from its size."""
    forms = [
        shape("prompt_ids", "prompt", "[B_prompt, S_prompt]", [4, 512], dtype="int64"),
        shape("attention_mask", "ref_log_prob", "[B_micro, S_prompt + S_resp]", [8, 536], dtype="int64"),
        shape("attention_mask", "ref_log_prob", "[B_prompt*G, S_prompt + S_resp]", [16, 536], dtype="int64"),
        shape("advantage", "advantage", "[B_prompt*G]", [16]),
    ]  # fmt: skip
    rows = [
        span(None),
        TensorRow(tensor_name="prompt_ids", stage="prompt", step=0, dims="B_prompt, S_prompt", local_shape=[16, 28], dtype="int64"),
        TensorRow(tensor_name="attention_mask", stage="ref_log_prob", step=0, dims="B_prompt, S_prompt", local_shape=[16, 52], dtype="int64"),
        TensorRow(tensor_name="advantage", stage="update_actor", step=0, dims="B_prompt*G", local_shape=[8], dtype="float32"),
    ]  # fmt: skip
    found = compare(plan(framework="trl", shapes=forms), book(tmp_path / "run", rows, framework="trl"))
    assert {(pair.tensor_name, pair.dims, pair.outcome) for pair in found.pairs} == {
        ("prompt_ids", "B_prompt, S_prompt", EXPLAINED), ("attention_mask", "B_prompt*G, S_prompt + S_resp", EXPLAINED),
    }  # fmt: skip
    assert "each prompt stands there 4 times, once for each of its samples" in found.pairs[0].why
    assert found.agrees and [row["why"] for row in found.only_recorded] == ["planned in advantage, not there"]


def peak(stage: str, step: str, rank: int = 0, count: int = 1, **kinds: int) -> dict[str, Any]:
    of = dict.fromkeys(
        ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue"), 0
    )
    return (
        of
        | {
            "step": step,
            "stage": stage,
            "ranks": "all",
            "rank": rank,
            "rank_count": count,
            "allocated": sum(kinds.values()),
            "instant": "x",
        }
        | kinds
    )


def test_peaks_stand_beside_each_other_by_kind_and_the_residue_does_not_count(tmp_path: Path) -> None:
    told = plan(
        rows=[
            peak("update_actor", "first", param=100, activation=50, residue=7),
            peak("update_actor", "later", param=100, optimizer=200),
            peak("rollout", "first", param=1),
        ]
    )
    readings = [
        (0, "param", 100),
        (0, "activation", 20),
        (1, "param", 100),
        (1, "optimizer", 150),
        (2, "param", 90),
        (2, "optimizer", 100),
    ]
    rows = [
        span(None),
        *(
            MemoryRow(step=step, stage="update_actor", instant="peak", kind=kind, allocated=size)
            for step, kind, size in readings
        ),
    ]
    found = compare(told, book(tmp_path / "run", rows)).peaks
    assert [(one.stage, one.step, one.planned_total, one.recorded_total) for one in found] == [
        ("update_actor", "first", 150, 120), ("update_actor", "later", 300, 250),  # of steps 1 and 2 the fuller
    ]  # fmt: skip
    assert found[0].difference == pytest.approx(0.25) and found[1].difference == pytest.approx(0.2)
    assert found[1].recorded["optimizer"] == 150 and found[1].planned["optimizer"] == 200


def test_of_an_accelerator_the_allocator_is_compared_where_no_operator_was_watched(tmp_path: Path) -> None:
    told = plan(rows=[peak("update_actor", "first", param=100, residue=30)])
    rows = [
        span(None),
        MemoryRow(step=0, stage="update_actor", instant="end", kind="total", allocated=60, peak_since_stage=80),
    ]
    made = directory.create(tmp_path / "run", manifest.Manifest(run="hand"))
    ink = Writer(made.part("actor", 0, device="cuda:0"))
    for one in rows:
        ink.put(one)
    ink.close()
    (found,) = compare(told, tmp_path / "run").peaks
    assert (found.planned_total, found.recorded_total, found.recorded) == (100, 80, {})


def failing(fires_at: str | None, **known: Any) -> dict[str, Any]:
    return {"id": "verl.R5", "verdict": "fail", "message": "is not divisible", "fires_at": fires_at} | known


def failed(stage: str | None, message: str) -> FindingRow:
    return FindingRow(id="call_failed", verdict="fail", stage=stage, message=message)


WAITED = failing(None, id="memory.kv_pool", verdict="warn")


@pytest.mark.parametrize(
    ("check", "ended", "failure", "outcome", "why"),
    [
        (failing("first_update"), ["rollout", "update_actor"], None, REFUTED, "the run went through update_actor"),
        (failing("first_update"), ["rollout"], failed("update_actor", "boom"), TRUE, "boom"),
        (failing("first_update"), ["rollout"], failed(None, "rank 1 died"), TRUE, "rank 1 died"),
        (failing("first_update"), [], failed("rollout", "oh"), NOT_REACHED, "the run failed before, in rollout: oh"),
        (failing("first_update"), ["rollout"], None, NOT_REACHED, "the run has not ended update_actor"),
        (failing("first_rollout"), ["rollout"], None, REFUTED, "the run went through rollout"),
        (failing("worker_start"), ["rollout"], None, REFUTED, "the run came to its steps"),
        (failing("long_sample"), ["rollout"], None, OPEN, "no sign of it so far"),
        (failing("long_sample"), [], failed("rollout", "oh"), OPEN, "the run failed in rollout: oh"),
        (failing("first_update", verdict="warn"), ["update_actor"], None, OPEN, "a warning, which no stage shows by failing"),
    ],
)  # fmt: skip
def test_checks_that_came_true(
    check: dict[str, Any], ended: list[str], failure: FindingRow | None, outcome: str, why: str
) -> None:
    run = Course(ended=frozenset(ended), failed=failure, metrics={})
    assert [(one.outcome, one.why) for one in outcomes([FindingRow(**check)], run)] == [(outcome, why)]


@pytest.mark.parametrize(("most", "outcome", "why"), [(3.0, TRUE, "was up to 3"), (0.0, REFUTED, "was never above 0")])
def test_samples_that_wait_are_what_a_small_pool_was_warned_of(most: float, outcome: str, why: str) -> None:
    run = Course(ended=frozenset(), failed=None, metrics={"rollout/waiting": most})
    assert [(one.outcome, one.why) for one in outcomes([FindingRow(**WAITED)], run)] == [
        (outcome, f"rollout/waiting {why}")
    ]


def test_what_held_is_no_outcome_and_failures_come_first() -> None:
    checks = [WAITED, {"id": "x", "verdict": "pass", "message": "held"}, failing("runtime")]
    found = outcomes([FindingRow(**one) for one in checks], Course(ended=frozenset(), failed=None, metrics={}))
    assert [one.check.verdict for one in found] == ["fail", "warn"]


def test_the_course_of_a_run_is_read_from_its_ledger(tmp_path: Path) -> None:
    """A law that is broken ends no run; an announced failure that stayed away is a difference."""
    rows: list[Row] = [
        span("rollout"), span("update_actor", ended=False), MetricRow(name="rollout/waiting", raw_name="w", value=2.0, step=0),
        FindingRow(id="shapes_conserved", order="laws", verdict="fail", message="a law"), failed("update_actor", "boom"),
    ]  # fmt: skip
    checks = [
        failing("first_update"),
        failing("first_rollout"),
        WAITED,
        {"id": "x", "verdict": "pass", "message": "held"},
    ]
    found = compare(plan(checks=checks), book(tmp_path / "run", rows, state="crashed"))
    assert [(one.outcome, one.why) for one in found.checks] == [
        (TRUE, "boom"), (REFUTED, "the run went through rollout"), (TRUE, "rollout/waiting was up to 2"),
    ]  # fmt: skip
    assert (found.holding, found.agrees) == (1, False) and "verl.R5 did not come true" in verdict(found)
    assert {row["id"] for row in found.findings} == {"shapes_conserved", "call_failed"}
    law = FindingRow(id="shapes_conserved", order="laws", verdict="fail", message="a law")
    (kept,) = compare(plan(checks=checks[:1]), book(tmp_path / "law", [span("rollout"), law])).checks
    assert (kept.outcome, kept.why) == (NOT_REACHED, "the run has not ended update_actor")


# --------------------------------------------------------------------------------------------------------- bad input


def test_a_run_without_a_step_is_bad_input_and_says_how_it_failed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"empty has no step to compare with the plan$"):
        compare(plan(), book(tmp_path / "empty", []))
    with pytest.raises(BadInput, match="has no step to compare with the plan; no such model"):
        compare(plan(), book(tmp_path / "failed", [failed(None, "no such model")]))


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ([], "it is no plan: give a configuration"),
        ({"verb": "check"}, "it is no plan"),
        ({"verb": "plan", "schema": 9}, "it has schema 9, and this flowledger reads 1"),
        ({"verb": "plan", "schema": 1}, "it is not a whole plan: Object missing required field"),
    ],
)
def test_what_is_no_plan_is_refused(told: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        planned.read(told, "it")


def test_shapes_that_are_not_their_dims_are_refused() -> None:
    with pytest.raises(BadInput, match=r"params in update_actor has shapes that are not \[P\]"):
        plan(shapes=[shape("params", "update_actor", "[P]", [3, 3])])


def test_the_document_has_its_keys(alone: Ledger) -> None:
    told = document(beside(launch(), alone))
    assert list(told) == [
        "rows", "plan", "recorded", "settings", "only_planned", "only_recorded", "memory", "no_memory", "checks", "findings", "summary",
    ]  # fmt: skip
    assert list(told["rows"][0]) == [
        "stage", "tensor_name", "dims", "outcome", "why", "planned_logical_shape", "planned_local_shape", "logical_shape",
        "local_shape", "local_shape_min", "planned_dtype", "dtype", "ranks", "layers",
    ]  # fmt: skip
    assert list(told["memory"][0]) == [
        "step", "stage", "ranks", "rank", "planned", "recorded", "planned_total", "recorded_total", "difference",
    ]  # fmt: skip
    summary = told["summary"]
    assert summary["agrees"] is True and summary["equal"] + summary["explained"] == len(told["rows"])
    assert {
        "unequal",
        "only_planned",
        "only_recorded",
        "checks_held",
        "checks_fired",
        "checks_came_true",
        "checks_refuted",
        "verdict",
    } <= summary.keys()
    update = next(one for one in told["memory"] if (one["stage"], one["step"]) == ("update_actor", "later"))
    # AdamW keeps two float32 numbers for each parameter, and a step count for each tensor
    assert update["recorded"]["optimizer"] == pytest.approx(update["planned"]["optimizer"], rel=0.01)
