"""Findings with their sentences in Chinese beside the English ones: what the page shows where Chinese is switched on.

The rows of a ledger are English. An alarm and the rule of a framework have a sentence in each language, with places for the values;
all else is looked up in the table of `diagnose --lang zh`. What nothing knows stays as it is: texts of frameworks, formulas.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

PLACE = re.compile(r"\{([^{}]*)\}")
SENTENCES = ("message", "next_step")
LISTS = ("evidence", "needs")

Row = Mapping[str, Any]
Form = tuple[
    re.Pattern[str], str
]  # an English sentence with groups where its values stand, the Chinese one with the same names in braces


def with_chinese(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The findings, each with `zh`: those of its sentences that have a Chinese form, under their column's name."""
    return [{**row, "zh": _said_of(row)} for row in rows]


def _said_of(row: Row) -> dict[str, Any]:
    own = _forms("alarms" if row.get("order") == "alarms" else row.get("scope") or "", row["id"])
    told = {name: _chinese(row[name], own) for name in SENTENCES if row.get(name)}
    lists = {name: [_chinese(str(line), own) for line in row[name]] for name in LISTS if row.get(name)}
    return {name: said for name, said in (told | lists).items() if said != row[name]}


def _chinese(text: str, own: tuple[Form, ...]) -> str:
    """By the sentences of its own rule; else by the table, whole or part by part."""
    for pattern, meant in own:
        if (found := pattern.fullmatch(text)) is not None:
            return meant.format(
                **{name: _known(value).replace(" or ", " 或 ") for name, value in found.groupdict().items()}
            )
    said = _known(text)
    if said != text or "; " not in text:
        return said
    return "；".join(map(_known, text.split("; ")))


@lru_cache(maxsize=10_000)
def _known(text: str) -> str:
    from flowledger.diagnose.orders.chinese import chinese

    return chinese(text)


@cache
def _forms(of: str, name: str) -> tuple[Form, ...]:
    """The sentences of the rule that makes a finding."""
    if of == "alarms":
        return tuple(_alarms().get(name, ()))
    return tuple(_rules(name)) if of == "plan" else ()


@cache
def _alarms() -> Mapping[str, Sequence[Form]]:
    from flowledger.diagnose.alarms.rules import built_in

    pairs = {one.id: ((one.message, one.zh), (one.next_step, one.next_step_zh)) for one in built_in()}
    return {name: [form for one in both if (form := _form(*one)) is not None] for name, both in pairs.items()}


def _rules(name: str) -> Iterator[Form]:
    """Of the rules of a framework; those of a model or a mesh stand in every table."""
    from flowledger.plan.checks import WORDS
    from flowledger.tables.rules import FIRES_AT, FRAMEWORKS, table

    english, other = WORDS["en"], WORDS["zh"]
    ways = [(english[way], other[way]) for way in ("turn", "use")]  # the nearest values that work, behind the sentence
    family = name.partition(".")[0]
    for rule in table(family if family in FRAMEWORKS else FRAMEWORKS[0]).rules:
        if rule.id != name:
            continue
        moment = FIRES_AT[rule.fires_at]
        for more, more_zh in (*ways, ("", "")):
            for when, when_zh in ((f" ({moment['en']})", f"（{moment['zh']}）"), ("", "")):
                if (form := _form(rule.message + when + more, rule.zh + when_zh + more_zh)) is not None:
                    yield form


def _form(english: str, chinese: str) -> Form | None:
    """Both sentences with the same names where the same values stand; None where the Chinese one has a value that the other has not."""
    places = {place: f"v{at}" for at, place in enumerate(dict.fromkeys(PLACE.findall(english)))}
    if not chinese or not places.keys() >= set(PLACE.findall(chinese)):
        return None
    pattern, seen = "", set[str]()
    for at, part in enumerate(PLACE.split(english)):
        if at % 2 == 0:
            pattern += re.escape(part)
            continue
        pattern += f"(?P={places[part]})" if part in seen else f"(?P<{places[part]}>.+?)"
        seen.add(part)
    return re.compile(pattern, re.DOTALL), PLACE.sub(lambda found: f"{{{places[found[1]]}}}", chinese)
