"""One of the processes that train together, made by torchrun. They end together, and one of them says why."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flowledger.cli.deaths import last_seen
from flowledger.cli.finish import deaf, finish
from flowledger.cli.recorded import Recorded, on_disk, train
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig
    from flowledger.run.parallel.company import Company, Word

LAUNCHER = "FLOWLEDGER_LAUNCHER"  # set by `--nproc`, whose process finishes the run and tells of ranks that were killed
SPEAKS_S = 2.0  # for the first process of a machine to say what is wrong for all
STATES = {"interrupted": "interrupted"}  # of a run that ends for a reason; crashed for any other


def join(asked: Callable[[], tuple["RunConfig", Path | None]], *, tables: bool, quiet: bool) -> None:
    """Meet the other ranks and train with them; `asked` reads the configuration, and where the run goes.

    Leaves the process with an exit code where the run does not end well: 2 bad input, 130 interrupted, 1 anything else.
    """
    from flowledger.ledger.manifest import Process
    from flowledger.run.parallel import processes
    from flowledger.run.parallel.company import Company
    from flowledger.run.parallel.watch import Watch

    _check(asked)
    processes.start()
    company, word = Company.join(Process.this()), None
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


def _check(asked: Callable[[], object]) -> None:
    """Leave where the configuration cannot be, before others are waited for: as it is the same for all, they leave too.

    The first process of a machine says why; torchrun ends it when another ends, so that these give it the time.
    """
    from flowledger.run.parallel import environment, torchrun
    from flowledger.run.parallel.company import Word

    try:
        asked()
    except BadInput as error:
        torchrun.leave_word(Word(0, "bad_input", str(error)))
        if not environment.first_here():
            time.sleep(SPEAKS_S)
            sys.exit(2)
        if LAUNCHER not in os.environ:
            raise
        sys.exit(2)


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
    from flowledger.run.parallel import torchrun
    from flowledger.run.parallel.company import LOST
    from flowledger.run.parallel.watch import EXIT_CODES

    recorded.stop()
    company.leave()
    torchrun.leave_word(word)
    if word.kind in LOST:
        word = replace(word, text=word.text + _last_seen(word, recorded))
    if word.rank == company.rank and LAUNCHER not in os.environ:
        for line in word.text.splitlines():
            print(f"flowledger: {line}", file=sys.stderr)
    if company.rank == 0:
        recorded.close(STATES.get(word.kind, "crashed"), recorded.wrote())
        if recorded.book is not None and LAUNCHER not in os.environ and company.all_left():
            recorded.close(STATES.get(word.kind, "crashed"), on_disk(recorded.book.path))
            _finish(recorded.book.path, word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODES[word.kind])  # an orderly exit would wait for peers that are no more


def _finish(path: Path, word: "Word") -> None:
    """Check and show the run; whatever happens, the process is to end after it."""
    from flowledger.run.parallel.company import LOST

    try:
        finish(path, tables=False, died=word.text if word.kind in LOST else "")
    except Exception as error:  # noqa: BLE001
        print(f"flowledger: {path} cannot be checked: {error}", file=sys.stderr)


def _last_seen(word: "Word", recorded: Recorded) -> str:
    """Where the rank was that died without a word, as far as the ledger tells."""
    if recorded.book is None or LAUNCHER in os.environ:
        return ""
    try:
        return last_seen(recorded.book.path, word.about)
    except Exception:  # noqa: BLE001  whatever is wrong with the ledger, this process is to end
        return ""


def _keep(error: BaseException, recorded: Recorded, rank: int) -> None:
    """Keep where an exception came from, for whoever mends it."""
    if recorded.book is not None:
        text = "".join(traceback.format_exception(error))
        (recorded.book.path / f"traceback-r{rank}.txt").write_text(text, encoding="utf-8")
