"""The language of alarms: conditions over the numbers of a step, of earlier steps and of ranks. Parsed, never executed as Python.

An expression has numbers, names of metrics (`grad_norm`, `m["rollout_gap/mean"]`), + - * /, comparisons, and, or, not, and
calls of the functions in `functions`. Nothing else is taken: no attributes, no other calls. What is not known is None and
spreads as in Kleene's logic: `unknown and false` is false, `unknown and true` unknown, and only what is true fires.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowledger.diagnose.alarms.functions import FUNCTIONS, HIDDEN, Function
from flowledger.diagnose.alarms.moments import Moment, Value
from flowledger.diagnose.alarms.program import Part, Program
from flowledger.flow.errors import BadInput, nearest

LONGEST = 1000  # characters
DEEPEST = 20  # levels of one expression
OTHERWISE = {"&&": "and", "||": "or"}  # how other languages write what is a word here
MOST_STEPS = 1000  # that a function may look back

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an expression stands, and which names it may use besides functions."""

    where: str  # `alarm grad_norm_spike, when`: what an error begins with
    metrics: Collection[str] = ()  # known names
    thresholds: Mapping[str, int] = field(default_factory=dict)  # name -> its node


def read(program: Program, text: str, scope: Scope) -> int:
    """The node of an expression in a program. Raises BadInput with the place of what cannot be taken."""
    return _Reading(program, text, scope).whole()


