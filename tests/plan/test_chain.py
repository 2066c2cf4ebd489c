"""The chain from prompts to optimizer steps: units, arithmetic and keys, for frameworks that count differently."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.plan.chain import Chain, chain
from flowledger.plan.lengths import parse
from tests.plan.rules_data import SCRIPTS, foreign, verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def values(made: Chain) -> dict[str, tuple[float, str]]:
    return {row.quantity: (row.value, row.unit) for row in made.rows}


def script(name: str) -> Any:
    case = next(case for case in SCRIPTS if case["script"].endswith(name))
    return verl(case["settings"], engine=case["engine"], module=case["module"])


def test_verls_canonical_grpo_launch_comes_to_four_steps_of_twenty_micro_batches() -> None:
    made = chain(script("run_qwen3_8b_fsdp.sh"), None, None)  # 1024 prompts * 5, mini-batch 256, 24576 tokens, 8 GPUs
    told = values(made)
    assert told["samples"] == (5120, "samples")
    assert told["samples of a rank"] == (640, "samples")
    assert told["mini-batch"] == (1280, "samples")
    assert told["optimizer steps"] == (4, "steps")
    assert told["update: token budget"] == (24576, "tokens")
    assert told["update: micro-batches"] == (20, "micro-batches")  # ceil(160 * 3072 / 24576)
    assert told["old log-probs: micro-batches"] == (80, "micro-batches")
    assert made["samples"].arithmetic == "1024 prompts * 5 = 5120 samples"
    assert made["mini-batch"].key == f"{ACTOR}.ppo_mini_batch_size"
    assert "without length statistics" in made.notes[0]


def test_the_key_and_the_place_that_set_a_quantity_are_named() -> None:
    config = verl({f"{ROLLOUT}.n": 5})
    config._sources.update(
        {
            "rollout.samples_per_prompt": f"{ROLLOUT}.n@run.sh:31",
            "data.prompts_per_step": "data.train_batch_size default@verl head",
        }
    )
    made = chain(config, None, None)
    assert (made["samples of a prompt"].key, made["samples of a prompt"].source) == (f"{ROLLOUT}.n", "run.sh:31")
    assert made["prompts"].source == "default"


def test_v1_pads_the_batch_and_says_so() -> None:
    static = {"data.train_batch_size": 60, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.use_dynamic_bsz": True}
    made = chain(verl({**static, "algorithm.adv_estimator": "grpo"}), None, None)
    assert values(made)["samples of a rank"] == (8, "samples")  # 60 padded to 64
    assert "padded from 60 to 64" in str(made["samples of a rank"].note)
    assert values(made)["optimizer steps"] == (4, "steps")


def test_fully_async_counts_the_queue_as_its_source_does() -> None:
    told = values(chain(script("dapo_7b_math_fsdp2_8_8.sh"), None, None))
    assert told["required for an update"] == (128, "prompts")  # ppo_mini_batch_size 32 * require_batches 4
    assert told["queue"] == (563, "prompts")  # int(128 * 1.1 * 4)
    assert told["training steps"] == (100, "steps")  # int(51200 / 512)


def test_real_lengths_bring_the_count_down_and_the_worst_micro_batch_may_exceed_the_budget() -> None:
    config = script("run_qwen3_8b_fsdp.sh")
    worst = chain(config, None, None)
    real = chain(config, None, parse("p50=512,p99=1500,max=2048,prompt_p50=128,prompt_max=1024"))
    assert real["update: micro-batches"].value < worst["update: micro-batches"].value
    assert "drawn" in str(real["update: micro-batches"].arithmetic)
    tight = verl({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 10000, "data.train_batch_size": 64,
                  f"{ACTOR}.ppo_mini_batch_size": 64, f"{ROLLOUT}.prompt_length": 0, f"{ROLLOUT}.response_length": 6000})  # fmt: skip
    # 8 samples of 6000 tokens a rank: 5 micro-batches of 10000, so that one holds two samples
    assert values(chain(tight, None, None))["update: micro-batches"][0] == 5
    assert chain(tight, None, None)["update: worst micro-batch"].note == "exceeds the budget of 10000 by 2000 tokens"


FOREIGN: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]] = [
    (
        "trl",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 16, "num_iterations": 1},
        {"hardware": {"gpus_per_node": 8}, "mesh": {"dp": 8}, "rollout": {"samples_per_prompt": 16}},
        {"prompts": 8, "samples": 128, "mini-batch": 128, "optimizer steps": 1, "update: micro-batches": 4},
    ),
    (
        "slime",
        {"--rollout-batch-size": 32, "--n-samples-per-prompt": 8, "--global-batch-size": 256, "--micro-batch-size": 2,
         "--tensor-model-parallel-size": 2, "--actor-num-gpus-per-node": 8, "--rollout-max-response-len": 8192},
        {},
        {"samples": 256, "data-parallel ranks": 4, "mini-batch": 256, "update: micro-batches": 32, "optimizer steps": 1},
    ),
    (
        "openrlhf",
        {"--rollout.batch_size": 128, "--rollout.n_samples_per_prompt": 8, "--train.batch_size": 256,
         "--train.micro_batch_size": 4, "--actor.num_gpus_per_node": 8},
        {},
        {"samples": 1024, "mini-batch": 256, "optimizer steps": 4, "update: micro-batches": 8},
    ),
    (
        "nemo_rl",
        {"grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, "policy.train_global_batch_size": 512,
         "policy.train_micro_batch_size": 4, "cluster.gpus_per_node": 8},
        {},
        {"samples": 512, "mini-batch": 512, "optimizer steps": 1, "update: micro-batches": 16},
    ),
    (
        "areal",
        {"train_dataset.batch_size": 32, "gconfig.n_samples": 4, "actor.ppo_n_minibatches": 4},
        {"hardware": {"gpus_per_node": 8}, "mesh": {"dp": 8}, "rollout": {"max_response_tokens": 512}},
        {"samples": 128, "mini-batch": 32, "optimizer steps": 4, "rollouts ahead": 32},
    ),
    (
        "flowledger",
        {},
        {"data": {"path": None, "task": "chain_sum", "prompts_per_step": 8}, "rollout": {"samples_per_prompt": 4},
         "actor": {"mini_batch_prompts": 4, "micro_batch": {"samples": 2}, "epochs": 2}, "mesh": {"dp": 2}},
        {"samples": 32, "mini-batch": 16, "optimizer steps": 4, "update: micro-batches": 4, "data-parallel ranks": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "raw", "sections", "told"), FOREIGN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_framework_counts_in_its_own_units(
    framework: str, raw: dict[str, Any], sections: dict[str, Any], told: dict[str, float]
) -> None:
    made = chain(foreign(framework, raw, **dict(sections)), None, None)
    found = values(made)
    assert {name: found[name][0] for name in told} == told
    note = str(made["mini-batch"].note)
    assert (
        "prompts" if framework in ("flowledger",) else "samples" if framework != "areal" else "mini-batches"
    ) in note


@given(
    st.integers(1, 64), st.integers(1, 16), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4),
    st.booleans(), st.integers(1, 8),
)  # fmt: skip
def test_the_arithmetic_told_comes_to_the_value(
    prompts: int, n: int, mini: int, gpus: int, epochs: int, dynamic: bool, micro: int
) -> None:
    settings = {"data.train_batch_size": prompts, f"{ROLLOUT}.n": n, f"{ACTOR}.ppo_mini_batch_size": mini,
                "trainer.n_gpus_per_node": gpus, f"{ACTOR}.ppo_epochs": epochs, f"{ACTOR}.use_dynamic_bsz": dynamic,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro, "trainer.use_v1": False,
                "algorithm.adv_estimator": "grpo"}  # fmt: skip
    made = chain(verl(settings), None, None)
    for row in made.rows:
        if row.arithmetic and (end := re.search(r"= (-?[\d.]+) [\w-]+$", row.arithmetic)) and not row.note:
            assert float(end[1]) == pytest.approx(row.value), row
    found = values(made)
    if (prompts * n) % gpus == 0 and (mini * n) % gpus == 0 and prompts % mini == 0:
        assert found["samples of a rank"][0] * gpus == found["samples"][0]
        batches = found["optimizer steps"][0] / epochs
        assert found["mini-batch of a rank"][0] * batches == found["samples of a rank"][0]
        if dynamic:
            assert (
                found["update: worst micro-batch"][0] * found["update: micro-batches"][0]
                >= 1024 * found["mini-batch of a rank"][0]
            )
        else:
            assert (found["update: micro-batches"][0] - 1) * micro < found["mini-batch of a rank"][0]


def test_flowledgers_own_file_is_named_as_the_place() -> None:
    sections = {"data": {"path": None, "task": "chain_sum", "prompts_per_step": 8}}
    config = foreign("flowledger", {}, **sections)
    config._sources.update({"data.prompts_per_step": "examples/tiny.yaml:6"})
    made = chain(config, None, None)
    assert (made["prompts"].key, made["prompts"].source) == ("data.prompts_per_step", "examples/tiny.yaml:6")
    assert made["samples of a prompt"].source == "default"
