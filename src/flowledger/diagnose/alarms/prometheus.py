"""What Prometheus takes: the alarms as a file of rules, and the numbers of the latest step as text."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import yaml

from flowledger.diagnose.alarms.numbers import facts_of, numbers, numbers_of
from flowledger.diagnose.alarms.promql import Untold, labels, metric_name, promql, summary
from flowledger.diagnose.alarms.rules import Rule, compiled
from flowledger.diagnose.measures.series import series_of
from flowledger.ledger.reader import Ledger
from flowledger.tables.metrics import find

STEP_S = 60.0  # where the run does not say how long a step takes


def rules_file(ledger: Ledger, rules: Sequence[Rule]) -> str:
    """A file for `rule_files` of Prometheus: a group a goal; what cannot be said in PromQL stands in comments with the reason.

    `for` is counted in steps here and in time there: so many times the median step of the run.
    """
    compiled(rules)  # what `watch` refuses is refused here
    facts, seconds = facts_of(ledger), _step_s(ledger)
    groups: dict[str, list[dict[str, Any]]] = {}
    untold: list[str] = []
    for rule in rules:
        for stage in rule.each or [rule.stage or ""]:
            name = f"{rule.id} ({stage})" if rule.each else rule.id
            try:
                condition = promql(rule, stage, facts)
            except Untold as why:
                untold.append(f"# {name}: {' '.join(str(why).split())}")
                continue
            groups.setdefault(rule.goal, []).append(
                _alert(rule, stage, condition, summary(rule, stage, facts), seconds)
            )
    document = {"groups": [{"name": f"flowledger_{goal}", "rules": alerts} for goal, alerts in groups.items()]}
    told = sum(map(len, groups.values()))
    head = (
        f"# Alarms of flowledger for Prometheus. A step of run {_comment(ledger.run)} takes {seconds:.3g} s: `for` counts steps.\n"
        f"# {told} are told, {len(untold)} cannot be said in PromQL (below).\n"
    )
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)
    return head + body + "".join(f"{line}\n" for line in ("# Not told:", *untold) if untold)


def _alert(rule: Rule, stage: str, condition: str, said: str, seconds: float) -> dict[str, Any]:
    name = "Flowledger" + "".join(word.capitalize() for word in rule.id.split("_"))
    made: dict[str, Any] = {"alert": name, "expr": condition}
    if rule.hold > 1:
        made["for"] = f"{math.ceil((rule.hold - 1) * seconds)}s"
    made["labels"] = {"severity": rule.severity, "goal": rule.goal, **({"stage": stage} if stage else {})}
    made["annotations"] = {
        "summary": said,
        "value": "{{ $value }}",
        "next_step": rule.next_step.replace("<stage>", stage),
    }
    return made


def exposition(ledger: Ledger, rules: Sequence[Rule]) -> str:
    """The latest number of every metric, and of what alarms read besides, in Prometheus' text format (0.0.4).

    A number of the whole job has the label run, one of a rank the label rank besides; a stage is a label too.
    """
    program, _ = compiled(rules)
    series = series_of(ledger)
    own = numbers_of(ledger, program.metrics & numbers().keys(), program.of_ranks & numbers().keys())
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    helps: dict[str, str] = {}
    for name in [*series.names, *own.job]:
        job = own.job[name] if name in own.job else series.by_step(name)
        ranks = own.ranks.get(name, {}) if name in own.job else series.by_rank(name)
        key = metric_name(name)
        helps.setdefault(key, _help(name))
        rows = found.setdefault(key, [])
        if job:
            rows.append(({"run": ledger.run, **labels(name)}, job[max(job)]))
        if ranks and len(latest := ranks[max(ranks)]) > 1:
            rows += [
                ({"run": ledger.run, "rank": str(rank), **labels(name)}, value)
                for rank, value in sorted(latest.items())
            ]
    lines = []
    for key in sorted(found):
        lines += [f"# HELP {key} {helps[key]}", f"# TYPE {key} gauge"]
        lines += [f"{key}{_labelled(given)} {_value(value)}" for given, value in found[key]]
    return "".join(f"{line}\n" for line in lines)


def _step_s(ledger: Ledger) -> float:
    times = [
        seconds
        for seconds in series_of(ledger).by_step("step_time_s").values()
        if math.isfinite(seconds) and seconds > 0
    ]
    return median(times) if times else STEP_S


def _help(name: str) -> str:
    row = find(name)
    said = numbers()[name].definition if name in numbers() else row.definition if row else name
    return said.replace("\\", "\\\\").replace("\n", " ")


def _labelled(given: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in given.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}" if not float(value).is_integer() or abs(value) > 1e15 else f"{value:.0f}"


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
