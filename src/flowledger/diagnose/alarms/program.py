"""What all expressions of all alarms come to: one list of small functions, each evaluated once a step.

Equal parts are one, so that ten alarms that ask for `usual(grad_norm)` keep one history.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.diagnose.alarms.functions import FUNCTIONS
from flowledger.diagnose.alarms.moments import Evaluated, Facts, Moment, Value


@dataclass(frozen=True, slots=True)
class Part:
    """One node of a program. kind: metric, constant, operation, past (hidden), or what its function looks at: now, back, ranks, facts."""

    run: Evaluated
    text: str
    children: tuple[int, ...]
    kind: str
    name: str = ""  # of the metric or the function
    key: str = ""  # of a setting, a size, a planned number, a metric of ranks


class Program:
    """The parts of many expressions, each once, children before those that use them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.metrics: set[str] = set()  # whose number of the whole job is asked for
        self.of_ranks: set[str] = set()  # whose numbers of the ranks are asked for
        self._known: dict[tuple[Any, ...], int] = {}
        self._constants: list[Value] = []
        self._each: list[tuple[int, Evaluated]] = []
        self._rest: list[tuple[int, Evaluated]] = []

    def part(self, identity: tuple[Any, ...], make: Callable[[], Part]) -> int:
        """The node with this identity; made where it is new."""
        if identity not in self._known:
            self._known[identity] = len(self.parts)
            self.parts.append(make())
        return self._known[identity]

    def first_of(self, nodes: tuple[int, ...], name: str) -> int:
        """A node that is the first of others that is known: a threshold."""
        return self.part(("first", *nodes), lambda: Part(FUNCTIONS["first"].make(*nodes), name, nodes, "now", "first"))

    def conjuncts(self, node: int) -> tuple[int, ...]:
        """The parts that a condition joins with `and`; itself where it joins none."""
        part = self.parts[node]
        return tuple(one for inner in part.children for one in self.conjuncts(inner)) if part.name == "and" else (node,)

    def deciding(self, node: int, values: Sequence[Value]) -> list[int]:
        """The comparisons that make a condition true at a step: of those that it joins with `or` the ones that hold."""
        part = self.parts[node]
        if part.name in ("and", "or"):
            return [one for inner in part.children if values[inner] for one in self.deciding(inner, values)]
        return [node] if part.name == "compare" and values[node] else []

    def below(self, node: int) -> list[int]:
        """A node and all that it is made of, each once, in reading order."""
        found: dict[int, None] = {}
        left = [node]
        while left:
            one = left.pop()
            if one not in found:
                found[one] = None
                left.extend(reversed(self.parts[one].children))
        return list(found)

    def advance(self, moment: Moment) -> list[Value]:
        """The values at a step of what must be known at each: conditions, and what histories are made of."""
        values = self._constants.copy()
        for index, run in self._each:
            values[index] = run(values, moment)
        return values

    def complete(self, values: list[Value], moment: Moment) -> None:
        """Add what is needed only when an alarm fires: the words of messages."""
        for index, run in self._rest:
            values[index] = run(values, moment)

    def settle(self, conditions: Iterable[int], facts: Facts) -> None:
        """Say which nodes are conditions, and what is known of the run; no expression is added after that."""
        nothing = Moment(0, {}, {}, facts)
        self._constants = [None] * len(self.parts)
        needed = set().union(*(self.below(one) for one in conditions))
        needed |= set().union(*(self.below(n) for n, part in enumerate(self.parts) if part.kind in ("back", "past")))
        self._each, self._rest = [], []
        for index, part in enumerate(self.parts):
            if part.kind in ("constant", "facts"):
                self._constants[index] = part.run(self._constants, nothing)
            else:
                (self._each if index in needed else self._rest).append((index, part.run))
