"""The words, assignments and operators of one stretch of shell text, cut as bash cuts them and not yet expanded."""

import re
from dataclasses import dataclass, field

from flowledger.flow.errors import BadInput

OPERATORS = ("&&", "||", ";;&", ";&", ";;", "|&", ";", "|", "&", "(", ")", "\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?=)")
_REDIRECT = re.compile(r"(\d*|\{\w+\})(&>>|&>|<<<|<<-|<<|>>|>&|<&|<>|>\||>|<)")
_BLANK = " \t"
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")


@dataclass(frozen=True, slots=True)
class Word:
    """Raw text of a word, quotes and all."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """`NAME=word`, `NAME[key]+=word`, or `NAME=(words)`."""

    name: str
    key: str | None
    append: bool
    value: Word
    elements: tuple[Word, ...] | None  # of an array; then `value` is empty
    line: int


@dataclass(slots=True)
class Simple:
    """One simple command: what stands before it, its words, and the operator that follows."""

    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    input: Word | None = None  # of `<<<`
    output_lost: bool = False  # standard output goes to a file
    operator: str = ""


def simple_commands(text: str, line: int, file: str) -> list[Simple]:
    """The simple commands of a text without compound commands. `line` is that of its first character."""
    return _Lexer(text, line, file).commands()


def array_words(text: str, line: int, file: str) -> list[Word]:
    """The words between the parentheses of an array, comments and line breaks left out."""
    lexer = _Lexer(text, line, file)
    words = []
    while lexer.skip(newlines=True):
        words.append(lexer.word())
    return words


def closing(text: str, at: int, close: str, *, double: bool = False) -> int:
    """The index of the `close` that ends what began before `at`, past quotes and nested expansions; -1: none.

    `double`: it stands between double quotes, where an apostrophe is a letter.
    """
    opening = {"}": "", ")": "(", "]": "["}[close]
    while at < len(text):
        letter = text[at]
        if letter == close:
            return at
        if letter in "\\'\"`$" and not (double and letter == "'"):
            at = past(text, at, double=double)
        elif letter == opening:
            at = closing(text, at + 1, close) + 1
            if at == 0:
                return -1
        else:
            at += 1
        if at < 0:
            return -1
    return -1


def past(text: str, at: int, *, double: bool = False) -> int:
    """The index after the quote, escape or expansion that starts at `at`; -1 where it does not end."""
    letter, following = text[at], text[at + 1 : at + 2]
    if letter == "\\":
        return min(at + 2, len(text))
    if letter == "'":
        return text.find("'", at + 1) + 1 or -1
    if letter == "`":
        return _past_backquote(text, at + 1)
    if letter == '"':
        return _past_double(text, at + 1)
    if letter == "$":
        if following == "'" and not double:
            return _past_ansi(text, at + 2)
        if following == '"' and not double:
            return _past_double(text, at + 2)
        if following in ("{", "("):
            inner = double and following == "{"
            end = closing(text, at + 2, "}" if following == "{" else ")", double=inner)
            return end + 1 or -1
        if following == "[":
            return closing(text, at + 2, "]") + 1 or -1
    return at + 1


def _past_backquote(text: str, at: int) -> int:
    while at < len(text) and text[at] != "`":
        at += 2 if text[at] == "\\" else 1
    return at + 1 if at < len(text) else -1


def _past_double(text: str, at: int) -> int:
    while at < len(text) and text[at] != '"':
        if text[at] in "\\`" or text[at : at + 2] in ("${", "$("):
            at = past(text, at, double=True)
            if at < 0:
                return -1
        else:
            at += 1
    return at + 1 if at < len(text) else -1


def _past_ansi(text: str, at: int) -> int:
    while at < len(text) and text[at] != "'":
        at += 2 if text[at] == "\\" else 1
    return at + 1 if at < len(text) else -1


class _Lexer:
    def __init__(self, text: str, line: int, file: str) -> None:
        self.text, self.at, self.first, self.file = text, 0, line, file
        self.heredocs: list[tuple[str, bool]] = []  # delimiters whose bodies begin at the next line break

    @property
    def line(self) -> int:
        return self.first + self.text.count("\n", 0, self.at)

    def commands(self) -> list[Simple]:
        found, current = [], Simple()
        while self.skip(newlines=False):
            operator = next((o for o in OPERATORS if self.text.startswith(o, self.at)), "")
            if operator and not self.redirect(current):
                self.at += len(operator)
                self.bodies(operator)
                current.operator = operator
                found.append(current)
                current = Simple()
            elif not operator and not self.redirect(current):
                self.take(current)
        return [*found, current]

    def take(self, current: Simple) -> None:
        """The next assignment or word."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match and (not current.words or current.words[0].text in DECLARATIONS):
            current.assignments.append(self.assignment(match))
        else:
            current.words.append(self.word())

    def assignment(self, match: re.Match[str]) -> Assignment:
        line = self.line
        self.at = match.end()
        name, key, sign = match.group(1), match.group(2), match.group(3)
        elements = None
        value = Word("", line)
        if self.text.startswith("(", self.at):
            elements = tuple(self.array())
        elif self.at < len(self.text) and self.text[self.at] not in " \t\n;&|)":
            value = self.word()
        return Assignment(name, key[1:-1] if key else None, sign == "+=", value, elements, line)

    def array(self) -> list[Word]:
        start, line = self.at + 1, self.line
        inner = _Lexer(self.text[start:], line, self.file)
        words: list[Word] = []
        while inner.skip(newlines=True):
            if inner.text[inner.at] == ")":
                self.at = start + inner.at + 1
                return words
            words.append(inner.word())
        raise BadInput(f"{self.file}:{line}: an array is opened with `(` and never closed; add `)`")

    def word(self) -> Word:
        start, line = self.at, self.line
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|()<>":
            if self.text[self.at] in "\\'\"`$":
                self.quoted(line)
            elif self.text[self.at] == "(":
                break
            else:
                self.at += 1
        if self.at == start and self.at < len(self.text):
            self.at += 1  # a stray parenthesis or the like: a word of its own, so that reading goes on
        return Word(self.text[start : self.at], line)

    def quoted(self, line: int) -> None:
        end = past(self.text, self.at)
        if end < 0:
            shown = self.text[self.at : self.at + 6].split("\n")[0]
            raise BadInput(f"{self.file}:{self.line}: {shown} is opened and never closed; close the quote or bracket")
        self.at = end

    def redirect(self, current: Simple) -> bool:
        """Step over `2>&1`, `> file`, `<<EOF`, `<<< word`; false where none stands here."""
        match = _REDIRECT.match(self.text, self.at)
        if not match or (match.group(1).startswith("{") and self.at and self.text[self.at - 1] not in " \t"):
            return False
        descriptor, sign = match.group(1), match.group(2)
        if not descriptor and self.text.startswith(("<(", ">("), self.at):
            current.words.append(self.process())
            return True
        self.at = match.end()
        self.skip(newlines=False)
        target = self.process() if self.text.startswith(("<(", ">("), self.at) else self.word()
        if sign in ("<<", "<<-"):
            self.heredocs.append((re.sub(r"[\\'\"]", "", target.text), sign == "<<-"))
        elif sign == "<<<":
            current.input = target
        elif sign[0] in ">&" and descriptor in ("", "1") and target.text not in ("1", "2"):
            current.output_lost = True
        return True

    def process(self) -> Word:
        """`<(command)`: a file whose name only bash knows; the text stands for it."""
        start, line = self.at, self.line
        self.at = closing(self.text, start + 2, ")") + 1 or len(self.text)
        return Word("'" + self.text[start : self.at].replace("'", "'\\''") + "'", line)

    def bodies(self, operator: str) -> None:
        """Step over the here-documents that begin after a line break."""
        if operator != "\n":
            return
        for delimiter, tabs in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                body = self.text[self.at : end if end >= 0 else len(self.text)]
                self.at = end + 1 if end >= 0 else len(self.text)
                if (body.lstrip("\t") if tabs else body) == delimiter:
                    break
        self.heredocs = []

    def skip(self, *, newlines: bool) -> bool:
        """Step over blanks, joined lines and comments; false at the end of the text."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in _BLANK or (newlines and letter == "\n"):
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;&|("):
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            else:
                return True
        return False
