"""Settings in sentences, shell lines, YAML, Python and logs alike: `n=16`, `lr 1e-5`, `max response length of 8k`, `--tp 4`, `beta: 0`.

The rows are those of `keys.toml`: a key as it is spelt there (words may be joined by `_`, `-`, `.` or a space), and `said`, what
people say instead, with `#` for the value.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from flowledger.diagnose.reports.clauses import without_contrasts
from flowledger.diagnose.reports.keys import Key, parsed, rows

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?(?:\s?(?:k|[GM]i?B)\b|\s?%)?"
VALUES = {
    "number": NUMBER,
    "switch": r"true|false|on|off|yes|no|none|null|enabled|disabled",
    "word": r"['\"]?[A-Za-z][\w+-]*",
}
SETS = r"['\"]?\s*(?:=|:)\s*['\"]?"  # how a value is tied to a key
SAYS = rf"(?:{SETS}|\s+(?:is\s+|of\s+|was\s+|at\s+|to\s+|set to\s+|around\s+)?)"  # the same, in a sentence
LONGEST = 20_000  # characters that are read


def facts_in_prose(text: str) -> dict[str, Any]:
    """Name -> value of every setting that a text states; of two the first, and none of what is said to work."""
    said = without_contrasts(text[:LONGEST])
    found: dict[str, Any] = {}
    for pattern, keys in _patterns():
        for match in pattern.finditer(said):
            key = keys[_spelt(match["key"])] if "key" in match.re.groupindex else keys[""]
            value = parsed(match["value"].strip("'\""), key.kind)
            if value is not None:
                found.setdefault(key.name, value)
    return found


def _spelt(key: str) -> str:
    return re.sub(r"[\s_.-]+", "_", key.casefold())


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], dict[str, Key]], ...]:
    """One pattern for all keys of a kind that are tied to a value or (where they have several words) said beside it; one for each saying."""
    return (*_sayings(), *_keys())


def _keys() -> Iterator[tuple[re.Pattern[str], dict[str, Key]]]:
    for kind, value in VALUES.items():
        keys: dict[str, Key] = {}
        for row in rows():
            if row.get("kind", "number") == kind and not row.get("only"):
                for spelt in row["keys"]:
                    key = Key(name=row["name"], ending=spelt, kind=kind, only="")
                    keys.setdefault(_spelt(re.split(r"[./]", spelt)[-1]), key)
        several = [key for key in keys if "_" in key]
        for names, tie in ((keys, SETS), (several, SAYS) if kind == "number" else ((), "")):
            if names:
                either = "|".join(
                    re.escape(one).replace("_", r"[\s_-]") for one in sorted(names, key=len, reverse=True)
                )
                yield (
                    re.compile(rf"(?<![A-Za-z_])(?P<key>{either}){tie}(?P<value>{value})(?![\w.]*\w)", re.IGNORECASE),
                    keys,
                )


def _sayings() -> Iterator[tuple[re.Pattern[str], dict[str, Key]]]:
    for row in rows():
        kind = row.get("kind", "number")
        for saying in row.get("said", ()):
            pattern = saying.replace("#", rf"(?P<value>{VALUES[kind]})(?![\w.]*\w)", 1)
            yield (
                re.compile(rf"(?<![\w.]){pattern}", re.IGNORECASE),
                {"": Key(name=row["name"], ending="", kind=kind, only="")},
            )
