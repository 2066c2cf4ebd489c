"""Questions to a run, as a table: what must hold, where that is known from, what to do where it does not."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowledger.diagnose import missing
from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found; `needs`: what was lacking to look at all; `seen`: how many things were looked at."""

    breaches: Sequence[Breach] = ()
    needs: Sequence[str] = ()
    seen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What holds in a healthy run (`sentence`), and the `source` of the rule and its threshold."""

    id: str
    sentence: str
    source: str
    next_step: str
    ask: Callable[[Any], Answer]
    verdict: Literal["fail", "warn"] = "fail"
    confidence: float = 0.95


def number(ledger: Ledger, key: str) -> float | None:
    """A setting of the run, where it is a number."""
    found = ledger.setting(key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def asked(ledger: Ledger, questions: Iterable[Question], subject: Any = None) -> list[FindingRow]:
    """One finding for each question, asked of the ledger, or of the `subject` that was made of it once for all of them.

    Where rows were dropped none is asked, since what is missing would look like a fault.
    """
    lost = missing.rows_dropped(ledger)
    found = []
    for one in questions:
        said = one.ask(ledger if subject is None else subject) if lost is None else Answer()
        needs = [f"a complete recording: {lost.message}"] if lost is not None else said.needs
        row = answer(
            one.id, one.sentence, seen=said.seen, breaches=said.breaches, needs=needs, next_step=one.next_step,
            verdict=one.verdict, confidence=one.confidence,
        )  # fmt: skip
        if row.evidence:
            row.evidence.append(f"the rule: {one.source}")
        found.append(row)
    return found
