"""The canonical metrics have unit, level and definition, and cover what people watch."""

import math
import re

import pytest

from flowledger.diagnose.measures.recompute import MEASURES
from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import ROWS, columns
from flowledger.tables.metrics import LEVELS, OVER_RANKS, find, metric, metrics, over_ranks

WATCHED = """
step_time_s tokens_per_s total_tokens reward/mean reward/std reward/min reward/max response_length/mean
response_length/max response_length/min prompt_length/mean prompt_length/max truncation_ratio abort_ratio
dropped_ratio zero_variance_groups advantage/mean advantage/std policy_loss kl_loss entropy_loss entropy
ref_kl policy_kl clip_ratio ratio/max grad_norm lr update_ratio rollout_gap/mean rollout_gap/max
rollout/running rollout/waiting mask_ratio stage_time_s/rollout reward/format/mean
"""

# What was asked for, word by word: the six goals, and the five levels of metrics.
GOALS = {
    "正确性": "shape 对不对、mask 对不对、token 对不对",
    "稳定性": "KL、entropy、grad norm、abort ratio",
    "性能": "step time、tokens/s、stage time、MFU / SMA",
    "显存": "allocated / reserved、峰值、碎片率",
    "负载": "rank 间 token 与时间是否均衡",
    "数据质量": "prompt length、response length、clip ratio、reward 分布",
}
LAYERS = {
    "e2e": "step time、throughput、total tokens",
    "stage": "rollout / reward / logprob / ref / update 的耗时",
    "tensor": "shape、bytes、mask ratio、lifetime",
    "parallel": "rank 负载、通信时长、bubble、queue depth",
    "stability": "KL、entropy、grad norm、clipfrac",
}


@pytest.mark.parametrize("words", [*GOALS.values(), *LAYERS.values()])
def test_every_word_of_what_was_asked_for_has_a_metric(words):
    for word in words.split("、"):
        assert [row for row in metrics().values() if word in row.mission], word


@pytest.mark.parametrize(("level", "words"), LAYERS.items())
def test_a_layer_has_its_metrics_on_its_level(level, words):
    for word in words.split("、"):
        assert level in {row.level for row in metrics().values() if word in row.mission}, word


def test_no_metric_answers_to_a_word_that_nobody_asked_for():
    asked = {word for words in (*GOALS.values(), *LAYERS.values()) for word in words.split("、")}
    assert {word for row in metrics().values() for word in row.mission} <= asked


def test_sources_are_columns_of_the_ledger_and_told_numbers_only_where_nothing_makes_them():
    known = {f"{row.table}.{column}" for row in ROWS for column in columns(row)}
    made = {name for measure in MEASURES for name in measure.names}
    for row in metrics().values():
        assert row.sources and set(row.sources) <= known, row.name
        if row.sources != ("metrics.value",):
            assert row.name in made, row.name


def test_what_is_recomputed_is_a_metric():
    names = [name for measure in MEASURES for name in measure.names]
    assert set(names) <= metrics().keys()
    assert len(names) == len(set(names))  # nothing is made twice


def test_ranks_are_joined_as_means_unless_the_table_says_otherwise():
    assert {row.over_ranks for row in metrics().values()} == set(OVER_RANKS)
    assert over_ranks("stage_time_s/rollout") == "max" and over_ranks("nobody/knows") == "mean"


@pytest.mark.parametrize("name", re.findall(r"\S+", WATCHED))
def test_what_people_watch_has_a_row(name):
    assert metric(name).unit


@pytest.mark.parametrize("row", metrics().values(), ids=lambda row: row.name)
def test_a_row_is_complete(row):
    assert row.level in LEVELS
    assert row.definition and re.search(r"[\u4e00-\u9fff]", row.definition_zh)
    assert row.healthy is None or row.healthy[0] < row.healthy[1]


def test_every_level_has_a_metric():
    assert {row.level for row in metrics().values()} == set(LEVELS)


def test_a_pattern_stands_for_one_word_per_bracket():
    assert find("stage_time_s/rollout") is metrics()["stage_time_s/<stage>"]
    assert find("stage_time_s/a/b") is None
    assert find("stage_time_s/") is None
    assert find("reward/mean") is metrics()["reward/mean"]  # plain name before pattern


def test_health_is_judged_at_the_edges():
    clip = metric("clip_ratio")
    assert clip.healthy == (0.0, 0.3)
    assert clip.is_healthy(0.3) and not clip.is_healthy(0.31)
    assert not clip.is_healthy(math.nan)
    assert metric("rollout_gap/pearson").is_healthy(1 + 4e-16)  # by rounding
    assert not metric("rollout_gap/pearson").is_healthy(1.001)
    assert not metric("update_ratio").is_healthy(0.0)  # a bound of 1e-9 has no room for rounding
    assert metric("entropy").is_healthy(1e9)  # open towards infinity
    assert metric("lr").is_healthy(1.0) is None


def test_an_unknown_metric_is_refused_with_the_nearest():
    with pytest.raises(BadInput, match="did you mean grad_norm"):
        metric("grad_nrm")
