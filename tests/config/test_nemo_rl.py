"""NeMo-RL's files, with their parents, become the numbers that NeMo-RL would run with.

Truth: `composed.json` holds what OmegaConf and Hydra make of the same files; the other figures are worked out by hand beside
each assertion from the rules of nemo_rl (lm_policy.py, batched_data_dict.py, grpo.py).
"""

import json
from pathlib import Path

import pytest

from flowledger.config.nemo_rl import read as nemo_rl
from flowledger.flow.errors import BadInput
from flowledger.plan.chain import chain

DATA = Path(__file__).parents[1] / "data" / "nemo_rl"


def read(name, *overrides, version=None, **assume):
    return nemo_rl.read(DATA / f"{name}.yaml", overrides, assume=assume, version=version)


def fault(source, *overrides, **assume) -> str:
    with pytest.raises(BadInput) as caught:
        nemo_rl.read(source, overrides, assume=assume, version=None)
    return str(caught.value).replace(f"{DATA}/", "")


def written(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder / "run.yaml"


@pytest.mark.parametrize("name", ["dense", "experts", "apart", "lora"])
def test_inheritance_interpolation_and_overrides_give_what_omegaconf_gives(name):
    recorded = json.loads((DATA / "composed.json").read_text())["files"][name]
    raw = read(name, *recorded["overrides"]).config.raw
    assert {key: raw.get(key, "absent") for key in recorded["values"]} == recorded["values"]


def test_the_base_configuration_alone():
    config = nemo_rl.read(None, (), assume={}, version=None).config
    # 32 prompts * 16 = 512 samples = train_global_batch_size: one optimizer step; bins of 4*512 tokens
    assert (config.samples_per_step, config.mini_batch_samples, config.actor.micro_batch.max_tokens) == (512, 512, 2048)
    assert (config.mesh.dp, config.rollout.serving.memory_fraction, config.algorithm.kl_coef) == (1, 0.6, 0.01)
    assert config.actor.packed and config.algorithm.loss_aggregation == "token-mean"


def test_a_dense_model_with_tensor_parallelism():
    reading = read("dense")
    config, engine = reading.config, reading.config.actor.engine
    # 64*32 = 2048 samples in 4 steps of 512; 8 GPUs / tp 2 = dp 4: a rank takes 128 of each step, 1 at a time
    assert (config.samples_per_step, config.mini_batch_samples, config.mesh.dp) == (2048, 512, 4)
    assert config.actor.micro_batch.samples == 1
    assert config.actor.log_prob_micro_batch.samples == 1  # logprob_batch_size: ${policy.train_micro_batch_size}
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (4096 - 3072, 3072)
    assert (engine.strategy, engine.param_dtype, engine.compute_dtype, engine.reduce_dtype) == (
        "fsdp2", "float32", "bfloat16", "float32"
    )  # fmt: skip
    assert (engine.logits.dtype, engine.logits.chunk_tokens, engine.optimizer.implementation) == (
        "float32",
        1024,
        "loop",
    )
    assert engine.recompute.granularity == "full" and engine.pads_to_multiple == 2 and not engine.packed
    assert engine.offload.param and engine.offload.optimizer and not engine.offload.streamed
    assert (config.rollout.serving.mesh.tp, config.rollout.serving.mesh.dp) == (2, 1)
    assert config.ref is not None and config.ref.engine.offload.param  # computed even at weight 0, from host memory
    assert reading.ignored == (f"policy.generation.vllm_cfg.speculation@{DATA}/dense.yaml:27",)
    assert any("vllm_cfg.speculation is no key of the base configuration" in note for note in reading.notes)
    assert any("grpo_math_1B.yaml is not at hand" in note for note in reading.notes)


def test_megatron_through_two_parents():
    reading = read("experts")
    config, engine, mesh = reading.config, reading.config.actor.engine, reading.config.mesh
    # 4 nodes * 8 = 32 devices / (tp 4 * pp 2 * cp 2 = 16) = dp 2; 128*16 = 2048 samples in 2 steps of 1024
    assert (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp) == (2, 4, 2, 2, 2, 1)
    assert (config.samples_per_step, config.mini_batch_samples) == (2048, 1024)
    # bins: 8192 tokens * 2 samples, and * 4 for log-probs; each sequence padded to 2*cp*tp = 16
    assert config.actor.micro_batch.max_tokens == 16384 and config.actor.log_prob_micro_batch.max_tokens == 32768
    assert engine.pads_to_multiple == 16 and engine.sequence_parallel and engine.layers_in_last_stage == 22
    assert (engine.strategy, engine.param_dtype, engine.grad_dtype) == ("megatron", "bfloat16", "bfloat16")
    assert (engine.optimizer.master_dtype, engine.offload.optimizer_fraction) == ("float32", 1.0)
    assert (engine.recompute.granularity, engine.recompute.layers) == ("full", 1)  # from the parent
    assert config.optim.lr == 1e-6 and config.raw["policy.megatron_cfg.optimizer.min_lr"] == 1e-6
    assert (config.rollout.serving.mesh.tp, config.rollout.serving.mesh.dp, config.rollout.serving.max_running) == (
        4,
        1,
        128,
    )
    assert config.source_of("mesh.dp") == f"cluster.gpus_per_node@{DATA}/megatron_parent.yaml:15"
    assert config.source_of("actor.micro_batch.max_tokens") == f"policy.train_micro_batch_size@{DATA}/experts.yaml:8"
    assert f"policy.train_micro_batch_size@{DATA}/experts.yaml:8" not in reading.ignored


def test_experts_wider_than_tensor_parallelism_make_a_replica_data_parallel():
    # vLLM spreads experts over dp*tp ranks: ep 4 over tp 2 is dp 2, and a replica of 4 of the 32 devices
    wide = ("policy.generation.vllm_cfg.expert_parallel_size=4", "policy.generation.vllm_cfg.tensor_parallel_size=2")
    config = read("experts", *wide).config
    assert (config.rollout.serving.mesh.dp, config.rollout.serving.mesh.ep) == (2, 4)
    links = {row.quantity: row.value for row in chain(config, None, None).rows}
    assert links["rollout replicas"] == 8


def test_generation_on_a_node_of_its_own():
    config = read("apart").config
    # 3 nodes * 4: one generates (4 devices), two train: dp 8; 2048 tokens * 2 samples padded
    assert (config.mesh.dp, config.rollout.serving.gpus, config.hardware.world) == (8, 4, 12)
    assert not config.rollout.serving.colocated and config.rollout.serving.mesh.dp == 1
    assert config.actor.micro_batch.max_padded_tokens == 4096 and not config.actor.packed
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 1536)  # the second parent's
    assert (config.async_.mode, config.async_.max_staleness) == ("fully_async", 2)
    assert not config.actor.engine.offload.optimizer  # nothing makes room for generation
    assert [key for key in config.raw if key.startswith("logger.")] == [
        "logger.log_dir"
    ]  # _override_ replaces a section


