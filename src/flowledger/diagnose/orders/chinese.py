"""A diagnosis in Chinese: each English sentence that `chinese.toml` knows, with its values put into the Chinese one."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

FIELD = re.compile(r"\\{(\w+)\\}")
LONGEST = 600  # characters of a sentence that is looked up; what is longer is somebody's text
RANGE = re.compile(
    r" \(([-+\w.]+) to ([-+\w.]+) over (\d+) steps\)(?:; )?"
)  # of a figure: `grad_norm 0.9 (0.9 to 1.1 over 3 steps)`
# Keys of the document under which sentences stand, or parts that have some.
SPOKEN = frozenset({
    "rows", "summary", "message", "evidence", "needs", "next_step", "not_checked", "partly", "ended", "shown", "cause", "not_beside", "sources",
    "unread", "what", "why",
})  # fmt: skip

Words = Mapping[str, str]


def spoken(found: Any, own: Words) -> Any:
    """A document of `diagnose` with every sentence in Chinese that is known; ids, numbers and names stay.

    `own`: sentences that others have in Chinese, such as the rules of a configuration.
    """
    if isinstance(found, Mapping):
        return {key: spoken(value, own) if key in SPOKEN else value for key, value in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [spoken(one, own) for one in found]
    return chinese(found, own) if isinstance(found, str) else found


def chinese(text: str, own: Words | None = None) -> str:
    """The sentence in Chinese, and what stands in it too where that is known; as it is where nothing knows it."""
    if not text or len(text) > LONGEST:
        return text
    if own and text in own:
        return own[text]
    whole, forms = _known()
    if text in whole:
        return whole[text]
    if RANGE.search(text):
        return RANGE.sub(r"（\3 步中 \1 到 \2） ", text).rstrip()
    if (listed := _listed(text)) is not None:
        return listed
    for own_words, form, meant in forms:
        if all(part in text for part in own_words) and (found := _pattern(form).fullmatch(text)) is not None:
            return meant.format(**{name: chinese(value) for name, value in found.groupdict().items()})
    return text


def _listed(text: str) -> str | None:
    """`asked for 2 GiB, free 1 GiB`: several parts that are all known; None where one is not."""
    parts = text.split(", ")
    known = [chinese(part) for part in parts] if len(parts) > 1 else []
    return "，".join(known) if known and all(said != part for said, part in zip(known, parts, strict=True)) else None


@cache
def _known() -> tuple[Mapping[str, str], Sequence[tuple[Sequence[str], str, str]]]:
    """(sentences without values; forms: what stands between the values, in English, in Chinese; those with most text of their own first)."""
    text = files("flowledger.diagnose.orders").joinpath("chinese.toml").read_text(encoding="utf-8")
    rows = {key: value for part in tomllib.loads(text).values() for key, value in part.items()}
    forms = sorted((key for key in rows if "{" in key), key=lambda key: -len(re.sub(r"\{\w+\}", "", key)))
    return (
        {key: value for key, value in rows.items() if "{" not in key},
        [(re.split(r"\{\w+\}", key), key, rows[key]) for key in forms],
    )


@cache
def _pattern(form: str) -> re.Pattern[str]:
    """Made when a sentence has all the words of the form: of hundreds a run needs a few."""
    return re.compile(FIELD.sub(r"(?P<\1>.+?)", re.escape(form)), re.DOTALL)
