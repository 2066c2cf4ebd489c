"""TRL's files and launches become the numbers that TRL itself would run with, and each says where it came from.

Truth: `batches_1.16.json` holds what GRPOConfig of trl 1.16 derived when it was made, `defaults_1.16.json` the defaults of its
dataclasses; the other figures are worked out by hand beside each assertion.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flowledger.config.settings import table
from flowledger.config.shell.launches import launches
from flowledger.config.trl import read as trl
from flowledger.flow.errors import BadInput
from flowledger.plan.chain import chain
from flowledger.plan.checks import check

DATA = Path(__file__).parents[1] / "data" / "trl"


@dataclass
class Line:
    """One command line of a script, as the shell reader hands it over."""

    argv: list[str]
    places: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = self.places or [f"{DATA}/run.sh:3"] * len(self.argv)


def read(source, *overrides, version=None, **assume):
    return trl.read(source, overrides, assume=assume, version=version)


def launch(text: str, **options):
    return read(Line(text.split()), **options)


def fault(source, *overrides, **options) -> str:
    with pytest.raises(BadInput) as caught:
        read(source, *overrides, **options)
    return str(caught.value).replace(f"{DATA}/", "")


def written(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder / "run.yaml"


def test_every_default_is_the_one_of_the_installed_dataclasses():
    recorded = json.loads((DATA / "defaults_1.16.json").read_text())["classes"]
    real: dict[str, object] = {}
    for fields in recorded.values():
        real = {**fields, **real}  # the first class that has a name is the one that takes it
    ours = {**table("trl")["defaults"], **dict.fromkeys(table("trl")["unset"])}
    assert ours == real and len(real) > 200


def test_generation_batches_are_those_that_grpo_config_derives():
    recorded = json.loads((DATA / "batches_1.16.json").read_text())
    for world, per_rank, accumulate, group, batch, steps, derived in recorded["rows"]:
        given = {"generation_batch_size": batch, "steps_per_generation": steps}
        reading = read(
            None,
            f"num_processes={world}",
            f"per_device_train_batch_size={per_rank}",
            f"gradient_accumulation_steps={accumulate}",
            f"num_generations={group}",
            *(f"{key}={value}" for key, value in given.items() if value is not None),
        )
        raw, config = reading.config.raw, reading.config
        assert {key: raw[f"_trl.{key}"] for key in derived} == derived
        assert {key: raw[key] for key in given} == given  # what the user wrote stays as it is
        assert config.samples_per_step == derived["generation_batch_size"]  # divisible, or GRPOConfig refuses
        assert config.mini_batch_samples == per_rank * accumulate * world
    assert len(recorded["rows"]) == 60


def test_ddp_from_a_shortcut():
    reading = read(DATA / "multi_gpu.yaml")
    config = reading.config
    # 4 per device * 8 processes * 4 accumulated = 128 completions = 8 prompts * 16; one optimizer step takes all of them
    assert (config.data.prompts_per_step, config.samples_per_step, config.mini_batch_samples) == (8, 128, 128)
    assert (config.mesh.dp, config.hardware.world, config.actor.micro_batch.samples) == (8, 8, 4)
    engine = config.actor.engine
    assert (engine.strategy, engine.param_dtype, engine.compute_dtype, engine.autocast) == (
        "ddp",
        "float32",
        "bfloat16",
        True,
    )
    assert config.ref is not None and config.algorithm.kl_coef == 0.04
    assert config.rollout.weights == "shared" and config.rollout.serving.engine == "hf"
    assert config.rollout.serving.max_running == 4 * 4  # a rank samples its whole generation batch at once
    assert [one.path for one in config.reward.components] == ["trl.rewards:accuracy_reward", "my_lab.rewards:brevity"]
    assert reading.config.raw["old_per_token_logps"] is False  # 4 accumulated, 4 steps * 1 iteration: aligned
    assert reading.ignored == (f"output_dir@{DATA}/multi_gpu.yaml:12",)


def test_colocated_vllm_with_lora_under_fsdp2():
    config = read(DATA / "colocate_fsdp2.yaml").config
    # 2 per device * 16 processes * 16 steps per generation = 512 completions = 64 prompts * 8
    assert (config.data.prompts_per_step, config.samples_per_step) == (64, 512)
    # an optimizer step: 2 * 8 accumulated * 16 = 256; a generation is used 2 times: 2 * 512/256 = 4 steps
    assert config.mini_batch_samples == 256 and config.actor.epochs == 2
    assert config.actor.epochs * config.samples_per_step // config.mini_batch_samples == 4
    assert (config.hardware.nodes, config.hardware.gpus_per_node, config.mesh.dp) == (2, 8, 16)
    engine = config.actor.engine
    assert (engine.strategy, engine.reshard_after_forward, engine.accumulates_unsharded) == ("fsdp2", False, True)
    assert engine.offload.param and engine.offload.optimizer and engine.offload.streamed
    assert (engine.param_dtype, engine.lora.rank, engine.lora.dtype) == ("bfloat16", 32, "float32")
    assert len(engine.lora.target_modules) == 7  # all-linear of a dense Qwen3 layer
    serving = config.rollout.serving
    assert (serving.mesh.tp, serving.mesh.dp) == (
        2,
        1,
    )  # 16 processes / tp 2 = 8 replicas, none of which has a dp of its own
    assert serving.max_running == 2 * 2 * 16  # per device * tp * steps per generation
    assert serving.max_batched_tokens == 4096 and serving.memory_fraction == 0.35 and serving.sleeps
    assert config.data.max_prompt_tokens == 6144 - 4096
    algorithm = config.algorithm
    assert (algorithm.loss_aggregation, algorithm.loss_scale_factor) == ("seq-mean-token-sum-norm", 4096)
    assert (algorithm.norm_by_std, algorithm.clip_low, algorithm.clip_high) == (False, 0.2, 0.28)
    assert config.ref is None and config.raw["old_per_token_logps"] is True  # vLLM's correction needs them


def test_a_launch_line_with_a_deepspeed_file_and_a_server():
    reading = launch(
        "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file zero3.json trl/scripts/grpo.py "
        "--config server.yaml --num-generations 16 --no_mask_truncated_completions --vllm_mode=server"
    )
    config, engine = reading.config, reading.config.actor.engine
    # generation_batch_size 512 = 8 per device * 4 processes * 16; 512/16 = 32 prompts; a step takes 8*2*4 = 64
    assert (config.data.prompts_per_step, config.mini_batch_samples) == (32, 64)
    assert (config.raw["_trl.steps_per_generation"], config.raw["steps_per_generation"]) == (16, None)
    assert (engine.strategy, engine.param_dtype, engine.optimizer.master_dtype) == ("zero3", "bfloat16", "float32")
    assert engine.offload.optimizer and not engine.offload.param and not engine.autocast
    assert engine.optimizer.kind == "adamw_8bit" and engine.recompute.granularity == "none"
    assert not config.rollout.serving.colocated and config.rollout.serving.gpus is None
    assert (
        config.source_of("rollout.samples_per_prompt") == f"num_generations@{DATA}/run.sh:3"
    )  # the line above the file
    assert config.source_of("data.prompts_per_step") == f"generation_batch_size@{DATA}/server.yaml:9"
    assert (
        config.source_of("actor.engine.offload.optimizer") == f"accelerate.offload_optimizer_device@{DATA}/zero3.json:5"
    )


def test_a_script_is_read_as_it_stands_and_says_what_it_left_open(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "MODEL=${MODEL:-Qwen/Qwen3-4B}\n"
        "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 2 \\\n"
        "  trl/scripts/grpo.py --model_name_or_path $MODEL --num_generations 4 \\\n"
        '  --output_dir "out/$RUN"\n',
        encoding="utf-8",
    )
    reading = read(launches(script)[0])
    assert reading.config.source_of("rollout.samples_per_prompt") == f"num_generations@{script}:3"
    assert (reading.config.model.path, reading.config.actor.engine.strategy) == ("Qwen/Qwen3-4B", "zero2")
    assert any("RUN is not set" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("words", "strategy", "world"),
    [
        ("trl grpo --accelerate_config zero2 --beta 0.1", "zero2", 8),
        ("trl grpo --accelerate_config fsdp1 --num_processes 4", "fsdp1", 4),
        ("trl grpo --accelerate_config single_gpu", "single", 1),
        ("torchrun --nproc_per_node=4 --nnodes=2 grpo.py --output_dir x", "ddp", 8),
        ("torchrun --standalone --nproc-per-node 2 grpo.py --deepspeed zero3.json", "zero3", 2),
        ("python grpo.py --output_dir x", "single", 1),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 -m trl.scripts.grpo", "fsdp2", 2),
        ("accelerate launch --num_processes 6 --use_fsdp --fsdp_sharding_strategy 3 grpo.py", "ddp", 6),
    ],
)
def test_every_launcher_says_strategy_and_world(words, strategy, world):
    config = launch(f"{words} --num_generations 2 --per_device_train_batch_size 2").config
    assert (config.actor.engine.strategy, config.mesh.dp) == (strategy, world)


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [  # frameworks that name them: the DAPO, Dr. GRPO, GRPO and CISPO papers; LUSPO weighs by length
        ("grpo", "seq-mean-token-mean"),
        ("dapo", "token-mean"),
        ("bnpo", "token-mean"),
        ("cispo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
        ("luspo", "seq-mean-token-sum"),
    ],
)
def test_losses_say_how_tokens_become_one_number(loss, aggregation):
    assert read(None, f"loss_type={loss}", "num_processes=1").config.algorithm.loss_aggregation == aggregation


@pytest.mark.parametrize(
    ("accumulate", "steps", "iterations", "vllm", "needed"),
    [  # gradient_accumulation_steps % (steps_per_generation * num_iterations) != 0, or vLLM with its correction
        (4, None, 1, False, False),
        (4, 2, 1, False, False),
        (4, 8, 1, False, True),
        (4, 4, 2, False, True),
        (4, None, 1, True, True),
    ],
)
def test_old_log_probs_are_computed_only_where_sampling_and_steps_do_not_align(
    accumulate, steps, iterations, vllm, needed
):
    words = [f"gradient_accumulation_steps={accumulate}", f"num_iterations={iterations}", f"use_vllm={vllm}"]
    words += [] if steps is None else [f"steps_per_generation={steps}"]
    assert read(None, *words).config.raw["old_per_token_logps"] is needed


def test_half_precision_weights_are_kept_in_float32_under_fsdp_and_in_half_under_ddp(tmp_path):
    for name, stored in (("fsdp2", "float32"), ("multi_gpu", "bfloat16"), ("zero3", "bfloat16")):
        path = written(tmp_path, f"accelerate_config: {name}\ndtype: bfloat16\n")
        assert read(path).config.actor.engine.param_dtype == stored


def test_the_trainers_own_keys_may_ask_for_fsdp(tmp_path):
    text = "num_processes: 16\nnum_machines: 2\nfsdp: hybrid_shard auto_wrap offload\nfsdp_config: {fsdp_version: 1}\n"
    engine = read(written(tmp_path, text)).config.actor.engine
    assert (engine.strategy, engine.shard_size, engine.offload.streamed) == ("fsdp1", 8, True)  # shards within a node


def test_the_newer_name_of_gradient_checkpointing_counts(tmp_path):
    config = read(written(tmp_path, "activation_checkpointing: false\n")).config
    assert not config.actor.activation_checkpointing and config.actor.engine.recompute.granularity == "none"
    assert config.source_of("actor.activation_checkpointing") == f"activation_checkpointing@{tmp_path}/run.yaml:1"


def test_logits_exist_whole_only_before_1_16():
    assert read(None).config.actor.engine.logits.implementation == "fused"
    older = read(None, "max_prompt_length=300", version="1.2").config
    assert older.actor.engine.logits.implementation == "full" and older.actor.engine.logits.entropy == "chunked"
    assert older.data.max_prompt_tokens == 300 and older.framework_version == "1.2"


def test_what_trl_refuses_is_refused_with_its_line_and_the_nearest_name(tmp_path):
    path = written(tmp_path, "num_generations: 8\nmax_completion_lenght: 100\nmax_prompt_length: 5\n")
    lines = fault(path).replace(f"{tmp_path}/", "").splitlines()
    assert lines[0] == (
        "run.yaml:2: unknown key max_completion_lenght: trl 1.16 refuses it; did you mean max_completion_length?"
    )
    assert lines[1].startswith("run.yaml:3: unknown key max_prompt_length: trl 1.16 has it no more: it was removed")
    assert "unknown key num_generation:" in fault(Line(["trl", "grpo", "--num_generation", "4"]))


def test_a_script_of_ones_own_may_have_arguments_of_its_own():
    reading = launch("accelerate launch --num_processes 2 train_math.py --curriculum hard --num_generations 2")
    assert reading.ignored == (f"curriculum@{DATA}/run.sh:3",)
    assert any("curriculum" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "accelerate_config: zero4\n",
            "zero4: no such file and none of single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2",
        ),
        ("loss_type: grop\n", "loss_type = grop: is no loss of trl 1.16; did you mean grpo?"),
        ("num_generations: many\n", "num_generations = many: should be a number"),
        ("num_generations: 0\n", "should be a whole number of at least 1"),
        ("dtype: float8\n", "dtype = float8: should be one of"),
        ("num_processes: 4\nnum_machines: 3\n", "is not divisible by num_machines = 3"),
        ("- 1\n", "expected `key: value` lines"),
    ],
)
def test_bad_values_are_one_line_with_a_place(tmp_path, text, message):
    said = fault(written(tmp_path, text))
    assert message in said and "run.yaml:" in said and "\n" not in said


WHOLE = "num_processes: 4\nper_device_train_batch_size: 4\nnum_generations: 8\n"  # 16 completions: two groups


@pytest.mark.parametrize(
    ("text", "fails"),
    [  # each check of GRPOConfig, GRPOTrainer and its vLLM, just kept and just broken
        ("", set()),
        ("generation_batch_size: 32\n", set()),
        ("steps_per_generation: 2\n", set()),
        ("generation_batch_size: 32\nsteps_per_generation: 2\n", {"trl.T1"}),  # refused although they agree
        ("generation_batch_size: 32\nsteps_per_generation: 4\n", {"trl.T1"}),
        ("generation_batch_size: 24\n", {"trl.T2"}),  # 24 % (4*4), three groups
        ("generation_batch_size: 28\n", {"trl.T2", "trl.T3"}),
        ("num_generations: 6\n", {"trl.T3"}),
        ("num_generations: 3\ngradient_accumulation_steps: 3\n", set()),  # 48 % 3
        ("num_generations: 1\n", {"trl.T4"}),
        ("per_device_eval_batch_size: 3\n", set()),  # nothing is evaluated
        ("per_device_eval_batch_size: 3\neval_strategy: steps\n", {"trl.T5"}),  # 12 % 8
        ("per_device_eval_batch_size: 3\neval_strategy: steps\nnum_generations_eval: 4\n", set()),
        ("parallelism_config: {cp_size: 2}\n", {"trl.T6"}),
        ("parallelism_config: {cp_size: 1, sp_size: 1}\n", set()),
        ("auto_find_batch_size: true\n", {"trl.T6.auto"}),
        ("use_vllm: true\nvllm_tensor_parallel_size: 3\n", {"trl.T7"}),
        ("use_vllm: true\nvllm_tensor_parallel_size: 2\n", set()),
        ("use_vllm: true\nvllm_tensor_parallel_size: 3\nvllm_mode: server\n", set()),
        ("use_vllm: true\nvllm_mode: colocated\n", {"trl.T8"}),
        ("use_vllm: true\nvllm_importance_sampling_clip_min: 4.0\n", {"trl.T9"}),
    ],
)
def test_each_rule_fires_exactly_where_trl_refuses(tmp_path, text, fails):
    lines = {line.partition(":")[0]: line for line in (WHOLE + text).splitlines()}  # the later of two lines counts
    reading = read(written(tmp_path, "\n".join(lines.values()) + "\n"))
    assert {one.id for one in check(reading.config, None, None) if one.verdict == "fail"} == fails
    assert not [key for key in reading.ignored if key.partition(":")[0].split("@")[0] in lines]


def test_a_launchers_context_parallelism_is_refused_too():
    words = (
        "accelerate launch --num_processes 4 --parallelism_config_cp_size {} grpo.py --per_device_train_batch_size 4"
    )
    for size, fails in ((2, {"trl.T6"}), (1, set())):
        found = check(launch(words.format(size)).config, None, None)
        assert {one.id for one in found if one.verdict == "fail"} == fails


def test_replicas_follow_from_the_training_processes():
    links = chain(read(DATA / "colocate_fsdp2.yaml").config, None, None).rows
    assert next(row.value for row in links if row.quantity == "rollout replicas") == 8  # 16 processes / tp 2


def test_what_is_missing_may_be_assumed_and_is_marked():
    reading = read(None, "num_generations=2", num_processes="4", max_prompt_tokens="900", **{"model.path": "my/model"})
    assert reading.config.mesh.dp == 4 and reading.config.data.max_prompt_tokens == 900
    assert reading.config.model.path == "my/model"
    assert sorted(reading.assumed) == ["max_prompt_tokens=900", "model.path=my/model", "num_processes=4"]
    assert reading.config.source_of("mesh.dp") == "accelerate.num_processes@--assume"


def test_every_value_says_where_it_came_from():
    reading = read(DATA / "colocate_fsdp2.yaml")
    sources = reading.config._sources
    assert all("@" in source or source == "trl 1.16" for source in sources.values())
    assert sources["optim.lr"] == "learning_rate default@trl 1.16"
    assert sources["actor.engine.lora.rank"] == f"lora_r@{DATA}/colocate_fsdp2.yaml:8"
    assert sources["hardware.nodes"] == f"accelerate.num_machines@{DATA}/accelerate_fsdp2.yaml:13"
    assert f"accelerate.fsdp_auto_wrap_policy@{DATA}/accelerate_fsdp2.yaml:6" in reading.ignored
