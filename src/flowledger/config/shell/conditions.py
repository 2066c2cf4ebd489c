"""`[ … ]` and `[[ … ]]`: true, false, or None where only the machine that runs the script could tell."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowledger.config.shell.arithmetic import ArithmeticFault, integer
from flowledger.config.shell.expand import Expander
from flowledger.config.shell.lexer import closing, past
from flowledger.config.shell.scope import Scope, is_unknown
from flowledger.flow.errors import BadInput

Truth = bool | None
_FILES: dict[str, Callable[[Path], bool]] = {
    "-e": Path.exists,
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
    "-r": Path.exists,
    "-w": Path.exists,
    "-x": Path.exists,
    "-L": Path.is_symlink,
    "-h": Path.is_symlink,
}
_UNARY = {*_FILES, "-n", "-z", "-v", "-t", "-p", "-S", "-b", "-c", "-o"}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_STRINGS = {"=", "==", "!=", "<", ">", "=~"}


def both(a: Truth, b: Truth) -> Truth:
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: Truth, b: Truth) -> Truth:
    return True if a or b else None if a is None or b is None else False


def negated(a: Truth) -> Truth:
    return None if a is None else not a


def bracket(words: list[str], scope: Scope, place: str) -> Truth:
    """The truth of `[ words ]` (or `test words`), by the number of words as POSIX has it."""
    if not words:
        return False
    if words[0] == "!" and len(words) > 1 and not (len(words) == 3 and words[1] in _NUMBERS | {"=": None, "!=": None}):
        return negated(bracket(words[1:], scope, place))
    for joint, join in (("-o", either), ("-a", both)):
        if joint in words[1:-1] and len(words) > 3:
            at = words.index(joint, 1)
            return join(bracket(words[:at], scope, place), bracket(words[at + 1 :], scope, place))
    if words[0] == "(" and words[-1] == ")" and len(words) > 2:
        return bracket(words[1:-1], scope, place)
    if len(words) == 1:
        return True if is_unknown(words[0]) else words[0] != ""
    if len(words) == 2 and words[0] in _UNARY:
        return unary(words[0], words[1], scope)
    if len(words) == 3:
        return binary(words[0], words[1], words[2], place)
    raise BadInput(
        f"{place}: [ {' '.join(words)} ]: no test of {len(words)} words; quote what may be empty or hold blanks"
    )


def unary(operator: str, word: str, scope: Scope) -> Truth:
    if operator in ("-z", "-n"):
        return (operator == "-n") if is_unknown(word) else (word == "") == (operator == "-z")
    if operator == "-v":
        variable = scope.variables.get(word.split("[")[0])
        return bool(variable and variable.items)
    if is_unknown(word) or operator not in _FILES:
        return None
    try:
        return _FILES[operator](scope.directory / word) if word else False
    except (OSError, ValueError):
        return False


def binary(left: str, operator: str, right: str, place: str) -> Truth:
    if is_unknown(left) or is_unknown(right):
        return None
    if operator in _NUMBERS:
        return _NUMBERS[operator](number(left, place), number(right, place))
    if operator in ("=", "==", "!="):
        return (left == right) == (operator != "!=")
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    if operator in ("-nt", "-ot", "-ef"):
        return None
    raise BadInput(
        f"{place}: [ {left} {operator} {right} ]: {operator} is no operator of a test; use =, !=, -eq, -lt …"
    )


def number(text: str, place: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise BadInput(f"{place}: {text!r} is compared as a whole number and is none") from None


@dataclass(slots=True)
class DoubleBracket:
    """Recursive descent over the text between `[[` and `]]`."""

    text: str
    expander: Expander
    at: int = 0

    def truth(self) -> Truth:
        value = self.all()
        while self.take("||"):
            value = either(value, self.all())
        return value

    def all(self) -> Truth:
        value = self.single()
        while self.take("&&"):
            value = both(value, self.single())
        return value

    def single(self) -> Truth:
        if self.take("!"):
            return negated(self.single())
        if self.take("("):
            value = self.truth()
            self.take(")")
            return value
        first = self.word()
        if first in _UNARY and not self.ended():
            operator_next = self.peek_word()
            if operator_next not in _STRINGS | _NUMBERS.keys():
                return unary(first, self.expander.one(self.word()), self.expander.scope)
        operator = self.peek_word()
        if operator in _STRINGS | _NUMBERS.keys() | {"-nt", "-ot", "-ef"}:
            self.word()
            return self.compared(first, operator, self.word(pattern=True))
        alone = self.expander.one(first)
        return True if is_unknown(alone) else alone != ""

    def compared(self, first: str, operator: str, second: str) -> Truth:
        left, e = self.expander.one(first), self.expander
        if operator in ("=", "==", "!="):
            right = e.one(second)
            if is_unknown(left) or is_unknown(right):
                return None
            return bool(re.fullmatch(e.pattern(second), left, re.DOTALL)) == (operator != "!=")
        if operator == "=~":
            return self.matched(left, second)
        if operator in _NUMBERS:
            return self.numbers(left, operator, e.one(second))
        return binary(left, operator, e.one(second), e.place)

    def numbers(self, left: str, operator: str, right: str) -> Truth:
        """In `[[` both sides of `-lt` and its like are arithmetic."""
        if is_unknown(left) or is_unknown(right):
            return None
        scope = self.expander.scope
        try:
            a, b = (integer(side, lambda name: scope.scalar(name) or "") for side in (left, right))
        except ArithmeticFault as fault:
            raise BadInput(f"{self.expander.place}: [[ {left} {operator} {right} ]]: {fault}") from None
        return _NUMBERS[operator](a, b)

    def matched(self, left: str, raw: str) -> Truth:
        pieces = self.expander.pieces(raw)
        pattern = "".join(re.escape(i.text) if piece.quoted else i.text for piece in pieces for i in piece.items)
        if is_unknown(left) or is_unknown(pattern):
            return None
        for name, letters in (("digit", "0-9"), ("alpha", "A-Za-z"), ("space", r"\s"), ("alnum", "0-9A-Za-z")):
            pattern = pattern.replace(f"[:{name}:]", letters)
        try:
            return bool(re.search(pattern, left))
        except re.error:
            return None

    def skip(self) -> None:
        while self.at < len(self.text) and (self.text[self.at] in " \t\n" or self.text.startswith("\\\n", self.at)):
            self.at += 1 if self.text[self.at] != "\\" else 2

    def ended(self) -> bool:
        self.skip()
        return self.at >= len(self.text) or self.text.startswith(("&&", "||", ")"), self.at)

    def take(self, token: str) -> bool:
        self.skip()
        if not self.text.startswith(token, self.at):
            return False
        if token == "!" and self.text[self.at + 1 : self.at + 2] not in (" ", "\t", "(", "\n"):
            return False
        self.at += len(token)
        return True

    def peek_word(self) -> str:
        kept = self.at
        word = self.word()
        self.at = kept
        return word

    def word(self, *, pattern: bool = False) -> str:
        self.skip()
        start = self.at
        if self.text[start : start + 1] in ("<", ">"):
            self.at += 1
            return self.text[start]
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n" or (not pattern and letter in "()<>") or (pattern and letter == ")"):
                break
            if self.text.startswith(("&&", "||"), self.at):
                break
            if letter in "\\'\"`$":
                self.at = max(past(self.text, self.at), self.at + 1)
            elif letter == "(":
                end = closing(self.text, self.at + 1, ")")
                self.at = end + 1 if end >= 0 else len(self.text)
            else:
                self.at += 1
        return self.text[start : self.at]
