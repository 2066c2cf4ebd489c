"""What an alarm says in Prometheus: its message, with the value that Prometheus has of its condition."""

import ast
import re
import string

from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.promql import Writing, is_count
from flowledger.diagnose.alarms.rules import Rule
from flowledger.diagnose.alarms.words import bare, shown

HUMANE = {"%": "humanizePercentage", "B": "humanize1024"}  # end of a format -> the function of Prometheus' templates


def summary(rule: Rule, stage: str, facts: Facts) -> str:
    """What an alarm says, with Prometheus' own value in it; the condition in words where the message asks for more numbers.

    The value of a comparison is that of its left side; of several joined by `and`, of the first.
    """
    tree = ast.parse(rule.when.replace("<stage>", stage).strip(), mode="eval").body
    while isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        tree = tree.values[0]
    value = ast.unparse(tree.left) if isinstance(tree, ast.Compare) and not is_count(tree.left) else ""
    said = ""
    for before, inner, form, _ in string.Formatter().parse(rule.message.replace("<stage>", stage)):
        said += before
        if inner is None or form == "note":  # Prometheus has no notes
            continue
        if ast.unparse(ast.parse(inner.strip(), mode="eval").body) == value:
            said += f"{{{{ $value | {HUMANE.get((form or '')[-1:], 'humanize')} }}}}{'B' * (form == 'B')}"
        elif (fixed := Writing(rule, stage, facts).fixed(inner)) is not None:
            said += shown(fixed, form or "")
        else:
            return f"{rule.id.replace('_', ' ')}: {_condition(rule, stage, facts)}"
    return said.rstrip(": ")


def _condition(rule: Rule, stage: str, facts: Facts) -> str:
    """The condition as it reads, with numbers in place of thresholds where they are known."""
    text = bare(" ".join(rule.when.replace("<stage>", stage).split()))
    for name in rule.thresholds:
        if (fixed := Writing(rule, stage, facts).fixed(name)) is not None:
            text = re.sub(rf"\b{name}\b", shown(fixed), text)
    return text
