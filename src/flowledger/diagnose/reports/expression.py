"""The conditions that causes are written in: arithmetic, comparisons and `and`/`or`/`not` over names, in three values.

A name that nobody gave is unknown, not false. `evaluate("rows % chunks != 0", {"rows": 2})` is `Unknown({"chunks"})`: what is
missing to decide. `False and unknown` is False, `True or unknown` is True, as Kleene has it. `not` alone differs: it excludes, so
`not x` holds where x is not known to hold; what must be known to be off is written `given(x) and not x`.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """What an expression comes to while the named inputs are missing."""

    missing: frozenset[str]

    def __bool__(self) -> bool:
        return False


def _some(least: int, *conditions: object) -> object:
    """Whether at least so many conditions hold."""
    held = sum(bool(one) for one in conditions)
    open_ones = [one for one in conditions if isinstance(one, Unknown)]
    if held >= least or held + len(open_ones) < least:
        return held >= least
    return Unknown(frozenset().union(*(one.missing for one in open_ones)))


def _near(one: float, other: float, within: float = 0.02) -> bool:
    """Whether two numbers are the same but for a relative difference."""
    return abs(one - other) <= within * max(abs(one), abs(other))


def _ceil(one: float, other: float) -> int:
    return -int(-one // other)


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "min": min, "max": max, "abs": abs, "round": round, "gcd": math.gcd, "lcm": math.lcm, "near": _near, "ceil": _ceil,
}  # fmt: skip
OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other, ast.NotIn: lambda one, other: one not in other,
}  # fmt: skip


def evaluate(expression: str, names: Mapping[str, object]) -> object:
    """The value, or Unknown. Raises ValueError for what is no such expression."""
    return _value(_parsed(expression), names)


def names_in(expression: str) -> frozenset[str]:
    """Every name that an expression uses."""
    called = {id(node.func) for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Call)}
    found = (node for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name) and id(node) not in called)
    return frozenset(node.id for node in found)


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r}: {error.msg}") from None


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name, Unknown(frozenset({name})))
        case ast.BoolOp(op=op, values=parts):
            return _joined(isinstance(op, ast.Or), [_value(part, names) for part in parts])
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, names)  # Unknown is falsy: `not` says that it is not known
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _apply(operator.neg, [_value(inner, names)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _apply(OPERATORS[type(op)], [_value(left, names), _value(right, names)])
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared(ops, [_value(part, names) for part in (left, *others)])
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names) for part in parts)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]):
            return _called(name, parts, names)
    raise ValueError(f"{ast.unparse(node)!r} is no condition: {type(node).__name__}")


def _called(name: str, parts: list[ast.expr], names: Mapping[str, object]) -> object:
    values = [_value(part, names) for part in parts]
    if name == "given":  # whether all of them are known
        return not any(isinstance(value, Unknown) for value in values)
    if name == "some":
        return _some(*values)  # type: ignore[arg-type]  # the first is a number, which a test of the table holds
    if name not in FUNCTIONS:
        raise ValueError(f"{name!r} is none of given, some, {', '.join(FUNCTIONS)}")
    return _apply(FUNCTIONS[name], values)


def _joined(is_or: bool, values: list[object]) -> object:
    known = [value for value in values if not isinstance(value, Unknown)]
    if any(bool(value) is is_or for value in known):
        return is_or
    missing = [value.missing for value in values if isinstance(value, Unknown)]
    return Unknown(frozenset().union(*missing)) if missing else not is_or


def _compared(ops: list[ast.cmpop], values: list[object]) -> object:
    pairs = zip(ops, values, values[1:], strict=False)
    return _joined(False, [_apply(OPERATORS[type(op)], [left, right]) for op, left, right in pairs])


def _apply(function: Callable[..., object], values: list[object]) -> object:
    missing = [value.missing for value in values if isinstance(value, Unknown)]
    if missing:
        return Unknown(frozenset().union(*missing))
    try:
        return function(*values)
    except (TypeError, ZeroDivisionError, ValueError, OverflowError):  # a word where a number is asked, a zero degree
        return Unknown(frozenset())
