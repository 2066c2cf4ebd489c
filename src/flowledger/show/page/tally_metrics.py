"""One number a metric and step, added up as rows are written: by the rules of the view `metrics_by_step`."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from flowledger.show.page.tally_rows import Number
from flowledger.tables.metrics import over_ranks

OF_ENGINES = "rollout/"  # an engine beside the trainer is told of no step
COUNTS = frozenset({
    "rollout/engine_steps", "rollout/prefill_tokens", "rollout/decode_tokens", "rollout/cached_tokens", "rollout/preemptions",
})  # fmt: skip
PER_ROW = "recorder/ns_per_row"


def is_count(name: str) -> bool:
    """Counted wherever it happens: rows add up, in a process and over all. As the macro of `views.sql` has it."""
    return name in COUNTS or name.startswith("rollout/finished/")


def is_share(name: str) -> bool:
    """What each process has for itself, so that the run has the sum. As the macro of `views.sql` has it."""
    return name in ("rollout/running", "rollout/waiting") or (name.startswith("recorder/") and name != PER_ROW)


class Sum:
    """A metric in one step, over all processes."""

    __slots__ = (
        "highest",
        "lowest",
        "raw_name",
        "recomputed",
        "special",
        "stage",
        "total",
        "values",
        "weight",
        "weights",
    )

    def __init__(self, name: str, raw_name: str) -> None:
        self.raw_name = raw_name
        self.total: float | None = None  # of value times weight
        self.values = 0.0
        self.weight = 0.0
        self.weights: dict[int, float] | None = (
            {} if is_share(name) or over_ranks(name) == "sum" else None
        )  # by process
        self.highest = float("-inf")
        self.lowest = float("inf")
        self.special: str | None = None
        self.stage: str | None = None
        self.recomputed = True

    def add(self, process: int, row: Number) -> None:
        """One row more."""
        self.special = self.special or row.special
        self.stage = self.stage or row.stage
        self.recomputed &= row.recomputed
        if row.value is None:
            return
        weight = 1.0 if row.weight is None else row.weight
        self.total = (self.total or 0.0) + row.value * weight
        self.weight += weight
        self.values += row.value
        self.highest, self.lowest = max(self.highest, row.value), min(self.lowest, row.value)
        if self.weights is not None:
            self.weights[process] = self.weights.get(process, 0.0) + weight

    def value(self, name: str) -> float | None:
        """Its number; None where a special value stands in its place."""
        if self.special is not None or self.total is None:
            return None
        weight = (
            1.0 if is_count(name) else max(self.weights.values()) if is_share(name) and self.weights else self.weight
        )
        return self.total / weight if weight else None

    def joined(self, way: str) -> float | None:
        """The same as the table of metrics wants ranks joined: mean, count, max, min, sum. What is not finite stays so."""
        if self.special is not None:
            return float(self.special)
        if self.total is None:
            return None
        if way == "sum":
            largest = max(self.weights.values()) if self.weights else self.weight
            return self.total / largest if largest else None
        ways = {"count": self.values, "max": self.highest, "min": self.lowest}
        return ways[way] if way in ways else self.total / self.weight if self.weight else None


class Metrics:
    """The metrics of a run. `changed`: steps whose numbers are others than when they were taken last."""

    def __init__(self) -> None:
        self.changed: set[int | None] = set()
        self.steps: dict[int | None, dict[str, Sum]] = {}
        self._unplaced: list[tuple[int, int, Number]] = []  # when, process, row of an engine

    def add(self, process: int, rows: Sequence[Number], apart: int) -> None:
        """Rows of one process; `apart`: of its clock from that of all."""
        for row in rows:
            if row.step is None and row.name.startswith(OF_ENGINES):
                self._unplaced.append((row.t_ns + apart, process, row))
            else:
                self._put(row.step, process, row)

    def _put(self, step: int | None, process: int, row: Number) -> None:
        names = self.steps.setdefault(step, {})
        if row.name not in names:
            names[row.name] = Sum(row.name, row.raw_name)
        names[row.name].add(process, row)
        self.changed.add(step)

    def settle(self, began: Mapping[int, int], *, over: bool = False) -> None:
        """Give what engines told to the step that had begun; what is later than all begins waits, unless the run is `over`."""
        if not self._unplaced or not (began or over):
            return
        order = sorted((at, step) for step, at in began.items())
        begins = [at for at, _ in order]
        waiting = []
        for at, process, row in self._unplaced:
            place = bisect_right(begins, at)
            if place == len(begins) and not over:
                waiting.append((at, process, row))
            else:
                self._put(order[place - 1][1] if place else None, process, row)
        self._unplaced = waiting
