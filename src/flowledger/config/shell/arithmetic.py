"""The integers of a shell: `$((…))`, `((…))`, `let`, subscripts. 64-bit, C operators, assignments included."""

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(\d+#[\w@]+|0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)"
    r"|(<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
_LEVELS = (  # from loose to tight
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}
_DEEPEST = 100  # a variable may name a variable


class ArithmeticFault(Exception):  # noqa: N818  (bash's own word is error; here it only says: not a number)
    """The expression is none, or divides by zero."""


Read = Callable[[str], str]
Write = Callable[[str, int], None]


def integer(expression: str, read: Read, write: Write | None = None, depth: int = 0) -> int:
    """The value of an expression whose `$` expansions are already made. An empty one is 0.

    `read` gives the text of a variable (empty when unset), `write` takes assignments. Raises ArithmeticFault.
    """
    if depth > _DEEPEST:
        raise ArithmeticFault("a variable names itself")
    if not expression.strip():
        return 0
    reader = _Reader(_tokens(expression), read, write, depth)
    value = reader.comma()
    if reader.at < len(reader.tokens):
        raise ArithmeticFault(f"unexpected {reader.tokens[reader.at]}")
    return value


def _tokens(expression: str) -> list[str]:
    tokens, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise ArithmeticFault(f"unexpected {text[at:].strip()[:20]}")
        tokens.append(match.group(1) or match.group(2) or match.group(3))
        at = match.end()
    return tokens


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _literal(token: str) -> int:
    try:
        if "#" in token:
            base, digits = token.split("#")
            return int(digits, int(base))
        if token[:2] in ("0x", "0X"):
            return int(token, 16)
        return int(token, 8) if token[0] == "0" and len(token) > 1 else int(token)
    except ValueError:
        raise ArithmeticFault(f"{token} is no number") from None


def _binary(operator: str, a: int, b: int) -> int:
    if operator in ("/", "%"):
        if b == 0:
            raise ArithmeticFault("division by 0")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if operator == "/" else a - quotient * b
    if operator in ("<<", ">>"):
        b %= 64
        return _wrapped(a << b) if operator == "<<" else a >> b
    simple: dict[str, Callable[[], int]] = {
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "&": lambda: a & b,
        "|": lambda: a | b,
        "^": lambda: a ^ b,
        "==": lambda: a == b,
        "!=": lambda: a != b,
        "<": lambda: a < b,
        ">": lambda: a > b,
        "<=": lambda: a <= b,
        ">=": lambda: a >= b,
    }
    return _wrapped(int(simple[operator]()))


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: list[str], read: Read, write: Write | None, depth: int) -> None:
        self.tokens, self.at = tokens, 0
        self.read, self.write, self.depth = read, write, depth

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if token and token in wanted:
            self.at += 1
            return token
        return ""

    def comma(self) -> int:
        value = self.assignment()
        while self.take(","):
            value = self.assignment()
        return value

    def assignment(self) -> int:
        name = self.peek()
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if not name.isidentifier() or following not in _ASSIGN:
            return self.ternary()
        self.at += 2
        value = self.assignment()
        if following != "=":
            value = _binary(following[:-1], self.variable(name), value)
        return self.store(name, value)

    def ternary(self) -> int:
        condition = self.level(0)
        if not self.take("?"):
            return condition
        kept = self.write
        self.write = kept if condition else None
        yes = self.assignment()
        if not self.take(":"):
            raise ArithmeticFault("`:` expected")
        self.write = None if condition else kept
        no = self.ternary()
        self.write = kept
        return yes if condition else no

    def level(self, n: int) -> int:
        if n == len(_LEVELS):
            return self.power()
        value = self.level(n + 1)
        while operator := self.take(*_LEVELS[n]):
            if operator in ("||", "&&"):
                kept, decided = self.write, bool(value) == (operator == "||")
                self.write = None if decided else kept
                other = self.unevaluated(n + 1) if decided else self.level(n + 1)
                self.write = kept
                value = int(bool(value) or bool(other)) if operator == "||" else int(bool(value) and bool(other))
            else:
                value = _binary(operator, value, self.level(n + 1))
        return value

    def unevaluated(self, n: int) -> int:
        """The side that short-circuits: read for its tokens; its faults (a division by 0) do not count."""
        try:
            return self.level(n)
        except ArithmeticFault as fault:
            if "division" in str(fault):
                return 0
            raise

    def power(self) -> int:
        base = self.unary()
        if not self.take("**"):
            return base
        exponent = self.power()
        if exponent < 0:
            raise ArithmeticFault("exponent less than 0")
        return _wrapped(pow(base, exponent, 2**64))

    def unary(self) -> int:
        if operator := self.take("++", "--"):
            name = self.peek()
            if name.isidentifier():
                self.at += 1
                return self.store(name, self.variable(name) + (1 if operator == "++" else -1))
            value = self.unary()
            return value
        if operator := self.take("-", "+", "!", "~"):
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[operator]
        return self.atom()

    def atom(self) -> int:
        if self.take("("):
            value = self.comma()
            if not self.take(")"):
                raise ArithmeticFault("`)` expected")
            return value
        token = self.peek()
        if not token or not (token[0].isalnum() or token[0] == "_"):
            raise ArithmeticFault(f"operand expected, found {token or 'the end'}")
        self.at += 1
        if token[0].isdigit():
            return _wrapped(_literal(token))
        value = self.variable(token)
        if operator := self.take("++", "--"):
            self.store(token, value + (1 if operator == "++" else -1))
        return value

    def variable(self, name: str) -> int:
        return integer(self.read(name), self.read, self.write, self.depth + 1)

    def store(self, name: str, value: int) -> int:
        if self.write is not None:
            self.write(name, value)
        return value
