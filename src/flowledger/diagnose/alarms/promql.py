"""Alarms in PromQL, where they can be said in it: conditions over the numbers of a step.

Histories count steps, and Prometheus counts seconds; a threshold from a history is therefore exported by its default. Numbers of
the whole job have no label `rank`; a stage is a label, not part of the name.
"""

import ast
import math
import re
import string

from flowledger.diagnose.alarms.functions import FUNCTIONS, NOISE
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.rules import Rule
from flowledger.diagnose.alarms.words import bare, shown

OF_STAGE = re.compile(r"^stage_time_s/(?P<stage>.+)$")
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
HUMANE = {"%": "humanizePercentage", "B": "humanize1024"}  # end of a format -> the function of Prometheus' templates
OVER_RANKS = {"ranks_max": "max", "ranks_min": "min", "ranks_mean": "avg"}


class Untold(Exception):  # noqa: N818  (it is an answer: why an alarm is not exported)
    """Why an expression cannot be said in PromQL."""


def metric_name(name: str) -> str:
    """`rollout_gap/mean` -> `flowledger_rollout_gap_mean`: letters, digits and underscores."""
    return "flowledger_" + re.sub(r"[^a-zA-Z0-9_]", "_", OF_STAGE.sub("stage_time_s", name))


def labels(name: str) -> dict[str, str]:
    """The labels that a name carries: its stage."""
    found = OF_STAGE.match(name)
    return {"stage": found["stage"]} if found else {}


def promql(rule: Rule, stage: str, facts: Facts) -> str:
    """The condition of an alarm. Raises Untold with the reason where there is none."""
    return _Writing(rule, stage, facts).condition(
        ast.parse(rule.when.replace("<stage>", stage).strip(), mode="eval").body
    )


def summary(rule: Rule, stage: str, facts: Facts) -> str:
    """What an alarm says, with Prometheus' own value in it; the condition in words where the message asks for more numbers.

    The value of a comparison is that of its left side; of several joined by `and`, of the first.
    """
    tree = ast.parse(rule.when.replace("<stage>", stage).strip(), mode="eval").body
    while isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        tree = tree.values[0]
    value = ast.unparse(tree.left) if isinstance(tree, ast.Compare) and not _is_count(tree.left) else ""
    said = ""
    for before, inner, form, _ in string.Formatter().parse(rule.message.replace("<stage>", stage)):
        said += before
        if inner is None:
            continue
        if ast.unparse(ast.parse(inner.strip(), mode="eval").body) == value:
            said += f"{{{{ $value | {HUMANE.get((form or '')[-1:], 'humanize')} }}}}{'B' * (form == 'B')}"
        elif (fixed := _Writing(rule, stage, facts).fixed(inner)) is not None:
            said += shown(fixed, form or "")
        else:
            return f"{rule.id.replace('_', ' ')}: {_condition(rule, stage, facts)}"
    return said


def _condition(rule: Rule, stage: str, facts: Facts) -> str:
    """The condition as it reads, with numbers in place of thresholds where they are known."""
    text = bare(" ".join(rule.when.replace("<stage>", stage).split()))
    for name in rule.thresholds:
        if (fixed := _Writing(rule, stage, facts).fixed(name)) is not None:
            text = re.sub(rf"\b{name}\b", shown(fixed), text)
    return text


