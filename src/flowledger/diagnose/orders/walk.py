"""Walks the debug orders over what is known: which orders, each step's answer, the first that fails, and the likeliest cause."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowledger.diagnose.orders import (
    data_quality,
    hang,
    imbalance,
    instability,
    oom,
    shape_mismatch,
)
from flowledger.diagnose.orders.advice import advice
from flowledger.diagnose.orders.answer import KNOWN, Answer, passed, skipped, sureness, told
from flowledger.diagnose.orders.evidence import ABOUT_RECORDING, ENDS, Evidence
from flowledger.diagnose.orders.table import GOALS, Order, Step, by_goal, orders, step_of
from flowledger.ledger.rows import FindingRow

Test = Callable[[Evidence], Answer]

MODULES = {
    "shape_mismatch": shape_mismatch, "oom": oom, "imbalance": imbalance, "instability": instability,
    "data_quality": data_quality, "hang": hang,
}  # fmt: skip
# Orders that an exception may mean, the surest words first: "NCCL" stands in the log of many an OOM, never the other way.
OF_A_CRASH = ("oom", "shape_mismatch", "hang", "instability", "data_quality", "imbalance")
BY_ID = {"out_of_memory": "oom", "hang": "hang", "rank_died": "hang"}
SEVERITY = {"fail": "error", "warn": "warning"}
LATER = 0.1  # that a cause is less likely for each step between the first that fails and its own
MOST = 20  # lines of evidence
RECORDED = re.compile(r"\brecord\.|\brows of\b")  # a need of rows, which another recording would have
ELSEWHERE = re.compile(r"\bmesh\.|\bdata\.|\band a critic\b")  # and a run of another kind


@dataclass(frozen=True, slots=True)
class Walked:
    """One order with the answer of each step."""

    order: Order
    answers: tuple[tuple[Step, Answer], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What came of it. `ended`: how the run ended, where no order is for that; `reported`: answers to what somebody reports;
    `known`: what is known of such exceptions, the surest first; `besides`: findings that belong to no step.
    """

    walked: tuple[Walked, ...] = ()
    ended: FindingRow | None = None
    reported: tuple[FindingRow, ...] = ()
    known: tuple[FindingRow, ...] = ()
    besides: tuple[FindingRow, ...] = ()
    advice: tuple[FindingRow, ...] = ()

    @property
    def steps(self) -> Iterator[tuple[Step, Answer]]:
        return (pair for walked in self.walked for pair in walked.answers)

    @property
    def first(self) -> tuple[Step, Answer] | None:
        """The first step that fails; where none does, and the run ended well, the first that warns."""
        for verdict in ("fail",) if self.ended else ("fail", "warn"):
            if found := next((pair for pair in self.steps if pair[1].verdict == verdict), None):
                return found
        return None

    @property
    def cause(self) -> tuple[Step | None, Answer] | None:
        """Of what fails in the order of the first failing step the surest, where what comes later is more often a consequence, and of
        two that are as sure the one that says what to change; or what a report is answered with; or what such an exception is known for.
        """
        found: list[tuple[Step | None, Answer]] = []
        if self.first is not None:
            step, answer = self.first
            alike = [pair for pair in self.steps if pair[0].order == step.order and pair[1].verdict == answer.verdict]
            found.append(
                max(alike, key=lambda pair: (_likely(pair[1], pair[0].position - step.position), bool(pair[1].fix)))
            )
        found += [(None, told(one)) for one in self.reported if one.verdict in ("fail", "warn")]
        found += [(None, told(one).but(confidence=min(sureness(one), KNOWN))) for one in self.known[:1]]
        return max(found, key=lambda pair: _surely(pair[1]), default=None)


def _surely(answer: Answer) -> float:
    return answer.confidence or 0.0


def _likely(answer: Answer, later: int) -> float:
    """How sure it is, less what a place `later` steps behind the first takes from it."""
    return round(_surely(answer) - LATER * later, 6)


def diagnose(evidence: Evidence, *, reported: Sequence[FindingRow] = (), order: str | None = None) -> Diagnosis:
    """Walk the orders that the symptom asks for, or all; `order`: this one alone."""
    belongs = _placed(one for one in evidence.findings if not evidence.is_refuted(one))
    chosen = (orders()[order],) if order else picked(evidence) if evidence.books or evidence.findings else ()
    walked = tuple(
        Walked(one, tuple((step, _answer(step, evidence, belongs.get(step.id, ()))) for step in one.steps))
        for one in chosen
    )
    met = Diagnosis(walked=walked, reported=tuple(reported))
    besides = [] if order else _besides(evidence, {step.id for step, _ in met.steps})
    ended = None if order or _is_told(met, evidence) else evidence.end
    wrong = met.first or met.reported or evidence.end or [one for one in besides if one.id not in ABOUT_RECORDING]
    return replace(
        met, ended=ended, known=tuple(sorted(evidence.known, key=sureness, reverse=True)), besides=tuple(besides),
        advice=() if wrong or order else tuple(advice(evidence)),
    )  # fmt: skip


