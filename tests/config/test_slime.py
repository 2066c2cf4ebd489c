"""slime launches: batches, Megatron's and SGLang's flags, what slime derives, and what it lets pass."""

from pathlib import Path

import pytest

from flowledger.config.foreign import Reading
from flowledger.config.settings import table
from flowledger.config.shell.launches import launches
from flowledger.config.slime import read as slime
from flowledger.config.slime.engine import architecture_of
from flowledger.flow.errors import BadInput
from flowledger.plan.weights import count
from flowledger.tables.models import architecture

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000"


def read(name: str, *overrides: str, **assume: str) -> Reading:
    return slime.read(launches(SCRIPTS / name)[-1], overrides, assume=assume, version=None)


def line(text: str, folder: Path, *overrides: str, program: str = "train.py") -> Reading:
    script = folder / "run.sh"
    script.write_text(f"python3 {program} --rollout-batch-size 32 {text}\n", encoding="utf-8")
    return slime.read(launches(script)[-1], overrides, assume={}, version=None)


def test_a_colocated_launch_with_arrays_and_a_sourced_model() -> None:
    reading = read("slime_qwen3_4b.sh")
    config, engine = reading.config, reading.config.actor.engine
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt, config.mini_batch_samples) == (32, 8, 256)
    assert engine.mesh is not None and (engine.mesh.tp, engine.mesh.pp, engine.mesh.cp, engine.mesh.dp) == (2, 1, 1, 4)
    assert (engine.strategy, engine.sequence_parallel, engine.distributed_optimizer) == ("megatron", True, True)
    assert (engine.param_dtype, engine.grad_dtype, engine.optimizer.master_dtype) == ("bfloat16", "float32", "float32")
    assert (engine.recompute.granularity, engine.recompute.method, engine.recompute.layers) == ("full", "uniform", 1)
    assert (engine.logits.dtype, engine.logits.upcast, engine.logits.entropy) == ("float32", True, "full")
    assert (engine.offload.param, engine.offload.optimizer) == (True, True)  # --colocate
    assert config.actor.micro_batch.max_tokens == 9216
    serving = config.rollout.serving
    assert (serving.engine, serving.mesh.tp, serving.colocated, serving.sleeps) == ("sglang", 2, True, True)
    assert (serving.memory_fraction, serving.sync_bucket_bytes) == (0.7, 512 * 2**20)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_in) == (0.2, 0.28, "loss")
    assert config.ref is not None  # --use-kl-loss holds one, though its weight is 0
    assert config.optim.betas == (0.9, 0.98)
    assert config.steps == 3000
    assert config.raw["rollout_num_gpus"] == 8
    assert config.raw["log_probs_max_tokens_per_gpu"] == 9216
    assert config.source_of("actor.engine.mesh.tp").endswith("slime_qwen3_4b.sh:51")
    assert config.source_of("actor.epochs").startswith("default@")


def test_the_megatron_flags_give_the_model_that_is_published() -> None:
    found, known = architecture_of(read("slime_qwen3_4b.sh").config.raw), architecture("Qwen3-4B")
    assert found is not None
    padding = (found.vocab - known.vocab) * known.hidden  # rows up to a multiple of 128 * tp
    assert (found.vocab, known.vocab) == (152064, 151936)
    assert count(found) - padding == known.published == 4_022_468_096


def test_an_asynchronous_launch_with_its_own_gpus() -> None:
    config = read("slime_async.sh").config
    assert config.mini_batch_samples == 64 * 8 // 2  # --num-steps-per-rollout 2
    assert config.raw["global_batch_size"] == 256
    assert config.source_of("actor.mini_batch_samples").startswith("num_steps_per_rollout@")
    assert config.actor.micro_batch.max_tokens == 2 * 9216  # cp = 2
    assert config.actor.log_prob_micro_batch and config.actor.log_prob_micro_batch.max_tokens == 2 * 16384
    assert config.actor.engine.mesh is not None and config.actor.engine.mesh.dp == 1
    assert config.actor.engine.offload.optimizer_fraction == 1.0
    assert not config.actor.engine.offload.param
    assert (config.rollout.serving.colocated, config.rollout.serving.gpus, config.rollout.serving.sleeps) == (
        False,
        4,
        False,
    )
    assert config.async_ is not None and config.async_.mode == "one_step_off"
    assert (config.algorithm.advantage, config.algorithm.policy_loss) == ("grpo", "gspo")


def test_the_floor_of_the_global_batch_is_slimes(tmp_path: Path) -> None:
    text = f"{SIZES} --n-samples-per-prompt 3 --num-steps-per-rollout 7"
    assert line(text, tmp_path).config.mini_batch_samples == 13  # 96 // 7


def test_ppo_brings_a_critic_and_offloads(tmp_path: Path) -> None:
    config = line(f"{SIZES} --advantage-estimator ppo --lr 2e-6 --rollout-num-gpus 4", tmp_path).config
    assert config.critic is not None and config.critic.lr == 2e-6
    assert config.actor.engine.offload.param
    assert config.raw["offload_train"] is True
    assert config.algorithm.advantage == "gae"


