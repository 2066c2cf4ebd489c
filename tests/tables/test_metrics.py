"""The canonical metrics have unit, level and definition, and cover what people watch."""

import math
import re

import pytest

from flowledger.flow.errors import BadInput
from flowledger.tables.metrics import LEVELS, find, metric, metrics

WATCHED = """
step_time_s tokens_per_s total_tokens reward/mean reward/std reward/min reward/max response_length/mean
response_length/max response_length/min prompt_length/mean prompt_length/max truncation_ratio abort_ratio
dropped_ratio zero_variance_groups advantage/mean advantage/std policy_loss kl_loss entropy_loss entropy
ref_kl policy_kl clip_ratio ratio/max grad_norm lr update_ratio rollout_gap/mean rollout_gap/max
rollout/running rollout/waiting mask_ratio stage_time_s/rollout reward/format/mean
"""


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
    assert metric("entropy").is_healthy(1e9)  # open towards infinity
    assert metric("lr").is_healthy(1.0) is None


def test_an_unknown_metric_is_refused_with_the_nearest():
    with pytest.raises(BadInput, match="did you mean grad_norm"):
        metric("grad_nrm")