def _is_count(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "count"


class _Writing:
    """One condition. A number that is known now (a setting, a size) is written out."""

    def __init__(self, rule: Rule, stage: str, facts: Facts) -> None:
        self._rule, self._stage, self._facts = rule, stage, facts

    def condition(self, tree: ast.expr, holds: bool = True) -> str:
        """A condition, or with `holds` false its opposite, as series that are there where it is true."""
        match tree:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.condition(inner, not holds)
            case ast.BoolOp(op=op, values=parts):
                both = isinstance(op, ast.And) is holds
                told = [part for part in parts if self._known(part, holds) is None]
                if any(self._known(part, holds) is (not both) for part in parts):
                    raise Untold(f"{ast.unparse(tree)} is {not both} whatever the run does, by its configuration")
                if not told:
                    raise Untold(f"{ast.unparse(tree)} asks no metric")
                return _joined("and" if both else "or", [self.condition(part, holds) for part in told])
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                sign = OPERATORS[type(op)]
                return self._compared(left, sign if holds else OPPOSITE[sign], right)
            case ast.Call(func=ast.Name(id="isnan"), args=[x]):
                value = self.number(x)
                return f"({value} - {value}) {'!=' if holds else '=='} 0"  # of nan and inf that is nan, which differs from 0
            case ast.Call(func=ast.Name(id=name), args=args):
                self._call(name, args)
        raise Untold(f"{ast.unparse(tree)} has no form in PromQL")

    def fixed(self, text: str) -> float | None:
        """The number that a threshold, or settings, come to whatever the run does; None where there is none."""
        try:
            return float(self.number(self._parsed(text)))
        except (Untold, ValueError):
            return None

    def _known(self, tree: ast.expr, holds: bool) -> bool | None:
        """What a condition comes to without any series: one of settings alone."""
        match tree:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self._fixed(left), self._fixed(right)
                if a is None or b is None or isinstance(a, str) is not isinstance(b, str):
                    return None
                signs = {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b, "!=": a != b}  # type: ignore[operator]  # both text or both numbers
                return bool(signs[OPERATORS[type(op)]]) is holds
        return None

    def _compared(self, left: ast.expr, sign: str, right: ast.expr) -> str:
        if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "count":
            if sign != ">" or self._fixed(right) != 0:
                raise Untold("count() of several is told only where one is enough: what is absent counts as false")
            return _joined("or", [self.condition(one) for one in left.args])
        a, b = self.number(left), self.number(right)
        both = self._fixed(left) is None and self._fixed(right) is None
        return f"{a} {sign} {'on(run) ' * both}{b}"

    def number(self, tree: ast.expr) -> str:
        """A number: written out, or series with the label run."""
        if (fixed := self._fixed(tree)) is not None and not isinstance(fixed, str):
            return f"{fixed:.10g}"
        match tree:
            case ast.Name(id=name) if name in self._rule.thresholds:
                return self._threshold(name)
            case ast.Name(id=name):
                return self._series(name)
            case ast.Subscript(slice=ast.Constant(value=str() as name)):
                return self._series(name)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return f"-({self.number(inner)})"
            case ast.BinOp(left=left, op=op, right=right):
                both = self._fixed(left) is None and self._fixed(right) is None
                return f"({self.number(left)} {OPERATORS[type(op)]} {'on(run) ' * both}{self.number(right)})"
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._call(name, args)
        raise Untold(f"{ast.unparse(tree)} has no form in PromQL")

    def _call(self, name: str, args: list[ast.expr]) -> str:
        if name in OVER_RANKS:
            return f"{OVER_RANKS[name]} by (run) ({self._series(_named(args[0]), rank=True)})"
        if name == "ranks_spread":
            series = self._series(_named(args[0]), rank=True)
            return f"(max by (run) ({series}) - min by (run) ({series}))"
        if name == "ranks_median":
            return f"quantile by (run) (0.5, {self._series(_named(args[0]), rank=True)})"
        if name in ("abs", "log"):
            return f"{'ln' if name == 'log' else 'abs'}({self.number(args[0])})"
        if name == "first":
            return _joined("or", [self.number(one) for one in args if not self._unset(one)])
        if FUNCTIONS[name].looks == "back":
            raise Untold(f"{name}() looks back over steps, and Prometheus over seconds")
        raise Untold(f"{name}() has no form in PromQL")

    def _series(self, name: str, rank: bool = False) -> str:
        if name == "step":
            raise Untold("the number of the step is no metric")
        chosen = ['rank!=""' if rank else 'rank=""', *(f'{key}="{value}"' for key, value in labels(name).items())]
        return f"{metric_name(name)}{{{','.join(chosen)}}}"

    def _threshold(self, name: str) -> str:
        """The first origin that can be said: the configuration's number, else the default."""
        reasons = []
        for origin, text in self._rule.thresholds[name].origins.items():
            try:
                return self.number(self._parsed(text))
            except Untold as why:
                reasons.append(f"{origin}: {why}")
        raise Untold(f"its threshold {name} has no number of its own ({'; '.join(reasons)})")

    def _parsed(self, text: str) -> ast.expr:
        return ast.parse(text.replace("<stage>", self._stage).strip(), mode="eval").body

    def _fixed(self, tree: ast.expr) -> float | str | None:
        """What an expression of numbers and settings comes to; None where it asks a metric, or a setting is not known."""
        match tree:
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in self._rule.thresholds:
                origins = self._rule.thresholds[name].origins.values()
                return next((one for text in origins if (one := self._fixed(self._parsed(text))) is not None), None)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                found = self._fixed(inner)
                return -found if isinstance(found, float | int) else None
            case ast.BinOp(left=left, op=op, right=right):
                return _applied(OPERATORS[type(op)], self._fixed(left), self._fixed(right))
            case ast.Compare():
                known = self._known(tree, True)
                return None if known is None else float(known)
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._setting(name, args)
        return None

    def _unset(self, tree: ast.expr) -> bool:
        """Whether an expression is a setting that the run does not have."""
        asks = (
            isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and FUNCTIONS[tree.func.id].looks == "facts"
        )
        return asks and self._fixed(tree) is None

    def _setting(self, name: str, args: list[ast.expr]) -> float | str | None:
        match name, args:
            case "config", [ast.Constant(value=str() as key), *default]:
                found = self._facts.setting(key)
                return found if found is not None else self._fixed(default[0]) if default else None
            case "size", [ast.Constant(value=str() as key)]:
                return self._facts.sizes.get(key)
            case "planned", [ast.Constant(value=str() as key)]:
                return self._facts.planned.get(key)
            case "noise_floor", []:
                return NOISE.get(str(self._facts.setting("model.dtype")))
            case "log", [x] if isinstance(value := self._fixed(x), float | int) and value > 0:
                return math.log(value)
            case "first", [x, *rest]:
                found = self._fixed(x)
                return self._setting(name, rest) if self._unset(x) and rest else found
            case (("max" | "min"), parts):
                values = [self._fixed(one) for one in parts]
                numbers = [one for one in values if isinstance(one, float | int)]
                return (max if name == "max" else min)(numbers) if len(numbers) == len(values) else None
        return None


def _applied(sign: str, a: float | str | None, b: float | str | None) -> float | None:
    if a is None or b is None or isinstance(a, str) or isinstance(b, str) or (sign == "/" and not b):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0.0}.get(sign)


def _joined(word: str, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "(" + f" {word} on(run) ".join(parts) + ")"


def _named(tree: ast.expr) -> str:
    match tree:
        case ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
        case ast.Name(id=name):
            return name
    raise Untold(f"{ast.unparse(tree)} is no metric")
