"""Every metric that the rows of a ledger give by themselves, made when it is asked for."""

from collections.abc import Callable, Iterable

from flowledger.diagnose.measures import load, memory, policy, rollout_gap, samples, speed
from flowledger.diagnose.measures.measure import Measure, Rows
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.tables.metrics import find

MEASURES: tuple[Measure, ...] = (
    *samples.MEASURES, *policy.MEASURES, *rollout_gap.MEASURES, *load.MEASURES, *memory.MEASURES,
    *speed.MEASURES,
)  # fmt: skip

BySteps = dict[str, dict[int, float]]
ByRanks = dict[str, dict[int, dict[int, float]]]

# Steps of which the tokens of every sample that was kept were recorded with this column.
COVERED = """
WITH kept AS (
    SELECT step, sample_id FROM samples_merged WHERE source <> 'plan' AND dropped_reason IS NULL AND step IS NOT NULL),
there AS (SELECT DISTINCT sample_id FROM tokens WHERE source <> 'plan' AND {column} IS NOT NULL)
SELECT step FROM kept LEFT JOIN there ON kept.sample_id = there.sample_id
GROUP BY step HAVING count(there.sample_id) = count(*)
"""


class Recomputed:
    """Numbers by metric, step and rank. `whole` steps are made of everything, the others of the tokens of a few groups."""

    def __init__(self, ledger: Ledger, measures: Iterable[Measure] = MEASURES) -> None:
        self._ledger = ledger
        self.measures = tuple(measures)
        self._by_step: BySteps = {}
        self._by_rank: ByRanks = {}
        self._made: set[int] = set()
        self._made_of_ranks: set[int] = set()
        self._whole: dict[str, set[int]] = {}
        self._gives: dict[str, list[int]] = {}  # metric -> numbers of the measures that make it

    def names(self) -> set[str]:
        """All that have a number; makes everything, but for the ranks."""
        for number in range(len(self.measures)):
            self._make(number)
        return set(self._by_step)

    def by_step(self, name: str) -> dict[int, float]:
        """The whole job's numbers."""
        for number in self._giving(name):
            self._make(number)
        return self._by_step.get(name, {})

    def by_rank(self, name: str) -> dict[int, dict[int, float]]:
        """step -> rank -> number."""
        for number in self._giving(name):
            self._make_of_ranks(number)
        return self._by_rank.get(name, {})

    def whole(self, name: str) -> set[int]:
        """The steps whose number is made of all that there was in them, not of the tokens of a few groups."""
        tokens = [self._covered(measure.of_tokens) for measure in self.giving(name) if measure.of_tokens]
        return set(self.by_step(name)).intersection(*tokens)

    def giving(self, name: str) -> list[Measure]:
        """The measures that make a metric."""
        return [self.measures[number] for number in self._giving(name)]

    def _giving(self, name: str) -> list[int]:
        if name not in self._gives:  # asked for each step
            row = find(name)
            made = enumerate(self.measures)
            self._gives[name] = [] if row is None else [n for n, measure in made if row.name in measure.names]
        return self._gives[name]

    def _make(self, number: int) -> None:
        if number in self._made:
            return
        self._made.add(number)
        for row in self._rows(self.measures[number].make):
            step = row["step"]
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._by_step.setdefault(name, {})[step] = value

    def _make_of_ranks(self, number: int) -> None:
        make = self.measures[number].of_ranks
        if make is None or number in self._made_of_ranks:
            return
        self._made_of_ranks.add(number)
        for row in self._rows(make):
            step, rank = row["step"], row["rank"]
            for name, value in row.items():
                if name not in ("step", "rank") and value is not None:
                    self._by_rank.setdefault(name, {}).setdefault(step, {})[rank] = value

    def _rows(self, make: Callable[[Ledger], Rows]) -> Rows:
        try:
            return make(self._ledger)
        except BadInput:  # numbers that cannot be added up: what does not need them is there all the same
            return []

    def _covered(self, column: str) -> set[int]:
        if column not in self._whole:
            self._whole[column] = {row["step"] for row in self._ledger.rows(COVERED.format(column=column))}
        return self._whole[column]
