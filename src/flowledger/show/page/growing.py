"""A run that is looked at while it grows: its page as it stands, and each part of a view when it is asked for.

A run whose rows fit into memory is opened again when it has grown. That is simple, and its numbers are those of `show --json` and
of the page as a file, for it is the same ledger read by the same views. So often that reading takes a third of the time at
most. A larger one is added up as it is written (`vast`).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowledger import __version__
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import MANIFEST, RunDirectory, open_run
from flowledger.ledger.reader import Ledger
from flowledger.show.page import document
from flowledger.show.page.book import Book, Rows, Text, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.tally import Tally
from flowledger.show.page.vast import Vast
from flowledger.show.page.views import BY_NAME, VIEWS

Maker = Callable[[Ledger, Ledger | None], Book]  # what the front door says of a run beside its rows
Sayer = Callable[[Rows], Rows]  # findings as the page shows them: what they say in its other language put beside it
FITS = 96 << 20  # bytes of rows: opened, they take about twice as much, and twice again while they are read anew
AT_FIRST, AT_ONCE = 24 << 20, 64 << 20  # bytes in the first look, which a browser may wait for, and in one that follows
PACKED = 8  # times the size of a Parquet file its rows have as text
GONE = "gone"  # the state of a run that was removed while it was looked at
SHARE = 2.0  # a reading is followed by so many times its own seconds without one


class Whole:
    """A run that fits: opened again when it has grown."""

    def __init__(self, planned: Ledger | None, make: Maker) -> None:
        self._planned, self._make = planned, make
        self._seen: object = None
        self._next: Book | None = None
        self._now: Book | None = None
        self._rests_until = 0.0
        self._says: Sequence[Text] = ()

    def prepare(self, directory: RunDirectory) -> bool:
        """Open it anew if it has changed; whether it has."""
        seen = directory.state, frozenset(sizes(directory.path))
        if seen == self._seen or time.monotonic() < self._rests_until:
            return False
        began = time.monotonic()
        ledger = Ledger(directory.path)
        try:
            self._next, self._says = self._make(ledger, self._planned), ()
        except Exception as error:  # noqa: BLE001  whatever cannot be said of the rows, they are shown
            self._next, self._says = Book(ledger=ledger, planned=self._planned), unsaid(error)
        self._seen = seen
        self._rests_until = time.monotonic() + SHARE * (time.monotonic() - began)
        return True

    def book(self, directory: RunDirectory) -> Book:
        """What was opened last. Not while another thread asks something of the book before."""
        if self._next is not None:
            if self._now is not None:
                self._now.ledger.close()
            self._now, self._next = self._next, None
        assert self._now is not None
        return self._now

    def book_of(self, book: Book, view: str, at: Choice) -> Book:
        """All parts of all views are of the same."""
        return book

    def says(self, view: str, at: Choice) -> Sequence[Text]:
        """Nothing where all of it is shown."""
        return self._says if view in ("overview", "signals") else ()

    def close(self) -> None:
        """Let go of it."""
        for book in (self._now, self._next):
            if book is not None:
                book.ledger.close()


class Growing:
    """The run at a path, whether it is there yet or not. `look` and all else may be called from different threads."""

    def __init__(self, run: Path, plan: Path | None, make: Maker, said: Sayer = list, fits: int = FITS) -> None:
        self.path = run
        self.version = 0  # grows with every reading
        self.beat = 0  # with every reading too, as soon as it is done
        self.pulse: dict[str, Any] = {}  # how far the run has come
        self.heard: Callable[[], object] = bool  # called when it has come on, while the rest of its rows is being read
        self.identity = ""  # which run it is: another one may be begun at the same path
        self.is_gone = False  # its directory was removed, and the page shows what was read before
        self._make, self._said, self._fits = make, said, fits
        self._planned = Ledger(plan) if plan else None
        self._reading: Whole | Vast | None = None
        self._tally: Tally | None = None
        self._added = ""  # the run that it is of
        self._adding = threading.Lock()
        self._book: Book | None = None
        self._kept: dict[tuple[str, str], Any] = {}  # parts of this version
        self._lock = threading.RLock()  # a connection answers one question at a time

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read at once."""
        return self._tally is not None and self._tally.growth.left > 0

    def look(self) -> bool:
        """Read what is new, and show it; whether there was anything."""
        return self.read() | self.turn()

    def read(self) -> bool:
        """Add up what is new, and say how far the run has come; whether it has. A run that has gone leaves its page as it was."""
        began = time.time()
        try:
            directory = open_run(self.path)
        except BadInput:
            return False
        with self._adding:
            if self._tally is None or self._added != identity(directory):
                self._tally, self._added = Tally(directory.path), identity(directory)
            tally = self._tally

            def comes_on() -> None:
                self.pulse = {"latest": tally.latest(), "read": tally.read_share(), "looked": began}
                self.beat += 1

            def timed() -> None:
                comes_on()
                self.heard()

            most, over = AT_ONCE if self.beat else AT_FIRST, directory.state != "open"
            if not tally.look(most, over=over, timed=timed) and self.beat:
                return False
            comes_on()
        return True

    def turn(self) -> bool:
        """Show what is there now; whether that is anything new, and it is time for it."""
        try:
            directory = open_run(self.path)
            reading = self._reading_of(directory)
            if reading is None or not (reading.prepare(directory) or self.is_gone):
                return False
            with self._lock, self._adding:
                self._book = reading.book(directory)
                before, self._reading = self._reading, reading
                if before is not None and before is not reading:
                    before.close()
                self.identity = identity(directory)
                self._turned(is_gone=False)
        except BadInput:  # it is not there yet, or no more, or its files are being set aside
            return self._misses()
        return True

    def _misses(self) -> bool:
        """Whether a run that was shown has gone since the last look."""
        if self._book is None or self.is_gone or (self.path / MANIFEST).exists():
            return False
        with self._lock:
            self._turned(is_gone=True)
        return True

    def _turned(self, *, is_gone: bool) -> None:
        self.is_gone = is_gone
        self._kept.clear()
        self.version += 1

    def _reading_of(self, directory: RunDirectory) -> Whole | Vast | None:
        """The one that goes on; a new one for another run, and for one that has outgrown its own."""
        same = self._reading is not None and identity(directory) == self.identity
        if same and isinstance(self._reading, Vast):
            return self._reading
        if sum(size for _, size in sizes(directory.path)) > self._fits:
            there = self._tally is not None and self._added == identity(directory)
            return Vast(self._planned, self._tally, self._said) if there and self._tally else None
        return self._reading if same and self._reading else Whole(self._planned, self._make)

    def document(self, lang: str) -> dict[str, Any]:
        """The page as it opens: its first view, and what there is to choose from in all others."""
        if self._book is None:  # which may take a while: nobody waits for that
            return waiting(self.path, lang)
        with self._lock:
            views = {view.name: self._choices(view.name) for view in VIEWS}
            first = VIEWS[0].name
            views[first]["at"] = dict([self.part(first, Choice())])
            return page_of(lang, {**self.about(), **self.pulse}, views, run=self.identity, version=self.version)

    def _choices(self, name: str) -> dict[str, Any]:
        keys = self.choices(name)
        return {"first": keys[0], "choices": keys, "at": {}}

    def choices(self, name: str) -> list[str]:
        """What there is to choose from in a view, the first is shown first."""
        return [one.key for one in self._chosen(name)]

    def _chosen(self, name: str) -> list[Choice]:
        """The same as choices; one of all where they cannot be made."""

        def make(book: Book) -> list[Choice]:
            with suppress(Exception):  # the view itself says why
                return [*BY_NAME[name].choices(book)] or [Choice()]
            return [Choice()]

        with self._lock:
            found: list[Choice] = [Choice()] if self._book is None else self._remembered(name, "choices", make)
            return found

    def part(self, name: str, at: Choice) -> tuple[str, dict[str, Any]]:
        """(key, data) of a part of a view; of its first one where nothing is chosen."""
        if self._book is None or self._reading is None:
            return at.key, nothing_yet(self.path)
        with self._lock:
            reading = self._reading

            def make(book: Book) -> dict[str, Any]:
                try:
                    with self._adding:
                        of = reading.book_of(book, name, at)
                except BadInput as error:
                    return document.not_shown(str(error))
                made = document.data(BY_NAME[name], of, at)
                return {**made, "missing": [*made.get("missing", ()), *reading.says(name, at)]}

            at = self._chosen(name)[0] if at == Choice() else at
            return at.key, self._remembered(name, at.key, make)

    def about(self) -> dict[str, Any]:
        """What the page is of, and how far it has come."""
        with self._lock:
            told: dict[str, Any] = self._remembered("", "about", document.about) if self._book else {}
            return {**told, "state": GONE} if self.is_gone else told

    def _remembered(self, view: str, key: str, make: Callable[[Book], Any]) -> Any:
        """Made once a version: several browsers ask for the same."""
        assert self._book is not None
        if (view, key) not in self._kept:
            self._kept[view, key] = make(self._book)
        return self._kept[view, key]

    def close(self) -> None:
        """Let go of the ledgers."""
        for one in (self._reading, self._planned):
            if one is not None:
                one.close()


