"""Every rule of a framework held against one configuration: what would stop it, when, and the nearest way out."""

from collections.abc import Sequence
from typing import Any

from flowledger.config.schema import RunConfig
from flowledger.ledger.rows import FindingRow
from flowledger.plan.arithmetic import MissingNameError, evaluate, names_in
from flowledger.plan.facts import Facts, facts, family, plain
from flowledger.plan.lengths import Lengths
from flowledger.plan.nearest import Way, holds, ways
from flowledger.plan.unread import unread
from flowledger.tables.models import Architecture
from flowledger.tables.rules import FIRES_AT, Rule, holds_for, table

WORDS = {
    "en": {"use": "; use {values}", "turn": "; set {key} = {values}", "or": " or ", "set": "{key} = {values}", "needs": "{title}: unknown without {inputs}",
           "breaks": "{key} = {value} would break {rules}", "also": "or set {ways}", "join": ", "},
    "zh": {"use": "；可用 {values}", "turn": "；请设 {key} = {values}", "or": " 或 ", "set": "{key} = {values}", "needs": "{title}：缺少 {inputs}，无法判断",
           "breaks": "{key} = {value} 会违反 {rules}", "also": "或设 {ways}", "join": "、"},
}  # fmt: skip
ORDER = {"error": 0, "warning": 1, "info": 2}


def check(
    config: RunConfig, architecture: Architecture | None, lengths: Lengths | None, *, language: str = "en"
) -> list[FindingRow]:
    """A row for each rule that applies, ordered by when it fires, then by severity.

    `fail`: the run stops; `warn`: it goes on, unlike what one expects; `pass`; `skipped`: an input is missing, which `needs`
    names; a setting of the loop that nothing reads is a `warn` too. `fix` has `key`, `from` and `to` of the nearest values; `language` is `en` or `zh`.
    """
    names = facts(config, architecture, lengths)
    rules = applicable(config, names)
    rows = [row for rule in rules if (row := _finding(rule, names, rules, language)) is not None]
    if family(config.framework) == "flowledger":
        rows += unread(config, rows, language)
    moments = list(FIRES_AT)
    rows.sort(key=lambda row: (moments.index(row.fires_at or "runtime"), ORDER[row.severity], row.verdict))
    return rows


def applicable(config: RunConfig, names: Facts) -> tuple[Rule, ...]:
    """Rules of this framework, its version and its trainer; `when` is not asked yet."""
    version = config.framework_version or config.raw.get("_verl.version")
    trainer = names.values.get("trainer")
    return tuple(
        rule
        for rule in table(family(config.framework)).rules
        if holds_for(rule.versions, version) and (not rule.trainers or trainer is None or trainer in rule.trainers)
    )


def _finding(rule: Rule, names: Facts, rules: Sequence[Rule], language: str) -> FindingRow | None:
    answers = [_answer(expression, names) for expression in (rule.when, rule.given)]
    if False in answers:
        return None
    if None in answers:
        asked = [name for expression in (rule.when, rule.given) for name in names_in(expression)]
        return _skipped(rule, names, asked, language)
    try:
        met = bool(evaluate(rule.condition, names.values))
    except (MissingNameError, TypeError, ZeroDivisionError):
        return _skipped(rule, names, names_in(rule.condition), language)
    if met:
        return _row(rule, names, verdict="pass", severity="info", message=rule.title)
    found = ways(rule, names)
    return _row(
        rule,
        names,
        verdict="fail" if rule.severity == "error" else "warn",
        severity=rule.severity,
        message=_message(rule, names, found, language),
        fix=_fix(found[0]) if found else None,
        next_step=_next_step(rule, names, found, rules, language),
    )


def _answer(expression: str, names: Facts) -> bool | None:
    """Whether an expression is true; null where that depends on a name that is missing (false with any value is false)."""
    missing = [name for name in names_in(expression) if name not in names.values]
    answers = set()
    for guess in (None, 0, 1) if missing else (None,):
        try:
            answers.add(bool(evaluate(expression, {**names.values, **dict.fromkeys(missing, guess)})))
        except (TypeError, ZeroDivisionError):
            return None
    return False if answers == {False} else None if missing else True


