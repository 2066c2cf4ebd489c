"""OOM: an allocation is named by its tensor, the peak by stage and kind, and the change has a value."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.diagnose.orders import changes, walk
from flowledger.diagnose.orders.allocation import tensors_of
from flowledger.diagnose.orders.budget import token_counts
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.peaks import planned_for
from flowledger.diagnose.orders.shortage import Size, said
from flowledger.diagnose.planned import Peak, Planned, Summary
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, MetricRow, Row, SpanRow, TensorRow
from tests.diagnose import sick
from tests.diagnose.sick import cause, first, span, verdict

GIB = 1 << 30
QWEN3_8B = {"V": 151936, "H": 4096, "L": 36, "A": 32, "K": 8, "D": 128, "F": 12288}  # its published config.json


# ---------------------------------------------------------------------------------------------------- the error's text

# As torch 2.x prints it (c10/cuda/CUDACachingAllocator.cpp), and as torch 1.x did.
NEW = (
    "CUDA out of memory. Tried to allocate 58.15 GiB. GPU 3 has a total capacity of 139.80 GiB of which 21.07 GiB is free. "
    "Including non-PyTorch memory, this process has 118.72 GiB memory in use. Of the allocated memory 110.31 GiB is allocated by "
    "PyTorch, and 5.55 GiB is reserved by PyTorch but unallocated."
)
OLD = "CUDA out of memory. Tried to allocate 384.00 MiB (GPU 0; 79.15 GiB total capacity; 76.49 GiB already allocated; 60.94 MiB free; 77.42 GiB reserved in total by PyTorch)"


def test_sizes_of_an_error_are_read_as_they_are_printed() -> None:
    new, old = said(NEW), said(OLD)
    assert new is not None and old is not None
    assert new.asked == Size(round(58.15 * GIB), int(0.005 * GIB) + 1)
    assert [round(one.bytes / GIB, 2) for one in new[1:]] == [139.80, 21.07, 118.72, 110.31, 5.55]
    assert (old.asked.bytes, round(old.free.bytes / 2**20, 2), round(old.allocated.bytes / GIB, 2)) == (
        384 << 20,
        60.94,
        76.49,
    )


def test_a_text_without_a_failed_allocation_has_none() -> None:
    assert said("3.5 GiB allocated, 2 GiB free") is None


# -------------------------------------------------------------------------------------------------------- which tensor


def printed(count: float) -> Size:
    """A size as torch prints it: two decimals of the largest unit."""
    unit = GIB if count >= GIB else 1 << 20
    return Size(round(round(count / unit, 2) * unit), int(0.005 * unit) + 1)


def test_the_logits_of_a_full_budget_are_named() -> None:
    """32768 tokens * 151936 * 4 bytes = 18.55 GiB."""
    best = tensors_of(Size(round(18.55 * GIB), int(0.005 * GIB)), QWEN3_8B, [32768], degrees={}, stage="update_actor")[
        0
    ]
    assert (best.tensor, best.dims, best.dtype, best.sizes) == ("logits", "T_logit, V", "float32", (32768, 151936))
    assert best.formula == "32,768 * 151,936 * 4 bytes" and "raised to float32" in best.sentence()


@given(tokens=st.integers(4096, 120_000), width=st.sampled_from([2, 4]), copies=st.integers(1, 2))
def test_logits_of_any_number_of_known_tokens_are_found(tokens: int, width: int, copies: int) -> None:
    size = printed(tokens * 151936 * width * copies)
    found = tensors_of(size, QWEN3_8B, [tokens, 1_234_567_890], degrees={}, stage="update_actor")
    assert found[0].tensor == "logits" and found[0].solved is None
    widths = {(2, 1): {2}, (2, 2): {4}, (4, 1): {4}, (4, 2): {8}}[width, copies]  # two bf16 copies are one in float32
    assert {one.copies * {"bfloat16": 2, "float32": 4}[one.dtype] for one in found[:1]} == widths


def test_tokens_that_nobody_knows_are_worked_out_and_said_to_be() -> None:
    best = tensors_of(Size(round(58.15 * GIB), int(0.005 * GIB)), QWEN3_8B, [], degrees={}, stage="update_actor")[0]
    assert best.tensor == "logits" and best.solved == round(58.15 * GIB / (151936 * 4)) == best.sizes[0]


def test_the_embedding_and_the_cache_are_named_too() -> None:
    embedding = tensors_of(printed(151936 * 4096 * 4), QWEN3_8B, [], degrees={}, stage="update_actor")[0]
    assert (embedding.tensor, embedding.dims, embedding.dtype) == ("params", "V, H", "float32")
    sizes = QWEN3_8B | {"B_slot": 64, "S_cache": 8192}
    cache = tensors_of(printed(36 * 2 * 64 * 8 * 8192 * 128 * 2), sizes, [], degrees={}, stage="rollout")[0]
    assert (cache.tensor, cache.dtype) == ("kv_cache", "bfloat16")


@given(st.integers(1 << 20, 1 << 36))
def test_what_is_named_has_the_size_that_it_is_named_for(count: int) -> None:
    for match in tensors_of(Size(count, 1), QWEN3_8B, [4096, 16384], degrees={}, most_tokens=65536):
        whole = {"bfloat16": 2, "float32": 4, "int64": 8, "bool": 1}[match.dtype] * match.copies
        for size in match.sizes:
            whole *= size
        assert abs(whole - count) <= 2.1e-3 * count or match.solved is not None


# ------------------------------------------------------------------------------------------------------------ evidence

CONFIG = {
    "data": {"max_prompt_tokens": 1024}, "rollout": {"max_response_tokens": 8192},
    "actor": {"micro_batch": {"max_tokens": 32768, "samples": None}, "engine": {"logits": {"implementation": "torch"}}},
}  # fmt: skip
ZERO = dict.fromkeys(
    ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue"), 0
)


def peak(stage: str, **kinds: int) -> Peak:
    return Peak(step="later", stage=stage, ranks="all", rank=0, rank_count=8, allocated=sum(kinds.values()), instant="forward",
                **{**ZERO, **kinds})  # fmt: skip


PLAN = Planned(
    run="verl", summary=Summary(framework="verl", model="Qwen3-8B", world=8, mesh={"dp": 8}), chain=[], checks=[], shapes=[],
    rows=[peak("update_actor", param=8 * GIB, optimizer=16 * GIB, activation=20 * GIB), peak("rollout", kv_cache=40 * GIB)],
)  # fmt: skip


def crash(text: str, *lines: str, stage: str | None = "update_actor") -> FindingRow:
    return FindingRow(
        id="crash", verdict="fail", severity="critical", stage=stage, rank=3, message=text, evidence=list(lines)
    )


def evidence(*findings: FindingRow, planned: Planned | None = PLAN, sizes: dict[str, int] | None = None) -> Evidence:
    made = Evidence(findings=findings, planned=planned, planned_config=CONFIG if planned else {})
    made.__dict__["sizes"] = QWEN3_8B if sizes is None else sizes
    return made


def test_a_crash_names_stage_tensor_and_the_change_with_its_value() -> None:
    met = walk.diagnose(evidence(crash(f"torch.OutOfMemoryError: {NEW.replace('58.15', '18.55')}")))
    assert [one.order.name for one in met.walked] == ["oom"]
    assert first(met) == "oom.peak_stage" and "update_actor on rank 3" in met.first[1].message
    assert "logits [T_logit, V] in float32" in cause(met) and "32,768 * 151,936 * 4 bytes" in cause(met)
    fix = met.cause[1].fix
    assert fix is not None and fix["key"] == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert int(fix["to"]) < int(fix["from"]) == 32768
    assert int(fix["to"]) >= 1024 + 8192  # the longest sample still has to fit


def test_of_two_answers_that_are_as_sure_the_one_with_a_change_is_the_cause() -> None:
    """25 GiB are 44,169 tokens of logits, of which nobody knows: surer than the stage by as much as a second answer is later."""
    met = walk.diagnose(evidence(crash(f"torch.OutOfMemoryError: {NEW.replace('58.15', '25.00')}")))
    assert first(met) == "oom.peak_stage" and "worked out of the size" in cause(met)
    assert met.cause[1].fix is not None


def test_where_the_device_is_far_too_small_for_logits_they_are_not_to_be_made_whole() -> None:
    text = NEW.replace("58.15", "18.55").replace("21.07 GiB is free", "1.07 GiB is free")
    met = walk.diagnose(evidence(crash(f"torch.OutOfMemoryError: {text}")))
    assert met.cause[1].fix["key"] == "actor_rollout_ref.model.use_fused_kernels"


def test_without_a_configuration_the_frames_tell_of_logits_and_what_is_missing_is_said() -> None:
    text = f"torch.OutOfMemoryError: {NEW}"
    met = walk.diagnose(
        evidence(crash(text, "frame torch_functional.py:140 in entropy_from_logits"), planned=None, sizes={})
    )
    assert "logits [T_logit, V]" in cause(met) and "entropy_from_logits" in cause(met)
    assert "CONFIG" in met.cause[1].next_step and met.cause[1].confidence < 0.7


def test_pieces_that_are_free_but_too_small_are_fragmentation() -> None:
    text = "CUDA out of memory. Tried to allocate 1.23 GiB. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated."
    met = walk.diagnose(evidence(crash(text, stage=None)))
    assert "fragmentation" in cause(met)
    assert met.cause[1].fix == {"key": "PYTORCH_CUDA_ALLOC_CONF", "from": "", "to": "expandable_segments:True"}


def test_a_plan_that_does_not_fit_fails_at_the_stage_of_its_peak() -> None:
    fits = FindingRow(
        id="memory.fits",
        verdict="fail",
        severity="error",
        scope="plan",
        stage="update_actor",
        message="update_actor needs 96 GiB of 80",
    )
    met = walk.diagnose(evidence(fits))
    assert first(met) == "oom.peak_stage"
    assert verdict(met, "oom.by_kind") == "fail"
    assert any("kv_cache" in line or "activation" in line for _, answer in met.steps for line in answer.evidence)


def test_a_crash_of_which_nothing_else_is_known_is_still_an_oom() -> None:
    met = walk.diagnose(Evidence(findings=(crash("torch.OutOfMemoryError: CUDA error: out of memory", stage=None),)))
    assert first(met) == "oom.peak_stage" and "does not name" in cause(met)
    assert verdict(met, "oom.dynamic_batch") == "skipped"


# ------------------------------------------------------------------------------------------------------------- ledgers


def readings(stage: str, **kinds: int) -> list[Row]:
    at = {"instant": "peak", "stage": stage, "step": 1, "t_ns": 10}
    return [MemoryRow(kind=kind, allocated=size, limit=80 * GIB, **at) for kind, size in kinds.items()]  # type: ignore[arg-type]


@pytest.mark.parametrize(("restored", "of_step"), [(False, {1: "first", 2: "later"}), (True, {1: "later", 2: "later"})])
def test_the_first_step_is_that_of_the_run_and_none_after_a_resume(
    tmp_path: Path, restored: bool, of_step: dict[int, str]
) -> None:
    """The first has no optimizer state yet; a run that goes on from a checkpoint has it from its begin on."""
    steps: list[Row] = [
        SpanRow(id=n, event="whole", name="step", span_kind="stage", start_ns=n, end_ns=n + 1, step=n) for n in (1, 2)
    ]
    if restored:
        steps.append(MetricRow(name="checkpoint/restored_bytes", raw_name="checkpoint/restored_bytes", value=1.0))
    firsts = [msgspec.structs.replace(one, step="first") for one in PLAN.rows]
    planned = msgspec.structs.replace(PLAN, rows=[*PLAN.rows, *firsts])
    with Ledger(sick.run(tmp_path / "run", [steps])) as ledger:
        made = Evidence(books=(ledger,), planned=planned)
        found = {step: planned_for(made, {"rank": 0, "step": step, "stage": "update_actor"}) for step in (1, 2)}
    assert {step: peak.step if peak else None for step, peak in found.items()} == of_step


def test_a_kind_above_its_plan_is_the_cause_and_has_a_change(tmp_path: Path) -> None:
    rows = readings("update_actor", param=8 * GIB, optimizer=60 * GIB, activation=9 * GIB)
    rows += readings("rollout", param=8 * GIB, kv_cache=30 * GIB)
    path = sick.run(tmp_path / "run", [rows], device="cuda:0", framework="verl", config=CONFIG)
    met = sick.told(path, planned=PLAN, order="oom")
    assert first(met) == "oom.by_kind"
    assert "optimizer takes 60.00 GiB in update_actor" in cause(met) and "planned are 16.00 GiB" in cause(met)
    assert met.cause[1].fix["key"].startswith("actor_rollout_ref.actor.fsdp_config.optimizer_offload")
    assert verdict(met, "oom.peak_stage") == "warn"  # 77 of 80 GiB: 96 %
    assert "update_actor" in next(answer.message for step, answer in met.steps if step.name == "peak_stage")


def test_memory_that_grows_with_each_micro_batch_is_found_and_with_the_budget_it_is_not(tmp_path: Path) -> None:
    def passed(left: int, at: int, tokens: int, top: int) -> list[Row]:
        place = {"stage": "update_actor", "step": 1, "epoch": 0, "mini_batch": 0, "micro_batch": at}
        return [
            span(10 + at, "micro_batch", at, at + 1, **{**place, "span_kind": "compute"}, tokens_computed=tokens),
            MemoryRow(instant="end", kind="total", allocated=left, t_ns=at, peak_since_stage=top, **place),
        ]

    kept = [row for at in range(6) for row in passed((10 + at) * GIB, at, 1000, 30 * GIB)]
    met = sick.told(sick.run(tmp_path / "kept", [kept], device="cuda:0"), order="oom")
    assert first(met) == "oom.dynamic_batch"
    assert "every micro-batch of update_actor leaves 1024.00 MiB more behind" in cause(met)

    even = [
        row for at in range(6) for row in passed(10 * GIB, at, 9000 if at == 2 else 3000, (40 if at == 2 else 15) * GIB)
    ]
    met = sick.told(sick.run(tmp_path / "even", [even], device="cuda:0"), order="oom")
    assert first(met) is None
    assert "micro-batch 2 (step 1, rank 0) of 9,000 tokens" in next(
        a.message for s, a in met.steps if s.name == "dynamic_batch"
    )


@pytest.mark.parametrize("device", ["cpu"])
def test_a_process_on_the_host_has_no_peak_but_what_tensors_take(tmp_path: Path, device: str) -> None:
    row = MemoryRow(
        instant="end", kind="total", allocated=79 * GIB, reserved=80 * GIB, stage="update_actor", step=0, limit=80 * GIB
    )
    met = sick.told(sick.run(tmp_path / "run", [[row]], device=device), order="oom")
    assert first(met) is None and verdict(met, "oom.peak_stage") == "skipped"


# What a plan has of micro-batches on one rank: an engine's steps and the passes of the trainer, each with a size of its own.
SIZES = {"rollout": 32_768, "old_log_prob": 24_576, "ref_log_prob": 4_096, "update_actor": 18_432}
CUT = msgspec.structs.replace(PLAN, shapes=[
    TensorRow(tensor_name="hidden_states", dims="[1, T, H]", logical_shape=[1, 8 * tokens, 4096], local_shape=[1, tokens, 4096], stage=stage)
    for stage, tokens in SIZES.items()
])  # fmt: skip
BUDGETS = {
    "data": {"max_prompt_tokens": 1024}, "rollout": {"max_response_tokens": 8192},
    "actor": {"micro_batch": {"max_tokens": 18_432}, "log_prob_micro_batch": {"max_tokens": 24_576}},
    "ref": {"micro_batch": {"max_tokens": 4_096}},
}  # fmt: skip
OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB. GPU 3 has 80.00 GiB total capacity, 0.50 GiB free"


@pytest.mark.parametrize(("stage", "counts"), [
    *(([name, [size]]) for name, size in SIZES.items() if name != "rollout"),
    ("rollout", []), ("weight_sync", []), (None, [4_096, 18_432, 24_576]),
])  # fmt: skip
def test_tokens_of_micro_batches_are_those_of_the_stage_that_ran_out_and_never_an_engines(
    stage: str | None, counts: list[int]
) -> None:
    made = Evidence(findings=(crash(OUT, stage=stage),), planned=CUT, planned_config=BUDGETS)
    assert token_counts(made) == counts


def test_what_a_pass_without_a_budget_of_its_own_has_is_the_next_ones() -> None:
    shared = {"actor": {"micro_batch": {"samples": 2}, "log_prob_micro_batch": None}, "ref": {"micro_batch": None},
              "data": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 900}}  # fmt: skip
    for stage in ("ref_log_prob", "update_critic", "values", "update_actor"):
        made = Evidence(findings=(crash(OUT, stage=stage),), planned_config=shared)
        assert token_counts(made) == [2 * 900, 2 * 1000]


@pytest.mark.parametrize(("stage", "says", "key"), [
    ("update_actor", "18,432", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    ("old_log_prob", "24,576", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
    (None, "18,432", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),  # the update's, beside its own budget
    ("ref_log_prob", "4,096", None),  # a knob that no row of the advice has: no other pass's is turned for it
])  # fmt: skip
def test_the_budget_that_the_peak_follows_and_what_to_turn_are_those_of_the_stage(
    stage: str | None, says: str, key: str | None
) -> None:
    made = Evidence(findings=(crash(OUT, stage=stage),), planned=CUT, planned_config=BUDGETS)
    answers = {step.name: answer for step, answer in walk.diagnose(made).steps}
    assert (
        answers["dynamic_batch"].message
        == f"micro-batches have up to {says} tokens, the budget is {says}: the peak follows it"
    )
    assert (answers["dynamic_batch"].fix or {}).get("key") == key
    if stage in (
        "old_log_prob",
        "ref_log_prob",
    ):  # a pass without a backward keeps nothing that could be computed again
        assert all("gradient_checkpointing" not in (answer.fix or {}).get("key", "") for answer in answers.values())


def test_the_tokens_that_a_run_recorded_are_those_of_the_stage_too(tmp_path: Path) -> None:
    rows: list[Row] = [
        span(
            10 + at,
            "micro_batch",
            at,
            at + 1,
            stage=stage,
            step=1,
            micro_batch=0,
            span_kind="compute",
            tokens_computed=tokens,
        )
        for at, (stage, tokens) in enumerate(SIZES.items())
    ]
    with Ledger(sick.run(tmp_path / "run", [rows])) as ledger:
        counts = {
            stage: token_counts(Evidence(books=(ledger,), findings=(crash(OUT, stage=stage),)))
            for stage in ("update_actor", "rollout", None)
        }
    assert counts == {"update_actor": [18_432], "rollout": [], None: [4_096, 18_432, 24_576]}


def test_a_plan_somewhat_below_what_the_crash_needed_is_told_in_one_sentence() -> None:
    """Planned are 44 GiB of tensors and 5 GiB of residue, which PyTorch's 50 + 5 GiB do not count; of the process it is 58 + 5 of 49."""
    rows = [
        peak("update_actor", param=8 * GIB, optimizer=16 * GIB, activation=20 * GIB, residue=5 * GIB),
        peak("rollout", kv_cache=90 * GIB),
    ]
    planned = msgspec.structs.replace(PLAN, rows=rows)

    def told(text: str, stage: str | None = "update_actor") -> list[str]:
        lines = walk.diagnose(evidence(crash(text, stage=stage), planned=planned, sizes={"H": 4096})).first[1].evidence
        return [line for line in lines if line.startswith("the plan has")]

    process = "CUDA out of memory. Tried to allocate 5.00 GiB. Including non-PyTorch memory, this process has 58.00 GiB memory in use."
    (line,) = told(f"{process} Of the allocated memory 50.00 GiB is allocated by PyTorch.")
    assert line.startswith(
        "the plan has 44.00 GiB at the peak of update_actor (49.00 GiB with its residue), and 55.00 GiB were needed here, "
        "1.2 times as much: the plan is lower by 11.00 GiB, which does not count what it cannot know: an engine that was awake"
    )
    (line,) = told(process)
    assert "the plan has 49.00 GiB at the peak of update_actor, and 63.00 GiB were needed here, 1.3 times" in line
    assert told(process.replace("58.00", "48.00")) == []  # 53 of 49: as near as a plan is
    assert told(process, stage="validate") == []  # nothing is planned there: another stage's peak says nothing of it


