"""How a run ends, in whatever state: its ledger is checked, compacted and shown, once."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowledger.cli.recorded import Recorded
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger


def finish(path: Path, *, tables: bool, died: str = "") -> None:
    """Check, compact and show what was recorded, in one reading. `died`: which rank did, where one has."""
    from flowledger.ledger.reader import Ledger

    with Ledger(path, external_access=True) as ledger:
        _close_book(ledger, died)
        _conclude(ledger, tables=tables)


@contextmanager
def finished(recorded: Recorded, *, tables: bool) -> Iterator[None]:
    """Finish the run that is recorded inside, however it ends."""
    try:
        yield
    except BaseException:
        with deaf(), suppress(BadInput):  # what ended the run is what must be heard
            if recorded.book is not None:
                finish(recorded.book.path, tables=False)
        raise
    with deaf():
        if recorded.book is not None:
            finish(recorded.book.path, tables=tables)


@contextmanager
def deaf() -> Iterator[None]:
    """Ctrl-C is not heard inside: closing a book takes a second or two, and half closed it would be worth less."""
    import signal

    from flowledger.run.signals import SIGNALS, unheard

    before = [(number, signal.signal(number, unheard)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _close_book(ledger: "Ledger", died: str) -> None:
    """Write the laws' findings into the book and hear them, then compact it."""
    from flowledger.cli import deaths
    from flowledger.diagnose.findings import findings
    from flowledger.ledger import compact, directory, rows, writer

    path, found = ledger.directory.path, findings(ledger)
    ink = writer.Writer(directory.open_run(path).part("actor", 0))
    for finding in (*([deaths.finding(died)] if died else []), *found):
        ink.put(finding)
    ink.close()
    if ink.failure is not None:
        raise BadInput(
            f"what was found in {path} cannot be written: {ink.failure.strerror}; what was recorded is there: flowledger diagnose {path}"
        )
    ledger.heard(rows.FindingRow)
    compact.compact(path, ledger)


def _conclude(ledger: "Ledger", *, tables: bool) -> None:
    """What a run ends with: its tables where asked for, its report, its findings and its own cost."""
    from flowledger.cli import page
    from flowledger.cli.outside import outside
    from flowledger.show import report, terminal

    screen = terminal.console()
    if tables:
        report.draw(ledger, screen)
    marked = ""
    try:
        page.write(ledger, ledger.directory.path / "report.html")
        marked = outside(ledger)  # of the numbers that the page was made of
    except BadInput as error:
        screen.print(f"no report: {error}", markup=False)
    report.conclude(ledger, screen, marked)