def _is_told(met: Diagnosis, evidence: Evidence) -> bool:
    """Whether how the run ended shows at a step of the order that is for such an end."""
    meant = _of_end(evidence)
    return any(step.order in meant and answer.verdict == "fail" for step, answer in met.steps)


def _besides(evidence: Evidence, walked: Container[str]) -> list[FindingRow]:
    """What was found and belongs to no step that was walked; how the run ended is told of elsewhere."""
    bad = (one for one in evidence.findings if one.verdict in ("fail", "warn") and one.id not in ENDS)
    return [
        one
        for one in bad
        if ((place := step_of(one)) is None or place.id not in walked) and not evidence.is_refuted(one)
    ]


def picked(evidence: Evidence) -> tuple[Order, ...]:
    """Of a run that ended in a known way the orders of its symptom, before those of what was found; else all, by their goals."""
    meant = [orders()[name] for name in _of_end(evidence)]
    if not meant:
        return by_goal()
    places = [step_of(one) for one in evidence.findings if one.verdict == "fail"]
    failing = {place.order for place in places if place is not None}
    return (*meant, *(one for one in by_goal() if one.name in failing and one not in meant))


def _of_end(evidence: Evidence) -> list[str]:
    """The order that the end of a run asks for: by its finding's id, by the sentence, by the lines around it."""
    end = evidence.end
    if end is None:
        return []
    for text in (end.message, evidence.words):
        if found := [name for name in OF_A_CRASH if orders()[name].is_meant(text)]:
            first = BY_ID.get(end.id, found[0])
            return [first]
    return [BY_ID[end.id]] if end.id in BY_ID else []


def _placed(findings: Iterable[FindingRow]) -> Mapping[str, list[FindingRow]]:
    found: dict[str, list[FindingRow]] = {}
    for one in findings:
        if (step := step_of(one)) is not None:
            found.setdefault(step.id, []).append(one)
    return found


def _answer(step: Step, evidence: Evidence, findings: Sequence[FindingRow]) -> Answer:
    """What the step's own test says, joined with the findings that belong to it: the surest failure speaks, all are evidence."""
    own = _asked(step, evidence)
    bad = sorted(
        (told(one) for one in findings if one.verdict in ("fail", "warn")),
        key=lambda one: (one.verdict != "fail", -(one.confidence or 0)),
    )
    if not bad:
        return (
            own
            if own.is_bad
            else _held(own, step, [one for one in findings if one.verdict == "pass"], _lacked(findings))
        )
    first, *others = bad
    if own.is_bad and (own.verdict == "fail", own.confidence or 0) >= (first.verdict == "fail", first.confidence or 0):
        return own.but(evidence=_joined(own.evidence, (one.message for one in bad)), fix=own.fix or first.fix,
                       next_step=own.next_step or first.next_step)  # fmt: skip
    more = [*(one.message for one in others), *([own.message, *own.evidence] if own.verdict != "skipped" else [])]
    return first.but(
        evidence=_joined(first.evidence, more), fix=first.fix or own.fix, next_step=first.next_step or own.next_step
    )


def _held(own: Answer, step: Step, held: Sequence[FindingRow], lacked: Sequence[str]) -> Answer:
    """The answer of a step of which nothing fails. It has passed where nothing of it wanted for input; else it was checked in
    part, as the needs beside its verdict say.
    """
    if own.verdict != "skipped":
        return own.but(needs=tuple(lacked))
    if not held:
        return own
    needs = dict.fromkeys([*(own.needs or (step.needs,)), *lacked])
    return passed(held[0].message, *(one.message for one in held[1:])).but(needs=tuple(needs))


def _lacked(findings: Iterable[FindingRow]) -> list[str]:
    """What detectors of a step wanted for: rows that a recording has or has not, not what another kind of run would have."""
    needs = (need for one in findings if one.verdict == "skipped" for need in one.needs or ())
    return list(dict.fromkeys(need for need in needs if RECORDED.search(need) and not ELSEWHERE.search(need)))


