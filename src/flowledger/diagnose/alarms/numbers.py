"""The numbers that alarms look at, step by step: metrics of the run, and what its other rows give (`numbers.toml`)."""

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from flowledger.diagnose.alarms.moments import Facts, Moment
from flowledger.diagnose.measures.series import series_of
from flowledger.ledger.reader import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number that is no metric."""

    name: str
    unit: str
    definition: str
    zh: str
    needs: str
    sql: str
    ranks: int = 1
    cut: bool = False
    of_ended: bool = True


@dataclass(slots=True)
class Numbers:
    """Of one run, or of some of its steps: name -> step -> number, and name -> step -> rank -> number."""

    job: dict[str, dict[int, float]] = field(default_factory=dict)
    ranks: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    notes: dict[tuple[str, int], str] = field(default_factory=dict)  # (name, step) -> what else is known of it
    resumed: set[int] = field(default_factory=set)  # steps at which another process took a rank over
    names: set[str] = field(default_factory=set)  # of every metric that was told, also as its framework calls it

    @property
    def steps(self) -> list[int]:
        """Every step that has a number."""
        return sorted(set().union(*self.job.values(), *self.ranks.values()))

    def moments(self, facts: Facts) -> Iterator[Moment]:
        """The steps in their order."""
        job: defaultdict[int, dict[str, float]] = defaultdict(dict)
        ranks: defaultdict[int, dict[str, Mapping[int, float]]] = defaultdict(dict)
        for name, by_step in self.job.items():
            for step, value in by_step.items():
                job[step][name] = value
        for name, by_rank in self.ranks.items():
            for step, values in by_rank.items():
                ranks[step][name] = values
        for step in self.steps:
            yield Moment(step, job.get(step, {}), ranks.get(step, {}), facts)


@cache
def numbers() -> Mapping[str, Number]:
    """Every number of `numbers.toml` by name."""
    text = files("flowledger.diagnose.alarms").joinpath("numbers.toml").read_text(encoding="utf-8")
    return {name: Number(name=name, **row) for name, row in tomllib.loads(text).items()}


def facts_of(ledger: Ledger) -> Facts:
    """What the run says of itself once."""
    manifest = ledger.directory.manifest
    planned = {}
    for name, column in (("memory_allocated", "allocated"), ("memory_reserved", "reserved")):
        (row,) = ledger.rows(f"SELECT max({column}) AS most FROM memory WHERE source = 'plan' AND kind = 'total'")
        if row["most"] is not None:
            planned[name] = float(row["most"])
    return Facts(config=manifest.config, sizes=manifest.bindings, planned=planned)


def numbers_of(ledger: Ledger, metrics: Collection[str], of_ranks: Collection[str]) -> Numbers:
    """The numbers with these names, and of the ranks those of `of_ranks`. What the ledger lacks is not in it."""
    ledger.settle("walked", "cut_steps")
    found, series = Numbers(), series_of(ledger)
    canonical = _raw_names(ledger)
    found.names = {*series.told, *canonical}
    for name in sorted(set(metrics) | set(of_ranks)):
        if name in numbers():
            _ask(ledger, numbers()[name], found)
        else:
            kept = name if name in series.told else canonical.get(name, name)
            if by_step := series.by_step(kept):
                found.job[name] = by_step
            if name in of_ranks and (by_rank := series.by_rank(kept)):
                found.ranks[name] = by_rank
    found.resumed = _resumed(ledger)
    return found


def _raw_names(ledger: Ledger) -> dict[str, str]:
    """What a framework calls a metric -> the name under which the run keeps it."""
    rows = ledger.rows("SELECT DISTINCT raw_name, name FROM metrics WHERE source <> 'plan' AND raw_name <> name")
    return {row["raw_name"]: row["name"] for row in rows}


def _ask(ledger: Ledger, number: Number, found: Numbers) -> None:
    if not number.of_ended and ledger.directory.state == "closed":
        return
    if number.ranks > 1 and ledger.rows("SELECT count(DISTINCT rank) AS n FROM processes")[0]["n"] < number.ranks:
        return
    cut = set() if number.cut else {row["step"] for row in ledger.rows("SELECT step FROM cut_steps")}
    by_rank: dict[int, dict[int, float]] = {}
    for row in ledger.rows(number.sql):
        step, value = row["step"], row["value"]
        if value is None or step in cut:
            continue
        job = found.job.setdefault(number.name, {})
        job[step] = max(job.get(step, float("-inf")), float(value))
        if row["rank"] is not None:
            by_rank.setdefault(step, {})[row["rank"]] = float(value)
        if row.get("note"):
            who = "" if row["rank"] is None else f"rank {row['rank']}: "
            before = found.notes.get((number.name, step))
            found.notes[number.name, step] = f"{before}; {who}{row['note']}" if before else f"{who}{row['note']}"
    if by_rank:
        found.ranks[number.name] = by_rank


def _resumed(ledger: Ledger) -> set[int]:
    """The first step of each process that took over the rank of another."""
    rows = ledger.rows(
        "WITH firsts AS (SELECT process, role, rank, min(step) AS step, min(monotonic_ns) AS began FROM walked "
        "JOIN (SELECT process, wall_ns AS monotonic_ns FROM processes) USING (process) WHERE rank IS NOT NULL GROUP BY ALL) "
        "SELECT step FROM firsts QUALIFY row_number() OVER (PARTITION BY role, rank ORDER BY began, process) > 1"
    )
    return {row["step"] for row in rows}
