"""What `show RUN --html`, `--png` and `watch RUN --serve` put into a page: the run, the plan beside it, and what is said of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowledger.ledger.reader import Ledger
    from flowledger.show.page.book import Book, Metric

# Views that most questions of a page go through, each after those that it is made of: worked out once, two rows of them at a time.
BENEATH = (
    ("spans_view", "waits", "waited_by_stage", "own_seconds", "stage_shares", "step_seconds", "step_begins", "metrics_by_step"),
    ("samples_merged", "tokens_merged", "memory_readings", "peaks", "lifetimes", "shapes"),
)  # fmt: skip
UPON = (("balance_at",), ("stages",))  # of both


def write_html(run: Path, out: Path, *, plan: Path | None, lang: str) -> int:
    """The page of a run as one file; its size in bytes. Raises BadInput where it cannot be read or written."""
    from flowledger.ledger.directory import spared
    from flowledger.show.page import vega

    spared(run, out)
    vega.begin()
    with _uncollected(), book_of(run, plan) as book:
        return _write(book, out, lang)


def write(ledger: "Ledger", out: Path) -> int:
    """The same of a ledger that is open, in English."""
    from flowledger.show.page import vega

    vega.begin()
    with ThreadPoolExecutor(1) as aside:
        return _write(book(ledger, None, aside), out, "en")


def write_png(run: Path, folder: Path, *, plan: Path | None, lang: str) -> "list[Path]":
    """The page's charts as pictures in a folder; the files written. Raises BadInput where nothing can be drawn or written."""
    from flowledger.ledger.directory import spared
    from flowledger.show.page import png

    spared(run, folder)
    with book_of(run, plan) as book:
        return png.write(book, folder, lang)


def _write(book: "Book", out: Path, lang: str) -> int:
    from flowledger.show.page import html
    from flowledger.show.page.document import document

    made = html.page(document(book, lang)).encode()
    try:
        _replace(out.resolve(), made)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from None
    return len(made)


def _replace(target: Path, made: bytes) -> None:
    """Write a file whole or not at all: where the disk is full, the one that was there stays."""
    from flowledger.ledger.directory import write_aside

    if target.is_dir():
        raise IsADirectoryError(EISDIR, "it is a directory; name a file in it")
    if target.exists() and not target.is_file():  # a pipe or a device is written to
        target.write_bytes(made)
        return
    write_aside(target, made)


@contextmanager
def book_of(run: Path, plan: Path | None) -> "Iterator[Book]":
    """The run opened, with everything that is said of it."""
    from threading import Thread

    from flowledger.cli.beside import fits
    from flowledger.ledger.reader import Ledger

    Thread(target=_ahead, daemon=True).start()
    with Ledger(run) as ledger, ThreadPoolExecutor(1) as aside:
        if plan is None:
            yield book(ledger, None, aside)
            return
        with Ledger(plan) as planned:
            fits(ledger, planned)
            yield book(ledger, planned, aside)


def _ahead() -> None:
    """Load what makes a page while the database reads the rows: half a second of Python, which that does not need."""
    from importlib import import_module

    for name in ("diagnose.measures", "cli.in_chinese", "show.page.document", "show.page.html"):
        import_module(f"flowledger.{name}")


@contextmanager
def _uncollected() -> "Iterator[None]":
    """Rows come by the ten thousand and hold no cycles: to look for some took a twentieth of a page's time."""
    import gc

    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def settle(ledger: "Ledger") -> None:
    """Work out what most questions of a page go through."""
    with ThreadPoolExecutor(len(BENEATH)) as pool:
        for rows in (BENEATH, UPON):
            list(pool.map(lambda views: ledger.settle(*views), rows))


def book(ledger: "Ledger", planned: "Ledger | None", aside: ThreadPoolExecutor | None = None) -> "Book":
    """What a page is made of. Where there is a thread `aside`, it makes the metrics while views that show none of them are put together."""
    from flowledger.cli.beside import beside
    from flowledger.cli.in_chinese import with_chinese
    from flowledger.show.page.book import Book, Coming

    settle(ledger)
    agreement, said = beside(ledger, planned)
    told = [*findings(ledger), *said, *([] if planned is None else findings(planned))]
    numbers = metrics(ledger) if aside is None else Coming(aside.submit(metrics, ledger))
    return Book(
        ledger=ledger, planned=planned, findings=with_chinese(_worst_first(told)), metrics=numbers, agreement=agreement
    )  # fmt: skip


def findings(ledger: "Ledger") -> "Sequence[dict[str, Any]]":
    """What a run's recorder found at its end; of one that has not ended, or was imported, what its rows say now."""
    from flowledger.show.plain import clean

    ranks = {
        (row["id"], row["step"], row["message"]): row["rank"]
        for row in ledger.rows("SELECT id, step, message, min(rank) AS rank FROM findings GROUP BY ALL")
    }
    told = [
        row | {"rank": ranks.get((row["id"], row["step"], row["message"]))} for row in ledger.rows("FROM findings_view")
    ]
    if not any(row["order"] == "laws" for row in told) and _has_happened(ledger):
        from flowledger.diagnose.findings import findings as look

        known = {(row["id"], row["message"]) for row in told}
        found = [clean(_row(one)) for one in look(ledger)]
        told += [row for row in found if (row["id"], row["message"]) not in known]
    return _worst_first(told)


def _worst_first(rows: "Sequence[dict[str, Any]]") -> "list[dict[str, Any]]":
    worst = ("fail", "warn", "skipped", "pass")
    return sorted(rows, key=lambda row: worst.index(row["verdict"]))


def _has_happened(ledger: "Ledger") -> bool:
    """Whether anything but a plan is in it."""
    tables = ("spans", "metrics", "tensors", "memory", "samples", "findings")
    listed = " UNION ALL ".join(f"(SELECT 1 FROM {table} WHERE source <> 'plan' LIMIT 1)" for table in tables)
    return bool(ledger.rows(listed))


def _row(finding: Any) -> dict[str, Any]:
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(finding)
    return dict.fromkeys(finding.__struct_fields__) | told


def metrics(ledger: "Ledger") -> "list[Metric]":
    """Every metric that has numbers, recomputed where the rows allow it, with what the table of metrics says of it."""
    from flowledger.diagnose.measures import series_of
    from flowledger.show.page.book import Metric, text
    from flowledger.tables.metrics import find

    series = series_of(ledger)
    found = []
    for name in series.names:
        known = find(name)
        found.append(
            Metric(
                name=name, unit=known.unit if known else "", level=known.level if known else "",
                means=text(known.definition, known.definition_zh) if known else None,
                healthy=known.healthy if known else None, values=series.by_step(name),
                recomputed=series.is_recomputed(name),
            )
        )  # fmt: skip
    return found
