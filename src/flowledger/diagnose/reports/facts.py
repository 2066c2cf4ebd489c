"""Every name that a condition may use of one report: what it says, and what follows from that by arithmetic.

A quantity whose inputs are not all there is absent, and a condition that needs it comes out as unknown.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowledger.diagnose.reports.arithmetic import DERIVED
from flowledger.diagnose.reports.clauses import without_contrasts
from flowledger.diagnose.reports.keys import facts_by_key, facts_in_words
from flowledger.diagnose.reports.machines import hardware, model, ranks
from flowledger.diagnose.reports.prose import facts_in_prose
from flowledger.diagnose.reports.report import Report, leaves
from flowledger.diagnose.reports.series import facts_of_ranks, facts_of_runs, facts_of_two

MISSING = re.compile(
    r"KeyError: ?['\"]?([\w.]+)|(?<!'list' object has )(?<!'tuple' object has )(?<!'dict' object has )(?<!'str' object has )no attribute ['\"]?([\w.]+)|\b(\w+_\w+) (?:is required in|does not exist|is missing|is None|not (?:found )?in (?:the )?(?:batch|dict|td|tensordict))"
)
# The two names of a refusal: `rollout world_size: 1 is not divisible by infer_tp: 2`.
NOT_DIVISIBLE = re.compile(
    r"\b([A-Za-z]\w*(?:[ .]\w+){0,2}?)(?: \(|: | ?= ?| (?:is |of )?)\d+\)? (?:is |are |must be |should be )?(?:not )?(?:evenly )?(?:divisible by|a multiple of) "
    r"([A-Za-z]\w*(?:[ .]\w+){0,2}?)(?: \(|: | ?= ?| (?:is |of )?)\d+"
)
UNEQUAL_ONE = re.compile(r"^\s*(!=|≠|<>|not)\s*1(\.0*)?\s*$")
BELOW_ONE = re.compile(r"^\s*<\s*1(\.0*)?\s*$")
ABOVE_ONE = re.compile(r"^\s*>\s*1(\.0*)?\s*$")


def facts_of(report: Report) -> dict[str, Any]:
    """Facts by name: of keys first, then of sentences, of the hardware and the model, then what follows from them."""
    facts: dict[str, Any] = {
        **model(report.model), **ranks(without_contrasts(report.said())), **hardware(report.hardware), **facts_in_prose(report.said()),
        **facts_in_words(report.said()), **facts_by_key(report),
        **facts_of_ranks(report.measured), **facts_of_runs(report.measured), **facts_of_two(report.measured), **_compared(report), **report.planned,
    }  # fmt: skip
    if missing := MISSING.search(report.said()):
        facts["missing_name"] = next(name for name in missing.groups() if name)
    if names := NOT_DIVISIBLE.search(report.said()):
        facts["dividend_name"], facts["divisor_name"] = names[1], names[2]
    facts["keys_given"] = sum(value is not None for _, value in leaves(report.config))
    for name, derive in DERIVED:
        value = _derived(derive, facts)
        if value is not None:
            facts.setdefault(name, value)
    return facts


def _derived(derive: Callable[[Mapping[str, Any]], Any], facts: Mapping[str, Any]) -> Any:
    try:
        return derive(facts)
    except (KeyError, TypeError, ZeroDivisionError, ValueError, OverflowError):
        return None  # an input is missing, or a word stands where a number should


def _compared(report: Report) -> dict[str, Any]:
    """Settings that are told by a comparison: `temperature: != 1`, `top_p: < 1`, `PP: > 1`; and those told as a set of them."""
    found: dict[str, Any] = {}
    for key, value in leaves(report.config):
        words, tail = str(value), re.split(r"[./-]", key.casefold())[-1]
        if UNEQUAL_ONE.match(words):
            found[f"{tail}_not_one"] = True
        elif BELOW_ONE.match(words):
            found[f"{tail}_below_one"] = True
        elif ABOVE_ONE.match(words):
            found[f"{tail}_above_one"] = True
        elif words.casefold() in ("ignored", "unused", "no effect", "not used", "dead"):
            found.setdefault("dead_key", key)
    return found
