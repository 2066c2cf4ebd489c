"""Glob patterns of a shell as regular expressions, and the brace expansion that precedes all others."""

import re

from flowledger.config.shell.lexer import past
from flowledger.flow.errors import BadInput

MOST_WORDS = 10_000

_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "blank": r" \t",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9a-fA-F",
    "word": r"\w",
}
_EXTENDED = {"@": "", "?": "?", "*": "*", "+": "+"}


def glob(parts: list[tuple[str, bool]]) -> str:
    """The regular expression of a pattern given as (text, quoted) parts; quoted text stands for itself."""
    text = "".join(re.sub(r"(.)", r"\\\1", part, flags=re.DOTALL) if quoted else part for part, quoted in parts)
    return _translate(text)


def _translate(text: str) -> str:
    out, at = [], 0
    while at < len(text):
        letter = text[at]
        if letter in _EXTENDED and text[at + 1 : at + 2] == "(" and (end := _group_end(text, at + 2)) > 0:
            branches = "|".join(_translate(branch) for branch in _branches(text[at + 2 : end]))
            out.append(f"(?:{branches}){_EXTENDED[letter]}")
            at = end + 1
            continue
        if letter == "[" and (end := _bracket_end(text, at)) > 0:
            out.append(_bracket(text[at + 1 : end]))
            at = end + 1
            continue
        if letter == "\\" and at + 1 < len(text):
            out.append(re.escape(text[at + 1]))
            at += 2
            continue
        out.append({"*": ".*", "?": "."}.get(letter) or re.escape(letter))
        at += 1
    return "".join(out)


def _group_end(text: str, at: int) -> int:
    depth = 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if not depth:
                return at
        at += 1
    return -1


def _branches(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _bracket_end(text: str, at: int) -> int:
    first = at + 2 if text[at + 1 : at + 2] in ("!", "^") else at + 1
    scan = first + 1 if text[first : first + 1] == "]" else first
    while scan < len(text) and text[scan] != "]":
        if text.startswith("[:", scan) and (end := text.find(":]", scan)) > 0:
            scan = end + 2
        else:
            scan += 2 if text[scan] == "\\" else 1
    return scan if scan < len(text) else -1


def _bracket(inner: str) -> str:
    negated = inner[:1] in ("!", "^")
    body = inner[1:] if negated else inner
    body = re.sub(r"\[:(\w+):\]", lambda match: "\0" + match.group(1) + "\0", body)
    parts = body.split("\0")
    shown = "".join(
        _CLASSES.get(part, "") if n % 2 else re.sub(r"([\[\]^&~|])", r"\\\1", part) for n, part in enumerate(parts)
    )
    return f"[{'^' if negated else ''}{shown}]"


def braces(text: str) -> list[str]:
    """`a{b,c}d` -> `abd`, `acd`; `{1..3}` -> `1`, `2`, `3`. Quoted braces and `${` stay."""
    at = 0
    while at < len(text):
        if text[at] in "\\'\"`$":
            at = past(text, at)
            if at < 0:
                return [text]
        elif text[at] == "{" and (found := _alternatives(text, at)):
            end, inner = found
            middles, tails = [m for choice in inner for m in braces(choice)], braces(text[end:])
            if len(middles) * len(tails) > MOST_WORDS:
                raise BadInput(f"{text[:40]}…: its braces make more than {MOST_WORDS} words, and no launch has so many")
            return [text[:at] + middle + tail for middle in middles for tail in tails]
        else:
            at += 1
    return [text]


def _alternatives(text: str, start: int) -> tuple[int, list[str]] | None:
    """The index after the closing brace, and what stands between the commas; None where it is no brace expansion."""
    depth, at, parts, begin = 0, start, [], start + 1
    while at < len(text):
        letter = text[at]
        if letter in "\\'\"`$":
            at = past(text, at)
            if at < 0:
                return None
            continue
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
        if depth == 0:
            break
    if depth:
        return None
    if len(parts) == 1:
        parts = _range(parts[0])
    return (at, parts) if parts else None


def _range(text: str) -> list[str]:
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)
    if match:
        first, last = int(match.group(1)), int(match.group(2))
        step = abs(int(match.group(3) or 1)) or 1
        wide = [len(end.lstrip("-")) for end in match.groups()[:2] if re.fullmatch(r"-?0\d+", end)]
        count = abs(last - first) // step + 1
        if count > 10_000:
            return []
        numbers = [first + n * step * (1 if last >= first else -1) for n in range(count)]
        return [f"{number:0{max(wide, default=0) + (number < 0)}d}" for number in numbers]
    match = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", text)
    if not match:
        return []
    first, last = ord(match.group(1)), ord(match.group(2))
    step = 1 if last >= first else -1
    return [chr(code) for code in range(first, last + step, step)]
