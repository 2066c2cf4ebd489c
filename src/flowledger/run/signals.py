"""The signals that ask a process to end, and how to be deaf to them."""

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def unheard(number: int, frame: FrameType | None) -> None:
    """A handler in place of SIG_IGN: Python complains of a signal that arrives while it gives that."""
