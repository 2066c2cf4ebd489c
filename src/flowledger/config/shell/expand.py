"""Expansion of one word: quotes, `$NAME`, `$(…)`, `$((…))`, then splitting into fields. Parameter forms: shell_parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from flowledger.config.shell.lexer import closing, past
from flowledger.config.shell.patterns import braces, glob
from flowledger.config.shell.scope import Missing, Scope, Text, unknown
from flowledger.flow.errors import BadInput

PER_WORD = 64  # characters that a word counts for, beside its own
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word: literal, quoted, or what an expansion gave. Several items: `"$@"` and its like."""

    items: tuple[Text, ...]
    quoted: bool = False
    splits: bool = False


@dataclass(frozen=True, slots=True)
class Expander:
    """Expands raw words in a scope. `substitute` runs the text of a `$(…)`, `parameter` reads a `${…}`."""

    scope: Scope
    place: str
    substitute: Callable[[str, Scope, str], str]
    parameter: Callable[["Expander", str, bool], list[Piece]]
    arithmetic: Callable[["Expander", str], str]

    def fields(self, raw: str) -> list[Text]:
        """The fields that one raw word becomes: none, one, or many."""
        found = []
        try:
            words = braces(raw)
        except BadInput as error:
            raise BadInput(f"{self.place}: {error}") from None
        if len(words) > 1:
            self.scope.found.spend(sum(len(word) + PER_WORD for word in words), self.place)
        for word in words:
            found += self.split(self.pieces(self.with_home(word)))
        self.scope.found.spend(sum(len(field.text) + PER_WORD for field in found), self.place)
        return found

    def words(self, raw: str) -> list[Text]:
        """The fields with what each lacks: a single one all that was missing, of several those that are left empty."""
        before = set(self.scope.missing)
        self.scope.missing.clear()
        found = self.fields(raw)
        missing = frozenset(self.scope.missing)
        self.scope.missing.update(before)
        if not missing:
            return found
        return [
            replace(field, missing=field.missing or missing)
            if len(found) == 1 or (not field.missing and field.text[-1:] in ("=", ""))
            else field
            for field in found
        ]

    def one(self, raw: str, *, assigned: bool = False) -> str:
        """The word without splitting, as the right side of `=`, a `case` word or an operand of `[[`."""
        text = joined(self.pieces(self.with_home(raw, assigned=assigned)), self.scope.ifs)
        self.scope.found.spend(len(text), self.place)
        return text

    def pattern(self, raw: str) -> str:
        """A regular expression for a glob pattern."""
        return glob([(item.text, piece.quoted) for piece in self.pieces(raw) for item in piece.items])

    def with_home(self, raw: str, *, assigned: bool = False) -> str:
        """`~/x` and `NAME=~/x`; on the right side of an assignment also after each colon. Quoted tildes stay."""
        if "~" not in raw:
            return raw
        prefix = _ASSIGNED.match(raw)
        starts = {0, prefix.end()} if prefix else {0}
        ends = ("/", ":", "") if assigned or prefix else ("/", "")
        out, at = [], 0
        while at < len(raw):
            end = max(past(raw, at), at + 1) if raw[at] in "\\'\"`$" else at + 1
            is_home = raw[at] == "~" and at in starts and raw[end : end + 1] in ends
            out.append(self.scope.scalar("HOME") or "" if is_home else raw[at:end])
            if raw[at] == ":" and assigned:
                starts.add(end)
            at = end
        return "".join(out)

    def pieces(self, raw: str, *, double: bool = False) -> list[Piece]:
        """The parts of a raw word, in order. `double`: it stood between double quotes."""
        found: list[Piece] = []
        at = 0
        while at < len(raw):
            end, more = self.next(raw, at, double)
            if end <= at:
                raise BadInput(
                    f"{self.place}: {raw[at : at + 6]} is opened and never closed; close the quote or bracket"
                )
            found += more
            at = end
        return found

    def next(self, raw: str, at: int, double: bool) -> tuple[int, list[Piece]]:
        """The pieces that start at `at`, and where they end."""
        letter = raw[at]
        if letter == "$":
            return self.dollar(raw, at, double)
        if letter == "\\":
            return self.escape(raw, at, double)
        if letter == "`":
            end = past(raw, at)
            inner = re.sub(r"\\([`\\$])", r"\1", raw[at + 1 : end - 1])
            return end, [self.made(self.substitute(inner, self.scope, self.place), double)]
        if letter == "'" and not double:
            end = raw.find("'", at + 1)
            if end < 0:
                return at + 1, [self.said("'", quoted=True)]
            return end + 1, [self.said(raw[at + 1 : end], quoted=True)]
        if letter == '"':
            end = past(raw, at)
            return end, self.between_quotes(raw[at + 1 : end - 1])
        stop = re.compile(r"[$\\`\"]" if double else r"[$\\`\"']").search(raw, at + 1)
        end = stop.start() if stop else len(raw)
        return end, [self.said(raw[at:end], quoted=double)]

    def between_quotes(self, raw: str) -> list[Piece]:
        """A string exists even when empty, unless it holds an empty list (`"$@"`) and nothing else that shows."""
        found = self.pieces(raw, double=True)
        vanishes = any(not piece.items for piece in found) and not any(i.text for piece in found for i in piece.items)
        return [] if vanishes else [self.said("", quoted=True), *found]

    def escape(self, raw: str, at: int, double: bool) -> tuple[int, list[Piece]]:
        following = raw[at + 1 : at + 2]
        if following == "\n":
            return at + 2, []
        if not following or (double and following not in '$`"\\'):
            return at + 1, [self.said("\\", quoted=True)]
        return at + 2, [self.said(following, quoted=True)]

    def dollar(self, raw: str, at: int, double: bool) -> tuple[int, list[Piece]]:
        following = raw[at + 1 : at + 2]
        if following == "'" and not double:
            end = past(raw, at)
            return end, [self.said(ansi(raw[at + 2 : end - 1]), quoted=True)]
        if following == '"' and not double:
            end = past(raw, at)
            return end, self.between_quotes(raw[at + 2 : end - 1])
        if raw.startswith("$((", at):
            inner = closing(raw, at + 3, ")")
            if inner >= 0 and raw[inner + 1 : inner + 2] == ")":
                return inner + 2, [self.made(self.arithmetic(self, raw[at + 3 : inner]), double)]
        if following == "(":
            end = closing(raw, at + 2, ")")
            return end + 1, [self.made(self.substitute(raw[at + 2 : end], self.scope, self.place), double)]
        if following == "[":
            end = closing(raw, at + 2, "]")
            return end + 1, [self.made(self.arithmetic(self, raw[at + 2 : end]), double)]
        if following == "{":
            end = closing(raw, at + 2, "}", double=double)
            return end + 1, self.parameter(self, raw[at + 2 : end], double)
        match = _NAME.match(raw, at + 1)
        if not match:
            return at + 1, [self.said("$", quoted=double)]
        return match.end(), self.parameter(self, match.group(), double)

    def said(self, text: str, *, quoted: bool) -> Piece:
        return Piece((Text(text, self.place),), quoted=quoted)

    def made(self, text: str, double: bool) -> Piece:
        return Piece((Text(text, self.place),), quoted=double, splits=not double)

    def miss(self, name: str) -> None:
        self.scope.missing.add(Missing(name, self.place))

    def unknown(self, text: str) -> str:
        return unknown(text)

    def split(self, pieces: list[Piece]) -> list[Text]:
        """Word splitting: unquoted expansions fall apart at IFS, and vanish where nothing is left of them."""
        done: list[Text] = []
        current: Text | None = None
        for piece in pieces:
            for n, item in enumerate(piece.items):
                if n and current is not None:
                    done.append(current)
                    current = None
                if not piece.splits:
                    current = _add(current, item)
                    continue
                parts = cut(item.text, self.scope.ifs)
                for m, part in enumerate(parts):
                    if m and current is not None:
                        done.append(current)
                        current = None
                    current = _add(current, replace(item, text=part)) if part is not None else current
        return done if current is None else [*done, current]


