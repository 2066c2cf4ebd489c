"""The one exception a user meets: a clear line for bad input, never a traceback."""

import difflib
from collections.abc import Iterable


class BadInput(Exception):  # noqa: N818  (it names what the user gave, not what the code did)
    """Something the user gave cannot work. The text names the key or file, the value, the rule and the way out."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known word, or an empty string when nothing is close."""
    spelt = {folded(one): one for one in reversed(list(known))}
    close = difflib.get_close_matches(folded(word), spelt, n=1, cutoff=0.5)
    return f"; did you mean {spelt[close[0]]}?" if close else ""


def nearest_divisor(number: int, of: int) -> int:
    """The divisor of `of` (at least 1) that is nearest to `number`; the smaller of two."""
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: (abs(n - number), n))


def folded(word: str) -> str:
    """A word as names are compared where they need not be spelt exactly: without case, `-` as `_`."""
    return word.casefold().replace("-", "_")
