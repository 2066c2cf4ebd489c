"""Findings with their sentences in Chinese: of alarms, laws, checks and rules, with numbers and names as they are."""

import re

import pytest

from flowledger.cli.in_chinese import with_chinese
from flowledger.diagnose.alarms.rules import built_in
from flowledger.diagnose.laws import LAWS
from flowledger.tables.rules import FRAMEWORKS, table

HAN = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def said(message: str, **more: object) -> dict[str, object]:
    (row,) = with_chinese([{"id": "x", "message": message, **more}])
    assert row["message"] == message, "the ledger's own sentence stays"
    return dict(row["zh"])


@pytest.mark.parametrize(
    "message",
    [
        "loss mask within response mask within attention mask: not so. step 3: sample 7-1 position 12: attention 1, response 0, loss 1 (and 4 more)",
        "what is made is freed or persistent, and read only while it lives (214 rows)",
        "advantages are those that the estimator makes of the recorded rewards (grpo): not so. step 2: sample 5-1 of group 5 has advantage "
        "0.25, its rewards give -0.75",
        "3 rows were dropped: the queue was full, so tables lack them",
        "grad_norm_high: quiet in 12 steps",
        "the KV pool holds 59 samples of 9216 tokens; up to 256 would run at once on a replica: the others wait or are preempted",
        "plan and run agree: 85 shapes equal, 42 explained; peak in update_actor planned +9.3%",
    ],
)  # fmt: skip
def test_a_sentence_keeps_its_numbers(message: str) -> None:
    chinese = str(said(message)["message"])
    assert HAN.search(chinese)
    assert not re.search(r"\b(the|its|was|were|rows|of)\b", chinese)
    assert sorted(NUMBER.findall(chinese)) == sorted(NUMBER.findall(message))


def test_texts_of_others_stay() -> None:
    assert said("torch.OutOfMemoryError: CUDA out of memory.") == {}
    told = said("torch.OutOfMemoryError", evidence=["frame a/b.py:7 in update", "fsdp = True = strategy in ('fsdp',)"])
    assert told == {"evidence": ["栈帧 a/b.py:7，位于 update", "fsdp = True = strategy in ('fsdp',)"]}


def test_an_alarm_says_its_own_chinese_sentence() -> None:
    told = said(
        "one step changed the weights by 0.12 of their norm (limit 0.05)", id="update_too_large", order="alarms"
    )
    assert "0.12" in str(told["message"]) and HAN.search(str(told["message"]))
    assert said("one step changed the weights by 0.12 of their norm (limit 0.05)") == {}, "which is that alarm's alone"


def test_a_rule_of_a_framework_says_when_it_fires_and_what_works() -> None:
    message = "ppo_mini_batch_size*n = 20 is not divisible by dp = 8 (fires at the first update); use 16 or 24"
    rule = next(one for one in table("verl").rules if one.id == "verl.R5")
    assert re.sub(r"\{\w+\}", "{}", rule.message) in re.sub(r"= \d+", "= {}", message), (
        "the sentence is that of the rule"
    )
    told = str(said(message, id="verl.R5", scope="plan")["message"])
    assert "（首次更新时触发）；可用 16 或 24" in told
    assert NUMBER.findall(told)[:2] == ["20", "8"]


def test_every_alarm_law_and_rule_has_a_chinese_form() -> None:
    sentences = [sentence for _, sentence, _ in LAWS]
    sentences += [rule.title for framework in FRAMEWORKS for rule in table(framework).rules]
    sentences += [f"{alarm.id}: quiet in 3 steps" for alarm in built_in()]
    assert [one for one in sentences if "message" not in said(one)] == []
    assert [alarm.id for alarm in built_in() if not (alarm.zh and alarm.next_step_zh)] == []
