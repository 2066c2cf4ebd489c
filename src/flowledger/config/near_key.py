"""Which key a user meant who wrote one that is not there."""

import difflib
from collections.abc import Iterable

CLOSE, LIKE = 0.75, 0.5  # similarity of two words


def near(key: str, known: Iterable[str]) -> str:
    """`; did you mean X?`: the key that lacks only its beginning; a word much like it in the same section; the same last
    word in another section; a word somewhat like it here, then anywhere. Empty where nothing is close."""
    names = list(known)
    section, _, last = key.rpartition(".")
    beside = [name for name in names if name.rpartition(".")[0] == section]
    for found in (
        [name for name in names if name.endswith(f".{key}")],
        _alike(last, beside, CLOSE),
        [name for name in names if name.rpartition(".")[2] == last and name != key],
        _alike(last, beside, LIKE),
        _alike(last, names, LIKE + 0.1),
    ):
        if found:
            best = difflib.get_close_matches(key, found, n=1, cutoff=0.0)
            return f"; did you mean {best[0]}?"
    return ""


def _alike(word: str, names: Iterable[str], cutoff: float) -> list[str]:
    """The keys whose last word is most like a word; one that has all its parts (`model` more or less) is like it."""
    by_last: dict[str, list[str]] = {}
    for name in names:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    parts = set(word.split("_"))
    same = [last for last in by_last if len(parts) > 1 and parts < set(last.split("_"))]
    close = difflib.get_close_matches(word, list(by_last), n=1, cutoff=cutoff)
    best = difflib.get_close_matches(word, same, n=1, cutoff=LIKE) or close
    return by_last[best[0]] if best else []