def _add(current: Text | None, more: Text) -> Text:
    if current is None or not current.text:
        place = more.place if more.text or current is None else current.place
        return Text((current.text if current else "") + more.text, place, _lacking(current, more))
    return Text(current.text + more.text, current.place, _lacking(current, more))


def _lacking(current: Text | None, more: Text) -> frozenset[Missing]:
    return more.missing | current.missing if current else more.missing


def cut(text: str, ifs: str) -> list[str | None]:
    """The parts between separators. None: nothing stands there, so that no field begins."""
    if not ifs or not text:
        return [text or None]
    blank = "".join(re.escape(letter) for letter in ifs if letter in " \t\n")
    hard = "".join(re.escape(letter) for letter in ifs if letter not in " \t\n")
    spaces = f"[{blank}]" if blank else "(?!)"
    separator = f"{spaces}*[{hard}]{spaces}*|{spaces}+" if hard else f"{spaces}+"
    parts: list[str | None] = []
    at = 0
    for match in re.finditer(separator, text):
        is_hard = bool(hard) and bool(re.search(f"[{hard}]", match.group()))
        part = text[at : match.start()]
        parts.append(part if part or is_hard else None)
        at = match.end()
    parts.append(text[at:] or None)
    return parts


def joined(pieces: list[Piece], ifs: str) -> str:
    """All pieces as one text; the items of a list with a blank between."""
    return "".join(" ".join(item.text for item in piece.items) for piece in pieces)


def ansi(raw: str) -> str:
    """The text of `$'…'`."""

    def one(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "01234567":
            return chr(int(code, 8) % 256)
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "uU" and len(code) > 1:
            return chr(int(code[1:], 16))
        return _ANSI.get(code, code if code in "\\'\"?" else "\\" + code)

    return re.sub(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|.)", one, raw, flags=re.DOTALL)
