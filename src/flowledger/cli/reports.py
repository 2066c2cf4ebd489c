"""From what somebody reports (a file or a text) to findings: read it, ask the causes, and run a plan's checks beside them."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowledger.diagnose.reports.report import Report
    from flowledger.ledger.rows import FindingRow

LEAST_SETTINGS = 3  # fewer say too little of a run for a plan of it
UNSURE = 0.5  # a check that fails where most settings are defaults: the report was silent on them
NEEDED = {"actor_rollout_ref.rollout.name": "vllm"}  # verl refuses to start without it


def reported(path_or_text: str) -> "list[FindingRow]":
    """The findings for one report, the surest first: a JSON, JSONL or YAML file, a text file, or the text itself.

    Raises BadInput for a file that cannot be read or holds nothing.
    """
    from flowledger.diagnose.reports.answers import answer
    from flowledger.diagnose.reports.read import read

    report = read(path_or_text)
    return answer(report, planned(report))


def planned(report: "Report") -> "list[FindingRow]":
    """Checks of a plan that fail for the report's configuration, told as unsure; none where no plan can be made of it."""
    from flowledger.ledger.rows import FindingRow

    framework = _framework(report.framework)
    settings = list(_settings(report, framework))
    if framework is None or len(settings) < LEAST_SETTINGS:
        return []
    silent = {row["id"] for row in _failing(framework, [])}  # what fails without any setting says nothing of these
    names = set(FindingRow.__struct_fields__) - {"seq", "t_ns"}
    rows = [row for row in _failing(framework, settings) if row["id"] not in silent and "= None" not in row["message"]]
    found = [FindingRow(**{key: value for key, value in row.items() if key in names}) for row in rows]
    for row in found:
        row.confidence = min(row.confidence or 1.0, UNSURE)
        row.evidence = [*(row.evidence or ()), "by the settings of the report, and defaults where it is silent"]
    return found


def _failing(framework: str, settings: list[str]) -> list[dict[str, Any]]:
    from flowledger.config.detect import Asked, read
    from flowledger.flow.errors import BadInput
    from flowledger.plan.ask import Question, checks, make

    assume = NEEDED if framework == "verl" else None
    try:
        made = make(
            read(framework, Asked(overrides=settings, assume=assume)), Question(gpu=None, model=None, lengths=None)
        )
        return [row for row in checks(made) if row["verdict"] == "fail"]
    except (BadInput, ValueError, TypeError, KeyError, ArithmeticError):
        return []  # a fragment of a configuration need not be one


def _framework(words: str) -> str | None:
    """The reader that a framework's name calls for; a fork is read as what it is a fork of."""
    from flowledger.config.detect import READERS

    plain = words.casefold().replace("-", "_")
    return next((name for name in READERS if name in plain), None)


def _settings(report: "Report", framework: str | None) -> Iterator[str]:
    """`key=value` words; verl's keys are completed from their ends where only one key ends so."""
    from flowledger.diagnose.reports.report import leaves

    full = _full_keys() if framework == "verl" else {}
    for key, value in leaves(report.config):
        plain = key.strip().lstrip("-+")
        if not isinstance(value, str | int | float) or " " in f"{plain}{value}":
            continue
        name = full.get(plain) if framework == "verl" else plain.replace("-", "_")
        if name:
            yield f"{name}={value}"


@cache
def _full_keys() -> Mapping[str, str]:
    """Each ending of a key of verl's configuration -> the key, where the actor's or the only one has it."""
    from flowledger.config.dotted import flat
    from flowledger.tables import verl

    tree: dict[str, Any] = flat(verl.defaults(verl.HEAD, "ppo_trainer"))
    found: dict[str, list[str]] = {}
    for key in tree:
        parts = key.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(key)
    unique = {ending: keys[0] for ending, keys in found.items() if len(keys) == 1}
    actor = {
        ending: key
        for ending, keys in found.items()
        for key in keys
        if key.endswith(f"actor_rollout_ref.actor.{ending}")
    }
    return {**actor, **unique}
