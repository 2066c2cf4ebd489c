"""One of the processes that train together, made by torchrun. They end together, and one of them says why."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flowledger.cli.finish import deaf, finish
from flowledger.cli.recorded import Recorded, train

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig
    from flowledger.run.parallel.company import Company, Word

LAUNCHER = "FLOWLEDGER_LAUNCHER"  # set by `--nproc`, whose process finishes the run and tells of ranks that were killed
STATES = {"interrupted": "interrupted"}  # of a run that ends for a reason; crashed for any other


def join(asked: Callable[[], tuple["RunConfig", Path | None]], *, tables: bool, quiet: bool) -> None:
    """Meet the other ranks and train with them; `asked` reads the configuration, and where the run goes.

    Leaves the process with an exit code where the run does not end well: 2 bad input, 130 interrupted, 1 anything else.
    """
    from flowledger.run.parallel import processes
    from flowledger.run.parallel.company import Company
    from flowledger.run.parallel.watch import Watch

    processes.start()
    company, word = Company.join(), None
    recorded = Recorded(end_all=lambda text: company.say("hung", text).rank == company.rank)
    with Watch(company, at_end=lambda word: _leave(word, company, recorded)) as watch:
        try:
            wrote = _work(asked, company, recorded, quiet=quiet)
            company.say("closed", "")
        except BaseException as error:  # noqa: BLE001  whatever it is, the others must learn of it
            word = watch.verdict(error)
            if word.kind == "crashed" and word.rank == company.rank:
                _keep(error, recorded, company.rank)
    if word is not None:
        _leave(word, company, recorded)
    processes.end()
    if company.rank == 0:
        with deaf():
            recorded.close("closed", wrote)
            if recorded.book is not None and LAUNCHER not in os.environ:
                finish(recorded.book.path, tables=tables)


def _work(
    asked: Callable[[], tuple["RunConfig", Path | None]], company: "Company", recorded: Recorded, *, quiet: bool
) -> Mapping[str, int]:
    """Train; returns what all ranks have written, whose parts are then closed."""
    from flowledger.run.parallel import processes

    settings, path = asked()
    path = processes.agreed(path)
    train(settings, path, recorded, quiet=quiet or company.rank > 0)
    parts: list[dict[str, int]] = processes.everyone(recorded.wrote())
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _leave(word: "Word", company: "Company", recorded: Recorded) -> NoReturn:
    """End this process: its part is closed; rank 0 closes the book, and finishes it where no launcher will."""
    from flowledger.run.parallel.watch import EXIT_CODES

    recorded.stop()
    company.leave()
    if word.rank == company.rank:
        _tell(word)
    if company.rank == 0:
        recorded.close(STATES.get(word.kind, "crashed"), recorded.wrote())
        if recorded.book is not None and LAUNCHER not in os.environ and company.all_left():
            _finish(recorded.book.path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODES[word.kind])  # an orderly exit would wait for peers that are no more


def _finish(path: Path) -> None:
    """Check and show the run; whatever happens, the process is to end after it."""
    try:
        finish(path, tables=False)
    except Exception as error:  # noqa: BLE001
        print(f"flowledger: {path} cannot be checked: {error}", file=sys.stderr)


def _tell(word: "Word") -> None:
    """To torchrun, and so to a launcher; without one, to the user."""
    from flowledger.run.parallel import torchrun

    if word.kind in ("bad_input", "crashed"):
        torchrun.leave_word(word.text)
    if LAUNCHER not in os.environ:
        for line in word.text.splitlines():
            print(f"flowledger: {line}", file=sys.stderr)


def _keep(error: BaseException, recorded: Recorded, rank: int) -> None:
    """Keep where an exception came from, for whoever mends it."""
    if recorded.book is not None:
        text = "".join(traceback.format_exception(error))
        (recorded.book.path / f"traceback-r{rank}.txt").write_text(text, encoding="utf-8")
