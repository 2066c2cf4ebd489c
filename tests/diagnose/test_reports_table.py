"""The tables that reports are answered from are whole: every name is known, every pattern and condition parses, `not` and unknown are kept apart."""

import re
from importlib.resources import files
from itertools import product

import pytest

from flowledger.diagnose.reports import clauses, keys, table
from flowledger.diagnose.reports.arithmetic import DERIVED
from flowledger.diagnose.reports.expression import Unknown, evaluate, names_in
from flowledger.diagnose.reports.report import Report

CAUSES = table.causes()
WORDS = {word for rows in table.words().values() for word in rows}
# Names that no table lists: made from several numbers, from comparisons, from the model's row.
MADE = {
    "time_by_longest", "time_by_sum", "longest_tokens", "slowest_s", "fastest_s", "allocated_first", "allocated_last",
    "fragmentation_first", "fragmentation_last", "logp_diff_first", "logp_diff_last", "residu_first", "residu_last", "temperature_not_one",
    "top_p_below_one", "params_b", "dead_key", "missing_name", "plan_gib", "plan_limit_gib", "plan_stage", "plan_kind",
    "plan_kind_gib", "plan_tensor", "plan_tensor_gib", "plan_kinds", "dividend_name",
    "divisor_name",
}  # fmt: skip


def test_every_name_of_a_condition_or_sentence_is_known() -> None:
    known = WORDS | MADE | {name for name, _ in DERIVED} | {key.name for key in keys._endings()}
    known |= {name for _, names in keys._spoken() for name in names}
    used: dict[str, str] = {}
    for cause in CAUSES:
        conditions = (cause.when, cause.suspect, *cause.surer)
        holes = (
            hole[1]
            for text in (*cause.says, *cause.evidence, *cause.fix.values(), cause.guess)
            for hole in table.HOLE.finditer(text)
        )
        used |= {name: cause.id for one in (*conditions, *holes) for name in names_in(one)}
    used |= {name: kind for kind, when in clauses.kinds().items() for name in names_in(when)}
    assert {name: cause for name, cause in used.items() if name not in known} == {}
    assert sorted(WORDS - used.keys()) == []


def test_a_row_is_whole() -> None:
    assert len({cause.id for cause in CAUSES}) == len(CAUSES) > 100
    for cause in CAUSES:
        assert cause.says and cause.next_step and 0 < cause.confidence < 1, cause.id
        assert set(cause.fix) in (set(), {"key", "from", "to"}), cause.id
        assert cause.signs or cause.when != "True", cause.id
        assert cause.needs or not cause.undecided, cause.id  # what is only located says what would decide
        evaluate(cause.when, {})
        evaluate(cause.suspect, {})


def test_nothing_is_told_of_an_empty_report() -> None:
    nothing = dict.fromkeys(WORDS, False)
    bare = [cause for cause in CAUSES if all(sign.search("") for sign in cause.signs)]
    assert len(bare) > 150 and [cause.id for cause in bare if evaluate(cause.when, nothing) is True] == []


def test_no_row_names_a_case() -> None:
    for name in ("words", "keys", "spoken", "mechanisms", "contrasts"):
        text = files("flowledger.diagnose.reports").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        assert not re.search(r"\bI\d{3}\b|\w#\d", text), name


VALUES = (True, False, Unknown(frozenset({"x"})))


@pytest.mark.parametrize(("one", "other"), product(VALUES, VALUES))
def test_and_or_are_kleenes(one: object, other: object) -> None:
    """By the ordering false < unknown < true: `and` is the least, `or` the greatest."""
    rank = {True: 2, False: 0}
    got = {"and": evaluate("a and b", {"a": one, "b": other}), "or": evaluate("a or b", {"a": one, "b": other})}
    ranks = [rank.get(value, 1) if isinstance(value, bool) else 1 for value in (one, other)]
    for word, choose in (("and", min), ("or", max)):
        value = got[word]
        assert (1 if isinstance(value, Unknown) else rank[bool(value)]) == choose(ranks)


def test_unknown_says_what_is_missing_and_not_excludes() -> None:
    assert evaluate("rows % chunks != 0", {"rows": 2}) == Unknown(frozenset({"chunks"}))
    assert evaluate("not x", {}) is True and evaluate("given(x) and not x", {}) is False
    assert isinstance(evaluate("1 / x", {"x": 0}), Unknown)
    assert evaluate("some(2, a, b, c)", {"a": True, "b": True}) is True
    assert evaluate("some(2, a, b)", {"a": False}) is False
    for bad in ("__import__('os')", "a.b", "[a for a in b]", "f(", "(lambda: 1)()"):
        with pytest.raises(ValueError):
            evaluate(bad, {"a": 1})


@pytest.mark.parametrize(
    ("key", "framework", "name"),
    [
        ("actor_rollout_ref.rollout.n", "verl", "group"), ("data.train_batch_size", "verl", "prompts"),
        ("train_batch_size", "verl", "prompts"), ("train_batch_size", "OpenRLHF", "samples"),
        ("--max-tokens-per-gpu", "slime", "token_cap"), ("policy.train_micro_batch_size", "NeMo-RL", "micro"),
        ("vllm_gpu_memory_utilization", "TRL", "util"), ("rollout.tensor_model_parallel_size", "verl", "rollout_tp"),
    ],
)  # fmt: skip
def test_a_key_is_known_by_its_ending_and_framework(key: str, framework: str, name: str) -> None:
    assert keys.facts_by_key(Report(framework=framework, config={key: 3})) == {name: 3}


@pytest.mark.parametrize(
    ("words", "value"),
    [("58.15 GiB", 58.15), ("512 MiB", 0.5), ("8,192", 8192), ("32k", 32768), ("1e-6", 1e-6), (">1", None), ("true", None), (True, None)],
)  # fmt: skip
def test_numbers_are_read_with_their_units(words: object, value: float | None) -> None:
    assert keys.number(words) == value
