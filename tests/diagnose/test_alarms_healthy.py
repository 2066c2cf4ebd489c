"""Alarms and healthy ranges say one thing of the same number: who fires inside a range, or long outside of it, says why."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flowledger.diagnose.alarms import rules
from flowledger.diagnose.alarms.rules import Rule, Threshold
from flowledger.diagnose.orders.table import orders
from flowledger.tables.metrics import Metric, find, metrics

LEDGER = Path(__file__).parents[2] / "docs" / "ledger.md"
SAME = {"memory_fragmentation": "memory/fragmentation"}  # numbers of alarms that are a metric
DIRECTIONS = {ast.Gt: 1, ast.GtE: 1, ast.Lt: 0, ast.LtE: 0}  # which end of the range a comparison looks beyond


def names(tree: ast.expr) -> Iterator[str]:
    """The metrics that one side of a comparison is, plainly or as the first of several that is known."""
    match tree:
        case ast.Name(id=name):
            yield SAME.get(name, name)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name
        case ast.Call(func=ast.Name(id="first" | "abs"), args=inner):
            for one in inner:
                yield from names(one)


def bounds(rule: Rule) -> Iterator[tuple[Metric, int, float, Threshold | None]]:
    """(metric, end of its range, what it is held against where nothing is known of the run) of each condition on a level."""
    tree = ast.parse(rule.when, mode="eval")
    guards = {id(one) for node in ast.walk(tree) if isinstance(node, ast.UnaryOp) for one in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in guards:  # what is left out, not what is meant
            continue
        if not isinstance(node, ast.Compare) or type(node.ops[0]) not in DIRECTIONS:
            continue
        limit, threshold = node.comparators[0], None
        match limit:
            case ast.Name(id=name) if name in rule.thresholds:
                threshold = rule.thresholds[name]
                value = threshold.default
            case _:
                try:
                    value = ast.literal_eval(limit)
                except ValueError:
                    continue  # of the run itself: a change, no level
        if value is None or not isinstance(value, int | float):
            continue
        for name in names(node.left):
            row = find(name)
            if row is not None and row.healthy is not None:
                yield row, DIRECTIONS[type(node.ops[0])], float(value), threshold


LEVELS = [(rule, *found) for rule in rules.built_in() for found in bounds(rule)]
ALSO: Mapping[tuple[str, str], str] = {  # conditions that are no bound of their own
    ("no_samples_left", "dropped_ratio"): "nothing is left, another alarm than too little",
    ("truncation_high", "truncation_ratio"): "with a jump of a half, whatever is usual",
    ("truncation_high", "response_limit_ratio"): "the same",
}


def test_enough_conditions_are_seen() -> None:
    seen = {rule.id for rule, *_ in LEVELS}
    assert {
        "truncation_high",
        "clip_ratio_high",
        "fragmentation_high",
        "critic_does_harm",
        "dead_gradient",
        "stale_weights",
    } - seen == {"stale_weights"}
    assert len(LEVELS) > 25


@pytest.mark.parametrize(
    ("rule", "row", "end", "value", "threshold"), LEVELS, ids=lambda one: getattr(one, "id", getattr(one, "name", ""))
)
def test_an_alarm_that_knows_nothing_of_the_run_is_at_the_end_of_the_range_or_says_why_not(
    rule: Rule, row: Metric, end: int, value: float, threshold: Threshold | None
) -> None:
    assert row.healthy is not None
    edge = row.healthy[end]
    assert value >= edge if end else value <= edge, (
        f"{rule.id} fires at {value:g}, which is healthy for {row.name} ({row.healthy})"
    )
    if value == edge or (threshold is None and (rule.id, row.name) in ALSO):
        return
    assert threshold is not None
    said = re.search(rf"healthy {'up to' if end else 'from'} {edge:g}(; .{{20,}})", threshold.source)
    assert said, f"{rule.id} fires at {value:g} and {row.name} is healthy up to {edge:g}: source does not say why"


@pytest.mark.parametrize("row", [row for row in metrics().values() if row.healthy], ids=lambda row: row.name)
def test_what_leaves_its_range_is_told_by_a_finding_that_exists_or_the_table_says_why_not(row: Metric) -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", LEDGER.read_text(encoding="utf-8"), re.MULTILINE))
    known = (
        {rule.id for rule in rules.built_in()}
        | documented
        | {step.id for order in orders().values() for step in order.steps}
    )
    assert set(row.told_by) <= known, set(row.told_by) - known
    naming = {rule.id for rule, metric, *_ in LEVELS if metric is row}
    assert naming <= set(row.told_by)
    assert bool(row.told_by) != bool(row.silent)


def test_a_range_is_one_that_can_be_left() -> None:
    """A fraction that is healthy from 0 to 1 says nothing."""
    assert not [row.name for row in metrics().values() if row.unit == "fraction" and row.healthy == (0.0, 1.0)]


@pytest.mark.parametrize(
    ("when", "default", "fires_inside"),
    [
        ("clip_ratio > bound", 0.2, True),
        ("clip_ratio > bound", 0.3, False),
        ("first(kl_loss, entropy) < bound", 0.02, True),
    ],
)
def test_the_reading_of_conditions_sees_a_contradiction(when: str, default: float, fires_inside: bool) -> None:
    rule = Rule(
        id="mine", goal="stability", when=when, severity="warning", message="m", next_step="n", thresholds={"bound": Threshold(default=default)},
    )  # fmt: skip
    found = [row.is_healthy(value) and row.healthy[end] != value for row, end, value, _ in bounds(rule)]
    assert any(found) == fires_inside
