"""The rows of `orders.toml`: orders in the mission's sequence, their steps, and which finding belongs to which step."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.ledger.rows import FindingRow

# What an order serves, first what counts first: speed is looked at only where nothing is wrong.
GOALS: Mapping[str, Mapping[str, str]] = {
    "correctness": {"en": "correctness", "zh": "正确性"},
    "data_quality": {"en": "data quality", "zh": "数据质量"},  # what the data are, stability follows from
    "stability": {"en": "stability", "zh": "稳定性"},
    "load": {"en": "balance", "zh": "负载"},
    "memory": {"en": "memory", "zh": "显存"},
    "performance": {"en": "speed", "zh": "性能"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of an order. `en` and `zh` say what to look at; so do the other pairs."""

    order: str
    position: int  # from 1
    name: str
    en: str
    zh: str
    test: str  # a function of orders/<order>.py
    findings: tuple[str, ...]  # ids that belong here; `*` stands for anything
    words: tuple[re.Pattern[str], ...]  # of rules of a configuration
    needs: str
    needs_zh: str
    next_step: str
    next_step_zh: str
    change: str | None = None  # row of tables/advice.toml

    @property
    def id(self) -> str:
        return f"{self.order}.{self.name}"

    def text(self, field: str, language: str) -> str:
        """`en`/`zh` of itself, `needs` or `next_step` in a language."""
        name = language if field == "" else field if language == "en" else f"{field}_zh"
        return str(getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One debug order."""

    name: str
    goal: str
    en: str
    zh: str
    symptoms: tuple[re.Pattern[str], ...]
    steps: tuple[Step, ...]

    def title(self, language: str) -> str:
        return self.en if language == "en" else self.zh

    def is_meant(self, text: str) -> bool:
        """Whether a text (an exception, a finding's sentence) is a symptom of this order."""
        return any(pattern.search(text) for pattern in self.symptoms)


@cache
def orders() -> Mapping[str, Order]:
    """Every order by its name, as they stand in the file."""
    text = files("flowledger.diagnose.orders").joinpath("orders.toml").read_text(encoding="utf-8")
    return {raw["name"]: _order(raw) for raw in tomllib.loads(text)["order"]}


def by_goal() -> tuple[Order, ...]:
    """Orders as their failures count: correctness, data, stability, balance, memory."""
    goals = list(GOALS)
    return tuple(sorted(orders().values(), key=lambda order: goals.index(order.goal)))


def step_of(finding: FindingRow) -> Step | None:
    """The step that a finding belongs to: by its id, by what it says of itself, by the pattern that fits it
    closest; a rule of a configuration by its words.
    """
    steps = [step for order in orders().values() for step in order.steps]
    if named := next((step for step in steps if finding.id in step.findings), None):
        return named
    if finding.order is not None and finding.order in orders() and finding.position is not None:
        own = orders()[finding.order].steps
        return own[min(max(finding.position, 1), len(own)) - 1]
    fitting = [
        (len(pattern), step) for step in steps for pattern in step.findings if "*" in pattern and _fits(pattern, finding.id)
    ]  # fmt: skip
    if fitting:
        return max(fitting, key=lambda pair: pair[0])[1]
    return _by_words(finding, steps) if finding.scope == "plan" else None


def _by_words(finding: FindingRow, steps: Sequence[Step]) -> Step:
    """Steps whose words its message fits, before those that its key fits; the order of shapes, whose words are plain, is last."""
    own = orders()["shape_mismatch"].steps
    for text in (finding.message, (finding.fix or {}).get("key", "")):
        for step in (*(step for step in steps if step not in own), *own):
            if any(word.search(text) for word in step.words):
                return step
    return own[-1]


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def _order(raw: Mapping[str, object]) -> Order:
    fields = dict(raw)
    steps: Any = fields.pop("step")
    symptoms = _patterns(fields.pop("symptoms"))
    if fields["goal"] not in GOALS:
        raise AssertionError(f"orders.toml: {fields['name']}: goal {fields['goal']!r}")
    made = tuple(Step(order=str(fields["name"]), position=at, **_lists(step)) for at, step in enumerate(steps, 1))
    return Order(**fields, symptoms=symptoms, steps=made)  # type: ignore[arg-type]  # a TOML table


def _lists(step: Mapping[str, Any]) -> dict[str, Any]:
    return {**step, "findings": tuple(step.get("findings", ())), "words": _patterns(step.get("words", ()))}


def _patterns(texts: Any) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(text, re.IGNORECASE) for text in texts)
