"""How a check answers: one finding, which passes, fails with the first step and place of the fault, or says what it lacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from flowledger.ledger.rows import FindingRow

SHOWN = 20  # places that are cited
TOLERANCE = 2e-4  # of numbers that were made in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One place where something does not hold."""

    step: int
    text: str
    stage: str | None = None
    rank: int | None = None


def answer(
    name: str,
    sentence: str,
    *,
    seen: int,
    breaches: Sequence[Breach] = (),
    needs: Sequence[str] = (),
    cause: str = "",
    next_step: str | None = None,
    verdict: Literal["fail", "warn"] = "fail",
    confidence: float = 0.95,
) -> FindingRow:
    """The finding of a check that looked at `seen` things. `cause`: what such breaches come from, in words."""
    if needs or not seen:
        return FindingRow(
            id=name, order="checks", verdict="skipped", message=f"{sentence}: not checked", needs=list(needs) or ["something to look at"]
        )  # fmt: skip
    if not breaches:
        return FindingRow(id=name, order="checks", verdict="pass", message=f"{sentence} ({seen} looked at)")
    first = min(breaches, key=lambda one: one.step)
    more = f" (and {len(breaches) - 1} more)" if len(breaches) > 1 else ""
    return FindingRow(
        id=name, order="checks", verdict=verdict, severity="error" if verdict == "fail" else "warning", step=first.step,
        stage=first.stage, rank=first.rank, message=f"{sentence}: not so. step {first.step}: {first.text}{more}" + (f"; {cause}" if cause else ""),
        evidence=[f"step {one.step}: {one.text}" for one in sorted(breaches, key=lambda one: one.step)[:SHOWN]],
        next_step=next_step, confidence=confidence,
    )  # fmt: skip


def apart(one: float, other: float, *, absolute: float = TOLERANCE, relative: float = TOLERANCE) -> bool:
    """Whether two numbers differ by more than rounding. Those that are not finite are not compared."""
    if not (isfinite(one) and isfinite(other)):
        return False
    return abs(one - other) > absolute + relative * max(abs(one), abs(other))
