"""The columns that flow and lifetimes share: the stages of a step in their order, those with several phases cut into these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowledger.flow.stages import PHASES, stages
from flowledger.show.page.book import Book, Rows, kept

AFTER = "after the step"
Place = tuple[str, str | None]  # stage, phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """`places` from left to right. `seconds` of each stage, where they are known."""

    places: tuple[Place, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def after(self) -> int:
        """The column behind the last: what is freed when the step is over, or not at all."""
        return len(self.places)

    def begin(self, place: str | None) -> int | None:
        """The column where `stage` or `stage/phase` begins."""
        return next(iter(self._of(place)), None)

    def end(self, place: str | None) -> int | None:
        """The column where `stage` or `stage/phase` ends."""
        return next(reversed(self._of(place)), None)

    def rows(self) -> Rows:
        """As the page has them."""
        known = stages()
        return [
            {
                "stage": stage, "phase": phase, "role": known[stage].role if stage in known else None,
                "seconds": self.seconds.get(stage),
            }
            for stage, phase in self.places
        ]  # fmt: skip

    def _of(self, place: str | None) -> list[int]:
        if place is None:
            return []
        if place == AFTER:
            return [self.after]
        stage, _, phase = place.partition("/")
        whole = [at for at, (name, _) in enumerate(self.places) if name == stage]
        exact = [at for at in whole if phase and self.places[at][1] == phase]
        return exact or whole


def columns(book: Book, step: int | None, uses: Rows, fates: Rows) -> Columns:
    """Every stage that ran or that a tensor was seen in. `uses`: rows of shapes, `fates`: rows of lifetimes."""
    seconds = _seconds(book, step)
    seen = [*_places(uses, fates), *((stage, None) for stage in seconds)]
    order = list(stages())
    names = sorted(
        {stage for stage, _ in seen}, key=lambda name: (order.index(name) if name in order else len(order), name)
    )
    places: list[Place] = []
    for name in names:
        phases = sorted({phase for stage, phase in seen if stage == name and phase}, key=_position)
        places += [(name, phase) for phase in phases] if len(phases) > 1 else [(name, None)]
    return Columns(places=tuple(places), seconds=seconds)


def recorded_shapes(book: Book, step: int | None) -> Rows:
    """The rows of `shapes_at(step)` as they were recorded; read once, for two views of the page are made of them."""
    asked = "FROM shapes" if step is None else f"FROM shapes_at({int(step)})"
    return kept(book, asked, lambda: book.seen(asked))


def planned(book: Book, view: str) -> Rows:
    """The same of the plan, where there is one."""
    return book.expected(f"FROM {view}(NULL)") if "plan" in book.sources() or book.planned else []


def place(row: Mapping[str, Any]) -> str | None:
    """`stage/phase` of a row of shapes."""
    return row["stage"] if row["phase"] is None or row["stage"] is None else f"{row['stage']}/{row['phase']}"


FLOWING = "SELECT source, step, count(DISTINCT tensor_name) AS names, sum(bytes) AS bytes FROM tensors WHERE step IS NOT NULL GROUP BY ALL ORDER BY step"


def steps(book: Book) -> Sequence[int]:
    """The steps that a file holds: the one in which most tensors flow and the largest, then the first and the last."""
    found = kept(book, "steps of tensors", lambda: book.seen(FLOWING))
    if not found:
        return []
    richest = max(found, key=lambda row: (row["names"], row["bytes"] or 0))
    return [*dict.fromkeys(int(row["step"]) for row in (richest, found[0], found[-1]))]


def _places(uses: Rows, fates: Rows) -> Iterator[Place]:
    named: Iterable[str | None] = (place(row) for row in uses)
    if not uses:
        named = (row["born_at"] for row in fates)
    for one in named:
        if one and one != AFTER:
            stage, _, phase = one.partition("/")
            yield stage, phase or None
    for row in fates:  # a stage of which no tensor has a name
        for one in (row["born_at"], row["freed_at"]):
            if one and one != AFTER:
                yield one.partition("/")[0], None


def _seconds(book: Book, step: int | None) -> dict[str, float]:
    """Stage -> the time of the rank that took longest."""
    rows = book.seen(
        "WITH whole AS (SELECT source, process, stage, id, coalesce(max(latency_ms), (max(end_ns) - min(start_ns)) / 1e6) / 1e3 AS seconds "
        "FROM spans WHERE span_kind = 'stage' AND stage IS NOT NULL AND (?::BIGINT IS NULL OR step = ?) GROUP BY ALL), "
        "spent AS (SELECT source, process, stage, sum(seconds) AS seconds FROM whole GROUP BY ALL) "
        "SELECT source, stage, max(seconds) AS seconds FROM spent GROUP BY ALL",
        [step, step],
    )
    return {row["stage"]: row["seconds"] for row in rows}


def _position(phase: str) -> tuple[int, str]:
    # in the order in which a micro-batch goes through them: loading comes before, offloading after
    order = ("load", "forward", "loss", "backward", "step", "offload", *PHASES)
    return (order.index(phase) if phase in order else len(order), phase)