def test_switches_that_can_be_turned_off(tmp_path: Path) -> None:
    config = line(f"{SIZES} --colocate --no-offload-train", tmp_path).config
    assert not config.actor.engine.offload.param
    assert config.rollout.serving.sleeps
    assert line(f"{SIZES} --offload --rollout-num-gpus 8", tmp_path).config.actor.engine.offload.param


def test_sglang_flags(tmp_path: Path) -> None:
    text = (
        f"{SIZES} --rollout-num-gpus 16 --rollout-num-gpus-per-engine 8 --sglang-pipeline-parallel-size 2"
        " --sglang-kv-cache-dtype fp8_e5m2 --sglang-max-running-requests 128 --sglang-disable-cuda-graph"
        " --sglang-page-size 64 --sglang-context-length 40960 --sglang-ep-size 4 --sglang-log-level info"
    )
    reading = line(text, tmp_path)
    serving = reading.config.rollout.serving
    assert (serving.mesh.tp, serving.mesh.pp, serving.mesh.ep, serving.gpus) == (4, 2, 4, 16)
    assert (serving.kv_dtype, serving.max_running, serving.cuda_graphs) == ("float8", 128, False)
    assert (serving.block_tokens, serving.max_model_tokens) == (64, 40960)
    assert reading.ignored == (f"sglang_log_level@{tmp_path / 'run.sh'}:1",)


def test_a_misspelt_flag_passes_as_it_does_in_slime_and_is_named(tmp_path: Path) -> None:
    reading = line(f"{SIZES} --max-token-per-gpu 4096 --global-batch-size 32", tmp_path)
    assert any("--max-token-per-gpu is no flag" in n and "did you mean max_tokens_per_gpu?" in n for n in reading.notes)
    assert any(name.startswith("max_token_per_gpu@") for name in reading.ignored)


def test_sizes_come_from_the_checkpoints_name_where_no_flag_says_them(tmp_path: Path) -> None:
    reading = line("--hf-checkpoint /opt/Qwen3-4B --pipeline-model-parallel-size 2", tmp_path)
    assert reading.config.actor.engine.mesh is not None and reading.config.actor.engine.mesh.pp == 2
    assert any("no --num-layers" in note for note in reading.notes)
    with pytest.raises(BadInput, match="no --num-layers, and --hf-checkpoint = /opt/unheard-of names no model"):
        line("--hf-checkpoint /opt/unheard-of", tmp_path)


def test_the_one_flag_that_slime_demands() -> None:
    with pytest.raises(BadInput, match="--rollout-batch-size is not given, and slime demands it"):
        slime.read(None, ["num_layers=4"], assume={}, version=None)


def test_overrides_and_assumptions() -> None:
    reading = read(
        "slime_qwen3_4b.sh", "global_batch_size=128", "--tensor-model-parallel-size=4", rollout_max_prompt_len="2048"
    )
    config = reading.config
    assert (config.mini_batch_samples, config.data.max_prompt_tokens) == (128, 2048)
    assert config.actor.engine.mesh is not None and config.actor.engine.mesh.tp == 4
    assert config.source_of("actor.engine.mesh.tp") == "tensor_model_parallel_size@command line"
    assert reading.assumed == ("rollout_max_prompt_len=2048",)
    with pytest.raises(BadInput, match="did you mean global_batch_size"):
        read("slime_qwen3_4b.sh", "global_batchsize=128")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--n-samples-per-prompt eight", "--n-samples-per-prompt = eight: should be a whole number; use 1"),
        ("--advantage-estimator gae", "--advantage-estimator = gae: should be one of grpo, gspo"),
        (
            "--actor-num-gpus-per-node 6 --tensor-model-parallel-size 4",
            "6 GPUs are not divisible by tp*pp*cp = 4; use 8",
        ),
        ("--num-layers four", "--num-layers = 'four' is no whole number"),
        ("--n-samples-per-prompt 0", "n_samples_per_prompt = 0: should be a whole number of at least 1"),
        ("--global-batch-size", "--global-batch-size needs a value"),
        ("--colocate yes", "'yes' stands alone after --colocate"),
    ],
)
def test_values_that_are_refused_get_one_clear_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        line(f"{SIZES} {text}", tmp_path)
    assert said in str(caught.value)
    assert "run.sh:1" in str(caught.value)


def test_every_row_of_the_table_is_read_or_says_that_no_plan_needs_it(tmp_path: Path) -> None:
    """A flag with a RunConfig key moves some key or counts as read; one without is named when given."""
    for row in table("slime")["flag"]:
        if row.get("config") and row.get("words", 1) == 1 and row.get("type") == "int":
            flag = row["key"].replace("_", "-")
            reading = line(f"{SIZES} --use-dynamic-batch-size --max-tokens-per-gpu 4096 --{flag} 2", tmp_path)
            named = any(name.startswith(f"{row['key']}@") for name in reading.ignored)
            unread = ("micro_batch_size", "num_critic_only_steps")  # dynamic batches, a run without critic
            assert named == (row["key"] in unread), row["key"]
