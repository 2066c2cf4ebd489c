"""The arithmetic that tables are written in: integers, comparisons and `and`/`or`/`not` over names. Parsed once, checked.

`evaluate("(mini * n) % dp == 0", {"mini": 5, "n": 4, "dp": 8})` is False. Names that a table uses and a caller does not
give raise `MissingNameError`, so that a rule without its input is reported as skipped, never as passed.
"""

import ast
import math
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

FUNCTIONS = {"ceil": lambda a, b: -(-a // b), "min": min, "max": max, "lcm": math.lcm, "gcd": math.gcd, "abs": abs}
ALLOWED = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.IfExp,
    ast.Load, ast.And, ast.Or, ast.Not, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot, ast.Tuple,
)  # fmt: skip


class MissingNameError(LookupError):
    """An expression asks for a name that nobody gave; `name` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def evaluate(expression: str, names: Mapping[str, object]) -> object:
    """The value of an expression. Raises MissingNameError for a name not given, ValueError for what is no arithmetic."""
    code, needed = _compiled(expression)
    for name in needed:
        if name not in names:
            raise MissingNameError(name)
    return eval(
        code, {"__builtins__": {}, **FUNCTIONS}, {name: names[name] for name in needed}
    )  # its nodes were checked


def integer(expression: str, names: Mapping[str, object]) -> int:
    """The same, rounded up to a whole number."""
    value = evaluate(expression, names)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{expression!r} gives {value!r}, which is no number")
    return math.ceil(value)


def names_in(expression: str) -> tuple[str, ...]:
    """The names an expression needs, in the order of their first use."""
    return _compiled(expression)[1]


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    tree = ast.parse(expression, mode="eval")
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ValueError(f"{expression!r}: {type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise ValueError(f"{expression!r} calls what is none of {', '.join(FUNCTIONS)}")
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            found.append((node.col_offset, node.id))
    return compile(tree, "<table>", "eval"), tuple(dict.fromkeys(name for _, name in sorted(found)))
