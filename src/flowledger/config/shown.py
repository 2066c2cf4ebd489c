"""Values as messages may show them: short, and none that looks like a secret."""

import re

_SECRET = re.compile(r"(token|key|secret|passw(or)?d|credentials?|api)$")
_NO_SECRET = re.compile(
    r"(^|[._-])(prompt|input|label|answer|reward_fn|response|image|video|tools?|text|eos|pad|bos)_?(key|token)$"
)
_IN_ADDRESS = re.compile(r"://[^/@\s]+@")
LONGEST = 80


def shown(key: str, value: object) -> str:
    """The text of a value; `…` where the key names a secret, and no password of an address."""
    word = key.lower().lstrip("-")
    if isinstance(value, str) and value and _SECRET.search(word) and not _NO_SECRET.search(word):
        return "…"
    if value is None:
        return "null"
    text = _IN_ADDRESS.sub("://…@", str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def shown_setting(text: str) -> str:
    """The same of `key=value`."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{shown(key, value)}"
