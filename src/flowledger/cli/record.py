"""The verb `record`: any launch of a framework that flowledger knows, recorded from outside without a line changed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowledger.flow.errors import BadInput

Level = Literal["steps", "tensors", "tokens"]
NOTHING = (
    "nothing was recorded: the command has called neither a trainer of verl's or TRL's nor flowledger.recorder() without a "
    "place of its own; the Python that it runs must have flowledger installed"
)


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="what is launched, as always")],
    out: Annotated[Path, typer.Option("-o", metavar="RUN", help="where the run goes; must not exist")],
    level: Annotated[Level, typer.Option("--level", help="steps: spans and metrics; tensors; tokens")] = "tensors",
    ops_every: Annotated[
        int, typer.Option("--ops-every", min=0, help="operator by operator every so many steps; 0: never")
    ] = 0,
    groups: Annotated[int, typer.Option("--groups", min=0, help="at level tokens: groups a step that are kept")] = 1,
    tables: Annotated[bool, typer.Option("--tables", help="end with the ledgers and one sample's passport")] = False,
) -> None:
    """Launch a training and record it: flowledger record -o RUN -- python train_grpo.py …

    Its exit code is the command's own. Every process of the job takes part that has the environment of the launch; where
    processes start elsewhere (another node, a Ray cluster), set FLOWLEDGER_RUN and FLOWLEDGER_JOB there.
    """
    from flowledger.cli.finish import deaf
    from flowledger.ledger.directory import check_free
    from flowledger.record import variables

    path = out.resolve()
    check_free(path)
    environment = os.environ | {
        variables.RUN: str(path), variables.LEVEL: level, variables.OPS_EVERY: str(ops_every), variables.GROUPS: str(groups),
    }  # fmt: skip
    job = environment.setdefault(variables.JOB, variables.new_job())
    code = _launched(command, environment)
    with deaf():
        _conclude(path, job, code, tables=tables)
    if code:
        raise typer.Exit(code)


def _launched(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of the command, 128 + n where signal n ended it. It hears the terminal's signals itself."""
    from flowledger.run.signals import unheard

    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        why = "there is no such command" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadInput(f"cannot launch {command[0]!r}: {why}") from None
    handlers = {signal.SIGINT: unheard, signal.SIGTERM: lambda number, _: process.send_signal(number)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _conclude(path: Path, job: str, code: int, *, tables: bool) -> None:
    """Close the book of the run and show what is in it; a job that nothing was seen of left none."""
    from flowledger.cli.finish import finish
    from flowledger.cli.recorded import on_disk
    from flowledger.ledger.directory import MANIFEST, open_run

    if not (path / MANIFEST).exists():
        nothing = f"the command ended with {code} before anything was recorded" if code else NOTHING
        print(f"flowledger: {nothing}", file=sys.stderr)
        return
    book = open_run(path)
    if book.manifest.job != job:
        return  # another job has made a run there meanwhile, and this one has said that it is not recorded
    state = "closed" if code == 0 else "interrupted" if code in (130, 143) else "crashed"
    book.close(state, book.manifest.recorder or on_disk(path))
    finish(path, tables=tables and code == 0)
