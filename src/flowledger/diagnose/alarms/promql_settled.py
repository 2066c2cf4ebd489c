"""What a condition comes to before any step: numbers, settings, sizes, and what was planned."""

import ast
import math

from flowledger.diagnose.alarms.functions import FUNCTIONS, NOISE
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.rules import Rule

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


class Settled:
    """One alarm's expressions as far as the run's configuration answers them."""

    def __init__(self, rule: Rule, stage: str, facts: Facts) -> None:
        self._rule, self._stage, self._facts = rule, stage, facts

    def parsed(self, text: str) -> ast.expr:
        return ast.parse(text.replace("<stage>", self._stage).strip(), mode="eval").body

    def number(self, tree: ast.expr) -> float | str | None:
        """What an expression of numbers and settings comes to; None where it asks a metric, or a setting is not known."""
        match tree:
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in self._rule.thresholds:
                origins = self._rule.thresholds[name].origins.values()
                return next((one for text in origins if (one := self.number(self.parsed(text))) is not None), None)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                found = self.number(inner)
                return -found if isinstance(found, float | int) else None
            case ast.BinOp(left=left, op=op, right=right):
                return _applied(OPERATORS[type(op)], self.number(left), self.number(right))
            case ast.Compare():
                known = self.holds(tree, True)
                return None if known is None else float(known)
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._setting(name, args)
        return None

    def holds(self, tree: ast.expr, holds: bool) -> bool | None:
        """What a condition comes to without any series: one of settings alone."""
        match tree:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.holds(inner, not holds)
            case ast.BoolOp(op=op, values=parts):
                found, both = [self.holds(part, holds) for part in parts], isinstance(op, ast.And) is holds
                return (not both) if (not both) in found else None if None in found else both
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self.number(left), self.number(right)
                if a is None or b is None or isinstance(a, str) is not isinstance(b, str):
                    return None
                signs = {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b, "!=": a != b}  # type: ignore[operator]  # both text or both numbers
                return bool(signs[OPERATORS[type(op)]]) is holds
        return None

    def unset(self, tree: ast.expr) -> bool:
        """Whether an expression is a setting that the run does not have."""
        asks = (
            isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and FUNCTIONS[tree.func.id].looks == "facts"
        )
        return asks and self.number(tree) is None

    def lacks(self, tree: ast.expr) -> bool:
        """Whether an expression asks for a setting that the run does not have."""
        return any(self.unset(node) for node in ast.walk(tree) if isinstance(node, ast.expr))

    def _setting(self, name: str, args: list[ast.expr]) -> float | str | None:
        match name, args:
            case "config", [ast.Constant(value=str() as key), *default]:
                found = self._facts.setting(key)
                return found if found is not None else self.number(default[0]) if default else None
            case "size", [ast.Constant(value=str() as key)]:
                return self._facts.sizes.get(key)
            case "planned", [ast.Constant(value=str() as key)]:
                return self._facts.planned.get(key)
            case "noise_floor", []:
                return NOISE.get(str(self._facts.setting("model.dtype")))
            case "log", [x] if isinstance(value := self.number(x), float | int) and value > 0:
                return math.log(value)
            case "first", [x, *rest]:
                found = self.number(x)
                return self._setting(name, rest) if self.unset(x) and rest else found
            case (("max" | "min"), parts):
                values = [self.number(one) for one in parts]
                numbers = [one for one in values if isinstance(one, float | int)]
                return (max if name == "max" else min)(numbers) if len(numbers) == len(values) else None
        return None


def _applied(sign: str, a: float | str | None, b: float | str | None) -> float | None:
    if a is None or b is None or isinstance(a, str) or isinstance(b, str) or (sign == "/" and not b):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0.0}.get(sign)
