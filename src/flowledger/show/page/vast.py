"""A run that is too large to be opened: added up by a tally, with the rows of a few ranks beside it.

Two things together give a page what it asks for. What is shown of all steps and ranks stands in the place of the ledger's views,
as the tally has added it up (`Ledger.stand_in`). Of the rows themselves there are those of one rank of each class, which
stands for the others, of the fullest and of the slowest; those of any other rank are read when it is asked for. So the views
need not know how large a run is, and a step costs what it has written.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from flowledger.ledger.directory import RunDirectory
from flowledger.ledger.reader import Ledger
from flowledger.show.page.book import Book, Metric, Rows, Text, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.tally import Tally
from flowledger.tables.metrics import find, over_ranks

RANKS = 8  # whose rows are held beside the tally
ASKED = 3  # ledgers of single ranks that were asked for
ROWS = 64 << 20  # bytes of rows in one of those ledgers; of more, the latest steps
POINTS = 400  # of one metric: more than a chart has pixels for
STALE_S = 10.0
SHARE = 20.0  # the rows of a few ranks are read again after so many times the seconds that it took
BY_STEP = ("step_seconds", "cut_steps", "stages", "peaks")

ADDED_UP = text(
    "This run is large: its numbers are added up over all ranks as they are written. How long ranks waited for one another is not among them, "
    "nor what is recomputed from samples.",
    "此运行很大：各项数字在写入时对所有 rank 累计。不包括 rank 之间相互等待的时间，也不包括由样本重新计算的指标。",
)
ALL_RANKS = text(
    "This run is large: time and peak memory are those of every rank, in the latest steps; all else is of a few ranks that stand for the others.",
    "此运行很大：最近若干步中，时间与峰值显存来自每个 rank；其余内容来自少数代表性 rank。",
)
SOME_RANKS = text(
    "This run is large: shown are the rows of rank {ranks}. Any other is read when it is asked for (#{view}?rank=7).",
    "此运行很大：显示的是 rank {ranks} 的行。其他 rank 在请求时读取（#{view}?rank=7）。",
)


class Vast:
    """One such run, as it grows."""

    def __init__(self, planned: Ledger | None, tally: Tally, said: Callable[[Rows], Rows] = list) -> None:
        self._planned, self._tally, self._said = planned, tally, said
        self._shown: object = None
        self._few: _Few | None = None
        self._asked: OrderedDict[int, _Few] = OrderedDict()
        self._values: dict[str, dict[int, float]] = {}
        self._detail: int | None = None  # the step of which every rank's part stands in

    def prepare(self, directory: RunDirectory) -> bool:
        """Whether more has been added up, or the run has ended."""
        return (self._tally.growth.read, directory.state) != self._shown

    def book(self, directory: RunDirectory) -> Book:
        """What a page is made of now. Not while another thread asks something of the book before, or adds to the tally."""
        tally = self._tally
        self._shown = tally.growth.read, directory.state
        ranks = self._ranks(directory)
        if (
            self._few is None
            or self._few.is_old(tally, ranks)
            or self._few.ledger.directory.manifest != directory.manifest
        ):
            if self._few is not None:
                self._few.ledger.close()
            self._few = _Few(directory, tally, ranks)
            tally.times.changed.update(tally.times.steps())
            tally.metrics.changed.update(tally.metrics.steps)
            self._detail = None
        self._stand_in(self._few.ledger)
        ledger = self._few.ledger
        return Book(
            ledger=ledger,
            planned=self._planned,
            findings=self._said(ledger.rows("FROM findings_view")),
            metrics=self._metrics(),
        )

    def book_of(self, book: Book, view: str, at: Choice) -> Book:
        """The book for a part of a view: where it is of a rank whose rows are not there, with those of that rank."""
        tally = self._tally
        if view == "mesh":
            self._stand_in_detail(book.ledger, at.step)
        if self._few is None or at.rank is None or at.rank in self._few.ranks:
            return book
        found = self._asked.pop(at.rank, None)
        if found is None or found.is_old(tally, [at.rank]):
            if found is not None:
                found.ledger.close()
            found = _Few(book.ledger.directory, tally, [at.rank])
        self._asked[at.rank] = found
        if len(self._asked) > ASKED:
            self._asked.popitem(last=False)[1].ledger.close()
        return Book(ledger=found.ledger, planned=self._planned, findings=book.findings, metrics=book.metrics)

    def says(self, view: str, at: Choice) -> list[Text]:
        """What must be known of a view of a large run: what of it is shown, and what is not."""
        if view in ("overview", "signals"):
            return [ADDED_UP]
        if view == "mesh":
            return [ALL_RANKS]
        ranks = (
            self._few.ranks if self._few is not None and (at.rank is None or at.rank in self._few.ranks) else (at.rank,)
        )
        named = ", ".join(map(str, ranks))
        return [text(SOME_RANKS["en"].format(ranks=named, view=view), SOME_RANKS["zh"].format(ranks=named, view=view))]

    def close(self) -> None:
        """Let go of all ledgers."""
        for few in (self._few, *self._asked.values()):
            if few is not None:
                few.ledger.close()

    def _stand_in(self, ledger: Ledger) -> None:
        """What has changed since the last time."""
        tally = self._tally
        steps = sorted(tally.times.changed | tally.memory.changed)
        timed = [step for step in steps if step in tally.times]
        rows = {"step_seconds": tally.step_seconds, "cut_steps": tally.cut_steps, "stages": tally.stages}
        for view, make in rows.items():
            ledger.stand_in(view, make(timed), steps)
        ledger.stand_in("peaks", tally.peaks(steps), steps)
        named = [*tally.metrics.changed]
        ledger.stand_in("metrics_by_step", tally.metrics_by_step(named), named)
        for step in named:
            for name, one in tally.metrics.steps[step].items():
                if step is not None and (value := one.joined(over_ranks(name))) is not None:
                    self._values.setdefault(name, {})[step] = value
        times = self._values.setdefault("step_time_s", {})
        times.update({row["step"]: row["seconds"] for row in tally.step_seconds(timed) if row["seconds"] is not None})
        for changed in (tally.times.changed, tally.memory.changed, tally.metrics.changed):
            changed.clear()
        if self._detail in steps:
            self._detail = None

    def _stand_in_detail(self, ledger: Ledger, asked: int | None) -> None:
        """Every rank's time and peak in one of the latest steps."""
        tally = self._tally
        step = asked if asked is not None else (tally.latest() or {}).get("step")
        if step is None or step == self._detail:
            return
        self._detail = step
        ledger.stand_in("balance_at", tally.balance(step), [step])
        if peaks := tally.peaks_of_ranks(step):
            ledger.stand_in("peaks", peaks, [step])

    def _ranks(self, directory: RunDirectory) -> list[int]:
        """Whose rows stand for the others': the first of each class, the fullest, the slowest of the last whole step."""
        tally = self._tally
        there = {known.rank for known in tally.processes if known is not None and known.rank is not None}
        classes = [ranks[0] for ranks in directory.manifest.rank_classes.values() if ranks]
        found = [rank for rank in (classes or sorted(there)[:1]) if rank in there][:RANKS]
        if self._few is not None:  # those that were chosen stay: a page that shows one goes on showing it
            return [*dict.fromkeys([*found, *self._few.ranks])]
        if tally.memory.fullest is not None and (rank := tally.rank(tally.memory.fullest.process)) is not None:
            found.append(rank)
        return [*dict.fromkeys(found)]

    def _metrics(self) -> list[Metric]:
        made = []
        for name in sorted(self._values):
            known = find(name)
            made.append(
                Metric(
                    name=name, unit=known.unit if known else "", level=known.level if known else "",
                    means=text(known.definition, known.definition_zh) if known else None,
                    healthy=known.healthy if known else None, values=thinned(self._values[name]),
                )
            )  # fmt: skip
        return made


