"""What a report says in sentences: settings with their units, what it works with, what is said of an object; and a plan of it."""

import json
from typing import Any

import pytest

from flowledger.cli.reports import with_plan
from flowledger.diagnose.reports.answers import answer
from flowledger.diagnose.reports.clauses import contrasts, switch, without_contrasts
from flowledger.diagnose.reports.facts import facts_of
from flowledger.diagnose.reports.mechanism import located
from flowledger.diagnose.reports.prose import facts_in_prose
from flowledger.diagnose.reports.read import of_mapping
from flowledger.diagnose.reports.report import Report
from flowledger.ledger.rows import FindingRow


def first(**parts: Any) -> FindingRow:
    return answer(Report(**parts))[0]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("GRPO with lr 1e-5, beta 0, n=16 and TP=4", {"lr": 1e-5, "kl_coef": 0, "group": 16, "tp": 4}),
        ("max response length 8k, a temperature of 0.7", {"max_response": 8192, "temperature": 0.7}),
        ("python -m main --tp 2 actor.ppo_mini_batch_size=64 \\\n  --max-tokens-per-gpu 9,216", {"tp": 2, "mini": 64, "token_cap": 9216}),
        ("actor:\n  use_kl_loss: false\nrollout:\n  n: 8\n  gpu_memory_utilization: 0.6", {"use_kl_loss": False, "group": 8, "util": 0.6}),
        ("GRPOConfig(learning_rate=1e-6, num_generations=8, beta=0.0, use_vllm=True)", {"lr": 1e-6, "group": 8, "kl_coef": 0, "use_vllm": True}),
        ("{'loss': 0.0, 'reward_std': 0.25, 'completions/clipped_ratio': 1.0}", {"loss_value": 0, "reward_std": 0.25, "clip_ratio": 1}),
        ("step:7 - response_length/clip_ratio:0.970 - actor/grad_norm:0.12", {"clip_ratio": 0.97, "grad_norm_value": 0.12}),
        ("four responses per prompt, 40 query heads and 8 KV heads", {"heads": 40, "kv_heads": 8}),
        ("utilisation of 90 %, ZeRO-3, LoRA rank 64", {"util": 0.9, "zero_stage": 3, "lora_rank": 64}),
        ("the chapter 3 of n lines says nothing", {}),
    ],
)  # fmt: skip
def test_settings_are_read_wherever_they_are_written(text: str, facts: dict[str, Any]) -> None:
    assert facts_in_prose(text) == pytest.approx(facts)


def test_the_configuration_goes_before_what_the_text_says() -> None:
    report = Report(config={"rollout.n": 4}, symptom="with n=8 and 2 nodes x 8 H100 it hangs")
    facts = facts_of(report)
    assert facts["group"] == 4 and facts["world"] == 16


def test_what_works_is_not_the_setting_of_the_failure() -> None:
    text = "It collapses with kl_beta=0.0. With kl_beta=0.1 it converges."
    assert facts_in_prose(text) == {"kl_coef": 0}
    assert without_contrasts(text) == "It collapses with kl_beta=0.0."


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Size mismatch in rope. With sequence_parallel=false it runs.", "sequence parallelism"),
        ("Text is garbled; with enforce_eager=true it is fine.", "CUDA graphs of the engine"),
        ("The gap is large, without LoRA it disappears.", "the LoRA adapter"),
        ("With vllm 0.8.2 the same script converges.", "the version"),
        ("Disabling prefix caching solves the problem.", "prefix caching"),
    ],
)
def test_what_it_works_with_decides(text: str, name: str) -> None:
    found = [known.name for one in contrasts(text) if (known := switch(one.factor))]
    assert found == [name]
    row = first(symptom=text)
    assert row.id == "report_contrast" and name.split()[-1] in row.message and (row.confidence or 0) < 0.7


@pytest.mark.parametrize(
    "text",
    [
        "With offload on it does not help.", "The loss looks fine.", "It works only for a few steps.",
        "Lowering gpu_memory_utilization makes no difference.", "Does it work with sequence_parallel=false?",
    ],
)  # fmt: skip
def test_what_does_not_help_decides_nothing(text: str) -> None:
    assert contrasts(text) == []


