"""Alarms in PromQL, where they can be said in it: conditions over the numbers of a step.

Histories count steps, and Prometheus counts seconds: so many steps are so many times the median step of the run (`promql_history`).
A threshold with a default is exported by that, not by its history. Numbers of the whole job have no label `rank`; a stage is a
label, not part of the name.
"""

import ast
from collections.abc import Mapping

from flowledger.diagnose.alarms.functions import FUNCTIONS
from flowledger.diagnose.alarms.moments import Facts
from flowledger.diagnose.alarms.promql_history import HISTORY, RISES, STEP_S, Untold
from flowledger.diagnose.alarms.promql_names import STEP, labels, metric_name
from flowledger.diagnose.alarms.promql_settled import OPERATORS, Settled
from flowledger.diagnose.alarms.rules import Rule

OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
OVER_RANKS = {"ranks_max": "max", "ranks_min": "min", "ranks_mean": "avg"}


def promql(
    rule: Rule, stage: str, facts: Facts, *, step_s: float = STEP_S, names: Mapping[str, str] | None = None
) -> str:
    """The condition of an alarm. Raises Untold with the reason where there is none.

    step_s: seconds that a step takes; names: of metrics as they are exported, where one has another name than its own.
    """
    return Writing(rule, stage, facts, step_s, names).condition(
        ast.parse(rule.when.replace("<stage>", stage).strip(), mode="eval").body
    )


def is_count(tree: ast.expr) -> bool:
    """Whether it asks how many conditions hold."""
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "count"


