"""verl launches as RunConfigs: what each default, backend and trainer comes to, and where each value is said to come from.

Expected values are verl's documented effective defaults (0.9.1 and its head of 2026-08-22) and the arithmetic of its engines.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.foreign import Reading
from flowledger.config.schema import RunConfig
from flowledger.config.shell.launches import Launched
from flowledger.config.verl.compose import compose
from flowledger.config.verl.launch import Launch, of_command
from flowledger.config.verl.read import read
from flowledger.flow.errors import BadInput

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
NAME = f"{ROLLOUT}.name=vllm"
GRPO = (NAME, "algorithm.adv_estimator=grpo")
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=true"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
LAUNCHES = json.loads((Path(__file__).parent.parent / "data/verl/compositions.json").read_text(encoding="utf-8"))[
    "launches"
]


def reading(
    *overrides: str,
    module: str = "verl.trainer.main_ppo",
    config: str | None = None,
    version: str = "head",
    **assume: str,
) -> Reading:
    placed = tuple((text, f"run.sh:{line}") for line, text in enumerate(overrides, 1))
    return read(Launch(module, config, placed, where="run.sh"), version=version, assume=assume)


def config(*overrides: str, **told: Any) -> RunConfig:
    return reading(*overrides, **told).config


@pytest.mark.parametrize(
    "row", [row for row in LAUNCHES if row["hydra"]["0.9.1"] == "composes"], ids=lambda row: row["script"]
)
@pytest.mark.parametrize("version", ["0.9.1", "head"])
def test_every_launch_becomes_a_config_with_a_source_for_each_value(row: dict[str, Any], version: str) -> None:
    found = config(*row["overrides"], module=row["module"], config=row["config_name"], version=version)
    assert (found.framework, found.framework_version) == ("verl", version)
    assert found.raw["_verl.module"] == row["module"]
    assert found.raw["_verl.version"] == version
    for key in (
        "model.path",
        "data.prompts_per_step",
        "rollout.serving.mesh.tp",
        "actor.engine.strategy",
        "mesh.dp",
        "optim.lr",
    ):
        assert f"default@verl {version}" in found.source_of(key) or "@run.sh:" in found.source_of(key), key


def test_the_defaults_that_users_are_surprised_by() -> None:
    found = config(NAME)  # adv_estimator is gae: a critic
    engine = found.actor.engine
    assert (engine.strategy, engine.param_dtype, engine.compute_dtype, engine.reduce_dtype) == (
        "fsdp1",
        "float32",
        "bfloat16",
        "float32",
    )
    assert engine.recompute.granularity == "full"
    assert engine.accumulates_unsharded
    assert (found.data.prompts_per_step, found.actor.mini_batch_prompts, found.rollout.samples_per_prompt) == (
        1024,
        256,
        1,
    )
    assert (found.mesh.dp, found.hardware.world) == (8, 8)
    assert (found.optim.lr, found.optim.weight_decay, found.optim.betas) == (1e-6, 0.01, (0.9, 0.999))
    serving = found.rollout.serving
    assert (serving.mesh.tp, serving.memory_fraction, serving.max_running, serving.max_batched_tokens) == (
        2,
        0.5,
        256,
        8192,
    )
    assert (
        serving.colocated,
        serving.sleeps,
        serving.cuda_graphs,
        serving.sync_bucket_bytes,
        serving.sync_buckets,
    ) == (True, True, True, 2**31, 1)
    assert found.ref is None
    assert found.async_ is None
    assert found.critic is not None
    assert found.algorithm.kl_coef == 0


def test_an_unset_engine_for_rollout_is_asked_for() -> None:
    with pytest.raises(
        BadInput, match=r"rollout\.name = \?\?\?: is missing.*--assume actor_rollout_ref\.rollout\.name=VALUE"
    ):
        reading("algorithm.adv_estimator=grpo")
    assumed = reading("algorithm.adv_estimator=grpo", **{f"{ROLLOUT}.name": "sglang", "WHO": "me"})
    assert assumed.config.rollout.serving.engine == "sglang"
    assert assumed.assumed == (f"{ROLLOUT}.name=sglang",)
    assert assumed.config.source_of("rollout.serving.engine") == f"{ROLLOUT}.name@--assume"


def test_sources_name_the_key_and_its_line() -> None:
    found = config(*GRPO, f"{ACTOR}.optim.lr=3e-6", version="0.9.1")
    assert found.source_of("optim.lr") == f"{ACTOR}.optim.lr@run.sh:3"
    assert found.source_of("optim.weight_decay") == f"{ACTOR}.optim.weight_decay default@verl 0.9.1"


def test_what_nothing_reads_is_named() -> None:
    found = reading(*GRPO, "trainer.logger=[console]", "data.max_prompt_length=9", "trainer.balance_batch=false")
    assert found.ignored == ("trainer.logger@run.sh:3",)  # lengths are read, balance_batch by a check


@pytest.mark.parametrize(
    ("version", "extra", "held"),
    [
        ("head", (), True),
        ("0.9.1", (), False),
        ("0.9.1", (f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true",), True),
    ],
)
def test_unsharded_gradients_by_version(version: str, extra: tuple[str, ...], held: bool) -> None:
    assert config(*GRPO, *extra, version=version).actor.engine.accumulates_unsharded is held


def test_the_actors_strategy_counts_and_the_engines_does_not() -> None:
    inner = reading(*GRPO, f"{ACTOR}.fsdp_config.strategy=fsdp2")
    assert inner.config.actor.engine.strategy == "fsdp1"
    assert any("has no effect" in note and "run.sh:3" in note for note in inner.notes)
    outer = config(*GRPO, f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.use_kl_loss=true")
    assert (outer.actor.engine.strategy, outer.ref.engine.strategy) == ("fsdp2", "fsdp2")  # type: ignore[union-attr]
    with pytest.raises(
        BadInput, match=r"run\.sh:3: .*strategy = fsdp3: is no strategy of verl; did you mean fsdp\?; use fsdp, fsdp2, "
    ):
        reading(*GRPO, f"{ACTOR}.strategy=fsdp3")


@pytest.mark.parametrize(("own", "inner", "sp"), [(1, 1, 1), (1, 4, 4), (2, 4, 2), (8, 1, 8)])
def test_ulysses_and_the_budget_it_multiplies(own: int, inner: int, sp: int) -> None:
    found = config(
        *GRPO, DYNAMIC, f"{ACTOR}.ulysses_sequence_parallel_size={own}",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size={inner}", f"{ACTOR}.ppo_max_token_len_per_gpu=10000",
    )  # fmt: skip
    assert (found.mesh.sp, found.mesh.dp) == (sp, 8 // sp)
    assert found.actor.micro_batch.max_tokens == 10000 * sp
    assert found.actor.log_prob_micro_batch is not None
    assert found.actor.log_prob_micro_batch.max_tokens == 10000 * sp  # follows the actor's
    assert found.actor.engine.pads_to_multiple == sp


def test_static_micro_batches() -> None:
    found = config(
        *GRPO, f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size=64", f"{ACTOR}.use_kl_loss=true",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    )  # fmt: skip
    assert found.actor.micro_batch.samples == 4
    assert found.actor.log_prob_micro_batch.samples == 64 // 8  # type: ignore[union-attr]  # the deprecated size counts all ranks
    assert found.ref.micro_batch.samples == 16  # type: ignore[union-attr]
    assert not found.actor.micro_batch.dynamic
    assert any("taken as 1 sample" in note for note in reading(*GRPO).notes)


def test_offload_precision_and_sharding() -> None:
    section = f"{ACTOR}.fsdp_config"
    found = config(
        *GRPO, f"{ACTOR}.strategy=fsdp2", f"{section}.param_offload=true", f"{section}.optimizer_offload=true",
        f"{section}.fsdp_size=4", f"{section}.model_dtype=bf16", f"{section}.reshard_after_forward=false",
        f"+{section}.mixed_precision={{param_dtype:fp16,reduce_dtype:bf16}}", f"{MODEL}.enable_gradient_checkpointing=false",
        f"{MODEL}.enable_activation_offload=true",
    ).actor.engine  # fmt: skip
    assert (found.offload.param, found.offload.optimizer, found.offload.streamed, found.offload.activation) == (
        True,
        True,
        False,
        True,
    )
    assert (found.shard_size, found.param_dtype, found.compute_dtype, found.reduce_dtype) == (
        4,
        "bfloat16",
        "float16",
        "bfloat16",
    )
    assert (found.reshard_after_forward, found.recompute.granularity) == (False, "none")


def test_an_offload_policy_streams_and_switches_the_other_offloads_off() -> None:
    section = f"{ACTOR}.fsdp_config"
    given = (*GRPO, f"{section}.offload_policy=true", f"{section}.param_offload=true")
    streamed = config(*given, f"{ACTOR}.strategy=fsdp2").actor.engine.offload
    assert (streamed.streamed, streamed.param) == (True, False)
    fsdp1 = config(*given).actor.engine.offload  # the policy is FSDP2's
    assert (fsdp1.streamed, fsdp1.param) == (False, True)


def test_the_reference_policy() -> None:
    found = config(*GRPO, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01")
    assert found.ref is not None
    assert found.ref.engine is not None
    assert (found.ref.engine.offload.streamed, found.ref.engine.param_dtype) == (True, "float32")
    assert (found.ref.engine.optimizer.kind, found.ref.engine.recompute.granularity) == ("none", "none")
    assert not found.ref.engine.accumulates_unsharded
    assert (found.algorithm.kl_in, found.algorithm.kl_coef, found.algorithm.kl_form) == ("loss", 0.01, "k3")
    rewarded = config(*GRPO, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.002")
    assert rewarded.ref is not None
    assert (rewarded.algorithm.kl_in, rewarded.algorithm.kl_coef, rewarded.algorithm.kl_form) == ("reward", 0.002, "k1")


def test_lora_needs_no_second_model_for_the_reference() -> None:
    found = reading(
        *GRPO,
        f"{ACTOR}.use_kl_loss=true",
        f"{MODEL}.lora_rank=32",
        f"{MODEL}.lora_alpha=64",
        f"{MODEL}.target_modules=[q_proj]",
    )
    lora = found.config.actor.engine.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (32, 64, ("q_proj",))
    assert found.config.model.lora == lora
    assert found.config.raw["_verl.ref_in_actor"] is True
    assert found.config.ref is not None
    assert found.config.ref.engine is None


@pytest.mark.parametrize(
    ("extra", "update", "values"),
    [
        ((), 32768, 32768),  # V1 takes the inference budget for both, whatever the other says
        (("critic.ppo_max_token_len_per_gpu=1000",), 32768, 32768),
        (("critic.ppo_max_token_len_per_gpu=1000", "trainer.use_v1=false"), 1000, 32768),
        (("+critic.ppo_infer_max_token_len_per_gpu=2000",), 2000, 2000),
        (
            (
                "critic.ppo_max_token_len_per_gpu=1000",
                "trainer.use_v1=false",
                "critic.ulysses_sequence_parallel_size=2",
            ),
            2000,
            65536,
        ),
    ],
)
def test_the_critics_budget_is_not_what_its_keys_suggest(extra: tuple[str, ...], update: int, values: int) -> None:
    found = config(NAME, "critic.ppo_micro_batch_size_per_gpu=4", "critic.model.path=/models/critic", *extra).critic
    assert found is not None
    assert found.micro_batch is not None
    assert found.values_micro_batch is not None
    assert (found.micro_batch.max_tokens, found.micro_batch.samples) == (update, None)
    assert found.values_micro_batch.max_tokens == values
    assert (found.path, found.lr, found.mini_batch_prompts) == ("/models/critic", 1e-5, 256)
    assert config(*GRPO).critic is None
    assert config(*GRPO, "critic.enable=true").critic is not None


def test_megatron() -> None:
    transformer = f"{MEGATRON}.override_transformer_config"
    found = config(
        *GRPO, "model_engine=megatron", "trainer.nnodes=4", f"{MEGATRON}.tensor_model_parallel_size=4",
        f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=8",
        f"{MEGATRON}.expert_tensor_parallel_size=1", f"{MEGATRON}.virtual_pipeline_model_parallel_size=3", f"{MEGATRON}.param_offload=true",
        f"{transformer}.recompute_granularity=full", f"{transformer}.recompute_method=block", f"{transformer}.recompute_num_layers=7",
        f"+{transformer}.num_layers_in_last_pipeline_stage=11", DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.001", f"{ACTOR}.entropy_from_logits_with_chunking=true",
    )  # fmt: skip
    engine, mesh = found.actor.engine, found.mesh
    assert (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp, mesh.vpp) == (2, 4, 2, 2, 8, 1, 3)
    assert (engine.param_dtype, engine.grad_dtype, engine.optimizer.master_dtype, engine.optimizer.moment_dtype) == (
        "bfloat16",
        "float32",
        "float32",
        "float32",
    )
    assert (engine.sequence_parallel, engine.distributed_optimizer, engine.accumulates_unsharded) == (True, True, False)
    assert (engine.recompute.granularity, engine.recompute.method, engine.recompute.layers) == ("full", "block", 7)
    assert (engine.offload.param, engine.offload.grad, engine.offload.optimizer) == (True, True, False)
    assert engine.layers_in_last_stage == 11
    assert (engine.logits.dtype, engine.logits.cross_entropy, engine.logits.entropy) == (
        "float32",
        "parallel",
        "chunked",
    )
    assert engine.pads_to_multiple == 2 * 4 * 2
    assert found.actor.micro_batch.max_tokens == 8192 * 2
    assert found.ref is not None
    assert found.ref.engine is not None
    assert found.ref.engine.offload.param  # follows the actor's
    assert not found.ref.engine.offload.streamed


def test_stages_that_count_embedding_and_loss_as_layers() -> None:
    """Qwen3-235B-A22B has 94 layers: with both ends counted, eight stages of 12 slots."""
    transformer = f"+{MEGATRON}.override_transformer_config"
    ends = (
        f"{transformer}.account_for_embedding_in_pipeline_split=true",
        f"{transformer}.account_for_loss_in_pipeline_split=true",
    )
    given = (*GRPO, "model_engine=megatron", "trainer.nnodes=8", f"{MEGATRON}.pipeline_model_parallel_size=8", *ends)
    found = config(*given, f"{MODEL}.path=/models/Qwen3-235B-A22B")
    assert found.actor.engine.layers_in_stages == (11, 12, 12, 12, 12, 12, 12, 11)
    assert any("are not known" in note for note in reading(*given, f"{MODEL}.path=/models/mine").notes)
    layout = f"{transformer}.pipeline_model_parallel_layout"
    two = (*GRPO, "model_engine=megatron", f"{MEGATRON}.pipeline_model_parallel_size=2")
    assert config(*two, f'{layout}="Ett|tttL"').actor.engine.layers_in_stages == (2, 3)
    assert config(*two, f"{layout}=[[embedding,decoder],[decoder,decoder,loss]]").actor.engine.layers_in_stages == (
        1,
        2,
    )


def test_megatron_packs_as_the_models_section_says() -> None:
    given = (*GRPO, "model_engine=megatron")
    assert config(*given, f"{MEGATRON}.use_remove_padding=false").actor.engine.packed  # verl writes the model's over it
    assert not config(*given, f"{MODEL}.use_remove_padding=false").actor.engine.packed


def test_megatron_alone_on_one_rank_of_tp_has_no_sequence_parallelism() -> None:
    assert not config(*GRPO, "model_engine=megatron").actor.engine.sequence_parallel


def test_megatrons_optimizer_on_the_host_and_in_narrow_dtypes() -> None:
    override = f"+{ACTOR}.optim.override_optimizer_config"
    found = config(
        *GRPO, "model_engine=megatron", f"{override}.optimizer_cpu_offload=true", f"{override}.optimizer_offload_fraction=0.5",
        f"{ACTOR}.optim.use_precision_aware_optimizer=true", f"{ACTOR}.optim.exp_avg_dtype=bf16", f"{ACTOR}.optim.main_grads_dtype=bf16",
    ).actor.engine  # fmt: skip
    assert found.offload.optimizer_fraction == 0.5
    assert (found.optimizer.moment_dtype, found.grad_dtype) == ("bfloat16", "bfloat16")
    aside = config(*GRPO, "model_engine=megatron", f"{ACTOR}.optim.exp_avg_dtype=bf16").actor.engine
    assert aside.optimizer.moment_dtype == "float32"  # without the precision-aware optimizer it has no effect


@pytest.mark.parametrize(
    ("extra", "entropy", "implementation"),
    [
        ((), "none", "full"),
        ((f"{ACTOR}.entropy_coeff=0.01",), "full", "full"),
        ((f"{ACTOR}.calculate_entropy=true", f"{ACTOR}.entropy_from_logits_with_chunking=true"), "chunked", "full"),
        ((f"{MODEL}.use_fused_kernels=true",), "none", "fused"),
    ],
)
def test_logits(extra: tuple[str, ...], entropy: str, implementation: str) -> None:
    found = config(*GRPO, *extra)
    logits = found.actor.engine.logits
    assert (logits.entropy, logits.implementation) == (entropy, implementation)
    assert logits.temperature_copy is (implementation == "full")
    assert found.actor.log_prob_entropy == (
        "chunked" if entropy == "chunked" else "full"
    )  # the old pass always computes it


def test_veomni_and_torchtitan() -> None:
    veomni = config(
        *GRPO,
        "model_engine=veomni",
        f"{ACTOR}.veomni.ulysses_parallel_size=2",
        f"{ACTOR}.veomni.expert_parallel_size=4",
    )
    assert (veomni.actor.engine.strategy, veomni.mesh.sp, veomni.mesh.ep, veomni.mesh.dp) == ("fsdp2", 2, 4, 4)
    titan = reading(*GRPO, "model_engine=torchtitan", f"{ACTOR}.torchtitan.tensor_parallel_size=2")
    assert (titan.config.mesh.tp, titan.config.mesh.dp, titan.config.actor.engine.recompute.granularity) == (
        2,
        4,
        "selective",
    )
    assert any("torchtitan" in note for note in titan.notes)


@pytest.mark.parametrize(
    ("module", "extra", "trainer", "mode", "gpus"),
    [
        ("verl.trainer.main_ppo", (), "sync", None, None),
        ("verl.trainer.main_ppo", ("trainer.use_v1=false",), "v0", None, None),
        ("verl.trainer.main_ppo_v0", (), "v0", None, None),
        ("verl.trainer.main_ppo", ("trainer.v1.trainer_mode=colocate_async",), "colocate_async", "fully_async", None),
        ("verl.trainer.main_ppo", ("trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4"), "separate_async", "fully_async", 8),
        (ONE_STEP, ("rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=6"), "one_step_off", "one_step_off", 2),
        (FULLY, ("rollout.nnodes=2", "data.train_batch_size=0"), "fully_async", "fully_async", 16),
    ],
)  # fmt: skip
def test_trainers_and_their_pools(
    module: str, extra: tuple[str, ...], trainer: str, mode: str | None, gpus: int | None
) -> None:
    found = config(*GRPO, *extra, module=module)
    assert found.raw["_verl.trainer"] == trainer
    assert (found.async_.mode if found.async_ else None) == mode
    serving = found.rollout.serving
    assert (serving.gpus, serving.colocated) == (gpus, gpus is None)
    assert serving.sync_buckets == (2 if trainer in ("one_step_off", "fully_async") else 1)


def test_expandable_segments_come_with_a_weight_sync_inside_one_process() -> None:
    colocated = config(*GRPO, f"{ACTOR}.use_kl_loss=true")
    assert colocated.actor.engine.expandable_segments
    assert colocated.ref is not None
    assert colocated.ref.engine is not None
    assert colocated.ref.engine.expandable_segments
    assert not config(*GRPO, module=ONE_STEP).actor.engine.expandable_segments


def test_fully_async_counts_the_prompts_that_the_trainer_waits_for() -> None:
    found = config(
        *GRPO,
        "data.train_batch_size=0",
        f"{ACTOR}.ppo_mini_batch_size=32",
        "async_training.require_batches=4",
        module=FULLY,
    )
    assert found.data.prompts_per_step == 128
    assert found.async_ is not None
    assert found.async_.max_staleness == 0.1


def test_serving() -> None:
    found = config(
        f"{ROLLOUT}.name=sglang", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=4",
        f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.free_cache_engine=false", f"{ROLLOUT}.max_model_len=20000",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512", f"+{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype=fp8_e5m2",
        f"+{ROLLOUT}.quantization=fp8", "data.max_prompt_length=1000", "data.max_response_length=3000", f"{ROLLOUT}.n=8",
    )  # fmt: skip
    serving = found.rollout.serving
    assert (serving.engine, serving.mesh.tp, serving.mesh.ep, serving.max_model_tokens) == ("sglang", 4, 4, 20000)
    assert (serving.cuda_graphs, serving.sleeps, serving.sync_bucket_bytes) == (False, False, 512 * 2**20)
    assert (serving.kv_dtype, serving.dtype) == ("float8", "float8")
    assert (found.data.max_prompt_tokens, found.rollout.max_response_tokens, found.rollout.samples_per_prompt) == (
        1000,
        3000,
        8,
    )


def test_bad_values_are_one_line_with_the_place() -> None:
    for override, words in (
        (f"{ACTOR}.fsdp_config.model_dtype=float42", "is no dtype of verl"),
        ("trainer.nnodes=many", "is text, and verl computes with it; give a number, such as 1"),
        ("data.train_batch_size=0", "should be a whole number of at least 1"),
        (f"{ACTOR}.loss_agg_mode=token-median", "did you mean token-mean"),
        (f"{ROLLOUT}.gpu_memory_utilization=1.7", "less than or equal to 1"),
    ):
        with pytest.raises(BadInput) as refusal:
            reading(*GRPO, override)
        assert words in str(refusal.value)
        assert "run.sh:3" in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_command_line(tmp_path: Path) -> None:
    argv = (
        "uv",
        "run",
        "python3",
        "-m",
        ONE_STEP,
        "--config-path=config",
        "--config-name",
        "one_step_off_ppo_megatron_trainer.yaml",
        NAME,
        "+data.x=1",
    )
    found = of_command(
        Launched(
            argv=argv, places=tuple(f"run.sh:{n}" for n in range(len(argv))), line=1, file="run.sh", environment={}
        )
    )
    assert (found.module, found.config) == (ONE_STEP, "one_step_off_ppo_megatron_trainer")
    assert found.overrides == ((NAME, "run.sh:8"), ("+data.x=1", "run.sh:9"))
    by_file = of_command(
        Launched(
            argv=("python", "verl/trainer/main_ppo.py", NAME),
            places=("a", "b", "c"),
            line=1,
            file="run.sh",
            environment={},
        )
    )
    assert by_file.module == "verl.trainer.main_ppo"
    with pytest.raises(BadInput, match=r"^run\.sh:4: starts no module of verl"):
        of_command(Launched(argv=("python3", "prepare.py"), places=("", ""), line=4, file="run.sh", environment={}))


def test_a_command_lines_environment_and_what_it_leaves_open() -> None:
    argv = ("python3", "-m", "verl.trainer.main_ppo", *GRPO, "trainer.experiment_name=${oc.env:RUN}")
    launched = Launched(
        argv=argv,
        places=tuple("run.sh:9" for _ in argv),
        line=9,
        file="run.sh",
        unset=(("HOME_DIR", "run.sh:2"), ("@", "run.sh:9")),
        unknown=("$(date)",),
        assumed=("MODEL",),
        environment={"RUN": "seven", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    found = read(launched, assume={"MODEL": "x"}, version="head")
    assert found.config.name == "seven"
    assert found.config.actor.engine.expandable_segments
    assert found.config.source_of("actor.engine.expandable_segments") == "PYTORCH_CUDA_ALLOC_CONF@run.sh"
    assert found.assumed == ("MODEL=x",)
    assert "run.sh:2: HOME_DIR is not set; give --assume HOME_DIR=…" in found.notes
    assert not any("@ is not set" in note for note in found.notes)  # a script without arguments is whole
    assert "$(date) is not known before the run" in found.notes


def test_a_users_own_configuration_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text(
        "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [ppo_trainer, _self_]\n"
        "data:\n  max_prompt_length: 333\nextra: {a: 1}\nactor_rollout_ref: {rollout: {name: sglang}}\n"
    )
    argv = (
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        "--config-path=conf",
        "--config-name=mine",
        "data.train_batch_size=8",
    )
    script = str(tmp_path / "run.sh")
    launched = Launched(argv=argv, places=(f"{script}:1",) * len(argv), line=1, file=script, environment={})
    found = read(launched, version="head").config
    assert (found.data.max_prompt_tokens, found.data.prompts_per_step, found.raw["extra.a"]) == (333, 8, 1)
    assert found.source_of("data.max_prompt_tokens").endswith("conf/mine.yaml:5")
    (tmp_path / "conf/mine.yaml").unlink()
    with pytest.raises(
        BadInput, match=r"run\.sh:1: --config-name mine is no configuration of verl.* no file conf/mine\.yaml"
    ):
        read(launched, version="head")


def command(folder: Path, *words: str) -> Launched:
    script = str(folder / "run.sh")
    argv = ("python3", "-m", "verl.trainer.main_ppo", *words)
    places = tuple(f"{script}:{line}" for line in range(len(argv)))
    return Launched(argv=argv, places=places, line=1, file=script, environment={})


@pytest.mark.parametrize(
    "folder", ["config", "./config", "verl/trainer/config", "/opt/verl/verl/trainer/config", "trainer/config/"]
)
@pytest.mark.parametrize("flag", ["--config-path={}", "-cp {}", "--config-path {}"])
def test_verls_own_folder_of_configurations_may_be_named(folder: str, flag: str, tmp_path: Path) -> None:
    words = (*flag.format(folder).split(), "--config-name=ppo_megatron_trainer", NAME)
    found = of_command(command(tmp_path, *words))
    assert (found.config, found.file, found.overrides[0][0]) == ("ppo_megatron_trainer", None, NAME)


@pytest.mark.parametrize("words", [("--config-name=ppo_trainer",), (), ("-cn", "ppo_trainer.yaml")])
def test_a_folder_of_ones_own_holds_the_configuration_also_by_a_name_of_verls(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    with pytest.raises(
        BadInput, match=r"run\.sh:1: --config-path .*mine: there is no file .*mine/ppo_trainer\.yaml; leave it out"
    ):
        read(command(tmp_path, f"--config-path={folder}", *words, NAME), version="head")
    folder.mkdir()
    (folder / "ppo_trainer.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - actor: mine\n  - _self_\ndata: {train_batch_size: 48}\n"
    )
    found = read(command(tmp_path, f"--config-path={folder}", *words, NAME), version="head")
    assert found.config.data.prompts_per_step == 48
    assert (
        f"{folder}/ppo_trainer.yaml: `actor: mine` of its defaults is not composed without an installed verl"
        in found.notes
    )


def test_a_folder_beside_verls_counts_only_for_names_that_verl_lacks(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("ppo_trainer", "mine"):
        (tmp_path / f"more/{name}.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 40}\n")
    more = f"--config-dir={tmp_path}/more"
    assert read(command(tmp_path, more, NAME), version="head").config.data.prompts_per_step == 1024
    assert read(command(tmp_path, more, "-cn=mine", NAME), version="head").config.data.prompts_per_step == 40


def test_what_speaks_to_hydra_alone_changes_no_value(tmp_path: Path) -> None:
    plain = read(command(tmp_path, NAME), version="head").config
    hydras = (
        "hydra.run.dir=outputs/${now:%Y-%m-%d}/a", "hydra/job_logging=disabled", "+hydra.job.env_set.A=1", "hydra.searchpath=[file:///x]",
        "++hydra.output_subdir=null", "~hydra.sweep", "hydra/launcher=basic",
    )  # fmt: skip
    launched = command(tmp_path, "-m", "--cfg", "job", NAME, *hydras, "--info")
    assert read(launched, version="head").config.model_dump() == plain.model_dump()
    assert compose(of_command(launched), "head").hydra == hydras
    with pytest.raises(BadInput, match=r"Could not override 'hydr\.run\.dir'"):
        read(command(tmp_path, NAME, "hydr.run.dir=x"), version="head")


def test_a_part_of_a_configuration_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    file.write_text(
        "actor_rollout_ref:\n  rollout:\n    name: vllm\n    n: 5\n  actor:\n    strategy: fsdp2\nalgorithm.adv_estimator: grpo\n"
    )
    found = read(file, ["data.train_batch_size=64"], version="head").config
    assert (found.rollout.samples_per_prompt, found.actor.engine.strategy, found.data.prompts_per_step) == (
        5,
        "fsdp2",
        64,
    )
    assert found.source_of("rollout.samples_per_prompt") == f"{ROLLOUT}.n@{file}:4"
    assert found.source_of("data.prompts_per_step") == "data.train_batch_size@command line"
    file.write_text("actor_rollout_ref:\n  rollout:\n    nn: 5\n")
    with pytest.raises(BadInput, match=r"part\.yaml:3: Could not override 'actor_rollout_ref\.rollout\.nn'"):
        read(file, version="head")
    file.write_text(
        "defaults: [ppo_megatron_trainer, _self_]\nmine: {x: 1}\nactor_rollout_ref: {rollout: {name: vllm}}\n"
    )
    assert read(file, version="head").config.actor.engine.strategy == "megatron"


def test_a_list_of_overrides_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text(f"- {NAME}\n- model_engine=megatron\n- +trainer.mine=1\n")
    found = read(file, version="head").config
    assert found.actor.engine.strategy == "megatron"
    assert found.source_of("rollout.serving.engine") == f"{ROLLOUT}.name@{file}:1"


@pytest.mark.parametrize("form", ["nested", "flat"])
@pytest.mark.parametrize(
    "row", [row for row in LAUNCHES if row["hydra"]["0.9.1"] == "composes"][:6], ids=lambda row: row["script"]
)
def test_a_resolved_dump_reads_as_the_launch_it_came_from(row: dict[str, Any], form: str, tmp_path: Path) -> None:
    launch = Launch(row["module"], row["config_name"], tuple((text, "") for text in row["overrides"]))
    composed = compose(launch, "0.9.1")
    file = tmp_path / "resolved.json"
    file.write_text(json.dumps(composed.tree if form == "nested" else composed.leaves))
    of_dump, of_launch = read(file, version="0.9.1").config, read(launch, version="0.9.1").config
    assert of_dump.model_dump(exclude={"raw"}) == of_launch.model_dump(exclude={"raw"})
    assert {key: value for key, value in of_dump.raw.items() if not key.startswith("_")} == composed.leaves


def test_the_installed_version_counts_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, taken in (("0.9.1", "0.9.1"), ("0.10.0.dev0", "head"), ("0.8.0", "0.9.1"), (None, "head")):

        def version(_: str, installed: str | None = installed) -> str:
            if installed is None:
                raise importlib.metadata.PackageNotFoundError
            return installed

        monkeypatch.setattr(importlib.metadata, "version", version)
        assert read(None, GRPO).config.framework_version == taken
    with pytest.raises(BadInput, match=r"--verl 0\.9: only 0\.9\.1 and head are known"):
        read(None, GRPO, version="0.9")


DEGREES = st.sampled_from((1, 2, 4))


@settings(max_examples=30, deadline=None)
@given(tp=DEGREES, pp=DEGREES, cp=DEGREES, nodes=st.integers(1, 8))
def test_the_ranks_of_a_megatron_world_are_all_used(tp: int, pp: int, cp: int, nodes: int) -> None:
    """dp*tp*pp*cp is the world wherever the degrees divide it."""
    mesh = config(
        *GRPO, "model_engine=megatron", f"trainer.nnodes={nodes}", f"{MEGATRON}.tensor_model_parallel_size={tp}",
        f"{MEGATRON}.pipeline_model_parallel_size={pp}", f"{MEGATRON}.context_parallel_size={cp}",
    ).mesh  # fmt: skip
    if (8 * nodes) % (tp * pp * cp) == 0:
        assert mesh.dp * mesh.tp * mesh.pp * mesh.cp == 8 * nodes
    assert mesh.dp >= 1
