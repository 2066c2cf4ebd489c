"""What a report compares, numbers of refusals, terms of the loss, agents and versions: each as a kind of failure, in sentences of our own."""

from typing import Any

import pytest

from flowledger.diagnose.reports.answers import BY_WORDS, answer
from flowledger.diagnose.reports.clauses import contrasts
from flowledger.diagnose.reports.facts import facts_of
from flowledger.diagnose.reports.report import Report
from flowledger.ledger.rows import FindingRow

ON = {"use_dynamic_bsz": True}


def first(symptom: str, **config: Any) -> FindingRow:
    return answer(Report(symptom=symptom, config=config))[0]


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("NaN as soon as virtual pipeline stages are used.", "virtual pipeline stages are used"),
        ("It hangs only when prefix caching is on.", "prefix caching is on"),
        ("The error fails only with vp=2.", "vp=2"),
        ("It dies whenever LoRA is on.", "LoRA is on"),
    ],
)
def test_what_a_failure_takes_is_named(text: str, factor: str) -> None:
    assert [one.factor for one in contrasts(text)] == [factor]


def test_only_for_a_while_names_nothing() -> None:
    assert contrasts("It works only for a few steps.") == []


def test_without_the_flag_it_does() -> None:
    row = first("The adapter is not saved. Without the flag it is.", **{"trainer.merge_adapter": True})
    assert row.id == "report_contrast" or "merge_adapter" in row.message


@pytest.mark.parametrize(
    ("symptom", "asked"),
    [
        ("CUDA out of memory.", True),
        ("CUDA out of memory during the forward of the policy update, in the actor's backward.", False),
    ],
)
def test_a_stage_that_is_told_is_not_asked_for(symptom: str, asked: bool) -> None:
    assert ("the stage in which it died" in first(symptom).message) is asked


def test_a_refusal_names_what_does_not_divide() -> None:
    facts = facts_of(Report(symptom="AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2"))
    assert facts["dividend"] == 1 and facts["divisor"] == 2
    assert "world_size" in str(facts["dividend_name"]) and "infer_tp" in str(facts["divisor_name"])


def test_the_longest_sample_is_over_the_limit_that_is_configured() -> None:
    report = Report(
        symptom="Training dies of OOM.", config={"rollout_max_response_len": 6000}, measured={"response_len_max": 61000}
    )
    row = answer(report)[0]
    assert "61,000" in row.message and "6,000" in row.message
    short = Report(symptom=report.symptom, config=report.config, measured={"response_len_max": 6000})
    assert answer(short)[0].id != row.id


def test_image_tokens_and_features_differ() -> None:
    row = first("ValueError: Image features and image tokens do not match: tokens: 2601, features 2600")
    assert "2601" in row.message and "2600" in row.message


