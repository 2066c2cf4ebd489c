"""Every rule can be evaluated, says the same in both languages, and stands in the reference that it was read in."""

import re
import string

import pytest

from flowledger.plan.arithmetic import names_in
from flowledger.plan.facts import facts
from flowledger.tables.rules import FRAMEWORKS, holds_for, table
from tests.plan.rules_data import foreign, model


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_of_a_rule_is_a_fact_and_every_knob_has_a_key(framework: str) -> None:
    data = {"task": "chain_sum", "path": None} if framework == "flowledger" else {}
    known = facts(foreign(framework, {}, data=data), model(), None)
    rows = {fact.name for fact in table(framework).facts}
    everything = set(known.values) | rows | {"worst_micro"}
    for rule in table(framework).rules:
        told = {name for _, name, _, _ in string.Formatter().parse(rule.message) if name}
        used = {
            *names_in(rule.when),
            *names_in(rule.given),
            *names_in(rule.condition),
            *told,
            *rule.knobs,
            *filter(None, [rule.shown]),
        }
        assert used <= everything, f"{rule.id}: {used - everything}"
        if rule.framework != "any":
            assert [knob for knob in rule.knobs if knob not in known.keys] == [], rule.id


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_both_languages_tell_of_the_same_values_and_a_source_is_named(framework: str) -> None:
    for rule in table(framework).rules:
        english, chinese = (
            {name for _, name, _, _ in string.Formatter().parse(text) if name} for text in (rule.message, rule.zh)
        )
        assert chinese <= english, rule.id
        assert re.search(r"[\u4e00-\u9fff]", rule.zh), rule.id
        assert len(rule.source) > 5, rule.id
        assert rule.id.split(".")[0] in (framework, "model", "mesh", "algorithm"), rule.id


def test_every_check_that_can_stop_verl_has_a_row() -> None:
    there = {rule.id.split(".")[1] for rule in table("verl").rules}
    wanted = [f"L{n}" for n in range(1, 24)] + [f"W{n}" for n in range(1, 10)] + [f"R{n}" for n in range(1, 14)]
    assert [name for name in wanted if name not in there] == []


@pytest.mark.parametrize(
    ("versions", "version", "covered"),
    [
        ("all", "0.1", True), (">=0.9.1", "0.9.1", True), (">=0.9.1", "head", True), (">=0.9.1", "0.9.0", False),
        ("head", "0.9.1", False), ("head", "head", True), ("<0.10,>=0.9", "0.9.1", True), ("<0.10", "head", False),
        (">=0.9.1", None, True), (">=0.9", "0.10.0", True), ("head", "0.10.0.dev0", True),
    ],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(versions: str, version: str | None, covered: bool) -> None:
    assert holds_for(versions, version) is covered
