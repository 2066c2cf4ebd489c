"""The table of algorithms is complete, true to the flow and the configuration, and names what the loop can run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from flowledger.config.algorithm import AGGREGATIONS, REJECTIONS, Algorithm, RolloutCorrection
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.flow.tensors import tensors
from flowledger.run.algorithms.advantages import ADVANTAGES
from flowledger.run.algorithms.aggregation import REDUCTIONS, totals_of
from flowledger.run.algorithms.kl import KL_FORMS
from flowledger.run.algorithms.policy_losses import POLICY_LOSSES
from flowledger.tables import algorithms as algorithm_tables
from flowledger.tables.algorithms import GRAINS, NEEDS, WHATS, Method, algorithms, find, method, names, needs_of

DOCS = Path(__file__).parents[2] / "docs"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
ROWS = tuple(algorithms().values())
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what}:{row.name}")

# What the field's algorithms are, written down here a second time on purpose: adding one is a decision.
NAMES = {
    "advantage": "gae grpo grpo_vectorized dr_grpo gdpo grpo_passk rloo rloo_vectorized reinforce_plus_plus "
    "reinforce_plus_plus_baseline remax opo gpg optimal_token_baseline tir_optimal_token_baseline",
    "policy_loss": "vanilla gspo cispo sapo gpg geo_mean clip_cov kl_cov dppo_tv dppo_kl dro bypass_mode",
    "aggregation": "token-mean token-sum seq-mean-token-sum seq-mean-token-sum-norm seq-mean-token-mean",
    "kl_form": "k1 abs k2 k3 k1+ abs+ k2+ k3+",
    "kl_control": "fixed adaptive",
    "importance": "token sequence",
    "rejection": "token_k1 token_k2 token_k3 seq_sum_k1 seq_sum_k2 seq_sum_k3 seq_mean_k1 seq_mean_k2 seq_mean_k3 "
    "seq_max_k2 seq_max_k3",
    "value_loss": "value_loss",
    "entropy": "entropy_bonus",
}


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted key of every setting and section."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in sections_in(field.annotation):
            yield from keys_of(part, f"{prefix}{name}.")


def sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from sections_in(part)


def choices(model: type[BaseModel], name: str) -> set[str]:
    """The words of a setting that is one of a few."""
    return set(model.model_fields[name].annotation.__args__)  # type: ignore[union-attr]


KEYS = set(keys_of(RunConfig))


@pytest.mark.parametrize("what", WHATS)
def test_the_names_are_the_closed_list(what: str) -> None:
    assert sorted(names(what)) == sorted(NAMES[what].split())


def test_the_loop_runs_what_the_table_explains() -> None:
    assert set(ADVANTAGES) == set(names("advantage"))
    assert set(POLICY_LOSSES) == set(names("policy_loss"))
    assert set(KL_FORMS) == {word for row in ROWS if row.what == "kl_form" for word in (row.name, *row.aliases)}


def test_the_configuration_accepts_what_the_table_explains() -> None:
    assert set(AGGREGATIONS) == set(names("aggregation")) == choices(Algorithm, "loss_aggregation")
    assert set(REJECTIONS) == set(names("rejection"))
    assert choices(Algorithm, "kl_control") == set(names("kl_control"))
    assert choices(RolloutCorrection, "importance") == {"none", *names("importance")}


@every_row
def test_a_row_speaks_of_tensors_and_settings_that_exist(row: Method) -> None:
    assert row.what in WHATS and row.grain in GRAINS
    assert row.inputs and set(row.inputs) <= tensors().keys()
    assert row.needs <= NEEDS.keys()
    assert set(row.settings) <= KEYS
    assert WHATS[row.what][2] is None or WHATS[row.what][2] in KEYS


@every_row
def test_a_row_is_complete_in_both_languages(row: Method) -> None:
    pairs = [(row.to_tokens, row.to_tokens_zh), (row.purpose, row.purpose_zh), (row.bug, row.bug_zh)]
    if row.surprise is not None:
        pairs.append((row.surprise, row.surprise_zh or ""))
    for english, chinese in pairs:
        assert len(english) > 8 and not CHINESE.search(english)
        assert english.endswith(".")
        assert CHINESE.search(chinese)
    said = set(re.findall(r"[a-z]+", row.formula_zh or row.formula))  # names such as `mean` and `clip` are in both
    assert not said & {
        "the",
        "over",
        "and",
        "of",
        "where",
        "keep",
        "with",
        "all",
        "stays",
        "as",
        "at",
        "for",
        "in",
        "is",
    }
    assert (row.surprise is None) == (row.surprise_zh is None)
    assert row.formula and "\n" not in row.formula
    assert re.search(r"arXiv \d{4}\.\d{4,5}\b|verl|PMLR|blog|notion\.site|\b19\d\d\b", row.source)


@every_row
def test_a_need_is_met_by_an_input_or_a_setting(row: Method) -> None:
    """Who needs a critic reads its values, and so on: the two columns cannot drift apart."""
    read = {
        "critic": {"values"},
        "group": {"group_id"},
        "baseline": {"baseline_reward"},
        "ref": {"ref_log_prob", "kl"},
        "sum_pi_squared": {"sum_pi_squared"},
        "rollout_log_prob": {"rollout_log_prob"},
        "old_log_prob": {"old_log_prob"},
    }
    for need in row.needs:
        assert read[need] & set(row.inputs), need
    for need in {"critic", "group", "baseline", "sum_pi_squared", "rollout_log_prob"} - row.needs:
        assert not read[need] & set(row.inputs), need


def test_a_word_of_one_sort_means_one_algorithm() -> None:
    for what in WHATS:
        words = [word for row in ROWS if row.what == what for word in (row.name, *row.aliases)]
        assert len(words) == len(set(words))


def test_needs_are_those_of_the_papers() -> None:
    assert needs_of("advantage", "gae") == {"critic"}
    assert needs_of("advantage", "grpo") == {"group"}
    assert needs_of("advantage", "remax") == {"baseline"}
    assert needs_of("advantage", "reinforce_plus_plus") == frozenset()
    assert needs_of("advantage", "optimal_token_baseline") == {"group", "sum_pi_squared", "old_log_prob"}
    assert needs_of("policy_loss", "vanilla") == frozenset()
    assert needs_of("policy_loss", "bypass_mode") == {"rollout_log_prob"}
    assert needs_of("kl_form", "low_var_kl") == {"ref"}


def test_a_name_may_be_an_estimator_and_a_loss() -> None:
    assert [row.what for row in find("gpg")] == ["advantage", "policy_loss"]
    assert [row.name for row in find("low_var_kl")] == ["k3"]
    assert [row.name for row in find("mse+")] == ["k2+"]
    assert [row.name for row in find("dapo")] == ["vanilla"]
    assert [row.name for row in find("icepop")] == ["token"]
    assert [(row.what, row.name) for row in find("ppo")] == [("advantage", "gae"), ("policy_loss", "vanilla")]
    assert find("nothing") == ()


@pytest.mark.parametrize(
    ("what", "word", "near"), [("advantage", "grop", "grpo"), ("policy_loss", "gsp", "gspo"), ("kl_form", "k4", "k")]
)
def test_an_unknown_name_is_refused_with_the_nearest_of_its_sort(what: str, word: str, near: str) -> None:
    with pytest.raises(BadInput, match=f"no .*{word}.*{near}"):
        method(what, word)


def test_a_row_that_lacks_a_column_or_has_a_strange_one_is_refused_by_name() -> None:
    raw = {"what": "advantage", "name": "best_of_group", "formula": "A = 1", "grain": "sample", "surprize": "none"}
    with pytest.raises(BadInput, match=r"the row 'best_of_group' lacks source, .*bug_zh and .*'surprize'.*surprise"):
        algorithm_tables._row(raw)


def test_an_estimator_is_no_loss() -> None:
    with pytest.raises(BadInput, match=r"no policy loss is called 'rloo'"):
        needs_of("policy_loss", "rloo")


@pytest.mark.parametrize("page", ["algorithms.md", "algorithms.zh-CN.md"])
def test_the_aggregation_worked_by_hand_on_the_page_is_what_the_loop_computes(page: str) -> None:
    """Token losses 1, 3 and 2, 2, 2, 6; weights and loss of each mode as the page has them."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    losses = torch.tensor([[1.0, 3.0, 0.0, 0.0], [2.0, 2.0, 2.0, 6.0]])
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^\| `([\w-]+)` \| ([\d/]+) \| ([\d/]+) \| (?:.* = )?([\d.]+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in found] == list(AGGREGATIONS)
    for name, first, second, loss in found:
        weight = REDUCTIONS[name].weight(mask, totals_of(mask, horizon=4))
        assert weight[0, 0].item() == pytest.approx(_fraction(first))
        assert weight[1, 0].item() == pytest.approx(_fraction(second))
        assert (weight * losses).sum().item() == pytest.approx(float(loss), abs=5e-4)


def _fraction(text: str) -> float:
    numerator, _, denominator = text.partition("/")
    return int(numerator) / int(denominator or 1)


@pytest.mark.parametrize("page", ["algorithms.md", "algorithms.zh-CN.md"])
def test_the_page_has_every_algorithm(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert not [row.name for row in ROWS if f"\n| `{row.name}`" not in text]