class _Few:
    """A ledger of a few ranks, and of all processes that have none."""

    def __init__(self, directory: RunDirectory, tally: Tally, ranks: Sequence[int]) -> None:
        began = time.monotonic()
        self.ranks = tuple(ranks)
        self._read = tally.growth.read
        parts = [
            name
            for name, known in zip(tally.names, tally.processes, strict=True)
            if known is None or known.rank is None or known.rank in ranks
        ]
        self.ledger = Ledger(directory.path, parts=parts, steps=_latest_steps(tally, parts))
        now = time.monotonic()
        self._fresh_until = now + max(STALE_S, SHARE * (now - began))

    def is_old(self, tally: Tally, ranks: Sequence[int]) -> bool:
        """Whether there is more to be had by reading again."""
        if set(ranks) - set(self.ranks):
            return True
        return time.monotonic() > self._fresh_until and tally.growth.read > self._read


def _latest_steps(tally: Tally, parts: Sequence[str]) -> range | None:
    """The steps whose rows fit, where those of all do not."""
    size = sum(file.stat().st_size for part in parts for file in tally.growth.where(part).glob("*.jsonl"))
    steps = tally.times.steps()
    if size <= ROWS or not steps:
        return None
    kept = max(1, (steps[-1] - steps[0] + 1) * ROWS // size)
    return range(steps[-1] - kept + 1, steps[-1] + 1_000_000)


def thinned(values: Mapping[int, float], most: int = POINTS) -> dict[int, float]:
    """At most about so many of a metric's numbers: the first, the last, and of each stretch of steps the lowest and the highest."""
    if len(values) <= most:
        return dict(values)
    steps = sorted(values)
    stretch = -(-len(steps) // (most // 2))
    kept = {steps[0], steps[-1]}
    for at in range(0, len(steps), stretch):
        part = steps[at : at + stretch]
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return {step: values[step] for step in sorted(kept)}
