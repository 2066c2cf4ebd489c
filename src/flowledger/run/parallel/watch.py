"""A thread that ends this rank when the run ends elsewhere.

A rank that waits in a collective runs no signal handler and raises nothing until its peers answer. This thread hears
signals (through the interpreter's wakeup descriptor, which is written to wherever the main thread is), the words of other
ranks and their silence. It interrupts the main thread; where that does not listen, it does what must be done last and
ends the process.
"""

import _thread
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from flowledger.flow.errors import BadInput
from flowledger.flow.lost import lost
from flowledger.run.exceptions import told
from flowledger.run.parallel.company import Company, Word
from flowledger.run.place import place_of
from flowledger.run.signals import SIGNALS, unheard

TICK_S = 1.0  # between two looks at the store
GRACE_S = 5.0  # for the main thread to end by itself
# Of a process that does not end by itself.
EXIT_CODES = {"bad_input": 2, "crashed": 1, "died": 1, "silent": 1, "hung": 1, "interrupted": 130}


class Watch:
    """Watches while the context is open, which the main thread enters. `at_end` comes before an end by force."""

    def __init__(self, company: Company, *, at_end: Callable[[Word], None]) -> None:
        self._company, self._at_end, self._parent = company, at_end, os.getppid()
        self._word: Word | None = None
        self._heard, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowledger-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        self._handlers = {number: signal.signal(number, _once) for number in SIGNALS}
        self._mouth, self._fd_before = mouth, signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        os.write(self._mouth, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is _once:  # who ends for a reason stays deaf until it has ended
                signal.signal(number, handler)
        os.close(self._mouth)
        os.close(self._ear)

    def verdict(self, error: BaseException) -> Word:
        """Why the run ends, for a rank whose work ended with `error`: its own reason, or the one that lies behind it."""
        _ignore()
        if isinstance(error, KeyboardInterrupt) or lost(error):
            self._heard.wait(GRACE_S)  # whoever caused it is about to say so, or to be found dead
            if self._word is not None:
                return self._word
        if isinstance(error, KeyboardInterrupt):
            return self._company.say("interrupted", "interrupted")
        this, place = self._company.this, place_of(error)
        if isinstance(error, BadInput):  # outside of a step it is the same for all ranks
            return self._company.say("bad_input", f"{this}{place}: {error}" if place else str(error))
        return self._company.say("crashed", f"{this}{place}: {told(error)}")

    def _run(self) -> None:
        """The thread: look around every TICK_S, and at once when a signal arrives."""
        while not self._over.is_set():
            signalled = self._signalled()
            word = self._reason()
            if signalled and word is None:
                asked = f"{self._company.this} was asked to end (SIGTERM)"
                word = self._company.say("interrupted", "interrupted" if signal.SIGINT in signalled else asked)
            if word is not None:
                self._end(word, interrupt=not signalled)
                return

    def _signalled(self) -> set[int]:
        """The signals that ask this process to end; waits TICK_S for them."""
        if not select.select([self._ear], [], [], TICK_S)[0]:
            return set()
        return set(os.read(self._ear, 512)) & set(SIGNALS)

    def _reason(self) -> Word | None:
        """What has been said, else a death that is seen from here."""
        company = self._company
        try:
            company.beat()
            if (said := company.said()) is not None:
                return said
        except RuntimeError:
            return Word(company.rank, "died", "the store through which the ranks talk is gone, with whoever kept it")
        if os.getppid() != self._parent:
            return company.say("died", f"what had started {company.this} died without a word")
        if (dead := company.dead()) is not None:
            return company.say("died", f"{dead} died without a word", about=dead.rank)
        if (silent := company.silent()) is not None:
            return company.say("silent", f"{silent} {silent.silence}", about=silent.rank)
        return None

    def _end(self, word: Word, *, interrupt: bool) -> None:
        """Tell the main thread; end the process where it does not hear."""
        self._word = word
        self._heard.set()
        if word.kind == "closed" or self._over.is_set():
            return
        if interrupt:
            _thread.interrupt_main()
        if self._over.wait(GRACE_S):
            return
        self._at_end(word)
        os._exit(EXIT_CODES[word.kind])


def _once(number: int, frame: FrameType | None) -> None:
    """The first request to end is heard, and what it sets off is not disturbed by a second."""
    _ignore()
    raise KeyboardInterrupt


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, unheard)
