"""The orders are those of the mission, word by word, and every step can be walked."""

import inspect
import re
from pathlib import Path

import pytest
import typer.main

from flowledger import cli
from flowledger.diagnose.orders import changes, walk
from flowledger.diagnose.orders.answer import Answer
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.ratios import CUT
from flowledger.diagnose.orders.table import GOALS, by_goal, orders, step_of
from flowledger.ledger.rows import FindingRow

# Section 11 of the document that this project was made from, as it stands there.
MISSION = """
11.1 shape mismatch
先看 logical shape。
再看 local shard shape。
再看 mask / broadcast / reshape。
最后才看算子实现和并行配置。
11.2 OOM
先找峰值阶段。
再拆参数、梯度、优化器、激活、KV、buffer。
再看 dynamic batch / sequence split 是否改变了峰值。
11.3 多卡不均衡
先看 token 分布。
再看动态 batch 和 micro batch 切分。
再看 SP / CP / PP / TP 的通信等待。
最后看异步队列与 straggler。
"""

DOCS = Path(__file__).parents[2] / "docs"
VERDICTS = ("fail", "warn", "pass", "skipped")
STEPS = [(order, step) for order in orders().values() for step in order.steps]
every_step = pytest.mark.parametrize(("order", "step"), STEPS, ids=[step.id for _, step in STEPS])


def test_the_first_three_orders_are_those_of_the_mission_in_its_words_and_sequence() -> None:
    asked = re.split(r"\n11\.\d ", MISSION.strip("\n").join(("\n", "")))[1:]
    told = [[order.zh, *(step.zh for step in order.steps)] for order in orders().values()]
    assert told[:3] == [block.split("\n") for block in asked]


def test_the_others_have_the_same_form() -> None:
    assert list(orders()) == ["shape_mismatch", "oom", "imbalance", "instability", "data_quality", "hang"]
    assert [step.name for step in orders()["instability"].steps] == [
        "identities",
        "data",
        "gap",
        "objective",
        "optimizer",
    ]
    assert all(3 <= len(order.steps) <= 5 for order in orders().values())


def test_correctness_counts_before_stability_before_balance_before_memory_before_speed() -> None:
    goals = [order.goal for order in by_goal()]
    assert goals == sorted(goals, key=list(GOALS).index)
    assert [goal for goal in GOALS if goal != "data_quality"] == [
        "correctness",
        "stability",
        "load",
        "memory",
        "performance",
    ]


@every_step
def test_every_step_has_a_test_that_says_what_it_lacks_where_nothing_is_known(order, step) -> None:
    test = getattr(walk.MODULES[order.name], step.test)
    assert inspect.getdoc(test)
    answer = test(Evidence())
    assert isinstance(answer, Answer)
    assert answer.verdict == "skipped"
    row = walk.row(step, answer)
    assert row.needs and row.order == order.name and order.steps[row.position - 1] is step


@every_step
def test_every_step_speaks_both_languages(order, step) -> None:
    for field in ("", "needs", "next_step"):
        english, chinese = step.text(field, "en"), step.text(field, "zh")
        assert english and chinese and english != chinese
        assert re.search(r"[\u4e00-\u9fff]", chinese) and not re.search(r"[\u4e00-\u9fff]", english)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 58.15 GiB.", "oom"),
        ("ValueError: No available memory for the cache blocks.", "oom"),
        ("RuntimeError: The size of tensor a (512) must match the size of tensor b (1024) at non-singleton dimension 1", "shape_mismatch"),
        ("AssertionError: only support equal chunk. Got size of DataProto 2 and chunk 4.", "shape_mismatch"),
        ("RuntimeError: shape '[4, 16]' is invalid for input of size 60", "shape_mismatch"),
        ("torch.distributed.DistBackendError: Watchdog caught collective operation timeout", "hang"),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "hang"),
        ("ValueError: loss is nan", "instability"),
    ],
)  # fmt: skip
def test_an_exception_asks_for_its_order(text: str, name: str) -> None:
    crash = FindingRow(id="crash", verdict="fail", message=text)
    assert walk.picked(Evidence(findings=(crash,)))[0].name == name


@pytest.mark.parametrize(
    ("finding", "step"),
    [
        (FindingRow(id="masks_nest", verdict="fail", message="", order="laws", position=3), "shape_mismatch.mask"),
        (FindingRow(id="identities", verdict="fail", message="", order="laws", position=6), "instability.identities"),
        (FindingRow(id="unheard_of", verdict="fail", message="", order="oom", position=2), "oom.by_kind"),
        (FindingRow(id="unheard_of", verdict="fail", message="", order="oom", position=9), "oom.dynamic_batch"),
        (FindingRow(id="memory.fits", verdict="fail", message="", scope="plan"), "oom.peak_stage"),
        (FindingRow(id="verl.L9", verdict="fail", message="the batch of 6*3 = 18 samples is not divisible by dp = 8", scope="plan"), "shape_mismatch.logical"),
        (FindingRow(id="model.heads_tp", verdict="fail", message="num_attention_heads = 12 is not divisible by tp = 8", scope="plan"), "shape_mismatch.operator"),
        (FindingRow(id="trl.T5", verdict="fail", message="vllm_enable is needed", scope="plan"), "shape_mismatch.operator"),
    ],
)  # fmt: skip
def test_a_finding_belongs_to_the_step_of_its_id_or_of_what_it_says(finding: FindingRow, step: str) -> None:
    found = step_of(finding)
    assert found is not None and found.id == step


def test_what_nobody_knows_belongs_to_no_step() -> None:
    assert step_of(FindingRow(id="unheard_of", verdict="fail", message="divisible")) is None


def test_changes_are_spelt_as_each_framework_spells_them() -> None:
    config = {"actor": {"micro_batch": {"max_tokens": 16384}, "engine": {"offload": {"optimizer": False}}}}
    budget = changes.fix("halve_token_budget", "verl", config)
    assert budget == {"key": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "from": "16384", "to": "8192"}
    assert changes.fix("halve_token_budget", "verl", config, to=4096)["to"] == "4096"
    fused = changes.fix("fused_logits", "verl", config)
    assert (fused["key"], fused["to"]) == ("actor_rollout_ref.model.use_fused_kernels", "True")
    assert changes.fix("recompute_full", "openrlhf", config)["key"] == "--actor.gradient_checkpointing_enable"
    assert changes.fix("offload_optimizer", "trl", config) is None  # TRL has no such key
    assert changes.fix("offload_optimizer", "verl", {"actor": {"engine": {"offload": {"optimizer": True}}}}) is None


@pytest.mark.parametrize(("page", "language"), [("diagnosis.md", "en"), ("diagnosis.zh-CN.md", "zh")])
def test_the_page_has_every_order_step_axis_and_option(page: str, language: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for order in orders().values():
        steps = " ".join(f"{step.position} {step.text('', language)}" for step in order.steps)
        assert f"| `{order.name}` | {GOALS[order.goal][language]} | {steps} |" in text
    verb = typer.main.get_command(cli.app).commands["diagnose"]
    options = {word for one in verb.params for word in one.opts if word.startswith("-")} - {"--help"}
    assert {"--order", "--all", "--fail-on", "--lang", "--json"} <= options
    assert not [option for option in options if f"`{option}`" not in text and f"`{option} " not in text]
    assert not [axis for axis in CUT if f"`{axis}`" not in text]
    summary = walk.summary(walk.diagnose(Evidence()), Evidence())
    assert not [
        key for key in (*summary, *walk.parts(walk.Diagnosis())) if f"`{key}`" not in text and key not in VERDICTS
    ]