def _row(rule: Rule, names: Facts, **told: Any) -> FindingRow:
    used = dict.fromkeys((*names_in(rule.condition), *names_in(rule.given), *names_in(rule.when)))
    return FindingRow(
        id=rule.id,
        scope="plan",
        versions=rule.versions,
        fires_at=rule.fires_at,
        confidence=rule.confidence,
        evidence=[*names.evidence(used), f"source: {rule.source}"],
        **told,
    )


def _skipped(rule: Rule, names: Facts, asked: Sequence[str], language: str) -> FindingRow:
    needs = names.missing(asked) or list(asked)
    words = WORDS[language]
    message = words["needs"].format(title=rule.title, inputs=words["join"].join(needs))
    return _row(rule, names, verdict="skipped", severity="info", message=message, needs=needs)


def _message(rule: Rule, names: Facts, found: Sequence[Way], language: str) -> str:
    """`ppo_mini_batch_size*n = 20 is not divisible by dp = 8 (fires at the first update); use 16 or 24`."""
    template = rule.message if language == "en" else rule.zh
    told = template.format_map(_Plain(names.values))
    if rule.severity == "error":
        moment = FIRES_AT[rule.fires_at][language]
        told += f" ({moment})" if language == "en" else f"（{moment}）"
    if not found:
        return told
    words, way = WORDS[language], found[0]
    values = words["or"].join(plain(value) for value in way.shown)
    short = way.key.rpartition(".")[2]
    if isinstance(way.current, bool):
        return told + words["turn"].format(key=short, values=values)
    if rule.shown is None and not _first_number_is(way, short, rule.message):
        values = words["set"].format(key=short, values=values)
    if rule.shown is not None and list(way.shown) != list(way.values):  # a product is named: say what to write, too
        written = words["or"].join(plain(value) for value in way.values)
        values += f" ({words['set'].format(key=short, values=written)})"
    return told + words["use"].format(values=values)


def _first_number_is(way: Way, short: str, message: str) -> bool:
    """Whether a message begins with the knob's own key and value, so that bare values say what to put there."""
    return (message.partition("}")[0] + "}").endswith(f"{short} = {{{way.knob}}}")


class _Plain(dict[str, str]):
    def __init__(self, values: Any) -> None:
        super().__init__({name: plain(value) for name, value in values.items()})

    def __missing__(self, name: str) -> str:
        return "?"


def _fix(way: Way) -> dict[str, str]:
    return {"key": way.key, "from": plain(way.current), "to": " or ".join(plain(value) for value in way.values)}


def _next_step(rule: Rule, names: Facts, found: Sequence[Way], rules: Sequence[Rule], language: str) -> str | None:
    """Other keys that would do, and what the proposed values would break that holds now."""
    if not found:
        return None
    words, steps = WORDS[language], []
    broken = _broken(rule, names, found[0], rules)
    steps += [words["breaks"].format(key=found[0].key, value=plain(v), rules=", ".join(r)) for v, r in broken if r]
    if found[1:]:
        others = (
            words["set"].format(key=way.key, values=words["or"].join(plain(value) for value in way.values))
            for way in found[1:]
        )
        steps.append(words["also"].format(ways=words["or"].join(others)))
    return "; ".join(steps) or None


def _broken(rule: Rule, names: Facts, way: Way, rules: Sequence[Rule]) -> list[tuple[Any, list[str]]]:
    """Rules that hold now and would not with each proposed value; only errors, of what depends on the knob."""
    held = [other for other in rules if other is not rule and other.severity == "error" and _known(other, names)]
    told = []
    for value in way.values:
        turned = names.varied(way.knob, value, names.order)
        told.append((value, [other.id for other in held if not holds(other, turned)]))
    return told


def _known(rule: Rule, names: Facts) -> bool:
    return holds(rule, dict(names.values))
