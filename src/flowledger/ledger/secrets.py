"""Secrets in a configuration are masked before it is written down."""

import re
from typing import Any

MASK = "***"

# One of these words in a key makes its value a secret, whatever stands beside it.
ALWAYS = frozenset({
    "password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey",
    "authorization", "bearer",
})  # fmt: skip
# `token` and `key` are everyday words here: `pad_token` is text, `prompt_key` names a column, `max_tokens` counts.
TEXT_TOKENS = frozenset({
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "image", "video", "audio", "special",
    "per",
})  # fmt: skip
KEY_WORDS = frozenset({
    "api", "access", "secret", "private", "auth", "encryption", "signing", "ssh", "account", "service", "wandb", "hf",
})  # fmt: skip

COLUMN_NAME = re.compile(r"[A-Za-z][A-Za-z_.]{0,31}")  # a field selector such as `prompt` or `data.answer`
CREDENTIAL = re.compile(
    r"(?P<url>(?<=://)[^/\s:@]*:[^/\s@]+(?=@))"
    r"|\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[bap]-|AKIA)[A-Za-z0-9_\-]{8,}"
    r"|(?<=Bearer )\S+"
    r"|(?<=TOKEN=)\S+|(?<=SECRET=)\S+|(?<=PASSWORD=)\S+|(?<=API_KEY=)\S+"
)


def masked(value: Any, key: str = "") -> Any:
    """The same tree of dicts, lists and scalars with every secret replaced by `***`; numbers and flags stay."""
    if isinstance(value, dict):
        return {name: masked(inner, f"{key}_{name}" if _always(key) else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, key) for inner in value]
    if isinstance(value, str):
        return MASK if value and is_secret(key, value) else CREDENTIAL.sub(MASK, value)
    if isinstance(value, int | float) and not isinstance(value, bool) and _always(key):
        return MASK
    return value


def is_secret(key: str, value: str) -> bool:
    """Whether a text under this key is a secret: by the words of the key, for `*_key` by the look of the value too."""
    words = _words(key)
    if _always(key):
        return True
    if not words or words[-1] not in ("token", "key"):
        return len(words) > 1 and words[-2:] == ["key", "id"] and bool(KEY_WORDS & set(words))
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in TEXT_TOKENS
    return before in KEY_WORDS or COLUMN_NAME.fullmatch(value) is None


def _always(key: str) -> bool:
    return bool(ALWAYS & set(_words(key)))


def _words(key: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key)
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]
