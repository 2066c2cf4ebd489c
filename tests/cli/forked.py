"""A command line in a process of its own, forked from this one: what it would import is there already."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from flowledger import cli

LIMIT_S = 240.0  # a loaded machine takes its time


@dataclass(frozen=True)
class Forked:
    """A `flowledger` that runs, or has run."""

    process: ForkProcess
    place: Path

    @property
    def out(self) -> str:
        return (self.place / "out").read_text()

    @property
    def err(self) -> str:
        return (self.place / "err").read_text()

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that it does."""
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert self.process.is_alive(), self.err
            assert time.monotonic() < deadline, self.out
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def ended(self) -> int | None:
        """Its exit code, waited for."""
        self.process.join(LIMIT_S)
        return self.process.exitcode


@contextmanager
def forked(place: Path, *words: object) -> Iterator[Forked]:
    """`flowledger WORDS`, which does not outlive the test; what it prints goes to files in `place`."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(place, list(map(str, words))))
    process.start()
    try:
        yield Forked(process, place)
    finally:
        process.kill()
        process.join()


def _child(place: Path, words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in its background ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code: object = 0
    with (place / "out").open("w") as out, (place / "err").open("w") as err:
        sys.stdout, sys.stderr, sys.argv = out, err, ["flowledger", *words]
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
    os._exit(code if isinstance(code, int) else 1)  # what the parent registered for its own end is not for its children


def in_step(run: Path, number: int) -> bool:
    """Whether the run has written a span of this step."""
    return any(f'"step":{number},' in spans.read_text() for spans in run.glob("parts/*/spans-*.jsonl"))
