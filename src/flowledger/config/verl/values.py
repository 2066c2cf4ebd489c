"""The values of Hydra's override grammar: quoted and bare strings, numbers, null, lists, dictionaries, casts.

Written after the grammar of hydra-core 1.3, because importing its parser takes a quarter of a second. At each place the
longest token wins; a value of one token has that token's type, of several it is their text put together.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

_INT = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_INT}?\.[0-9](?:_?[0-9])*|{_INT}\.)"
_EXPONENT = rf"(?:{_POINT}|{_INT})[eE][+-]?[0-9](?:_?[0-9])*"

# In the order in which ties are settled. WS around brackets, commas, colons belongs to them.
_TOKENS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("(", r"[ \t]*\([ \t]*"),
        (",", r"[ \t]*,[ \t]*"),
        (")", r"[ \t]*\)"),
        ("[", r"\[[ \t]*"),
        ("]", r"[ \t]*\]"),
        ("{", r"\{[ \t]*"),
        ("}", r"[ \t]*\}"),
        (":", r"[ \t]*:[ \t]*"),
        ("=", r"[ \t]*=[ \t]*"),
        ("float", rf"[+-]?(?:{_EXPONENT}|{_POINT}|[Ii][Nn][Ff]|[Nn][Aa][Nn])"),
        ("int", rf"[+-]?{_INT}"),
        ("bool", r"[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]"),
        ("null", r"[Nn][Uu][Ll][Ll]"),
        ("char", r"[/\-\\+.$%*@?|]"),
        ("id", r"[A-Za-z_][A-Za-z0-9_-]*"),
        ("escape", r"(?:\\[\\()\[\]{}:=, \t])+"),
        ("space", r"[ \t]+"),
        ("quoted", r'"(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)"|' + r"'(?:(?:\\\\)*|.*?[^\\](?:\\\\)*)'"),
        ("interpolation", r"\$\{[^}]+\}"),
    )
)
_PRIMITIVE = frozenset(
    {"id", "null", "int", "float", "bool", "interpolation", "char", ":", "escape", "space"},
)
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")  # never more than a text: a quick way out
_SWEEPS = frozenset({"choice", "range", "interval", "glob", "sort", "shuffle", "tag"})
Token = tuple[str, str, int]


class ValueSyntaxError(Exception):
    """A value that the grammar does not allow; the text says what stands where."""


def parse_value(text: str) -> Any:
    """The Python value of what stands right of `=` (blanks after `=` are not part of it).

    Raises ValueSyntaxError, also for sweeps, which one run cannot take.
    """
    if text == "" or _DOTTED.fullmatch(text):
        return text
    parser = _Parser(_tokens(text), text)
    value = parser.element()
    if parser.kind == ",":
        raise ValueSyntaxError(f"{text} is a sweep over several values; give one, or quote it as '[{text}]'")
    if parser.kind != "end":
        raise ValueSyntaxError(f"unexpected {parser.text!r} at character {parser.at + 1}; put the value in quotes")
    return value


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(text):
        best = ("", "")
        for kind, pattern in _TOKENS:
            match = pattern.match(text, at)
            if match and len(match.group()) > len(best[1]):
                best = (kind, match.group())
        if not best[1]:
            raise ValueSyntaxError(f"unexpected {text[at]!r} at character {at + 1}; put the value in quotes")
        found.append((*best, at))
        at += len(best[1])
    return [*found, ("end", "", at)]


class _Parser:
    def __init__(self, tokens: list[Token], whole: str) -> None:
        self._tokens = tokens
        self._next = 0
        self._whole = whole

    @property
    def kind(self) -> str:
        return self._tokens[self._next][0]

    @property
    def text(self) -> str:
        return self._tokens[self._next][1] or "the end"

    @property
    def at(self) -> int:
        return self._tokens[self._next][2]

    def element(self) -> Any:
        if self.kind == "[":
            return self._list()
        if self.kind == "{":
            return self._dictionary()
        if self.kind == "id" and self._tokens[self._next + 1][0] == "(":
            return self._function()
        if self.kind == "quoted":
            return _unquoted(self._take())
        return self._primitive(_PRIMITIVE)

    def _take(self, kind: str | None = None) -> str:
        if kind is not None and self.kind != kind:
            raise ValueSyntaxError(f"expected {kind!r} but found {self.text!r} at character {self.at + 1}")
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _list(self) -> list[Any]:
        return self._sequence("[", "]", self.element)

    def _sequence(self, first: str, last: str, item: Callable[[], Any]) -> list[Any]:
        self._take(first)
        items: list[Any] = []
        while self.kind != last:
            items.append(item())
            if self.kind != last:
                self._take(",")
                if self.kind == last:
                    raise ValueSyntaxError(f"a value is missing before {self.text!r} at character {self.at + 1}")
        self._take(last)
        return items

    def _dictionary(self) -> dict[Any, Any]:
        return dict(self._sequence("{", "}", self._pair))

    def _pair(self) -> tuple[Any, Any]:
        key = self._primitive(_PRIMITIVE - {":", "interpolation"})
        self._take(":")
        return key, self.element()

    def _function(self) -> Any:
        name = self._take()
        if name in _SWEEPS:
            raise ValueSyntaxError(f"{name}(…) is a sweep over several values; give one")
        cast = _CASTS.get(name)
        if cast is None:
            raise ValueSyntaxError(f"unknown function {name}(…); put the value in quotes")
        arguments = self._sequence("(", ")", self.element)
        if len(arguments) != 1:
            raise ValueSyntaxError(f"{name}(…) takes one value, got {len(arguments)}")
        return _cast(cast, arguments[0], name)

    def _primitive(self, kinds: frozenset[str]) -> Any:
        parts: list[tuple[str, str]] = []
        while self.kind in kinds:
            parts.append((self.kind, self._take()))
        if not parts:
            raise ValueSyntaxError(f"unexpected {self.text!r} at character {self.at + 1}; put the value in quotes")
        if parts[0][0] == "space":
            parts = parts[1:]
        if parts and parts[-1][0] == "space":
            parts = parts[:-1]
        if not parts:
            raise ValueSyntaxError("a value of blanks only; put it in quotes")
        if len(parts) == 1:
            return _typed(*parts[0])
        return "".join(text[1::2] if kind == "escape" else text for kind, text in parts)


def _typed(kind: str, text: str) -> Any:
    match kind:
        case "int":
            return int(text)
        case "float":
            return float(text)
        case "bool":
            return text.lower() == "true"
        case "null":
            return None
        case "escape":
            return text[1::2]
        case _:
            return text


def _unquoted(text: str) -> str:
    r"""`\"` becomes `"`, and backslashes that stand right before a quote or the end are halved; others stay."""
    quote, inner = text[0], text[1:-1]

    def halve(match: re.Match[str]) -> str:
        slashes = match.group(1)
        return "\\" * (len(slashes) // 2) + match.group(2)

    return re.sub(rf"(\\+)({quote}|$)", halve, inner)


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return bool(value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _cast(cast: Callable[[Any], Any], value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_cast(cast, item, name) for item in value]
    if isinstance(value, dict):
        return {key: _cast(cast, item, name) for key, item in value.items()}
    try:
        return cast(value)
    except (TypeError, ValueError):
        raise ValueSyntaxError(f"{value!r} cannot be made a value of {name}(…)") from None


_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": _text, "bool": _boolean}
