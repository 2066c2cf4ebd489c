"""Which models are at work in which stage, and how pipeline stages share a model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.engine import Engine, Mesh
from flowledger.config.schema import Critic
from flowledger.plan.roles import classes, stages, unused, works, world
from flowledger.plan.weights import count
from flowledger.plan.whatif import changed
from flowledger.tables.models import architecture
from tests.plan.conftest import planned

TINY = planned("tiny.yaml")
FSDP = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")
DENSE = architecture("Qwen3-8B")


def test_each_stage_that_computes_has_its_model() -> None:
    found = {work.stage: work for work in works(TINY.config)}
    assert {stage: (work.role, work.gradients) for stage, work in found.items()} == {
        "old_log_prob": ("actor", False), "ref_log_prob": ("ref", False), "update_actor": ("actor", True),
    }  # fmt: skip
    assert found["update_actor"].updates == 2  # 4 prompts in mini-batches of 2


def test_without_a_reference_there_is_no_such_stage_and_with_a_critic_two_more() -> None:
    alone = changed(TINY.config, "ref", None)
    assert "ref_log_prob" not in stages(alone)
    assert "ref_log_prob" not in {work.stage for work in works(alone)}
    taught = changed(TINY.config, "critic", Critic())
    assert {"values", "update_critic"} <= set(stages(taught))
    heads = {work.stage: work.head for work in works(taught)}
    assert heads["values"] == heads["update_critic"] == "value" and heads["update_actor"] == "lm"


def test_every_work_is_a_stage_that_runs() -> None:
    for config in (TINY.config, FSDP.config, changed(TINY.config, "actor.old_log_prob", False)):
        assert {work.stage for work in works(config)} <= set(stages(config))


def test_a_kl_stands_in_the_loss_or_in_the_reward() -> None:
    kl = {("advantage", "kl"), ("update_actor", "kl"), ("update_actor", "kl_loss")}
    assert unused(TINY.config) & kl == {("advantage", "kl")}
    assert unused(changed(TINY.config, "algorithm.kl_in", "reward")) & kl == kl - {("advantage", "kl")}
    weightless = changed(TINY.config, "algorithm.kl_coef", 0.0)
    assert unused(weightless) == unused(TINY.config)  # measured all the same
    assert kl <= unused(weightless.model_copy(update={"ref": None}))
    assert kl <= unused(weightless.model_copy(update={"framework": "verl"}))


def test_the_world_of_the_own_loop_is_its_mesh_and_elsewhere_its_hardware() -> None:
    assert world(TINY.config) == 1
    assert world(changed(TINY.config, "mesh", Mesh(dp=4, tp=2))) == 8
    assert world(FSDP.config) == 8


@settings(max_examples=40, deadline=None)
@given(pp=st.sampled_from([1, 2, 3, 4, 6, 9, 12]), dp=st.integers(1, 4))
def test_pipeline_stages_part_ranks_layers_and_parameters_without_loss(pp: int, dp: int) -> None:
    found = classes(Engine(mesh=Mesh(pp=pp, dp=dp)), DENSE, pp * dp)
    ranks = [rank for one in found for rank in range(one.first, one.first + one.count)]
    assert ranks == list(range(pp * dp))
    assert [layer for one in found for layer in one.layers] == list(range(36))
    held = sum(one.outer_elements + sum((one.layer_elements or {}).values()) for one in found)
    assert held == count(DENSE) == 8_190_735_360  # as the model card's safetensors index says
    assert [one.is_first for one in found] == [True] + [False] * (pp - 1)
    assert [one.is_last for one in found] == [False] * (pp - 1) + [True]
    assert [one.name for one in found] == (["all"] if pp == 1 else [f"pp{index}" for index in range(pp)])


def test_the_no_grad_pass_of_verl_computes_entropy_as_told_and_the_reference_none() -> None:
    entropies = {work.stage: work.engine.logits.entropy for work in works(FSDP.config)}
    assert entropies["ref_log_prob"] == "none"
    assert entropies["old_log_prob"] == FSDP.config.actor.log_prob_entropy == "full"


def test_a_critic_of_another_size_is_planned_with_its_own() -> None:
    """Qwen3-0.6B beside an 8B policy: its float32 shard of 8 ranks is 4 bytes * 596,049,920 / 8, and a bit for the value head."""
    words = ("algorithm.adv_estimator=gae", "critic.model.path=Qwen/Qwen3-0.6B")
    plan = planned("verl_qwen3_8b_fsdp.sh", *words, gpu="h100-80g")
    _, job = plan.jobs[("update_critic", "all")]
    assert job.architecture.name == "Qwen3-0.6B"
    assert plan.jobs[("update_actor", "all")][1].architecture.name == "Qwen3-8B"
    unknown = planned("verl_qwen3_8b_fsdp.sh", words[0], "critic.model.path=/models/mine", gpu="h100-80g")
    assert any("/models/mine" in note for note in unknown.notes)
