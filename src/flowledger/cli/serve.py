"""`watch RUN --serve`: the live page beside the alarms, for as long as somebody wants it."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from typer.core import TyperCommand

from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from socket import socket

    from flowledger.ledger.reader import Ledger
    from flowledger.show.page.book import Book

OPTION = "--serve"
LOOK_S = 0.5  # between two looks whether there is a run
PATIENCE = 20.0  # findings are looked for again after so many times the seconds that looking took


class WithAddress(TyperCommand):
    """A verb whose `--serve` may stand alone, before another option, before the run, or at the end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--serve` becomes `--serve=` where what follows is no address."""
        return super().parse_args(ctx, filled(args))


def filled(words: Sequence[str]) -> list[str]:
    """The words with `--serve=` for a `--serve` that is followed by no address."""
    from flowledger.show.page.address import is_address

    following = [*words[1:], ""]
    return [
        f"{OPTION}=" if word == OPTION and not is_address(after) else word
        for word, after in zip(words, following, strict=True)
    ]


class Told:
    """Makes the book of a run that goes on. To look for findings takes longer than all else: it begins with what the run's own
    recorder has found, and looks now and then."""

    def __init__(self) -> None:
        self._run, self._again_at = "", 0.0
        self._last: Book | None = None

    def __call__(self, ledger: "Ledger", planned: "Ledger | None") -> "Book":
        from flowledger.cli.in_chinese import with_chinese
        from flowledger.cli.page import book, metrics, settle
        from flowledger.show.page.book import Book

        manifest, before = ledger.directory.manifest, self._run
        self._run = f"{manifest.run} {manifest.created} {ledger.directory.state}"
        if self._run != before and ledger.directory.state == "open":
            settle(ledger)
            self._last = Book(ledger=ledger, findings=with_chinese(ledger.rows("FROM findings_view")))
            self._again_at = 0.0
        elif self._last is None or self._run != before or time.monotonic() > self._again_at:
            began = time.monotonic()
            self._last = book(ledger, planned)
            self._again_at = time.monotonic() + PATIENCE * (time.monotonic() - began)
            return self._last
        settle(ledger)
        return Book(
            ledger=ledger, planned=planned, findings=self._last.findings, metrics=metrics(ledger), agreement=self._last.agreement
        )  # fmt: skip


def serve(run: Path, where: str, plan: Path | None, lang: str, alarms: Callable[[], int]) -> int:
    """Serve the page of a run, and watch it; how many alarms fired. Waits for a run that is not there yet, and for the one after.

    `alarms`: watches the run to its end. Raises BadInput where the address cannot be had; KeyboardInterrupt while a run goes on.
    """
    from flowledger.ledger.directory import open_run
    from flowledger.show.page.address import address_of, bind

    check_place(run)
    if plan is not None:
        open_run(plan)
    with server(bind(address_of(where)), Asked(run=str(run), plan=str(plan) if plan else None, lang=lang)) as urls:
        say(f"the page is at {' or '.join(urls)}")
        fired = 0
        before = ""
        while True:
            try:
                before = wait_for(run, before)
            except KeyboardInterrupt:
                if not before:
                    raise
                return fired
            fired += _watched(run, alarms)
            say("the page stays; Ctrl-C ends it")


@contextmanager
def server(listening: "socket", asked: "Asked") -> "Iterator[Sequence[str]]":
    """Serve in a process of its own; the URLs, any of which opens it. It ends with the block, and with this process however that ends: its input does.

    It is in a process group of its own: Ctrl-C is for this one.
    """
    from flowledger.show.page.door import Door

    door = Door.of(listening)
    words = [sys.executable, "-P", "-c", "from flowledger.cli.serve import serve_here; serve_here()"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listening.fileno()], process_group=0)
    assert process.stdin is not None
    process.stdin.write(
        msgspec.json.encode((asked, listening.fileno(), door)) + b"\n"
    )  # the token is nobody else's to see
    process.stdin.flush()
    listening.close()
    try:
        yield door.urls
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Asked(msgspec.Struct, kw_only=True):
    """What the server's process is told."""

    run: str
    plan: str | None
    lang: str


def serve_here() -> None:
    """In the process: serve until the input ends."""
    from socket import socket

    from flowledger.cli.in_chinese import with_chinese
    from flowledger.show.page.door import Door
    from flowledger.show.page.serving import Served, serve

    asked, number, door = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[Asked, int, Door])
    plan = Path(asked.plan) if asked.plan else None
    served = Served(run=Path(asked.run), plan=plan, make=Told(), said=with_chinese, lang=asked.lang)
    serve(served, door, socket(fileno=number), sys.stdin.buffer.read)


def _watched(run: Path, alarms: Callable[[], int]) -> int:
    """How many alarms fired. A run that is removed while it is watched is over, and another may follow."""
    try:
        return alarms()
    except BadInput as error:
        if _is_there(run):
            raise
        say(str(error))
        return 0


def wait_for(run: Path, before: str) -> str:
    """Which run is there, once it is another one than before."""
    from flowledger.ledger.directory import open_run
    from flowledger.show.page.growing import identity

    told = False
    while True:
        if _is_there(run) and (found := identity(open_run(run))) != before:
            return found
        if not before and not told:
            told = True
            say(f"there is no run at {run} yet; waiting for it")
        time.sleep(LOOK_S)


def check_place(run: Path) -> None:
    """Raises BadInput for a path that has something else than a run; one that is free or empty may become a run."""
    from flowledger.cli.watch import check_run
    from flowledger.ledger.directory import open_run

    if run.is_file() or (run.is_dir() and any(run.iterdir())):
        check_run(run)
        open_run(run)


def _is_there(run: Path) -> bool:
    from flowledger.ledger.directory import MANIFEST

    return (run / MANIFEST).is_file() and ((run / "parts").is_dir() or any(run.glob("*.parquet")))


def say(text: str) -> None:
    """A line beside what is printed of the run."""
    print(f"flowledger: {text}", file=sys.stderr, flush=True)
