"""All that is known when orders are walked: recorded ledgers, a plan, and what detectors, checks and reports have found."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flowledger.diagnose import diff, shards
from flowledger.diagnose.came_true import REFUTED
from flowledger.diagnose.measures.series import series_of
from flowledger.diagnose.planned import Planned
from flowledger.flow.dims import SYMBOLS
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

# Findings that an end without success leaves in a ledger, the most telling first.
ENDS = ("out_of_memory", "crash", "hang", "rank_died", "call_failed")
GONE = "is gone"  # what a rank says that was cut off, for one that it talks to has ended
# What the recorder says of itself: it hides something, and is no symptom.
ABOUT_RECORDING = (
    "rows_dropped", "version_untested", "probe_missed", "name_unknown", "step_repeated", "recorder_error", "detector_failed",
)  # fmt: skip

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the tests of steps look at. `findings` has those of detectors, of checks of a plan (scope `plan`) and of reports."""

    books: tuple[Ledger, ...] = ()
    planned: Planned | None = None
    findings: tuple[FindingRow, ...] = ()
    known: tuple[FindingRow, ...] = ()  # what is known of such exceptions: guesses that stand behind what the run shows
    limit: int | None = None  # bytes of the planned device
    planned_config: Mapping[str, Any] = field(default_factory=dict)  # resolved, of what was planned
    told_sizes: Mapping[str, int] = field(
        default_factory=dict
    )  # symbol -> size, as the user has told beside the sources
    assumed: frozenset[str] = (
        frozenset()
    )  # symbols whose size is in no source: the reader of the configuration took one
    _asked: dict[str, Rows] = field(default_factory=dict, repr=False)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The rows of every ledger, one after the other; the same question is put once."""
        key = repr((sql, params))
        if key not in self._asked:
            self._asked[key] = [row for book in self.books for row in book.rows(sql, params)]
        return self._asked[key]

    def has(self, table: str) -> bool:
        """Whether anything was recorded in a table."""
        return bool(self.rows(f"SELECT 1 FROM {table} WHERE source <> 'plan' LIMIT 1"))

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, of those that cut anything."""
        found = dict(self.planned.summary.mesh) if self.planned else {}
        for book in self.books:
            found |= {axis: degree for axis, degree in book.mesh.items() if degree > 1 or axis not in found}
        return {axis: degree for axis, degree in found.items() if degree > 1}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Symbol of a dimension -> its size by the configuration: bindings of the runs, what a plan says, what the user told.

        Of a micro-batch or a decode step each rank has its own: these are none of them.
        """
        told = self.planned.sizes if self.planned else {}
        found = {text: size for text, size in told.items() if text in SYMBOLS and text not in shards.RAGGED}
        found |= {text: size for text, size in self.told_sizes.items() if text not in found}
        for book in self.books:
            found |= book.directory.manifest.bindings
        return found

    @cached_property
    def framework(self) -> str:
        """`verl`, `flowledger`, …; empty where nothing says."""
        named = [book.directory.manifest.framework for book in self.books]
        told = [self.planned.summary.framework] if self.planned else []
        return next((name for name in (*told, *named) if name), "")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration: of the plan, else of the first run that keeps one."""
        kept = [book.directory.manifest.config for book in self.books]
        return next((config for config in (self.planned_config, *kept) if config), {})

    @cached_property
    def end(self) -> FindingRow | None:
        """The finding that says how a run ended, where it did not end well; what broke on its own before what was cut off."""
        return min(self.ends, key=lambda one: (one.verdict != "fail", ENDS.index(one.id)), default=None)

    @cached_property
    def ends(self) -> list[FindingRow]:
        """Every finding that says so. A rank that was cut off by the end of another has only been warned of that."""
        return [one for one in self.findings if one.id in ENDS and (one.verdict == "fail" or GONE in one.message)]

    @cached_property
    def words(self) -> str:
        """What ended it, and what reports say: the text in which symptoms are looked for."""
        return "\n".join(line for one in self.ends for line in (one.message, *(one.evidence or ())))

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that have recorded anything."""
        found = self.rows("SELECT DISTINCT rank FROM processes WHERE rank IS NOT NULL AND source <> 'plan'")
        return sorted({row["rank"] for row in found})

    @cached_property
    def beside(self) -> list[diff.Diff]:
        """The plan beside each run of the same job that has recorded steps."""
        return [found for found in (self._beside(book) for book in self.books) if isinstance(found, diff.Diff)]

    @cached_property
    def not_beside(self) -> list[str]:
        """Why a plan stands beside no run, one line each."""
        return [found for found in (self._beside(book) for book in self.books) if isinstance(found, str)]

    def is_refuted(self, finding: FindingRow) -> bool:
        """Whether a check of the plan said that the run would fail, and the run went through it."""
        checks = (one for beside in self.beside for one in beside.checks)
        return finding.scope == "plan" and any(one.check.id == finding.id and one.outcome == REFUTED for one in checks)

    def _beside(self, book: Ledger) -> diff.Diff | str | None:
        if self.planned is None or not book.rows("SELECT 1 FROM tensors WHERE source <> 'plan' LIMIT 1"):
            return None
        try:
            return self._diffs.setdefault(id(book), diff.diff(self.planned, book))
        except BadInput as error:
            return str(error)

    @cached_property
    def _diffs(self) -> dict[int, diff.Diff]:
        return {}

    @cached_property
    def series(self) -> Mapping[str, dict[int, float]]:
        """Metric -> step -> the whole job's value, of everything that was recorded or recomputed."""
        found: dict[str, dict[int, float]] = {}
        for book in self.books:
            series = series_of(book)
            for name in series.names:
                found.setdefault(name, {}).update(series.by_step(name))
        return found

    def figures(self, *names: str) -> Iterator[str]:
        """`grad_norm 0.94 (0.9 to 1.1 over 3 steps)` for each metric that is known."""
        for name in names:
            values = list(self.series.get(name, {}).values())
            if values:
                finite = [value for value in values if value == value]
                ends = f" ({min(finite):.4g} to {max(finite):.4g} over {len(values)} steps)" if len(finite) > 1 else ""
                yield f"{name} {values[-1]:.4g}{ends}"
