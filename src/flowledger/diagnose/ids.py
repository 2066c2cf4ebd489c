"""What an id of a finding means, whoever makes it: a law, a check, an alarm, a rule, a step of an order, a cause, a fault.

Each sort has its table already; what stands in none is in `ids.toml`. `explain` asks here for the words that no view knows.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Any, Literal

from flowledger.diagnose import checks, faults, laws
from flowledger.diagnose.alarms.rules import Rule as Alarm
from flowledger.diagnose.alarms.rules import built_in
from flowledger.diagnose.checks.asked import Question
from flowledger.diagnose.orders.chinese import chinese
from flowledger.diagnose.orders.table import Order, Step, orders
from flowledger.diagnose.reports.table import causes
from flowledger.flow.errors import folded
from flowledger.tables.rules import FIRES_AT, FRAMEWORKS, Rule, table

Language = Literal["en", "zh"]
Facts = dict[str, Any]
HOLE = re.compile(r"(?<!\{)\{[^{}]*\}(?!\})")  # a place for a value, in a sentence of a table; `{{` is a brace


def facts(word: str, lang: Language) -> Iterator[tuple[str, Facts]]:
    """What an id is, with its sort; several where tables share it (a fault and the finding that catches it)."""
    asked = _spelt(word)
    for sort, made in SORTS.items():
        for name, tell in made().items():
            if _spelt(name) == asked:
                yield sort, {"what": sort, "name": name, **tell(lang)}


def words() -> Iterator[str]:
    """Every id that is understood here."""
    for made in SORTS.values():
        yield from made()


def _spelt(word: str) -> str:
    return folded(word).replace(" ", "_")


Told = Mapping[str, Callable[[Language], Facts]]


def _said(english: str, lang: Language, of: str = "") -> str:
    """A sentence in the language, with … where values stand. `of`: its Chinese, where a table has it beside."""
    text = english if lang == "en" else of or chinese(english)
    return HOLE.sub("…", text).replace("{{", "{").replace("}}", "}")


@cache
def _laws() -> Told:
    def tell(says: str, lang: Language) -> Facts:
        return {"holds": _said(says, lang)}

    return {name: partial(tell, says) for name, says, _ in laws.LAWS}


@cache
def questions() -> Mapping[str, Question]:
    """Every question of the checks by its id."""
    modules = [import_module(f"{checks.__name__}.{module.name}") for module in iter_modules(checks.__path__)]
    kept = [value for module in modules for value in vars(module).values() if isinstance(value, tuple)]
    return {one.id: one for value in kept for one in value if isinstance(one, Question)}


@cache
def _checks() -> Told:
    def tell(one: Question, lang: Language) -> Facts:
        return {
            "holds": _said(one.sentence, lang), "next_step": _said(one.next_step, lang), "source": one.source,
            "severity": one.verdict,
        }  # fmt: skip

    return {name: partial(tell, one) for name, one in questions().items()}


@cache
def _findings() -> Told:
    rows = tomllib.loads(files("flowledger.diagnose").joinpath("ids.toml").read_text(encoding="utf-8"))

    def tell(row: Mapping[str, str], lang: Language) -> Facts:
        return {"meaning": row[lang]}

    return {name: partial(tell, row) for name, row in rows.items()}


@cache
def _alarms() -> Told:
    def tell(one: Alarm, lang: Language) -> Facts:
        bounds = {name: bound.default for name, bound in one.thresholds.items() if bound.default is not None}
        return {
            "message": _said(one.message, lang, one.zh), "fires_when": " ".join(one.when.split()), "bounds": bounds,
            "severity": one.severity, "goal": one.goal, "next_step": _said(one.next_step, lang, one.next_step_zh),
        }  # fmt: skip

    return {one.id: partial(tell, one) for one in built_in()}


@cache
def _rules() -> Told:
    def tell(one: Rule, lang: Language) -> Facts:
        return {
            "holds": one.title if lang == "en" else None, "message": _said(one.message, lang, one.zh),
            "fires_at": FIRES_AT[one.fires_at][lang].removeprefix("fires "), "severity": "fail" if one.severity == "error" else "warn",
            "framework": one.framework, "versions": None if one.versions == "all" else one.versions, "source": one.source,
        }  # fmt: skip

    rows = {one.id: one for framework in reversed(FRAMEWORKS) for one in table(framework).rules}
    return {name: partial(tell, one) for name, one in rows.items()}


@cache
def _steps() -> Told:
    def tell(order: Order, step: Step, lang: Language) -> Facts:
        return {
            "meaning": step.text("", lang), "order": f"{order.title(lang)} {step.position}/{len(order.steps)}",
            "needs": [step.text("needs", lang)], "next_step": step.text("next_step", lang) or None,
        }  # fmt: skip

    pairs = [(order, step) for order in orders().values() for step in order.steps]
    return {step.id: partial(tell, order, step) for order, step in pairs}


@cache
def _causes() -> Told:
    def tell(says: str, then: str, lang: Language) -> Facts:
        return {"message": _said(says, lang), "next_step": _said(then, lang)}

    text = files("flowledger.diagnose.reports").joinpath("mechanisms.toml").read_text(encoding="utf-8")
    composed = [(row["id"], row["says"], row["next"]) for row in tomllib.loads(text)["failure"]]
    known = [(one.id, one.says[-1], one.next_step) for one in causes()]
    return {name: partial(tell, says, then) for name, says, then in (*known, *composed)}


@cache
def _faults() -> Told:
    def tell(one: faults.Fault, lang: Language) -> Facts:
        return {"meaning": _said(one.what, lang, one.zh), "goal": one.goal, "expects": list(one.expects)}

    return {one.id: partial(tell, one) for one in faults.table()[0]}


# Sort -> its ids, each with the facts that it tells in a language.
SORTS: Mapping[str, Callable[[], Told]] = {
    "law": _laws, "check": _checks, "finding": _findings, "alarm": _alarms, "rule": _rules, "order step": _steps, "cause": _causes,
    "fault": _faults,
}  # fmt: skip