def test_a_plan_far_below_what_the_crash_needed_is_told_and_its_parts_are_not_taken_for_the_crash() -> None:
    """Planned are 44 GiB at update_actor; 110.31 GiB were allocated when 58.15 more were asked for: 3.8 times as much."""
    met = walk.diagnose(evidence(crash(f"torch.OutOfMemoryError: {NEW}"), sizes={"H": 4096}))
    lines = met.first[1].evidence
    assert lines[0].startswith(
        "the plan has 44.00 GiB at the peak of update_actor, and 168.46 GiB were needed here, 3.8 times as much: the plan is lower by 124.46 GiB"
    )
    assert (
        "what a plan cannot know: an engine that was awake, another process on the device (2.86 GiB outside of PyTorch here)"
        in lines[1]
    )
    by_kind = next(answer for step, answer in met.steps if step.name == "by_kind")
    assert not any("planned at the peak" in line or line.startswith("activation") for line in by_kind.evidence)
    near = NEW.replace("110.31 GiB is allocated", "40.00 GiB is allocated").replace(
        "58.15", "2.15"
    )  # 42.15 of 44 planned
    told = walk.diagnose(evidence(crash(f"torch.OutOfMemoryError: {near}"), sizes={"H": 4096})).first[1].evidence
    assert not any("times as much" in line for line in told)