def test_a_bare_number_is_that_of_the_one_setting_of_its_size() -> None:
    row = first(config={"rollout.gpu_memory_utilization": 0.7, "rollout.n": 8}, symptom="OOM; with 0.6 it runs.")
    assert row.id == "report_contrast" and "gpu_memory_utilization 0.6" in row.message


@pytest.mark.parametrize(
    ("config", "symptom", "cause"),
    [
        ({"beta": 0.0}, "Reward rises, then entropy explodes and training collapses", "no_kl_anchor"),
        ({"beta": 0.04}, "Reward rises, then entropy explodes and training collapses", None),
        ({"kl_loss_coef": 0}, "The kl metric is always 0 in the log", "kl_is_not_computed"),
        ({"num_generations": 1}, "The reward does not improve at all", "group_of_one_learns_nothing"),
        ({"num_generations": 4}, "The reward does not improve at all", None),
    ],
)
def test_terms_that_are_off_are_named(config: dict[str, Any], symptom: str, cause: str | None) -> None:
    off = {"no_kl_anchor", "kl_is_not_computed", "group_of_one_learns_nothing"}
    told = [row.id for row in answer(Report(config=config, symptom=symptom)) if row.id in off]
    assert told[:1] == ([cause] if cause else [])


@pytest.mark.parametrize(("seconds", "told"), [(1500, True), (200, False)])  # 64 * 8 * 3 s = 1536 s one after the other
def test_the_time_of_rewards_is_held_against_their_sum(seconds: int, told: bool) -> None:
    config = {"data.train_batch_size": 64, "rollout.n": 8}
    rows = answer(Report(framework="verl", config=config, symptom=f"about 3 s a sample; {seconds} s for rewards"))
    assert ("reward_time_is_a_sum" in [row.id for row in rows]) is told


def test_a_sentence_is_located_by_what_it_is_said_of() -> None:
    strong, *_ = located(
        "Copies are appended whose loss_mask is still 1, and the count that divides the loss includes them."
    )
    assert strong.id == "report_miscounted" and "mask" in strong.message and not strong.weak
    weak, *_ = located("Rollout and actor log-probs differ.")
    assert weak.weak and "log-probs" in weak.message
    assert located("The weather differs.") == []


def test_what_is_only_located_is_told_as_unsure_and_not_for_symptoms_of_many_causes() -> None:
    assert (first(symptom="Rollout log-probs and those of the actor are another quantity.").confidence or 0) < 0.5
    assert first(symptom="Out of memory, the engine and the trainer differ.").verdict == "skipped"


PLANNED = {
    "framework": "verl", "model": "Qwen2.5-7B", "hardware": "8 x H100 80GB",
    "config": {"data.train_batch_size": 256, "rollout.n": 8, "ppo_mini_batch_size": 64, "ppo_micro_batch_size_per_gpu": 8,
               "data.max_prompt_length": 1024, "data.max_response_length": 8192},
}  # fmt: skip


def test_a_plan_of_the_report_says_where_its_memory_goes() -> None:
    # One copy of float32 logits of 8 rows: 8 * 9216 * 152064 * 4 B = 41.8 GiB; two of two bytes come to the same.
    report = with_plan(of_mapping({**PLANNED, "symptom": "CUDA out of memory"}))
    assert report.planned["plan_stage"] == "update_actor" and report.planned["plan_tensor"] == "logits"
    assert report.planned["plan_tensor_gib"] == pytest.approx(41.8, abs=0.1)
    assert report.planned["plan_gib"] > report.planned["plan_limit_gib"] == pytest.approx(79.2, abs=0.1)
    ids = [row.id for row in answer(report)]
    assert "plan_is_over_the_limit" in ids and "logits_of_the_micro_batch" in ids


@pytest.mark.parametrize(
    "change", [{"symptom": "it hangs"}, {"model": "not given"}, {"hardware": "8 GPUs"}, {"framework": "slime"}]
)
def test_no_plan_is_made_of_defaults(change: dict[str, str]) -> None:
    report = of_mapping({**PLANNED, "symptom": "CUDA out of memory", **change})
    assert with_plan(report) is report


def test_a_report_is_answered_in_a_moment() -> None:
    import time

    text = json.dumps({"symptom": "OOM in update_actor with n=8. " * 300, "config": {"rollout.n": 8}})
    answer(of_mapping(json.loads(text)))  # patterns are compiled once
    start = time.process_time()
    answer(of_mapping(json.loads(text)))
    assert time.process_time() - start < 1
