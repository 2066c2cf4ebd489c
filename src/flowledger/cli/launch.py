"""`--nproc N`: the ranks of this machine, started through torchrun, watched, and their run finished by this process."""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowledger.cli import hang
from flowledger.cli.deaths import last_seen
from flowledger.cli.finish import deaf, finish
from flowledger.cli.ranks import LAUNCHER
from flowledger.cli.recorded import on_disk
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.ledger.directory import RunDirectory
    from flowledger.run.parallel.company import Word
    from flowledger.run.parallel.torchrun import Outcome


ENDED = {0: "closed", 2: "crashed", 130: "interrupted"}  # exit code -> state of the run; crashed for any other
SPOKEN = (1, 2, 130)  # exit codes of ranks that said why, or ended because of another


def launch(config: Path, overrides: Sequence[str], nproc: int, path: Path | None, *, tables: bool, quiet: bool) -> None:
    """Run as `nproc` ranks and end as they did: exit code 0, 2 for bad input, 130 interrupted, 1 for anything else."""
    from flowledger.run.parallel import torchrun
    from flowledger.run.parallel.company import LOST

    out = [] if path is None else ["-o", str(path)]
    words = ["-m", "flowledger", "run", str(config), *overrides, *out, *(["-q"] if quiet else [])]
    outcome = torchrun.launched(nproc, words, _environment(nproc))
    code, word = _exit_code(outcome), None
    try:
        with deaf():
            book = _book(path)
            if book is not None:
                book.close(ENDED.get(code, "crashed"), book.manifest.recorder if code == 0 else on_disk(book.path))
            word = None if outcome.interrupted else _reason(outcome, None if book is None else book.path)
            with suppress(*(() if code == 0 else (BadInput,))):  # what ended the run is what must be heard
                if book is not None:
                    died = word.text if word is not None and word.kind in LOST else ""
                    finish(book.path, tables=tables and code == 0, died=died)
    finally:
        for line in word.text.splitlines() if word else ():
            print(f"flowledger: {line}", file=sys.stderr)
    if word is not None:
        sys.exit(code)
    if code:
        raise typer.Exit(code)


def _reason(outcome: "Outcome", path: Path | None) -> "Word | None":
    """What a rank has said or seen, else how one ended that could not speak; all others ended because of it.

    A signal is named only where it came before torchrun's agent ended the ranks, which it does with signals too.
    """
    from flowledger.run.parallel.company import LOST, Word

    said = next((one.said for one in outcome.failed if one.said is not None), None)
    if said is not None and said.kind not in LOST:
        return said
    look = hang.seen_in if said is not None and said.kind == "silent" else hang.recorded_in
    if path is not None and (seen := look(path)):
        return Word(0, "hung", seen)
    if said is None:
        gone = [one for one in outcome.failed if one.code not in (*SPOKEN, -signal.SIGTERM)]
        gone.sort(key=lambda one: one.code == -signal.SIGKILL)  # the agent's own, where another ended by itself
    else:
        gone = [one for one in outcome.failed if said.kind == "died" and one.rank == said.about]
    if gone:
        return Word(0, "died", f"{gone[0].described}{last_seen(path, gone[0].rank)}", gone[0].rank)
    return None if said is None else replace(said, text=f"{said.text}{last_seen(path, said.about)}")


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
    """The run, if the ranks came so far as to make it. One that another launch has made there meanwhile is not ours to end."""
    from flowledger.ledger.directory import open_run

    if path is not None:
        with suppress(BadInput):
            book = open_run(path)
            made_by = book.manifest.launcher
            return book if (made_by.host, made_by.pid) == (socket.gethostname(), os.getpid()) else None
    return None