class Writing:
    """One condition. A number that is known now (a setting, a size) is written out."""

    def __init__(
        self, rule: Rule, stage: str, facts: Facts, step_s: float = STEP_S, names: Mapping[str, str] | None = None
    ) -> None:
        self._rule, self._step_s, self._names = rule, step_s, names or {}
        self._settled = Settled(rule, stage, facts)

    def condition(self, tree: ast.expr, holds: bool = True) -> str:
        """A condition, or with `holds` false its opposite, as series that are there where it is true."""
        match tree:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.condition(inner, not holds)
            case ast.BoolOp(op=op, values=parts):
                return self._joined(tree, parts, holds, isinstance(op, ast.And) is holds)
            case ast.Compare() if (found := self._where_absent(tree, holds)) is not None and not found[1]:
                return self.condition(found[0], holds)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                sign = OPERATORS[type(op)]
                return self._compared(left, sign if holds else OPPOSITE[sign], right)
            case ast.Call(func=ast.Name(id="isnan"), args=[x]):
                value = self.number(x)
                return f"({value} - {value}) {'!=' if holds else '=='} 0"  # of nan and inf that is nan, which differs from 0
            case ast.Call(func=ast.Name(id="first"), args=args):
                return self._first_known(args, holds)
            case ast.Call(func=ast.Name(id=name), args=[x, *count]) if name in RISES and holds:
                return RISES[name](self.number(x), self._count(count), self._step_s)
            case ast.Call(func=ast.Name(id=name), args=args):
                self._call(name, args)
        raise Untold(f"{ast.unparse(tree)} has no form in PromQL")

    def _joined(self, tree: ast.expr, parts: list[ast.expr], holds: bool, both: bool) -> str:
        """Conditions that must all hold, or one of them. What holds unless something is seen is said by `unless`."""
        told = [part for part in parts if self._settled.holds(part, holds) is None]
        if any(self._settled.holds(part, holds) is (not both) for part in parts):
            raise Untold(f"{ast.unparse(tree)} is {not both} whatever the run does, by its configuration")
        if not told:
            raise Untold(f"{ast.unparse(tree)} asks no metric")
        against = [one for part in told if both and (one := self._unless(part, holds)) is not None]
        asked = [self.condition(part, holds) for part in told if not both or self._unless(part, holds) is None]
        if not asked:
            raise Untold(f"{ast.unparse(tree)} holds where nothing is seen, and PromQL answers with what is seen")
        found = _joined("and" if both else "or", asked)
        return f"({' unless on(run) '.join([found, *against])})" if against else found

    def _unless(self, tree: ast.expr, holds: bool) -> str | None:
        """Of a condition that holds where its numbers are absent (`first(c, 1)`, `first(x, 0) < 1`): what would speak against it."""
        match tree:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self._unless(inner, not holds)
            case ast.Call(func=ast.Name(id="first"), args=[inner, ast.Constant(value=else_)]) if bool(else_) is holds:
                return self.condition(inner, not holds)
            case ast.Compare() if (found := self._where_absent(tree, holds)) is not None and found[1]:
                return self.condition(found[0], not holds)
        return None

    def _where_absent(self, tree: ast.Compare, holds: bool) -> tuple[ast.Compare, bool] | None:
        """Of a comparison with a number in place of what is absent: itself without that number, and what it comes to with it."""
        match tree:
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="first") as first, args=[*asked, ast.Constant() as absent])
            ) if asked:
                known = self._settled.holds(ast.Compare(absent, tree.ops, tree.comparators), holds)
                return (
                    None
                    if known is None
                    else (ast.Compare(ast.Call(first, asked, []), tree.ops, tree.comparators), known)
                )
        return None

    def _first_known(self, args: list[ast.expr], holds: bool) -> str:
        """The first condition that is known. One that asks no other metrics than one before it is never asked."""
        left = [one for one in args if not self._settled.lacks(one)]
        if len(left) > 1 and isinstance(left[-1], ast.Constant) and bool(left[-1].value) is not holds:
            left = left[:-1]  # what is absent does not hold, here as there
        asked = [
            one for at, one in enumerate(left) if not any(self._asks(one) >= self._asks(before) for before in left[:at])
        ]
        if len(asked) == 1 and not isinstance(asked[0], ast.Constant):
            return self.condition(asked[0], holds)
        raise Untold(f"which of {', '.join(map(ast.unparse, left))} is known, PromQL cannot ask")

    def fixed(self, text: str) -> float | None:
        """The number that a threshold, or settings, come to whatever the run does; None where there is none."""
        try:
            return float(self.number(self._settled.parsed(text)))
        except (Untold, ValueError):
            return None

    def _compared(self, left: ast.expr, sign: str, right: ast.expr) -> str:
        if isinstance(left, ast.Call) and is_count(left):
            return self._counted(left.args, sign, self._settled.number(right))
        a, b = self.number(left), self.number(right)
        both = self._settled.number(left) is None and self._settled.number(right) is None
        return f"{a} {sign} {'on(run) ' * both}{b}"

    def _counted(self, parts: list[ast.expr], sign: str, least: float | str | None) -> str:
        """How many conditions hold: one of them, or the series that they leave, each with a number of its own."""
        if not isinstance(least, float | int) or sign not in (">", ">=") or (sign, least) == (">=", 0):
            raise Untold("count() is told only where it is more than a number: what is absent counts as false")
        told = [self.condition(one) for one in parts]
        if sign == ">" and least == 0:
            return _joined("or", told)
        marked = " or ".join(f'label_replace({one}, "part", "{at}", "", "")' for at, one in enumerate(told))
        return f"count by (run) ({marked}) {sign} {least:.10g}"

    def number(self, tree: ast.expr) -> str:
        """A number: written out, or series with the label run."""
        if (fixed := self._settled.number(tree)) is not None and not isinstance(fixed, str):
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
                both = self._settled.number(left) is None and self._settled.number(right) is None
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
            told = [one for one in args if not self._settled.unset(one)]
            if any(self._settled.number(one) is not None for one in told[1:]):
                raise Untold(f"a number in place of what is absent ({ast.unparse(told[-1])}) has no run in PromQL")
            return _joined("or", [self.number(one) for one in told])
        if name in ("max", "min"):
            return self._extreme(name, args)
        if name in HISTORY:
            return HISTORY[name](self.number(args[0]), self._count(args[1:]), self._step_s)
        if FUNCTIONS[name].looks == "back":
            raise Untold(f"{name}() looks back over steps, and Prometheus over seconds")
        if FUNCTIONS[name].looks == "facts":
            raise Untold(f"this run has no {name}({', '.join(map(ast.unparse, args))})")
        raise Untold(f"{name}() has no form in PromQL")

    def _extreme(self, name: str, args: list[ast.expr]) -> str:
        """The largest or smallest of series and of numbers that are known; unknown where a series is absent."""
        fixed = [value for one in args if isinstance(value := self._settled.number(one), float | int)]
        found, *others = [self.number(one) for one in args if self._settled.number(one) is None]
        sign = ">=" if name == "max" else "<="
        for one in others:
            found = f"({found} {sign} on(run) {one} or on(run) ({one} and on(run) {found}))"
        if fixed:
            bound = max(fixed) if name == "max" else min(fixed)
            found = f"{'clamp_min' if name == 'max' else 'clamp_max'}({found}, {bound:.10g})"
        return found

    @staticmethod
    def _count(args: list[ast.expr]) -> int:
        """How many steps a function looks back: a whole number in the rule, 1 where none stands there."""
        return (
            int(args[0].value) if args and isinstance(args[0], ast.Constant) and isinstance(args[0].value, int) else 1
        )

    def _asks(self, tree: ast.expr) -> set[str]:
        """The metrics that an expression names."""
        names = {
            node.slice.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        }
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        plain = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}
        return {str(name) for name in names} | (plain - {"m"})

    def _series(self, name: str, rank: bool = False) -> str:
        chosen = ['rank!=""' if rank else 'rank=""', *(f'{key}="{value}"' for key, value in labels(name).items())]
        spelt = STEP if name == "step" else self._names.get(name) or metric_name(name)
        return f"{spelt}{{{','.join(chosen)}}}"

    def _threshold(self, name: str) -> str:
        """The first origin that can be said: the configuration's number, else the default; a history where there is none."""
        reasons = []
        origins = self._rule.thresholds[name].origins
        for origin, text in origins.items():
            if origin == "history" and "default" in origins:
                continue
            try:
                return self.number(self._settled.parsed(text))
            except Untold as why:
                reasons.append(f"{origin}: {why}")
        raise Untold(f"its threshold {name} has no number of its own ({'; '.join(reasons)})")


def _joined(word: str, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "(" + f" {word} on(run) ".join(parts) + ")"


def _named(tree: ast.expr) -> str:
    match tree:
        case ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
        case ast.Name(id=name):
            return name
    raise Untold(f"{ast.unparse(tree)} is no metric")
