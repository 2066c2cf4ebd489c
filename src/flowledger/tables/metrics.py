"""The canonical metrics: one row each in `metrics.toml`, with unit, definition, level and healthy range.

A foreign metric is an alias of one of these (`metric_names.toml`) or stays raw. Names such as `stage_time_s/<stage>` are patterns: each part
in angle brackets stands for any one word.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from flowledger.flow.errors import BadInput, nearest

LEVELS = ("e2e", "stage", "tensor", "parallel", "stability", "data")
OVER_RANKS = ("mean", "sum", "count", "max", "min")
ROUNDING = 1e-9  # of what may be 1 at most 1.0000000000000004 is not too much
LISTS = ("sources", "mission", "told_by")  # columns that hold several


def lies_within(bounds: tuple[float | None, float | None], value: float) -> bool:
    """Whether a number lies between bounds, both inclusive, where None bounds nothing; but for rounding. NaN lies nowhere."""
    low, high = bounds
    above = low is None or value >= low - ROUNDING * _size(low)
    return not math.isnan(value) and above and (high is None or value <= high + ROUNDING * _size(high))


def _size(bound: float) -> float:
    return abs(bound) if math.isfinite(bound) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a step reports."""

    name: str
    unit: str
    level: str
    definition: str
    definition_zh: str
    sources: tuple[str, ...] = ()  # table.column of the rows that it is made of
    mission: tuple[str, ...] = ()  # words that it answers to where it was asked for
    over_ranks: str = "mean"  # how the whole job's number is made of those of its ranks: one of OVER_RANKS
    healthy: tuple[float, float] | None = None  # low, high; both inclusive
    told_by: tuple[str, ...] = ()  # findings that speak of what is outside of it
    silent: str = ""  # or why none does
    silent_zh: str = ""

    def is_healthy(self, value: float) -> bool | None:
        """Whether a value lies in the healthy range; None when the metric has none. NaN is never healthy."""
        return None if self.healthy is None else lies_within(self.healthy, value)

    def matches(self, name: str) -> bool:
        """Whether a metric's name is this one, or an instance of this pattern."""
        return _words(self.name, name) is not None


@cache
def metrics() -> Mapping[str, Metric]:
    """Every canonical metric by name, level by level."""
    text = files("flowledger.tables").joinpath("metrics.toml").read_text(encoding="utf-8")
    return {raw["name"]: _row(raw) for raw in tomllib.loads(text)["metric"]}


def metric(name: str) -> Metric:
    """The row of a metric, by its name or as an instance of a pattern. Raises BadInput with the nearest known name."""
    found = find(name)
    if found is None:
        raise BadInput(f"no metric is called {name!r}{nearest(name, metrics())}")
    return found


@lru_cache(maxsize=4096)  # asked for each metric of each step
def find(name: str) -> Metric | None:
    """The row of a metric, or None where the name is not canonical. A plain name wins over a pattern."""
    rows = metrics()
    return rows.get(name) or next((row for row in rows.values() if row.matches(name)), None)


@lru_cache(maxsize=4096)
def over_ranks(name: str) -> str:
    """How ranks' numbers of a metric are joined: by the table, and as means where it does not know the name."""
    row = find(name)
    return "mean" if row is None else row.over_ranks


@lru_cache(maxsize=4096)
def canonical(table: str, raw: str) -> str:
    """The canonical name of what a framework calls `raw`, by a table of `metric_names.toml`; where none has it, `raw`."""
    for own, name in _names().get(table, {}).items():
        if (words := _words(own, raw)) is not None:
            for placeholder, word in words.items():
                name = name.replace(f"<{placeholder}>", word)
            return name
    return raw


def name_tables() -> tuple[str, ...]:
    """The tables of `metric_names.toml`, one a framework or an algorithm of one."""
    return tuple(_names())


@cache
def _names() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(files("flowledger.tables").joinpath("metric_names.toml").read_text(encoding="utf-8"))


def _words(pattern: str, name: str) -> dict[str, str] | None:
    """What each placeholder of a pattern stands for in a name; None where the name is none of its instances."""
    if "<" not in pattern:
        return {} if name == pattern else None
    found = _expression(pattern).fullmatch(name)
    return found.groupdict() if found is not None else None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = (f"(?P{part}[^/]+)" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", pattern))
    return re.compile("".join(parts))


def _row(raw: dict[str, object]) -> Metric:
    fields = {key: tuple(value) if key in LISTS else value for key, value in raw.items()}  # type: ignore[arg-type]  # lists
    healthy = fields.pop("healthy", None)
    if isinstance(healthy, list):
        low, high = (float(bound) for bound in healthy)
        fields["healthy"] = (low, high)
    row = Metric(definition_zh=fields.pop("zh"), **fields)  # type: ignore[arg-type]  # TOML, checked below
    if row.level not in LEVELS:
        raise AssertionError(f"metrics.toml: {row.name}: level {row.level!r} is none of {LEVELS}")
    if (row.healthy is not None) != bool(row.told_by or (row.silent and row.silent_zh)):
        raise AssertionError(
            f"metrics.toml: {row.name}: a healthy range goes with told_by, or with silent and silent_zh"
        )
    if row.over_ranks not in OVER_RANKS:
        raise AssertionError(f"metrics.toml: {row.name}: over_ranks {row.over_ranks!r} is none of {OVER_RANKS}")
    return row