class _Reading:
    """One expression on its way into a program."""

    def __init__(self, program: Program, text: str, scope: Scope) -> None:
        self._program, self._text, self._scope = program, text, scope

    def whole(self) -> int:
        if len(self._text) > LONGEST:
            raise BadInput(f"{self._scope.where}: an expression of {len(self._text)} characters; at most {LONGEST}")
        try:
            tree = ast.parse(self._text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            at = getattr(error, "offset", None)
            place = f" at character {at}" if at else ""
            ways = "".join(f"; {sign} is written {word}" for sign, word in OTHERWISE.items() if sign in self._text)
            raise BadInput(f"{self._scope.where}: {self._text!r} is no expression{place}{ways}") from None
        return self._node(tree.body, 1)

    def _node(self, tree: ast.expr, depth: int) -> int:
        if depth > DEEPEST:
            raise self._wrong(tree, f"more than {DEEPEST} levels deep; split it, or name a part as a threshold")
        match tree:
            case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
                return self._constant(tree, value)
            case ast.Name(id=name):
                return self._name(tree, name)
            case ast.Subscript():
                return self._metric(tree, self._subscript(tree))
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.UAdd() as sign, operand=inner):
                return self._unary(tree, sign, self._node(inner, depth + 1))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return self._binary(
                    tree, ARITHMETIC[type(op)], self._node(left, depth + 1), self._node(right, depth + 1)
                )
            case ast.BoolOp(op=op, values=inner):
                return self._bool(tree, isinstance(op, ast.And), tuple(self._node(one, depth + 1) for one in inner))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARISONS for op in ops):
                return self._compare(tree, [left, *others], ops, depth + 1)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._call(tree, name, args, depth + 1)
        raise self._wrong(
            tree, 'not taken here: only numbers, metrics (grad_norm, m["reward/mean"]), + - * / < <= > >= == !=, '
            f"and, or, not, and calls of {', '.join(FUNCTIONS)}",
        )  # fmt: skip

    def _constant(self, tree: ast.expr, value: float | str) -> int:
        if isinstance(value, str):
            kept: Value = value
        else:
            kept = float(value) if abs(value) < 1e300 else math.inf
            if math.isinf(kept):
                raise self._wrong(tree, "too large a number")
        return self._program.part(
            ("constant", kept), lambda: Part(lambda values, at: kept, ast.unparse(tree), (), "constant")
        )

    def _name(self, tree: ast.expr, name: str) -> int:
        if name in self._scope.thresholds:
            return self._scope.thresholds[name]
        if name in FUNCTIONS:
            raise self._wrong(tree, f"{name} is a function: write {FUNCTIONS[name].usage}")
        if name == "step":
            return self._program.part(("step",), lambda: Part(lambda values, at: at.step, name, (), "now"))
        self._check_name(tree, name)
        return self._metric(tree, name)

    def _metric(self, tree: ast.expr, name: str) -> int:
        self._program.metrics.add(name)
        return self._program.part(
            ("metric", name), lambda: Part(lambda values, at: at.job.get(name), ast.unparse(tree), (), "metric", name)
        )

    def _check_name(self, tree: ast.expr, name: str) -> None:
        if name not in self._scope.metrics:
            close = nearest(name, [*self._scope.metrics, *self._scope.thresholds, *FUNCTIONS])
            raise self._wrong(
                tree, f'no metric is called {name!r}{close}; a metric of the run\'s own is written m["{name}"]'
            )

    def _subscript(self, tree: ast.Subscript) -> str:
        """A name in brackets may be one that only the run knows: whether it does is seen in its steps."""
        match tree:
            case ast.Subscript(value=ast.Name(id="m"), slice=ast.Constant(value=str() as name)):
                return name
        raise self._wrong(tree, 'only m["name of a metric"] has brackets')

    def _unary(self, tree: ast.expr, sign: ast.unaryop, inner: int) -> int:
        def negated(values: list[Value], at: Moment) -> Value:
            value = values[inner]
            return None if value is None else not value

        def minus(values: list[Value], at: Moment) -> Value:
            value = values[inner]
            return -value if isinstance(value, float | int) else None

        if isinstance(sign, ast.UAdd):
            return inner
        made, name = (negated, "not") if isinstance(sign, ast.Not) else (minus, "-")
        return self._program.part((name, inner), lambda: Part(made, ast.unparse(tree), (inner,), "operation"))

    def _binary(self, tree: ast.expr, apply: Callable[[Any, Any], Any], left: int, right: int) -> int:
        def run(values: list[Value], at: Moment) -> Value:
            a, b = values[left], values[right]
            if a is None or b is None or isinstance(a, str) or isinstance(b, str):
                return None
            try:
                return apply(a, b)  # type: ignore[no-any-return]  # of two numbers
            except ArithmeticError:
                return None

        return self._program.part(
            (apply, left, right), lambda: Part(run, ast.unparse(tree), (left, right), "operation")
        )

    def _bool(self, tree: ast.expr, conjunction: bool, inner: tuple[int, ...]) -> int:
        decides = not conjunction  # what one part must be to decide for all

        def run(values: list[Value], at: Moment) -> Value:
            known = True
            for one in inner:
                value = values[one]
                if value is None:
                    known = False
                elif bool(value) is decides:
                    return decides
            return conjunction if known else None

        return self._program.part(
            (conjunction, *inner),
            lambda: Part(run, ast.unparse(tree), inner, "operation", "and" if conjunction else "or"),
        )

    def _compare(self, tree: ast.Compare, sides: list[ast.expr], ops: list[ast.cmpop], depth: int) -> int:
        nodes = [self._node(side, depth) for side in sides]
        pairs = tuple(zip([COMPARISONS[type(op)] for op in ops], nodes, nodes[1:], strict=False))

        def run(values: list[Value], at: Moment) -> Value:
            for apply, left, right in pairs:
                a, b = values[left], values[right]
                if a is None or b is None or isinstance(a, str) is not isinstance(b, str):
                    return None
                if not apply(a, b):
                    return False
            return True

        return self._program.part(
            ("compare", *pairs), lambda: Part(run, ast.unparse(tree), tuple(nodes), "operation", "compare")
        )

    def _call(self, tree: ast.Call, name: str, args: list[ast.expr], depth: int) -> int:
        function = FUNCTIONS.get(name)
        if function is None:
            raise self._wrong(tree, f"no function is called {name!r}{nearest(name, FUNCTIONS)}")
        least, most = function.arguments
        if not least <= len(args) <= most:
            raise self._wrong(tree, f"{name} is written {function.usage}")
        kinds = function.kinds(len(args))
        given = tuple(self._argument(function, kind, arg, depth) for kind, arg in zip(kinds, args, strict=True))
        children = tuple(one for kind, one in zip(kinds, given, strict=True) if kind == "x")
        key = next((one for kind, one in zip(kinds, given, strict=True) if kind in ("key", "name")), "")
        if function.over is not None:
            hidden = HIDDEN[function.over]
            past = self._program.part(
                (function.over, *given),
                lambda: Part(hidden.make(*given), f"history of {ast.unparse(args[0])}", children, "past"),
            )
            identity, children = (name, past), (*children, past)
            return self._program.part(
                identity, lambda: Part(function.make(past), ast.unparse(tree), children, function.looks, name)
            )
        looks = function.looks
        if looks == "facts" and any(self._program.parts[one].kind not in ("constant", "facts") for one in children):
            looks = "now"  # a setting, else a number of the step
        return self._program.part(
            (name, *given), lambda: Part(function.make(*given), ast.unparse(tree), children, looks, name, key)
        )

    def _argument(self, function: Function, kind: str, arg: ast.expr, depth: int) -> Any:
        match kind, arg:
            case "k", ast.Constant(value=int() as steps) if 1 <= steps <= MOST_STEPS and not isinstance(steps, bool):
                return steps
            case "k", _:
                raise self._wrong(arg, f"{function.usage}: how many steps is a whole number from 1 to {MOST_STEPS}")
            case "key", ast.Constant(value=str() as key):
                return key
            case "key", _:
                raise self._wrong(arg, f"{function.usage}: the key is a text in quotes")
            case "name", ast.Name(id=name):
                self._check_name(arg, name)
                return self._ranked(name)
            case "name", ast.Subscript():
                return self._ranked(self._subscript(arg))
            case "name", _:
                raise self._wrong(arg, f"{function.usage}: what ranks have is one metric, not an expression")
        return self._node(arg, depth)

    def _ranked(self, name: str) -> str:
        self._program.of_ranks.add(name)
        return name

    def _wrong(self, tree: ast.expr, what: str) -> BadInput:
        found = ast.get_source_segment(self._text.strip(), tree) or ""
        place = f"at character {tree.col_offset + 1}, {found[:60]!r}"
        return BadInput(f"{self._scope.where}: {what} ({place} of {self._text.strip()!r})")
