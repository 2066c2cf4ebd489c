"""What a report says of its own settings and stage: what it works with, what a refusal names, what a ratio is equal to, and how sure words can make."""

import json
from typing import Any

import pytest

from flowledger.cli.reports import with_plan
from flowledger.diagnose.reports.answers import BY_WORDS, answer
from flowledger.diagnose.reports.facts import facts_of
from flowledger.diagnose.reports.read import of_mapping
from flowledger.diagnose.reports.report import Report
from flowledger.ledger.rows import FindingRow


def first(**parts: Any) -> FindingRow:
    return answer(with_plan(of_mapping(parts)))[0]


@pytest.mark.parametrize(
    ("symptom", "config"),
    [
        ("The log probabilities differ by 0.4. Without the sharded_embedding they agree.", {"model.sharded_embedding": True}),
        ("Rewards are garbage. With another parser they are right.", {"reward.parser": "strict"}),
        ("Results with flash_kernel differ from those without.", {"attn.flash_kernel": True}),
        ("With sharded_embedding the logits are wrong; without it they agree.", {"model.sharded_embedding": True}),
    ],
)  # fmt: skip
def test_what_it_works_without_is_named_by_its_key(symptom: str, config: dict[str, Any]) -> None:
    row = first(symptom=symptom, config=config)
    ((key, value),) = config.items()
    assert row.id == "report_contrast" and f"{key} = {value}" in row.message and (row.confidence or 0) < 0.6


def test_a_factor_that_no_setting_is_of_decides_nothing() -> None:
    row = first(symptom="Rewards are garbage. With another parser they are right.", config={"trainer.nnodes": 1})
    assert row.verdict == "skipped"


def test_what_it_works_with_goes_before_what_is_only_located_but_not_of_memory() -> None:
    told = "entropy collapses; with loss_fn=ppo it is stable."
    row = first(symptom=f"Entropy {told[8:]}", config={"loss_fn": "importance_sampling"})
    assert row.id == "report_contrast" and "loss_fn" in row.message
    assert first(symptom="CUDA out of memory at wake_up. Without sleep mode it works.").verdict == "skipped"


def test_two_settings_that_a_refusal_names_do_not_go_together() -> None:
    config = {"model.fused_linear": True, "actor.chunked_entropy": True, "trainer.nnodes": 1}
    row = first(symptom="ValueError: fused_linear cannot be used with chunked_entropy.", config=config)
    assert row.id == "report_clash" and "fused_linear = True and chunked_entropy = True" in row.message
    said = first(symptom="I set fused_linear and chunked_entropy. ValueError: bad input.", config=config)
    assert said.id != "report_clash"  # not in the refusal's own sentence


def test_the_setting_that_a_symptom_names_goes_before_the_first_of_few() -> None:
    row = first(symptom="reduce-scatter: dim 0 of size 1001 is not divisible", config={"tp": 4, "cp": 2})
    assert row.id == "report_setting" and "(tp = 4)" in row.message and (row.confidence or 0) < 0.5
    row = first(symptom="reduce-scatter: dim 0 of size 1001 is not divisible by tp", config={"tp": 4, "cp": 2})
    assert row.id == "report_setting" and "(tp = 4)" in row.message and (row.confidence or 0) > 0.5


@pytest.mark.parametrize(
    ("config", "measured", "says"),
    [
        ({"context_parallel_size": 4}, {"grad_norm": 4.02, "expected grad_norm": 1.0}, "(cp) = 4"),
        ({"gradient_accumulation_steps": 8}, {"loss": 0.5, "loss_expected": 4.0}, "accumulation steps = 8"),
    ],
)
def test_a_ratio_that_is_a_degree_names_the_degree(config: dict[str, Any], measured: dict[str, Any], says: str) -> None:
    row = first(symptom="the logged value of the update is wrong by a factor", config=config, measured=measured)
    assert row.id == "scale_is_a_degree" and says in row.message


def test_a_ratio_that_no_degree_is_equal_to_names_none() -> None:
    facts = facts_of(
        of_mapping({"symptom": "wrong loss", "config": {"cp": 4}, "measured": {"loss": 9.0, "expected": 3.0}})
    )
    assert "scale_degree" not in facts


