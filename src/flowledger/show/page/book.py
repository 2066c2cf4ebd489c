"""What a page is made of: a run, a plan, or the two side by side, and what was said of them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flowledger.ledger.reader import Ledger, Params

T = TypeVar("T")
Rows = list[dict[str, Any]]
SOURCES = ("plan", "record", "import")
Text = dict[str, str]  # language -> the sentence


def text(english: str, chinese: str) -> Text:
    """A sentence in both languages; the page shows the one that is switched on."""
    return {"en": english, "zh": chinese}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric over the steps, with what it means and where it is healthy."""

    name: str
    unit: str = ""
    level: str = ""  # e2e, stage, tensor, parallel, stability, data
    means: Text | None = None
    healthy: tuple[float | None, float | None] | None = None
    values: Mapping[int, float] = field(default_factory=dict)  # step -> number
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Coming(Sequence[T]):
    """A list that is still being made, elsewhere. Who looks into it waits."""

    made: Future[Sequence[T]]

    def __len__(self) -> int:
        return len(self.made.result())

    def __getitem__(self, at: Any) -> Any:
        return self.made.result()[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """`ledger`: the run, or the plan where there is no run. `planned`: the plan beside a run.

    `findings`: rows of the ledger's columns, worst first. `agreement`: what `diff` says of plan and run, row by row.
    """

    ledger: Ledger
    planned: Ledger | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    metrics: Sequence[Metric] = ()
    agreement: Sequence[Mapping[str, Any]] = ()

    @property
    def is_plan(self) -> bool:
        """Whether nothing was recorded: all there is is a plan."""
        return self.sources() == {"plan"}

    def sources(self) -> set[str]:
        """plan, record, import: of which there are rows."""
        return kept(self, "sources", self._sources)

    def _sources(self) -> set[str]:
        tables = ("spans", "tensors", "memory", "metrics", "samples")
        of_each = (
            f"SELECT '{source}' AS source WHERE EXISTS (FROM {table} WHERE source = '{source}')"
            for table in tables
            for source in SOURCES
        )
        return {row["source"] for row in self.ledger.rows(" UNION ".join(of_each))}

    def seen(self, sql: str, params: Params = ()) -> Rows:
        """What happened: the rows of a query, those of a plan left out. The query's rows have `source`."""
        return [row for row in self.ledger.rows(sql, params) if row["source"] != "plan"]

    def expected(self, sql: str, params: Params = ()) -> Rows:
        """What was planned: the same query where the plan is, the plan's rows alone."""
        where = self.planned or self.ledger
        return [row for row in where.rows(sql, params) if row["source"] == "plan"]

    def shown(self, sql: str, params: Params = ()) -> Rows:
        """What happened, where something did; else what was planned."""
        return self.seen(sql, params) or self.expected(sql, params)


def kept(book: Book, what: str, read: Callable[[], T]) -> T:
    """What `read` gives, read once for a ledger; anew each time where rows made elsewhere stand in for some of its views: they change."""
    if book.ledger.changes:
        return read()
    held = book.ledger.worked_out
    if (key := f"page, {what}") not in held:
        held[key] = read()
    found: T = held[key]
    return found
