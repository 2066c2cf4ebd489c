"""What a report is answered with: the cause where its numbers or words decide, else what is missing. Numbers are worked by hand."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.diagnose.reports.answers import Match, _doubted, answer
from flowledger.diagnose.reports.facts import facts_of
from flowledger.diagnose.reports.mechanism import located
from flowledger.diagnose.reports.read import of_mapping, read
from flowledger.diagnose.reports.report import Report
from flowledger.diagnose.reports.table import causes
from flowledger.flow.errors import BadInput
from flowledger.flow.stages import stages
from flowledger.ledger.rows import FindingRow

CASES = Path(__file__).parents[1] / "data/reports/cases.jsonl"


def first(**parts: Any) -> FindingRow:
    return answer(Report(**parts))[0]


# ------------------------------------------------------------------------------------------------ numbers worked by hand


def test_an_allocation_is_tokens_times_vocabulary_times_four() -> None:
    # 58.15 GiB = 62438086246 B; / (76032 * 4) = 205302 tokens; 205302 / 9216 = 22.3
    row = first(
        symptom="torch.OutOfMemoryError: tried to allocate 58.15 GiB in compute_log_probs(logits.clone())",
        config={"--max-tokens-per-gpu": 9216}, measured={"tensor": "[T, vocab/TP=76032] fp32"},
    )  # fmt: skip
    assert row.id == "logits_of_too_many_tokens"
    assert "205,302 tokens × 76032 × 4 B, 22 times over the cap" in row.message


def test_below_the_cap_the_cap_is_not_blamed() -> None:
    # 2.6 GiB / (76032 * 4) = 9180 tokens, under a cap of 9216
    row = first(
        symptom="torch.OutOfMemoryError: tried to allocate 2.6 GiB in compute_log_probs(logits.clone())",
        config={"--max-tokens-per-gpu": 9216}, measured={"tensor": "[T, vocab/TP=76032] fp32"},
    )  # fmt: skip
    assert row.id == "logits_allocation"


def test_a_group_is_lost_with_any_of_its_samples() -> None:
    # 1 - 0.95 ** 8 = 0.3366
    row = first(symptom="Group drop rate 1-(1-p)^n after aborts.", config={"n_samples": 8}, measured={"p": 0.05})
    assert row.id == "group_dropped_for_one" and "33.7 %" in row.message


@pytest.mark.parametrize(("rows", "chunks", "above"), [(512, 6, 516), (100, 8, 104), (7, 2, 8)])
def test_rows_that_do_not_split_get_the_next_that_do(rows: int, chunks: int, above: int) -> None:
    row = first(symptom=f"AssertionError: only support equal chunk. Got size of DataProto {rows} and chunk {chunks}.")
    assert row.id == "unequal_chunks" and row.fix == {
        "key": "rows of the dispatched batch", "from": str(rows), "to": str(above),
    }  # fmt: skip


def test_rows_that_split_are_not_blamed() -> None:
    row = first(symptom="AssertionError: only support equal chunk. Got size of DataProto 512 and chunk 8.")
    assert row.verdict == "skipped" and row.needs


@pytest.mark.parametrize(("gpus", "told"), [(8, True), (4, False)])  # 16 * 5 / 8 = 10 < 16; 16 * 5 / 4 = 20 >= 16
def test_nan_of_zero_accumulation_needs_the_number_of_gpus(gpus: int, told: bool) -> None:
    config = {"ppo_mini_batch_size": 16, "rollout.n": 5, "ppo_micro_batch_size_per_gpu": 16}
    ids = [row.id for row in answer(Report(framework="verl", hardware=f"{gpus} GPUs", config=config, symptom="grad_norm is NaN on every step"))]  # fmt: skip
    assert ("zero_accumulation" in ids) is told
    row = first(framework="verl", config=config, symptom="grad_norm is NaN on every step")
    assert row.verdict == "skipped" and "how many GPUs" in row.message


def test_legal_sequence_parallel_degrees_are_those_of_a_search() -> None:
    found = facts_of(
        Report(config={"num_attention_heads": 40, "num_key_value_heads": 8, "ulysses_sequence_parallel_size": 8})
    )
    searched = [s for s in range(1, 41) if 40 % s == 0 and (8 % s == 0 or s % 8 == 0)]
    assert found["legal_sp"] == ", ".join(map(str, searched)) and found["next_sp"] == 40


def test_time_is_held_against_the_longest_and_the_sum() -> None:
    ranks = {"rank0": {"s": 10, "max": 5, "total": 30}, "rank1": {"s": 20, "max": 7, "total": 20}, "rank2": {"s": 30, "max": 9, "total": 25}}  # fmt: skip
    row = first(symptom="workers finish at different times", measured=ranks)
    assert row.id == "time_follows_the_longest" and row.confidence is not None and row.confidence > 0.9
    by_sum = {name: {**one, "max": 40 - one["s"], "total": one["s"]} for name, one in ranks.items()}
    assert "time_follows_the_longest" not in [
        one.id for one in answer(Report(symptom="workers differ", measured=by_sum))
    ]


def test_fragmentation_is_told_from_footprint() -> None:
    measured = {"allocated_gb": {"0.5": 40.59, "0.45": 38.65}, "fragmentation_gb": {"0.5": 1.29, "0.45": 7.04}}
    row = first(symptom="refit runs out of memory", measured=measured)
    assert row.id == "fragmentation_between_runs" and "1.94 GB" in row.message and "5.75 GB" in row.message


def test_reserved_but_unallocated_is_compared_with_what_was_asked_for() -> None:
    text = "CUDA out of memory. Tried to allocate {} GiB. 40.00 GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
    assert first(symptom=text.format(2, 9)).id == "fragmentation_by_numbers"
    assert "fragmentation_by_numbers" not in [row.id for row in answer(Report(symptom=text.format(9, 2)))]


# ------------------------------------------------------------------------------------ fires, and does not one step beside

PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("group_of_one", {"config": {"num_generations": 1}, "symptom": "loss is NaN"}, {"config": {"num_generations": 2}, "symptom": "loss is NaN"}),
    ("temperature_on_one_side", {"config": {"temperature": 0.6}, "symptom": "importance ratio is 2"}, {"config": {"temperature": 1.0}, "symptom": "importance ratio is 2"}),
    ("top_p_renormalises", {"config": {"top_p": 0.9}, "symptom": "high log-prob difference"}, {"config": {"top_p": 1.0}, "symptom": "high log-prob difference"}),
    ("everything_truncated", {"measured": {"clip_ratio": 0.98}, "symptom": "reward 0"}, {"measured": {"clip_ratio": 0.1}, "symptom": "reward 0"}),
    ("partial_rollout_despite_switch", {"config": {"partial_rollout": False}, "measured": {"weight_versions": [1, 2]}, "symptom": "stale"}, {"config": {"partial_rollout": False}, "measured": {"weight_versions": [2, 2]}, "symptom": "fresh"}),
    ("utilisation_too_high_at_start", {"config": {"gpu_memory_utilization": 0.9}, "symptom": "CUDA OOM at vLLM init"}, {"config": {"gpu_memory_utilization": 0.3}, "symptom": "CUDA OOM at vLLM init"}),
    ("micro_batch_counts_differ", {"measured": {"rank0": 5, "rank1": 6}, "symptom": "NCCL hang"}, {"measured": {"rank0": 5, "rank1": 5}, "symptom": "NCCL hang"}),
    ("sample_longer_than_cap", {"config": {"max_tokens_per_gpu": 4096, "max_response_len": 8192}, "symptom": "AssertionError in micro-batch partition"}, {"config": {"max_tokens_per_gpu": 16384, "max_response_len": 8192}, "symptom": "AssertionError in micro-batch partition"}),
    ("heads_not_divisible", {"symptom": "ValueError: Total number of attention heads (52) must be divisible by tensor parallel size (8)."}, {"symptom": "ValueError: Total number of attention heads (56) must be divisible by tensor parallel size (8)."}),
    ("log_probs_filled_with_zero", {"symptom": "single tokens with logprob 0.0 dominate"}, {"symptom": "tokens have a logprob -0.7"}),
    ("width_is_an_axis", {"config": {"TP": 4}, "symptom": "size of tensor a (4096) must match the size of tensor b (1024) at dimension 1"}, {"config": {"TP": 2}, "symptom": "size of tensor a (4096) must match the size of tensor b (1024) at dimension 1"}),
    ("pipeline_bubble", {"config": {"PP": 8, "num_microbatches": 4}, "symptom": "GPUs idle"}, {"config": {"PP": 2, "num_microbatches": 64}, "symptom": "GPUs idle"}),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "fires", "beside"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_a_cause_is_told_for_its_numbers_and_not_beside_them(
    cause: str, fires: Mapping[str, Any], beside: Mapping[str, Any]
) -> None:
    assert first(**fires).id == cause
    assert cause not in [row.id for row in answer(Report(**beside))]


# ------------------------------------------------------------------------------------------------------- cannot tell


@pytest.mark.parametrize("symptom", ["training is bad", "OOM", "it hangs", "loss is nan at step 812", "slow", "?"])
def test_a_symptom_alone_is_answered_with_what_is_needed(symptom: str) -> None:
    row = first(symptom=symptom)
    assert row.verdict == "skipped" and row.needs and row.message.startswith("cannot tell, needs ")


def test_what_is_only_located_says_where_and_what_would_decide() -> None:
    row = first(symptom="At step 59 kl_loss, entropy and grad_norm are NaN; old_log_prob is NaN first.")
    assert row.verdict == "skipped" and row.needs and "old_log_prob" in row.message


def test_findings_of_a_plan_follow_when_they_fail() -> None:
    held = FindingRow(id="rule.a", verdict="pass", message="holds")
    failed = FindingRow(id="rule.b", verdict="fail", message="12 % 8 = 4")
    assert [row.id for row in answer(Report(symptom="it hangs"), (held, failed))][1:] == ["rule.b"]


# -------------------------------------------------------------------------------------- the report's own mechanism


@pytest.mark.parametrize(
    ("clause", "finding", "words"),
    [
        ("The optimizer is not offloaded again after checkpointing, GPU memory rises", "report_not_released", ("optimizer", "saved")),
        ("kv scales are reset to 1.0 on wake", "report_reset", ("KV scales", "wake_up")),
        ("value loss is averaged over micro-batches instead of summed", "report_wrong_scale", ("critic",)),
        ("the configured weight has no effect because rewards are not passed on", "report_dead_setting", ("rewards",)),
        ("labels are taken across the packed boundary by torch.roll", "report_wrong_positions", ("boundar",)),
    ],
)  # fmt: skip
def test_a_clause_that_tells_a_mechanism_names_what_and_where(
    clause: str, finding: str, words: tuple[str, ...]
) -> None:
    found = located(clause)[0]
    assert found.id == finding
    own = found.message.split("The report says")[0]
    assert all(word.casefold() in own.casefold() for word in words)


def test_a_supposition_locates_nothing() -> None:
    assert located("The user suspects that the optimizer is not offloaded, GPU memory rises") == []
    assert located("grad_norm rises and reward falls") == []


# --------------------------------------------------------------------------------------------------- reading, safety


def test_what_an_investigation_found_is_never_read() -> None:
    case = json.loads(CASES.read_text(encoding="utf-8").splitlines()[0])
    hidden = {
        "root_cause": "nan",
        "what_tool_should_say": "oom",
        "category": "oom",
        "confidence": "high",
        "verdict_label": {},
    }
    plain = {key: case[key] for key in ("framework", "model", "hardware", "config", "symptom", "measured")}
    assert of_mapping({**plain, **hidden}) == of_mapping(plain)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"framework": "verl", "config": {"n": 4}, "symptom": "loss is NaN"}),
        "framework: verl\nconfig: {n: 4}\nsymptom: loss is NaN\n",
        "framework: verl\nconfig: n=4\nsymptom: loss is NaN\n",
    ],
)
def test_json_yaml_and_settings_in_words_are_the_same_report(text: str) -> None:
    report = read(text)
    assert (report.framework, report.symptom) == ("verl", "loss is NaN") and facts_of(report)["group"] == 4


def test_a_long_log_is_read_around_its_last_exception(tmp_path: Path) -> None:
    noise = "INFO temperature=0.7 nan_guard wake_up hang timeout watchdog\n" * 20_000
    end = "Traceback (most recent call last):\nAssertionError: only support equal chunk. Got size of DataProto 100 and chunk 8.\n"
    path = tmp_path / "run.log"
    path.write_text(
        "x " * 2_000_000 + "\n" + noise.replace("watchdog", "dog") + "." * 5000 + "\n" + end, encoding="utf-8"
    )
    report = read(str(path))
    assert len(report.symptom) < 10_000
    assert answer(report)[0].id == "unequal_chunks"


def test_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    for name, content, said in (("a.txt", b" \n", "empty"), ("b.bin", b"\0\1\2" * 99, "binary")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match=said):
            read(str(tmp_path / name))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(
    ("tp", "ppo_mini_batch_size", "n", "rank0", "rank1", "alloc_gib", "vocab", "clip_ratio", "p", "dp", "sp")
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5), st.text(max_size=200), VALUES)
def test_whatever_is_reported_there_is_an_answer(config: dict[str, Any], symptom: str, model: Any) -> None:
    rows = answer(
        of_mapping({"config": config, "measured": config, "symptom": symptom + " oom nan hang", "model": model})
    )
    assert rows and all(row.message and "{" not in row.message.split("“")[0] for row in rows)
    assert all(row.confidence is None or (math.isfinite(row.confidence) and 0 <= row.confidence <= 1) for row in rows)


# ------------------------------------------------------------------------------------------- signs, doubt, states by stage


@pytest.mark.parametrize(
    ("stage", "states"),
    [(0, 16 * 8e9), (1, 4 * 8e9 + 12 * 8e9 / 4), (2, 2 * 8e9 + 14 * 8e9 / 4), (3, 16 * 8e9 / 4)],
)  # fmt: skip
def test_states_on_a_gpu_are_those_of_the_zero_stage(stage: int, states: float) -> None:
    """2 B weights, 2 B gradients, 12 B master and moments; stage 1 shards the last, 2 the last two, 3 all (ZeRO, arXiv:1910.02054)."""
    found = facts_of(Report(model="an 8B model", hardware="4 x A100 80GB", config={"zero_stage": stage}))
    assert found["states_gib"] == pytest.approx(states / 2**30)


def test_unsharded_states_are_told_with_their_size() -> None:
    # 3.2 * 16 = 51.2e9 B = 47.7 GiB for the actor, as much again for the critic
    row = first(
        model="a 3.2B model", hardware="4 GPUs of 80 GB", config={"algorithm": "ppo", "zero_stage": 0},
        symptom="CUDA out of memory in PPO training",
    )  # fmt: skip
    assert row.id == "states_not_sharded" and "48 GiB" in row.message and "95 of 80 GiB" in row.message


def test_a_global_batch_is_a_product() -> None:
    # 2 * 18 * 7 = 252; the next multiple of 14 above 256 is 266
    row = first(
        symptom="AssertionError: train_batch_size is not equal to micro_batch * steps * world_size 256 != 2 * 18 * 7"
    )
    assert row.id == "batch_is_not_a_product" and row.fix == {"key": "train_batch_size", "from": "256", "to": "266"}


@pytest.mark.parametrize(
    ("symptom", "cause"),
    [
        ("Loss is NaN although the only NaN in old log-probs stands at a position with action_mask 0", "masked_nan_survives"),
        ("Generation hangs with ZeRO-3: a rank that finishes early leaves, the others still wait for its shard", "sharded_generation_out_of_step"),
        ("No space left on device while Ray spills", "disk_or_descriptors_used_up"),
        ("RuntimeError: Inference tensors cannot be saved for backward", "inference_tensors_in_training"),
        ("The KL loss is computed under torch.no_grad(), its coefficient changes nothing", "term_without_gradient"),
    ],
)  # fmt: skip
def test_all_signs_of_a_row_must_stand_in_the_report(symptom: str, cause: str) -> None:
    assert first(symptom=symptom).id == cause
    halves = symptom[: len(symptom) // 3], "a run with " + symptom.split()[0]
    told = [first(symptom=half) for half in halves if half.strip() and len(half) > 12]
    assert all(row.id != cause or (row.confidence or 0) < 0.5 for row in told)  # likely at best


@pytest.mark.parametrize(("place", "most"), [(0, 0.9), (11, 0.9), (20, 0.65), (60, 0.45), (200, 0.45)])
def test_words_alone_are_less_sure_where_a_report_is_like_other_causes(place: int, most: float) -> None:
    cause = next(one for one in causes() if one.id == "checkpoint_is_stale")
    match = Match(cause=cause, confidence=0.9, missing=frozenset(), suspected=False)
    assert _doubted(match, {"save": True}, place).confidence == most
    assert (
        _doubted(match, {"save": True, "identical_steps": (1, 2)}, place) == match
    )  # a setting or number speaks for it


@pytest.mark.parametrize(
    ("symptom", "name"),
    [
        ("KeyError: 'raw_prompt_ids' in the agent loop's postprocess", "raw_prompt_ids"),
        ("AttributeError: 'DataProto' object has no attribute 'old_log_probs'", "old_log_probs"),
        ("ValueError: rollout_routed_experts is required in rollout_data, the output has no such key", "rollout_routed_experts"),
    ],
)  # fmt: skip
def test_a_missing_field_is_named(symptom: str, name: str) -> None:
    row = first(symptom=symptom)
    assert row.id == "field_missing_on_this_path" and f"`{name}`" in row.message


def test_a_name_of_the_code_stands_in_what_is_located() -> None:
    found = located("loss_agg_mode is not passed to compute_policy_loss")
    assert found and found[0].id == "report_dead_setting" and "oss_agg_mode" in found[0].message


@pytest.mark.parametrize(("stage", "there"), [("update_actor", False), ("update_critic", True), ("", True)])
def test_a_cause_of_another_stage_is_not_offered_where_the_stage_is_known(stage: str, there: bool) -> None:
    symptom = (
        "CUDA out of memory; critic/score/mean 0.2, ppo_micro_batch_size_per_gpu=4 of the micro-batch, value model"
    )
    config = {"ppo_max_token_len_per_gpu": 16384}
    rows = answer(Report(symptom=symptom, config=config, stage=stage))
    assert ("critic_has_its_own_budget" in {row.id for row in rows}) is there


def test_stages_of_causes_are_stages() -> None:
    assert {stage for cause in causes() for stage in cause.stages} <= set(stages())
    assert not any(
        "wake" in cause.id and cause.may_be_in("update_actor") and cause.kind == "memory"
        for cause in causes()
        if cause.stages
    )


@pytest.mark.parametrize(("line", "told"), [
    ("per_token_loss1 = coef_1 * advantages", True), ("pg_losses1 = -advantages * ratio", True), ("x = hidden * mask", False),
])  # fmt: skip
def test_advantages_without_a_token_dimension_are_named_by_the_expression(line: str, told: bool) -> None:
    text = f"    {line}\nRuntimeError: The size of tensor a (512) must match the size of tensor b (16) at non-singleton dimension 1"
    rows = {row.id: row for row in answer(Report(symptom=text))}
    assert ("advantages_lack_the_token_dimension" in rows) is told
    assert not told or "unsqueeze(1)" in rows["advantages_lack_the_token_dimension"].message
