"""What Prometheus takes: the alarms as a file of rules, and the numbers of the latest step as text."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unicodedata import category

import yaml

from flowledger.diagnose.alarms.numbers import facts_of, numbers, numbers_of
from flowledger.diagnose.alarms.promql import promql
from flowledger.diagnose.alarms.promql_history import STEP_S, Untold
from flowledger.diagnose.alarms.promql_names import STEP, labels, metric_names
from flowledger.diagnose.alarms.promql_summary import summary
from flowledger.diagnose.alarms.rules import Rule, compiled
from flowledger.diagnose.measures.series import series_of
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.tables.metrics import find

UNPRINTED = ("Cc", "Cs", "Zl", "Zp")  # categories of signs that end a line, or act on a terminal


def rules_file(ledger: Ledger, rules: Sequence[Rule]) -> str:
    """A file for `rule_files` of Prometheus: a group a goal; what cannot be said in PromQL stands in comments with the reason.

    Steps are counted here and time there: so many times the median step of the run.
    """
    program, _ = compiled(rules)  # what `watch` refuses is refused here
    facts, seconds = facts_of(ledger), _step_s(ledger)
    names = metric_names({*series_of(ledger).names, *program.metrics, *program.of_ranks})
    groups: dict[str, list[dict[str, Any]]] = {}
    untold: list[str] = []
    for rule in rules:
        for stage in rule.each or [rule.stage or ""]:
            name = f"{rule.id} ({stage})" if rule.each else rule.id
            try:
                condition = promql(rule, stage, facts, step_s=seconds, names=names)
            except Untold as why:
                untold.append(f"# {name}: {' '.join(str(why).split())}")
                continue
            groups.setdefault(rule.goal, []).append(
                _alert(rule, stage, condition, summary(rule, stage, facts), seconds)
            )
    document = {"groups": [{"name": f"flowledger_{goal}", "rules": alerts} for goal, alerts in groups.items()]}
    told = sum(map(len, groups.values()))
    head = (
        f"# Alarms of flowledger for Prometheus. A step of run {_comment(ledger.run)} takes {seconds:.3g} s: `for`, ranges and offsets are counted in steps.\n"
        "# Scrape at least once a step; where steps become longer or shorter, write the file anew.\n"
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


@dataclass(frozen=True, slots=True)
class Exposition:
    """The text of one step, and what is left out of it and why, a line each."""

    step: int
    text: str
    left_out: tuple[str, ...] = ()


def exposition(ledger: Ledger, rules: Sequence[Rule], step: int | None = None) -> Exposition:
    """Every number of one step, the last that is whole, in Prometheus' text format (0.0.4), and what alarms read besides.

    A number of the whole job has the label run, one of a rank the label rank besides; a stage is a label too. Numbers of other
    steps are none of this one's and are left out. Raises BadInput for a run without numbers, or without that step.
    """
    job, ranks = _numbers(ledger, rules)
    at = _chosen(
        ledger, Counter(one for name in {*job, *ranks} for one in {*job.get(name, ()), *ranks.get(name, ())}), step
    )
    names = metric_names({*job, *ranks})
    found: dict[str, list[tuple[dict[str, str], float]]] = {STEP: [({"run": ledger.run}, float(at))]}
    helps = {STEP: "number of the step that these numbers are of"}
    others: list[str] = []
    for name in sorted({*job, *ranks}):
        rows = [] if at not in job.get(name, {}) else [({"run": ledger.run, **labels(name)}, job[name][at])]
        if len(of_ranks := ranks.get(name, {}).get(at, {})) > 1:
            rows += [
                ({"run": ledger.run, "rank": str(rank), **labels(name)}, value)
                for rank, value in sorted(of_ranks.items())
            ]
        if rows:
            helps.setdefault(names[name], _help(name))
            found.setdefault(names[name], []).extend(rows)
        else:
            others.append(name)
    lines = []
    for key in sorted(found):
        lines += [f"# HELP {key} {helps[key]}", f"# TYPE {key} gauge"]
        lines += [f"{key}{_labelled(given)} {_value(value)}" for given, value in found[key]]
    return Exposition(at, "".join(f"{line}\n" for line in lines), tuple(_of_others(others, at)))


def _numbers(
    ledger: Ledger, rules: Sequence[Rule]
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, dict[int, float]]]]:
    """name -> step -> number of the job, and name -> step -> rank -> number."""
    program, _ = compiled(rules)
    series = series_of(ledger)
    own = numbers_of(ledger, program.metrics & numbers().keys(), program.of_ranks & numbers().keys())
    job = {name: series.by_step(name) for name in series.names} | own.job
    ranks = {name: series.by_rank(name) for name in series.names if name not in own.job} | own.ranks
    return job, ranks


def _chosen(ledger: Ledger, numbers: Mapping[int, int], asked: int | None) -> int:
    """The step that is exported: the one asked for, else the last that every rank went through and that has its numbers.

    numbers: how many there are of each step. One with less than half of the most is none to judge a run by: a last validation, a
    summary, a step that a crash broke off.
    """
    if not numbers:
        raise BadInput(f"{ledger.run} has no number of any step: there is nothing for Prometheus")
    if asked is not None:
        if asked not in numbers:
            nearest = min(numbers, key=lambda one: (abs(one - asked), one))
            raise BadInput(f"{ledger.run} has no number of step {asked}; the nearest that has is --step {nearest}")
        return asked
    cut = {row["step"] for row in ledger.rows("SELECT step FROM cut_steps")}
    whole = numbers.keys() - cut or numbers.keys()
    most = max(numbers[step] for step in whole)
    return max(step for step in whole if numbers[step] * 2 >= most)


def _of_others(names: Sequence[str], step: int) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = ", ".join(_comment(name) or "''" for name in names[:3])
        yield f"step {step} has no number for {shown}{more}: left out, for older ones would look like now (--step N exports another step)"


def _step_s(ledger: Ledger) -> float:
    times = [
        seconds
        for seconds in series_of(ledger).by_step("step_time_s").values()
        if math.isfinite(seconds) and seconds > 0
    ]
    return median(times) if times else STEP_S


def _help(name: str) -> str:
    row = find(name)
    said = (
        numbers()[name].definition
        if name in numbers()
        else row.definition
        if row
        else name or "a number without a name"
    )
    return _harmless(said).replace("\\", "\\\\").replace("\n", "\\n")


def _labelled(given: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in given.items()) + "}"


def _escaped(text: str) -> str:
    return _harmless(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _harmless(text: str) -> str:
    """A text without signs that end a line or act on a terminal, for which the format has no escape; a new line has one."""
    return "".join("\ufffd" if char != "\n" and category(char) in UNPRINTED else char for char in text)


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}" if not float(value).is_integer() or abs(value) > 1e15 else f"{value:.0f}"


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
