"""What the test of one step found."""

from dataclasses import dataclass, replace
from typing import Any

from flowledger.ledger.rows import FindingRow

# How sure a cause is, where a finding does not say: its severity.
CONFIDENCE = {"critical": 0.8, "error": 0.7, "warning": 0.5, "info": 0.3}
LAW = 0.9
KNOWN = 0.45  # how sure what an exception is known for can be, beside what this run shows
SYMPTOMS = {"identities": 0.75}  # what follows from other breaches too: samples that are lost, masks that are shifted


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A verdict with what shows it. `message` is one sentence: the cause of a failure, or what was looked at."""

    verdict: str = "pass"  # pass, warn, fail, skipped
    message: str = ""
    evidence: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # what was missing; empty of a skipped one: what the table says of the step
    fix: dict[str, str] | None = None  # key, from, to
    next_step: str = ""
    confidence: float | None = None
    step: int | None = None
    stage: str | None = None
    rank: int | None = None

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("fail", "warn")

    @property
    def is_partly(self) -> bool:
        """Whether nothing fails, and something of it could not be looked at."""
        return self.verdict == "pass" and bool(self.needs)

    def but(self, **changes: Any) -> "Answer":
        return replace(self, **changes)


def passed(message: str, *evidence: str) -> Answer:
    return Answer(message=message, evidence=evidence)


def skipped(*needs: str) -> Answer:
    return Answer(verdict="skipped", needs=needs)


def failed(message: str, *evidence: str, confidence: float = 0.7, **more: Any) -> Answer:
    return Answer(verdict="fail", message=message, evidence=evidence, confidence=confidence, **more)


def warned(message: str, *evidence: str, confidence: float = 0.5, **more: Any) -> Answer:
    return Answer(verdict="warn", message=message, evidence=evidence, confidence=confidence, **more)


def told(finding: FindingRow) -> Answer:
    """The answer that a finding is."""
    return Answer(
        verdict=finding.verdict, message=finding.message, evidence=tuple(finding.evidence or ()),
        needs=tuple(finding.needs or ()), fix=finding.fix, next_step=finding.next_step or "", confidence=sureness(finding),
        step=finding.step, stage=finding.stage, rank=finding.rank,
    )  # fmt: skip


def sureness(finding: FindingRow) -> float:
    """The confidence of a finding; where it names none that of its severity. A law that is broken is broken."""
    usual = LAW if finding.order == "laws" else CONFIDENCE.get(finding.severity, 0.5)
    usual = SYMPTOMS.get(finding.id, usual)
    return usual if finding.confidence is None else finding.confidence