def test_a_file_without_parents_on_one_of_two_gpus():
    config = read("lora").config
    engine = config.actor.engine
    assert (config.mesh.dp, config.rollout.serving.gpus, config.mini_batch_samples) == (1, 1, 64)
    assert engine.offload.streamed and (engine.lora.rank, engine.lora.alpha) == (16, 32)
    assert engine.lora.target_modules == ("q_proj", "v_proj") and config.ref.engine.lora is None
    assert config.checkpoint is None and config.optim.betas == (0.9, 0.95) and config.steps == 100
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens == 1024


def test_a_shared_length_may_be_split_by_assumption():
    reading = read("lora", max_prompt_tokens="200")
    assert (reading.config.data.max_prompt_tokens, reading.config.rollout.max_response_tokens) == (200, 824)
    assert reading.assumed == ("max_prompt_tokens=200",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: mine.yaml\n", "run.yaml:1: defaults = mine.yaml: no such file beside run.yaml"),
        ("defaults: run.yaml\n", "inherits from itself"),
        ("defaults: grpo_math_1B.yaml\npolicy: {megatron_cfg: {enabled: true}}\n", "both are enabled"),
        ("defaults: grpo_math_1B.yaml\npolicy: {dtensor_cfg: {enabled: false}}\n", "neither is enabled"),
        (
            "defaults: grpo_math_1B.yaml\npolicy:\n  dtensor_cfg:\n    tensor_parallel_size: 3\ncluster: {gpus_per_node: 8}\n",
            "run.yaml:4: policy.dtensor_cfg.tensor_parallel_size = 3: tp*pp*cp = 3 does not divide the 8 devices",
        ),
        ("defaults: grpo_math_1B.yaml\npolicy: {dynamic_batching: {enabled: true}}\n", "excludes dynamic_batching"),
        ("defaults: grpo_math_1B.yaml\npolicy: {precision: half}\n", "policy.precision = half: should be float32"),
        ("defaults: grpo_math_1B.yaml\ngrpo: {num_prompts_per_step: x}\n", "should be a number"),
        (
            "defaults: grpo_math_1B.yaml\npolicy: {generation: {colocated: {enabled: false}}}\ncluster: {gpus_per_node: 4}\n",
            "colocated.resources.gpus_per_node = null: should be from 1 to 3",
        ),
        (
            "defaults: grpo_math_1B.yaml\npolicy:\n  generation: {vllm_cfg: {tensor_parallel_size: 3}}\ncluster: {gpus_per_node: 4}\n",
            "tp*pp = 3 does not divide the 4 devices that generate",
        ),
        ("[1]\n", "expected `key: value` lines"),
        ("defaults: 3\n", "run.yaml:1: defaults = 3: should be a path or a list of paths"),
        (
            "defaults: grpo_math_1B.yaml\npolicy: {optimizer: {kwargs: {betas: 0.9}}}\n",
            "should be a list of two numbers",
        ),
        ("defaults: grpo_math_1B.yaml\ngrpo: {num_prompts_per_step: .inf}\n", "should be a whole number"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, text, message):
    said = fault(written(tmp_path, text))
    assert message in said and "\n" not in said


def test_a_missing_parent_may_be_assumed(tmp_path):
    reading = nemo_rl.read(
        written(tmp_path, "defaults: ../ours/base.yaml\npolicy: {model_name: my/model}\n"),
        (),
        assume={"defaults": "grpo_math_1B_megatron.yaml"},
        version=None,
    )
    assert reading.config.actor.engine.strategy == "megatron" and reading.config.model.path == "my/model"
    assert reading.assumed == ("defaults=grpo_math_1B_megatron.yaml",)
    assert reading.config.actor.log_prob_micro_batch.max_tokens == 8 * 512  # that file's logprob_batch_size


def test_a_parent_at_hand_counts_above_the_table(tmp_path):
    (tmp_path / "grpo_math_1B.yaml").write_text(
        (DATA / "lora.yaml").read_text().replace("num_prompts_per_step: 8", "num_prompts_per_step: 16")
    )
    config = nemo_rl.read(written(tmp_path, "defaults: grpo_math_1B.yaml\n"), (), assume={}, version=None).config
    assert config.data.prompts_per_step == 16
    assert config.source_of("data.prompts_per_step") == f"grpo.num_prompts_per_step@{tmp_path}/grpo_math_1B.yaml:3"


def test_overrides_are_hydras():
    config = read("dense", "cluster.num_nodes=2", "++policy.generation.vllm_kwargs.max_num_seqs=64").config
    assert config.mesh.dp == 8 and config.rollout.serving.max_running == 64
    assert config.source_of("hardware.nodes") == "cluster.num_nodes@command line"
    assert "is no key of the composed configuration; did you mean grpo.num_prompts_per_step" in fault(
        DATA / "dense.yaml", "grpo.num_prompt_per_step=2"
    )


def test_every_value_says_where_it_came_from():
    for name in ("dense", "experts", "apart", "lora"):
        sources = read(name).config._sources.values()
        assert all("@" in source or source == "nemo_rl 0.5" for source in sources)
    assert read("dense").config.source_of("optim.lr") == "policy.optimizer.kwargs.lr default@nemo_rl 0.5"