@pytest.mark.parametrize(
    ("cause", "symptom", "config"),
    [
        ("ratio_of_one_is_expected", "The ratio is exactly 1 at every step: old log-probs equal the new ones.", {"ppo_mini_batch_size": 128, "data.train_batch_size": 128, "ppo_epochs": 1}),
        ("accumulated_without_division", "The gradient norm of the critic changes with the setting and is larger by the number of micro-batches.", {}),
        ("kl_pushes_away", "KL rises; it rises faster with a larger kl_loss_coef.", {}),
        ("budget_is_times_the_sequence_ranks", "Micro-batches have 8192 tokens although the token budget is 4096.", {"ulysses_sequence_parallel_size": 2, **ON}),
        ("time_follows_the_lengths", "The time of the update grows from step to step, and the mean response length increases.", {}),
        ("full_weights_stay_on_the_loading_rank", "After the model is loaded rank 0 has 40 GB more than the other ranks, and keeps it.", {"strategy": "fsdp2"}),
        ("offload_is_between_stages", "Optimizer states stay on the GPU in the forward and backward of each mini-batch.", {"optimizer_offload": True}),
        ("lost_where_the_limit_is_just_reached", "An observation that exactly fills the remaining budget is dropped and the episode ends.", {}),
        ("log_probs_in_another_form", "TypeError: the server's response has a list of top log-probs where one was expected.", {}),
        ("set_once_and_met_again", "The first step is fine; the second fails with the assertion that a.hook is None.", {}),
        ("temperature_not_applied", "Rollout divides logits by the temperature, the reference's log-probs do not.", {}),
        ("shifted_by_one", "The prompt logprobs of a position are those of the token before, not of the next token.", {}),
        ("group_has_ranks_that_never_come", "Saving hangs: the barrier is on the full world, which includes the inference engine's ranks.", {}),
        ("quantised_on_one_side", "The log-prob ratio is off from step 1: base in 4-bit in training, bf16 in vLLM.", {}),
        ("chunks_kept_for_backward", "OOM in the backward: fp32 logits of all chunks are alive, although log-probs are made chunk by chunk.", {}),
        ("logits_gathered_over_tensor_ranks", "Memory of the log-probs does not shrink with tp: every rank holds the whole vocabulary.", {"tensor_model_parallel_size": 4}),
        ("recomputation_without_effect", "Activation checkpointing saves no memory at all.", {}),
        ("ratio_is_a_constant", "Only the KL term moves the weights: coef_1 is 1 everywhere.", {}),
        ("loss_is_a_sum_over_tokens", "grad_norm is 2000; the loss function returns two values and no number of tokens.", {}),
        ("cache_still_asleep", "After sleep, wake_up(tags=['weights']) and generate die of an illegal memory access.", {}),
        ("buffers_lost_in_reload", "KL to the engine is large after each reload: a buffer went from 0.02 to 1.0.", {}),
        ("reward_head_not_in_the_checkpoint", "AssertionError at the start: the reward model is not loaded, its path has no value head.", {}),
        ("passes_are_packed_otherwise", "The clip fraction of the first update is 0.01; with the same packing in both passes it is 0.", {}),
        ("rewards_are_summed_without_the_mask", "A response that rejection has masked out still has an advantage from its reward.", {}),
        ("return_ends_at_a_masked_token", "Tokens before a tool call's observation have return 0 although the reward comes later.", {}),
        ("advantage_changed_between_two_uses", "The advantage is normalised between the unclipped and the clipped objective.", {}),
        ("metrics_take_the_divisor_of_the_loss", "Reported metrics change with the loss_type, on the same samples.", {}),
        ("two_lists_of_other_lengths", "Validation says that messages and rewards must have the same length.", {}),
        ("adapter_is_not_applied", "Generation with the trained LoRA is the same as without it: the outputs are unchanged.", {}),
        ("no_slot_for_the_new_adapter", "Loading the next LoRA adapter fails when all slots are full.", {}),
        ("full_state_through_all_ranks", "Loading the checkpoint takes 2 hours on 512 ranks.", {"state_dict_type": "FULL_STATE_DICT"}),
        ("last_accumulation_is_shorter", "The last update of an epoch has fewer micro-batches, and its gradient is too small.", {"gradient_accumulation_steps": 8}),
    ],
)  # fmt: skip
def test_a_kind_of_failure_is_told_by_its_words(cause: str, symptom: str, config: dict[str, Any]) -> None:
    row = first(symptom, **config)
    assert row.id == cause


@pytest.mark.parametrize(("said", "told"), [("is 0", True), ("is not zero", False)])
def test_what_is_not_zero_is_not_taken_for_zero(said: str, told: bool) -> None:
    row = first(f"The clip ratio {said} in all steps.", num_iterations=1)
    assert (row.id == "clip_fraction_zero_is_expected") is told


def test_leave_one_out_needs_a_spread() -> None:
    row = first("Advantages explode to 1200 with RLOO and normalised rewards.")
    assert row.id == "leave_one_out_without_spread"


@pytest.mark.parametrize(
    ("text", "works"),
    [("The same batch is the largest that fits.", False), ("With tp=2 it fits.", True)],
)
def test_the_largest_that_fits_is_no_contrast(text: str, works: bool) -> None:
    assert bool(contrasts(text)) is works


def test_memory_that_does_not_fall_is_no_collapse_of_the_entropy() -> None:
    report = "Memory for the entropy does not fall with more ranks."
    assert all(row.id != "entropy_collapse" for row in answer(Report(symptom=report)))


def test_words_alone_never_make_sure() -> None:
    """One in three of new reports was told wrongly by words alone: under 0.7, whatever the row says."""
    assert BY_WORDS < 0.7
    row = first("Rollout divides logits by the temperature, the reference's log-probs do not.")
    assert row.id == "temperature_not_applied" and row.confidence == BY_WORDS
    row = first("OOM in the forward pass: logits of 8192 tokens, vocabulary 248000.", max_model_len=8192)
    assert (row.confidence or 0) <= BY_WORDS
