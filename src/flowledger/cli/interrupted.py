"""Ctrl-C and SIGTERM end a run at once, and after its step at the latest.

Python drops an exception that is raised while a finaliser runs, and a recorded step has thousands of those.
"""

import signal
from types import FrameType

from flowledger.run.signals import SIGNALS

_asked: list[int] = []


def listen() -> None:
    """From now on both raise KeyboardInterrupt, wherever the main thread is; one that this process was told to ignore does not."""
    _asked.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ask)


def check() -> None:
    """Raise KeyboardInterrupt where one was asked for: it may not have been heard."""
    if _asked:
        raise KeyboardInterrupt


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.append(number)
    raise KeyboardInterrupt