def page_of(lang: str, about: Mapping[str, Any], views: Mapping[str, Any], *, run: str, version: int) -> dict[str, Any]:
    """A live page's document. `live`: what it tells the server to listen for."""
    return {
        "schema": document.SCHEMA, "lang": lang, "live": {"run": run, "version": version}, "about": about,
        "words": document.words(), "views": views,
    }  # fmt: skip


def waiting(path: Path, lang: str) -> dict[str, Any]:
    """The page before there is anything to show."""
    about: dict[str, Any] = {
        "run": path.name, "state": "open", "sources": [], "framework": "", "framework_version": None, "mesh": {},
        "made_by": f"flowledger {__version__}",
    }  # fmt: skip
    views = {view.name: {"first": "", "choices": [""], "at": {"": nothing_yet(path)}} for view in VIEWS}
    return page_of(lang, about, views, run="", version=0)


def nothing_yet(path: Path) -> dict[str, Any]:
    """What every view shows before there is a run, and before it has been read."""
    if (path / MANIFEST).is_file():
        said = text("The run is being read.", "正在读取运行。")
    else:
        said = text(f"There is no run at {path} yet; the page begins when it does.", f"{path} 处还没有运行；运行开始后页面随之开始。")  # fmt: skip
    return {"absent": True, "missing": [said]}


def unsaid(error: Exception) -> list[Text]:
    """What is shown where nothing can be said of the rows."""
    why = str(error)[: document.MOST_TOLD]
    return [text(f"Findings and metrics cannot be shown: {why}", f"无法显示诊断结果与指标：{why}")]


def identity(directory: RunDirectory) -> str:
    """Which run it is: its name, when it was created, and by whom."""
    manifest = directory.manifest
    return f"{manifest.run} {manifest.created} {manifest.launcher.host} {manifest.launcher.pid} {manifest.launcher.started}"


def sizes(path: Path) -> Iterator[tuple[str, int]]:
    """(file, bytes as text) of all that a run's rows are read from: its tables, or its parts where they are not compacted."""
    yield from _files(path)
    yield from _files(path / "plan")
    for part in _entries(path / "parts"):
        yield from _files(Path(part.path))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for found in _entries(folder):
        if found.name.endswith((".jsonl", ".parquet")):
            yield found.path, found.stat().st_size * (PACKED if found.name.endswith(".parquet") else 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
