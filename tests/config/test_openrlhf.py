"""OpenRLHF launches: flags against the parsers of its wheels, argparse as second implementation, and what they mean."""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config import flag_words
from flowledger.config.foreign import Reading
from flowledger.config.openrlhf import read as openrlhf
from flowledger.config.settings import table
from flowledger.config.shell.launches import launches
from flowledger.flow.errors import BadInput

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (SCRIPTS.parent / "openrlhf" / "flags.json").read_text(encoding="utf-8")
)["versions"]


def rows(version: str) -> dict[str, flag_words.Row]:
    return openrlhf._rows(table("openrlhf"), older=version == "0.9.0")


def read(name: str, *overrides: str, version: str | None = None, **assume: str) -> Reading:
    return openrlhf.read(launches(SCRIPTS / name)[-1], overrides, assume=assume, version=version)


def line(text: str, tmp_path: Path, version: str | None = None, *overrides: str) -> Reading:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {text}\n", encoding="utf-8")
    return openrlhf.read(launches(script)[-1], overrides, assume={}, version=version)


@pytest.mark.parametrize("version", PUBLISHED)
def test_the_table_has_the_flags_and_defaults_of_the_wheels(version: str) -> None:
    known = rows(version)
    for flag, published in PUBLISHED[version].items():
        row = known[flag[2:]]
        expected = published["default"]
        assert row.get("default") == (float("inf") if expected == "inf" else expected), flag
        assert row.get("words", 1) == published.get("words", 1), flag
        assert row.get("choices") == published.get("choices"), flag