def test_what_the_plan_has_in_that_stage_is_named_before_another_reading_of_the_same_size() -> None:
    """With sp 2 a rank has half of 4 samples * 18,432 tokens: 36,864 in float32, not 73,728 in bfloat16."""
    shape = TensorRow(
        tensor_name="logits", dims="[T_logit, V]", logical_shape=[294_912, 152_064], local_shape=[36_864, 152_064],
        stage="old_log_prob",
    )  # fmt: skip
    asked = {
        "data": {"max_prompt_tokens": 2048}, "rollout": {"max_response_tokens": 16_384},
        "actor": {"log_prob_micro_batch": {"samples": 4}},
    }  # fmt: skip
    summary = Summary(framework="verl", model="Qwen2.5-7B", world=8, mesh={"dp": 4, "sp": 2})
    planned = msgspec.structs.replace(PLAN, shapes=[shape], summary=summary)
    made = Evidence(
        findings=(crash(NEW.replace("58.15", "20.86"), stage="old_log_prob"),), planned=planned, planned_config=asked
    )
    made.__dict__["sizes"] = {"V": 152_064}
    assert token_counts(made) == [4 * 16_384 // 2, 4 * 18_432 // 2]
    said_so = {step.name: answer for step, answer in walk.diagnose(made).steps}["by_kind"].message
    assert said_so.startswith("20.86 GiB ≈ logits") and "float32" in said_so
    assert said_so.endswith("36,864 * 152,064 * 4 bytes = 20.88 GiB")  # 22,422,749,184 bytes


def test_a_change_goes_from_the_value_of_its_key() -> None:
    raw = {
        "actor_rollout_ref.model.use_fused_kernels": False,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16_384,
    }
    config = {
        "raw": raw,
        "actor": {"micro_batch": {"max_tokens": 32_768}, "engine": {"logits": {"implementation": "full"}}},
    }
    fused = changes.fix("fused_logits", "verl", config)
    budget = changes.fix("halve_token_budget", "verl", config, to=8192)  # of two ranks that share a sequence
    assert fused is not None and (fused["from"], fused["to"]) == ("false", "True")
    assert budget is not None and (budget["from"], budget["to"]) == ("16384", "4096")
    unknown = changes.fix("fused_logits", "verl", {**config, "raw": {}})
    assert unknown is not None and unknown["from"] == ""


def test_what_a_report_names_is_no_tensor_that_nothing_explains() -> None:
    known = FindingRow(id="logits_allocation", verdict="fail", confidence=0.69, message="the 58.15 GiB fit the logits")
    made = Evidence(findings=(crash(NEW),), known=(known,))
    met = walk.diagnose(made)
    answer = {step.name: one for step, one in met.steps}["by_kind"]
    assert answer.message == known.message == cause(met) and answer.confidence == 0.45