def _joined(first: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(line for line in dict.fromkeys((*first, *more)) if line)[:MOST]


def _asked(step: Step, evidence: Evidence) -> Answer:
    """The step's own test; one that cannot take what it was given is no reason to say nothing of the others."""
    test: Test = getattr(MODULES[step.order], step.test)
    try:
        return test(evidence)
    except Exception as error:  # noqa: BLE001  whatever a ledger holds, the other steps are walked
        return skipped(f"a test that takes this ledger: {step.id} raised {type(error).__name__}: {error}"[:300])


def row(step: Step, answer: Answer, language: str = "en") -> FindingRow:
    """The answer of a step as a finding."""
    needs = [step.text("needs", language) if one == step.needs else one for one in answer.needs]
    if answer.verdict == "skipped" and not needs:
        needs = [step.text("needs", language)]
    look = step.text("", language)
    return FindingRow(
        id=step.id, order=step.order, position=step.position, verdict=answer.verdict,
        severity=SEVERITY.get(answer.verdict, "info"), message=answer.message or f"{look} not checked", evidence=list(answer.evidence) or None,
        needs=None if answer.is_bad else needs or None, fix=answer.fix, next_step=(answer.next_step or step.text("next_step", language)) if answer.is_bad else None,
        confidence=answer.confidence if answer.is_bad else None, step=answer.step, stage=answer.stage, rank=answer.rank,
    )  # fmt: skip


def parts(diagnosis: Diagnosis, language: str = "en") -> dict[str, list[FindingRow]]:
    """Findings in their order: an end that no order is for, answers to reports, the steps that were walked, what such
    exceptions are known for, what belongs to no step, and advice.
    """
    return {
        "ended": [diagnosis.ended] if diagnosis.ended is not None else [],
        "reported": list(diagnosis.reported),
        "walked": [row(step, answer, language) for step, answer in diagnosis.steps],
        "known": list(diagnosis.known),
        "besides": list(diagnosis.besides),
        "advice": list(diagnosis.advice),
    }


def rows(diagnosis: Diagnosis, language: str = "en") -> list[FindingRow]:
    """The same one after the other."""
    return [one for part in parts(diagnosis, language).values() for one in part]


def summary(diagnosis: Diagnosis, evidence: Evidence, language: str = "en") -> dict[str, Any]:
    """The first step that fails, the likeliest cause, what to change, how many of each verdict, and what was not checked."""
    first, cause = diagnosis.first, diagnosis.cause
    verdicts = [answer.verdict for _, answer in diagnosis.steps]
    return {
        "orders": [walked.order.name for walked in diagnosis.walked],
        "first": row(*first, language).id if first else None,
        "verdict": _worst(diagnosis),
        "ended": diagnosis.ended.message if diagnosis.ended is not None else None,
        "shown": first[1].message if first else None,
        "cause": cause[1].message if cause else None,
        "cause_step": cause[0].id if cause and cause[0] else None,
        "confidence": cause[1].confidence if cause else None,
        "change": cause[1].fix if cause else None,
        "next_step": (cause[1].next_step or (cause[0].text("next_step", language) if cause[0] else None)) if cause else None,
        **{verdict: verdicts.count(verdict) for verdict in ("fail", "warn", "pass", "skipped")},
        "partly": [{"id": step.id, "needs": row(step, answer, language).needs} for step, answer in diagnosis.steps if answer.is_partly],
        "not_checked": [{"id": step.id, "needs": row(step, answer, language).needs} for step, answer in diagnosis.steps
                        if answer.verdict == "skipped"],
        "not_beside": evidence.not_beside, "recorded": bool(evidence.books),
    }  # fmt: skip


def _worst(diagnosis: Diagnosis) -> str:
    """The gravest verdict of all; `skipped` where nothing at all could be looked at."""
    verdicts = [answer.verdict for _, answer in diagnosis.steps]
    verdicts += [one.verdict for one in (*diagnosis.reported, *diagnosis.besides)]
    verdicts += ["fail"] if diagnosis.ended is not None else []
    return next((verdict for verdict in ("fail", "warn", "pass") if verdict in verdicts), "skipped")


def titles(diagnosis: Diagnosis, language: str = "en") -> list[dict[str, Any]]:
    """The orders that were walked in a language: name, title, goal, and what each step looks at."""
    return [
        {
            "name": walked.order.name, "title": walked.order.title(language), "goal": GOALS[walked.order.goal][language],
            "steps": [{"id": step.id, "look": step.text("", language)} for step, _ in walked.answers],
        }
        for walked in diagnosis.walked
    ]  # fmt: skip
