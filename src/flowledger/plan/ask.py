"""Answers one question about a configuration: the plan itself, and where asked for what changes would do."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flowledger.config.foreign import Reading
from flowledger.plan import whatif
from flowledger.plan.document import Document, document, plain
from flowledger.plan.lengths import Lengths
from flowledger.plan.plan import Plan
from flowledger.plan.subject import architecture_of, device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked beside the configuration."""

    gpu: str | None = None
    model: str | None = None
    lengths: Lengths | None = None  # real length statistics
    sets: Sequence[str] = ()  # key=value of a second plan to stand beside the first
    advise: bool = False
    largest: bool = False
    tables: bool = False  # the shape ledger and the lifetimes too


def make(reading: Reading, question: Question) -> Plan:
    """The plan of a configuration. Raises BadInput for a model, device or length statistics that are not known."""
    gpu = device_of(question.gpu, reading.config)
    if gpu is not None and reading.config.hardware.gpu is None:
        reading = _on(reading, gpu.name)
    return Plan(reading, architecture_of(reading.config, question.model), gpu, question.lengths)


def answer(plan: Plan, question: Question, reread: Callable[[Sequence[str]], Reading]) -> Document:
    """The plan as a document, with `compare`, `advice` and `largest` where they are asked for.

    `reread` reads the same source again with further overrides.
    """
    found = document(plan, shapes=question.tables)
    if question.sets:
        other = make(reread(question.sets), question)
        found["compare"] = {
            "set": list(question.sets),
            "rows": whatif.compare(plan, other),
            "before": found["summary"],
            "after": document(other, shapes=False)["summary"],
            "broken": _newly_broken(plan, other),
        }
    if question.advise:
        advice = whatif.advise(plan)
        found["advice"] = [asdict(one) for one in advice]
        found["together"] = [asdict(one) for one in whatif.together(plan, advice)] if plan.fits is False else []
    if question.largest:
        found["largest"] = [asdict(one) for one in whatif.largest(plan)]
    return found


def _on(reading: Reading, gpu: str) -> Reading:
    """The same reading with its device named, so that every part of the plan knows that it is no CPU."""
    return replace(reading, config=whatif.changed(reading.config, "hardware.gpu", gpu))


def _newly_broken(before: Plan, after: Plan) -> list[str]:
    """What fails in the second plan and did not in the first, as `id: message`."""
    old = {finding.id for finding in before.findings if finding.verdict == "fail"}
    return [f"{one.id}: {one.message}" for one in after.findings if one.verdict == "fail" and one.id not in old]


def checks(plan: Plan) -> list[dict[str, Any]]:
    """The findings alone, as plain rows."""
    return [plain(row) for row in plan.findings]