def argparse_of(version: str) -> argparse.ArgumentParser:
    """The framework's parser, rebuilt from what its wheel declares."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    kinds = {"int": int, "float": float}
    for flag, row in PUBLISHED[version].items():
        if row.get("words") == 0:
            parser.add_argument(flag, action="store_true", default=row["default"])
        else:
            parser.add_argument(
                flag, type=kinds.get(row.get("type", ""), str), nargs=row.get("words"), choices=row.get("choices")
            )
    return parser


PARSER = argparse_of("0.11.2")
FLAGS = st.sampled_from([*PUBLISHED["0.11.2"], "--train.micro", "--vllm.gpu", "--actor.n", "--trian.batch_size"])
VALUES = st.sampled_from(["1", "8", "0.5", "-1", "1e-6", "k2", "gae", "bf16", "path/x", "", "a b", "10x"])
COMMANDS = st.lists(st.tuples(FLAGS, st.lists(VALUES, max_size=2), st.booleans()), max_size=4)


@settings(max_examples=400, deadline=None)
@given(commands=COMMANDS)
def test_random_command_lines_are_read_and_refused_as_argparse_does(
    commands: list[tuple[str, list[str], bool]],
) -> None:
    words: list[str] = []
    for flag, values, inline in commands:
        words += [f"{flag}={values[0]}"] if inline and values else [flag, *values]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            expected = vars(PARSER.parse_args(words))
    except (argparse.ArgumentError, SystemExit):
        expected = None
    try:
        found = flag_words.given([(word, "run.sh:1") for word in words], rows("0.11.2"), "openrlhf 0.11.2")
    except BadInput:
        assert expected is None
        return
    if found.unknown:
        assert expected is None
        return
    assert expected is not None
    assert found.values == {key: expected[key] for key in found.values}


def test_a_launch_with_dotted_flags() -> None:
    config = read("openrlhf_grpo.sh").config
    engine, serving = config.actor.engine, config.rollout.serving
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt, config.mini_batch_samples) == (
        128,
        8,
        1024,
    )
    assert (engine.strategy, engine.mesh and engine.mesh.dp, engine.param_dtype) == ("zero3", 8, "bfloat16")
    assert (engine.optimizer.master_dtype, engine.logits.upcast, engine.logits.entropy) == ("float32", True, "none")
    assert (engine.offload.optimizer, engine.offload.optimizer_fraction) == (True, 0.0)  # --ds.enable_sleep
    assert (engine.recompute.granularity, config.actor.packed) == ("full", True)
    assert config.actor.micro_batch.max_tokens == 16384
    assert config.actor.log_prob_micro_batch and config.actor.log_prob_micro_batch.max_tokens == 16384
    assert (serving.engine, serving.mesh.tp, serving.colocated, serving.sleeps, serving.memory_fraction) == (
        "vllm",
        2,
        True,
        True,
        0.7,
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (4096, 4096)
    assert (config.algorithm.kl_in, config.algorithm.kl_form, config.algorithm.kl_coef) == ("loss", "k2", 1e-5)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.critic is None
    assert config.ref is not None and config.ref.engine is not None and config.ref.engine.strategy == "zero3"
    assert config.raw["train.batch_size"] == 1024
    assert config.raw["rollout.max_tokens_per_gpu"] == 16384
    assert config.source_of("actor.mini_batch_samples").startswith("train.batch_size@")
    assert config.source_of("actor.mini_batch_samples").endswith("openrlhf_grpo.sh:30")
    assert config.source_of("actor.epochs") == "train.max_epochs default@openrlhf 0.11.2"


def test_a_launch_with_underscore_flags_means_the_same_and_has_its_own_defaults(tmp_path: Path) -> None:
    reading = read("openrlhf_ppo_underscores.sh")
    config = reading.config
    assert config.framework_version == "0.9.0"
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 1024)
    assert config.rollout.serving.max_model_tokens == 2048
    assert (config.actor.micro_batch.samples, config.mini_batch_samples) == (8, 128)
    assert config.critic is not None and config.critic.path == "/models/llama-3-8b-reward"
    assert config.critic.engine is not None and config.critic.engine.strategy == "zero3"
    assert (config.algorithm.advantage, config.algorithm.kl_in) == ("gae", "reward")
    assert config.reward.components[0].kind == "model"
    assert any("underscore flags" in note for note in reading.notes)
    plain = line("--pretrain m --vllm_num_engines 8", tmp_path).config
    assert (plain.actor.micro_batch.samples, plain.raw["rollout.micro_batch_size"]) == (4, 8)  # 0.9.0; 1 and 1 later
    newer = line("--actor.model_name_or_path m --vllm.num_engines 8", tmp_path).config
    assert (newer.actor.micro_batch.samples, newer.raw["rollout.micro_batch_size"]) == (1, 1)


def test_ring_attention_and_tensor_parallelism_share_a_token_budget(tmp_path: Path) -> None:
    config = line(
        "--actor.num_nodes 2 --ds.ring_attn_size 2 --ds.tensor_parallel_size 2 --train.dynamic_batch_enable"
        " --train.max_tokens_per_gpu 8192 --rollout.max_tokens_per_gpu 16384 --vllm.num_engines 4 --ds.adam_offload",
        tmp_path,
    ).config
    mesh = config.actor.engine.mesh
    assert mesh is not None and (mesh.dp, mesh.cp, mesh.tp) == (4, 2, 2)
    assert config.actor.micro_batch.max_tokens == 4 * 8192
    assert config.actor.log_prob_micro_batch and config.actor.log_prob_micro_batch.max_tokens == 4 * 16384
    assert config.actor.packed  # ring attention turns it on
    assert (config.actor.engine.strategy, config.actor.engine.offload.optimizer_fraction) == ("zero2", 1.0)
    assert (config.rollout.serving.colocated, config.rollout.serving.gpus) == (False, 4)


def test_zero2_holds_a_whole_reference_on_each_rank_and_no_kl_holds_none(tmp_path: Path) -> None:
    whole = line("--actor.model_name_or_path m --ref.num_gpus_per_node 4", tmp_path).config.ref
    assert whole is not None and whole.engine is not None and whole.engine.mesh is not None
    assert (whole.engine.strategy, whole.engine.mesh.dp, whole.engine.optimizer.kind) == ("ddp", 4, "none")
    assert line("--algo.kl.init_coef 0", tmp_path).config.ref is None


def test_asynchronous_training_takes_the_engines_off_the_policy(tmp_path: Path) -> None:
    text = "--train.async_enable --train.colocate_all --vllm.num_engines 8 --train.async_queue_size 2 --train.partial_rollout_enable"
    config = line(text, tmp_path).config
    assert config.async_ is not None and (config.async_.mode, config.async_.max_staleness) == ("fully_async", 2)
    assert (config.rollout.serving.colocated, config.rollout.serving.gpus) == (False, 8)


def test_overrides_count_above_the_script_and_assumptions_fill_what_it_leaves(tmp_path: Path) -> None:
    config = line("--train.batch_size 64", tmp_path, None, "train.batch_size=256", "ds.packing_samples=true").config
    assert (config.mini_batch_samples, config.actor.packed) == (256, True)
    assert config.source_of("actor.mini_batch_samples") == "train.batch_size@command line"
    reading = openrlhf.read(None, ["ds.zero_stage=3"], assume={"data.max_len": "4096"}, version=None)
    assert reading.config.actor.engine.strategy == "zero3"
    assert reading.config.rollout.serving.max_model_tokens == 4096
    assert reading.assumed == ("data.max_len=4096",)


def test_what_no_plan_depends_on_is_named(tmp_path: Path) -> None:
    reading = line("--logger.wandb.project x --train.batch_size 64", tmp_path)
    assert reading.ignored == (f"logger.wandb.project@{tmp_path / 'run.sh'}:1",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "--train.batchsize 8",
            "--train.batchsize: openrlhf 0.11.2 has no such flag and does not start; did you mean train.batch_size?",
        ),
        (
            "--train_batch_size 8 --train.batch_size 8 --ds.zero_stage 3",
            "--train_batch_size: openrlhf 0.11.2 has no such flag",
        ),
        ("--train.batch_size many", "--train.batch_size = many: should be a whole number; use 128"),
        ("--algo.kl.estimator k4", "--algo.kl.estimator = k4: should be one of k1, k2, k3"),
        ("--train.batch_size", "--train.batch_size needs a value (samples of one optimizer step"),
        ("--actor.eps_clip_low_high 0.2", "--actor.eps_clip_low_high needs 2 values"),
        ("--ds.packing_samples yes", "'yes' stands alone after --ds.packing_samples"),
        ("stray --train.batch_size 8", "'stray' stands alone"),
        ("--train.m 1", "--train.m could be --train.max_epochs"),
        ("--ds.zero_stage 4", "ds.zero_stage = 4: should be 0, 1, 2 or 3"),
        ("--ds.ring_attn_size 3", "the 8 GPUs of the policy are not divisible"),
        ("--rollout.batch_size 0", "rollout.batch_size = 0: should be a whole number of at least 1"),
    ],
)
def test_a_flag_that_is_refused_gets_one_clear_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        line(text, tmp_path)
    assert said in str(caught.value)
    assert "run.sh:1" in str(caught.value)