@pytest.mark.parametrize(("coefficient", "off"), [(0.001, False), (0, True), (None, True)])
def test_kl_is_off_where_neither_loss_nor_reward_has_it(coefficient: float | None, off: bool) -> None:
    config = {"actor.use_kl_loss": False} | ({} if coefficient is None else {"algorithm.kl_ctrl.kl_coef": coefficient})
    assert facts_of(of_mapping({"symptom": "x", "config": config})).get("kl_off", False) is off


def test_a_temperature_of_zero_divides_the_logits() -> None:
    row = first(symptom="Loss is NaN from the first step.", config={"sampling.temperature": 0})
    assert row.id == "temperature_zero" and (row.confidence or 0) >= 0.8


def test_rows_of_a_dispatch_grow_by_whole_prompts() -> None:
    """5 prompts × 6 responses = 30 rows into 4 chunks: 24 and 36 (4 and 6 prompts), not 28 and 32."""
    refused = "AssertionError: only support equal chunk. Got size of DataProto 30 and chunk 4."
    row = first(framework="verl", symptom=refused, config={"data.train_batch_size": 5, "rollout.n": 6})
    assert row.fix == {"key": "rows of the dispatched batch", "from": "30", "to": "36"}
    assert any("24 and 36" in line for line in row.evidence or ()) and any(
        "5 to 6 prompts" in line for line in row.evidence or ()
    )
    bare = first(framework="verl", symptom=refused)
    assert any("28 and 32" in line for line in bare.evidence or ())


def test_lengths_are_padded_for_context_and_tensor_parallelism() -> None:
    """cp 2 cuts a sequence into 2 × 2 chunks, sequence parallelism each rank's half into 4: multiples of 2 × lcm(2, 4) = 8."""
    config = {"tp": 4, "cp": 2, "make_sequence_length_divisible_by": 4}
    row = first(symptom="AssertionError in forward: sequence length", config=config)
    assert row.id == "length_multiple_too_small" and row.fix and row.fix["to"] == "8"


def test_logits_of_the_tokens_that_a_sentence_tells() -> None:
    """40,000 tokens × 151,936 / 4 entries × 4 B = 5.66 GiB."""
    symptom = "CUDA out of memory in the forward pass at 40,000 tokens of one micro-batch"
    row = first(symptom=symptom, model="Qwen3-4B", config={"tp": 4})
    assert row.id == "logits_over_all_tokens" and "40000 tokens × 37984" in row.message and "5.7 GiB" in row.message


@pytest.mark.parametrize(
    ("symptom", "stage"),
    [
        ('File "/x/verl/workers/actor/dp_actor.py", line 20, in update_policy\n    loss.backward()\nRuntimeError: x', "update_actor"),
        ("CUDA out of memory in compute_log_prob() after 3 steps", "old_log_prob"),
        ("CUDA out of memory after 3 steps", ""),
    ],
)  # fmt: skip
def test_the_stage_is_the_one_that_the_crash_reader_knows(symptom: str, stage: str) -> None:
    assert with_plan(Report(symptom=symptom)).stage == stage


def test_memory_that_grows_is_not_the_engines_share() -> None:
    """All truncated, and a leak: neither is the utilisation, and words alone make nobody sure."""
    symptom = "CUDA out of memory. Tried to allocate 2 GiB. All responses reach the limit, and allocated memory grows by 0.2 GiB each step."
    rows = answer(Report(symptom=symptom, config={"gpu_memory_utilization": 0.8}))
    assert "utilisation" not in rows[0].message and all((row.confidence or 0) < 0.8 for row in rows)


@pytest.mark.parametrize("measured", [{}, {"response_length/clip_ratio": 0.2}])
def test_words_alone_are_worth_less_than_numbers(measured: dict[str, Any]) -> None:
    symptom = "Every response is truncated at max_response_length, all rewards of a group are equal and the loss is 0."
    rows = answer(of_mapping({"symptom": symptom, "measured": measured}))
    assert all((row.confidence or 0) <= BY_WORDS < 0.8 for row in rows)
    assert not measured or rows[0].id != "everything_truncated"


def test_a_report_is_the_same_in_a_file(tmp_path: Any) -> None:
    from flowledger.cli.reports import reported

    path = tmp_path / "one.json"
    told = {
        "symptom": "Rewards are garbage. With another parser they are right.",
        "config": {"reward.parser": "strict"},
    }
    path.write_text(json.dumps(told), encoding="utf-8")
    assert reported(str(path))[0].message == first(**told).message
