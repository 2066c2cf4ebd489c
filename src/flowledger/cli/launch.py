"""`--nproc N`: the ranks of this machine, started through torchrun, watched, and their run finished by this process."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowledger.cli import hang
from flowledger.cli.finish import deaf, finish
from flowledger.cli.ranks import LAUNCHER
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.ledger.directory import RunDirectory
    from flowledger.run.parallel.torchrun import Outcome


ENDED = {0: "closed", 2: "crashed", 130: "interrupted"}  # exit code -> state of the run; crashed for any other
SPOKEN = (1, 2, 130)  # exit codes of ranks that said why, or ended because of another


def launch(config: Path, overrides: Sequence[str], nproc: int, path: Path | None, *, tables: bool, quiet: bool) -> None:
    """Run as `nproc` ranks and end as they did: exit code 0, 2 for bad input, 130 interrupted, 1 for anything else."""
    from flowledger.run.parallel import torchrun

    out = [] if path is None else ["-o", str(path)]
    words = ["-m", "flowledger", "run", str(config), *overrides, *out, *(["-q"] if quiet else [])]
    outcome = torchrun.launched(nproc, words, _environment(nproc))
    code, told = _exit_code(outcome), ""
    try:
        with deaf():
            book = _book(path)
            if book is not None:
                book.close(ENDED.get(code, "crashed"), book.manifest.recorder)
            told = "" if code == 130 else _reason(outcome, book)
            with suppress(*(() if code == 0 else (BadInput,))):  # what ended the run is what must be heard
                if book is not None:
                    finish(book.path, tables=tables and code == 0)
    finally:
        for line in told.splitlines():
            print(f"flowledger: {line}", file=sys.stderr)
    if code:
        raise typer.Exit(code)


def _reason(outcome: "Outcome", book: "RunDirectory | None") -> str:
    """What a rank has said or seen, else how one ended that could not speak; all others ended because of it."""
    for one in outcome.failed:
        if one.said is not None:
            return one.said
    if book is not None and (seen := hang.recorded_in(book.path)):
        return seen
    silent = (one for one in outcome.failed if one.code not in (*SPOKEN, -signal.SIGTERM))
    return next((f"{one.described}{_place(book, one.rank)}" for one in silent), "")


def _environment(nproc: int) -> dict[str, str]:
    """What ranks inherit: who launched them, their share of the cores, and no chatter from torch's C++."""
    share = max(1, (os.cpu_count() or 1) // nproc)
    wanted = {"OMP_NUM_THREADS": str(share), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {LAUNCHER: str(os.getpid())} | {key: os.environ.get(key, value) for key, value in wanted.items()}


def _exit_code(outcome: "Outcome") -> int:
    codes = {one.code for one in outcome.failed}
    if outcome.interrupted or (codes and codes <= {130, -signal.SIGTERM}):
        return 130
    return 0 if not codes else 2 if 2 in codes else 1


def _book(path: Path | None) -> "RunDirectory | None":
    """The run, if the ranks came so far as to make it."""
    from flowledger.ledger.directory import open_run

    with suppress(BadInput):
        return None if path is None else open_run(path)
    return None


def _place(book: "RunDirectory | None", rank: int) -> str:
    """` in update_actor, step 3`: where a rank was when it wrote for the last time, a second before its end at most."""
    from flowledger.ledger.reader import Ledger

    if book is None:
        return ""
    with Ledger(book.path) as ledger:
        last = ledger.rows(
            "SELECT stage, step FROM spans WHERE rank = ? AND stage IS NOT NULL ORDER BY t_ns DESC LIMIT 1", [rank]
        )
    return f" in {last[0]['stage']}, step {last[0]['step']}" if last else ""
