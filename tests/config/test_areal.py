"""AReaL's files become the numbers that AReaL would run with; strings of degrees follow its grammar.

Truth: `defaults_1.0.4.json` holds the dataclasses of areal 1.0.4 as Python made them, `resolved.json` the files as OmegaConf
resolves them; the other figures are worked out by hand beside each assertion.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.areal import read as areal
from flowledger.config.areal.allocation import component, parts
from flowledger.config.areal.keys import defaults
from flowledger.config.dotted import flat
from flowledger.flow.errors import BadInput
from flowledger.plan.checks import check

OWN = {"scheduling_spec", "agent", "reward_functioncall_config", "dataset_kwargs", "config"}
DATA = Path(__file__).parents[1] / "data" / "areal"


def read(name, *overrides, version=None, **assume):
    return areal.read(DATA / f"{name}.yaml", overrides, assume=assume, version=version)


def fault(source, *overrides, **assume) -> str:
    with pytest.raises(BadInput) as caught:
        areal.read(source, overrides, assume=assume, version=None)
    return str(caught.value).replace(f"{DATA}/", "")


def written(folder: Path, name: str, old: str, new: str) -> Path:
    text = (DATA / f"{name}.yaml").read_text(encoding="utf-8")
    assert old in text
    (folder / "run.yaml").write_text(text.replace(old, new), encoding="utf-8")
    return folder / "run.yaml"


def test_every_default_is_the_one_of_the_dataclasses():
    recorded = json.loads((DATA / "defaults_1.0.4.json").read_text())["values"]
    given = {"actor": {"optimizer": {}, "reward_norm": {}}, "critic": {"optimizer": {}}, "ref": {}}
    ours, real = flat(defaults("PPOConfig", given)), flat(recorded)
    shared = ours.keys() & real.keys()
    assert {key: ours[key] for key in shared} == {key: real[key] for key in shared} and len(shared) > 550
    # what only one side has: lists and sections of the user's own, of which no default matters
    apart = {part for key in ours.keys() ^ real.keys() for part in key.split(".")}
    assert {key for key in ours.keys() ^ real.keys() if not set(key.split(".")) & OWN} == set(), apart


@pytest.mark.parametrize("name", ["fsdp", "megatron", "older", "colocated"])
def test_references_resolve_as_omegaconf_resolves_them(name):
    recorded = json.loads((DATA / "resolved.json").read_text())["files"][name]
    raw = read(name, WANDB_API_KEY="none-at-all").config.raw
    assert {key: raw.get(key, "absent") for key in recorded} == recorded


def test_fsdp_beside_sglang():
    reading = read("fsdp")
    config, engine = reading.config, reading.config.actor.engine
    # 256 prompts * 8 = 2048 samples; two optimizer steps of 1024; every rank of dp 4 takes 256 of each
    assert (config.data.prompts_per_step, config.samples_per_step, config.mini_batch_samples) == (256, 2048, 1024)
    assert config.actor.micro_batch.max_tokens == 10240 and config.actor.micro_batch.dynamic
    assert (config.mesh.dp, config.hardware.world, config.rollout.serving.gpus) == (4, 8, 4)
    assert (engine.strategy, engine.param_dtype, engine.compute_dtype, engine.reduce_dtype) == (
        "fsdp2", "float32", "bfloat16", "float32"
    )  # fmt: skip  # 1.0.4 stores optimizer_dtype
    assert engine.optimizer.moment_dtype is None and engine.optimizer.master_dtype is None
    assert (engine.pads_to_multiple, engine.logits.chunk_tokens, engine.logits.dtype) == (256, 1024, "float32")
    assert config.ref is not None and config.ref.path == "start"  # the same path, by reference
    assert config.ref.engine.mesh == engine.mesh and config.ref.engine.optimizer.kind == "none"
    assert config.ref.micro_batch.max_tokens == 10240  # ref.mb_spec: ${actor.mb_spec}
    assert (config.algorithm.kl_in, config.algorithm.kl_coef, config.algorithm.clip_high) == ("reward", 0.01, 0.5)
    assert (config.async_.mode, config.async_.max_staleness) == ("fully_async", 2)
    assert config.optim.betas == (0.9, 0.99) and config.raw["recompute_logp"] is True
    assert config.rollout.serving.memory_fraction == 0.8 and config.rollout.serving.max_model_tokens == 4096


def test_megatron_with_experts():
    config = read("megatron").config
    engine, mesh = config.actor.engine, config.actor.engine.mesh
    # attention d1*p4*t2*c2 = 16 ranks; experts e4*t1*p4 leave 16/16 = 1 copy; vLLM d4*t4 = 16 more: four nodes of 8
    assert (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp) == (1, 2, 4, 2, 4, 1)
    assert mesh.dp * mesh.model == 16 and config.rollout.serving.gpus == 16 and config.hardware.world == 32
    assert engine.sequence_parallel and engine.param_dtype == "bfloat16" and engine.grad_dtype == "float32"
    assert (engine.optimizer.master_dtype, engine.optimizer.moment_dtype) == ("float32", "float32")
    assert (engine.recompute.granularity, engine.recompute.method, engine.recompute.layers) == ("full", "uniform", 1)
    # 64*16 = 1024 samples in 4 steps of 256; dp 1, n_mbs 4: micro-batches of 64; log-probs over all 1024 in 4 parts
    assert config.mini_batch_samples == 256 and config.actor.micro_batch.samples == 64
    assert config.actor.log_prob_micro_batch.samples == 256
    assert config.ref is None and not config.rollout.serving.cuda_graphs


def test_recompute_needs_gradient_checkpointing(tmp_path):
    path = written(tmp_path, "megatron", "gradient_checkpointing: true", "gradient_checkpointing: false")
    config = areal.read(path, (), assume={}, version=None).config
    assert config.actor.engine.recompute.granularity == "none"


def test_an_older_file_holds_bfloat16_weights_and_adam_states():
    reading = read("older")
    engine = reading.config.actor.engine
    assert (engine.param_dtype, engine.optimizer.master_dtype, engine.optimizer.moment_dtype) == (
        "bfloat16",
        None,
        None,
    )
    assert (engine.strategy, engine.mesh.dp, reading.config.rollout.serving.gpus) == ("fsdp2", 4, 4)
    assert reading.config.framework_version == "0.5"
    assert any("1.0.4 refuses actor.group_size, actor.behav_imp_weight_cap" in note for note in reading.notes)
    assert f"actor.optimizer.offload@{DATA}/older.yaml:19" in reading.ignored
    # 128*4 = 512 samples, 4 steps of 128, dp 4, one micro-batch: 32 samples
    assert reading.config.mini_batch_samples == 128 and reading.config.actor.micro_batch.samples == 32
    assert reading.config.ref is None  # kl_ctl is 0


def test_colocated_with_tensor_and_sequence_parallel():
    config = read("colocated").config
    engine, mesh = config.actor.engine, config.actor.engine.mesh
    assert (mesh.dp, mesh.tp, mesh.sp, mesh.cp) == (2, 2, 2, 1)  # FSDP's c is Ulysses
    assert config.rollout.serving.colocated and config.rollout.serving.gpus is None and config.hardware.world == 8
    # d of a rollout counts replicas, each of which has no data parallelism of its own
    mesh = config.rollout.serving.mesh
    assert (mesh.dp, config.raw["_areal.rollout_world"]) == (1, 8) and config.rollout.serving.sleeps
    assert engine.offload.streamed and engine.offload.optimizer and engine.param_dtype == "bfloat16"
    assert (engine.lora.rank, engine.lora.target_modules) == (16, ("q_proj", "v_proj"))
    assert config.mini_batch_samples == 32 and config.actor.micro_batch.balance  # 32*4/4; Karmarkar-Karp


@pytest.mark.parametrize(("rollout", "fails"), [("vllm:d4t2", False), ("vllm:d2t2", True)])
def test_a_colocated_rollout_has_as_many_devices_as_the_actor(rollout, fails):
    found = check(read("colocated", f"rollout.backend={rollout}").config, None, None)
    assert ("areal.A6.world" in {one.id for one in found if one.verdict == "fail"}) is fails


@pytest.mark.parametrize(
    ("text", "backend", "degrees"),
    [  # dp, tp, pp, cp, ep, etp by AReaL's grammar (api/alloc_mode.py)
        ("fsdp:d4t2c2", "fsdp", (4, 2, 1, 2, 1, 1)),
        ("megatron:d2p3t4e2", "megatron", (2, 4, 3, 1, 2, 1)),
        ("megatron:(attn:d1p12t4|ffn:d1p12e4)", "megatron", (1, 4, 12, 1, 4, 1)),
        ("megatron:attn:d4p2t2c2|ffn:p2t2e4", "megatron", (4, 2, 2, 2, 4, 2)),
        ("sglang:d4t1p1", "sglang", (4, 1, 1, 1, 1, 1)),
        ("sglang[rollout]:d2 t2", "sglang", (2, 2, 1, 1, 1, 1)),
        ("d4p1t1", "fsdp", (4, 1, 1, 1, 1, 1)),
        ("d4p2t2", "megatron", (4, 2, 2, 1, 1, 1)),
    ],
)
def test_degrees(text, backend, degrees):
    one = component(text, "here")
    assert (one.backend, (one.dp, one.tp, one.pp, one.cp, one.ep, one.etp)) == (backend, degrees)
    assert one.world == degrees[0] * degrees[1] * degrees[2] * degrees[3]


def test_parts_on_devices_of_their_own_and_shared_ones():
    found = parts("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", "here")
    assert [(one.name, one.beside) for one in found] == [("r", ()), ("a", ("c",)), ("c", ("a",))]
    moe = parts("sglang:d4t4+megatron:(attn:d2t4|ffn:d1e8)", "here")
    assert [one.world for one in moe] == [16, 8] and moe[1].ep == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp:d4p2", "fsdp has no degree p"),
        ("fdsp:d4", "no backend 'fdsp'; did you mean fsdp?"),
        ("fsdp:", "names no degrees"),
        ("fsdp:d0", "a number from 1"),
        ("megatron:(attn:d1p4t2|ffn:d1p2e4)", "attention has 4 stages, experts 2"),
        ("megatron:(attn:d1p4t2|ffn:d3p4e2)", "attention takes 8 ranks, experts 24; use d1"),
        ("megatron:(attn:d3t2|ffn:e4)", "6 ranks of attention are not divisible"),
        ("megatron:d2e4", "2 ranks are not divisible by p1*e4"),
    ],
)
def test_impossible_degrees_are_refused(text, message):
    with pytest.raises(BadInput, match="here: ") as caught:
        component(text, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "ppo_n_minibatches",
            "ppo_n_minibatch",
            "run.yaml:32: unknown key actor.ppo_n_minibatch: areal 1.0.4 refuses it; did you",
        ),
        ("  batch_size: 256", "  batch_size: many", "train_dataset.batch_size = many: should be a number"),
        ("fsdp:d4", "fsdp:d8", "takes 12 devices, the cluster has 1*8; use cluster.n_nodes=2"),
        ('  backend: "sglang:d4t1p1"\n', "", "rollout.backend is missing"),
        ("  path: Qwen/Qwen2.5-1.5B-Instruct\n", "", "actor.path is missing"),
        (
            "path: Qwen/Qwen2.5-1.5B-Instruct",
            "path: ${oc.env:MODEL}",
            "actor.path = ${oc.env:MODEL}: cannot be resolved",
        ),
        ("path: Qwen/Qwen2.5-1.5B-Instruct", "path: ${ref.path}", "lead back to themselves"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, old, new, message):
    said = fault(written(tmp_path, "fsdp", old, new))
    assert message in said and "\n" not in said


def test_an_environment_variable_may_be_assumed(tmp_path):
    path = written(tmp_path, "fsdp", "path: Qwen/Qwen2.5-1.5B-Instruct", "path: ${oc.env:MODEL}")
    assert areal.read(path, (), assume={"MODEL": "my/model"}, version=None).config.model.path == "my/model"


def test_overrides_are_hydras():
    config = read("fsdp", "gconfig.n_samples=16", "+actor.fsdp.offload_params=true", "++sglang.dtype=float16").config
    assert config.samples_per_step == 256 * 16 and config.actor.engine.offload.streamed
    assert config.source_of("rollout.samples_per_prompt") == "gconfig.n_samples@command line"
    assert "to add it, write +actor.fsdp.offload_params=…" in fault(
        DATA / "fsdp.yaml", "actor.fsdp.offload_params=true"
    )
    assert "the key is there already" in fault(DATA / "fsdp.yaml", "+gconfig.n_samples=2")


def test_every_value_says_where_it_came_from():
    reading = read("fsdp")
    assert all("@" in source or source == "areal 1.0.4" for source in reading.config._sources.values())
    assert reading.config.source_of("optim.eps") == "actor.optimizer.eps default@areal 1.0.4"
    assert reading.config.source_of("mesh.dp") == f"actor.backend@{DATA}/fsdp.yaml:19"
    assert f"sglang.model_path@{DATA}/fsdp.yaml:43" in reading.ignored
    assert reading.config.raw["actor.reward_norm.group_size"] == 8


@given(st.permutations("dtpc"), st.tuples(*[st.integers(1, 16)] * 4))
def test_the_order_of_degrees_says_nothing_and_their_product_is_the_world(order, sizes):
    named = dict(zip("dtpc", sizes, strict=True))
    one = component("megatron:" + "".join(f"{letter}{named[letter]}" for letter in order), "here")
    assert one == component("megatron:" + "".join(f"{letter}{named[letter]}" for letter in "dtpc"), "here")
    assert one.world == sizes[0] * sizes[1] * sizes[2] * sizes[3]


def test_a_release_that_is_named_is_kept_to():
    with pytest.raises(BadInput, match=r"unknown key actor\.group_size: areal 1\.0\.4 refuses it"):
        read("older", version="1.0.4")
