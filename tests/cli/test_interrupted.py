"""A request to end is heard, even where Python drops the exception that tells of it."""

import os
import signal

import pytest

from flowledger.cli import interrupted
from flowledger.run.signals import SIGNALS


@pytest.fixture(autouse=True)
def listening():
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    interrupted.listen()
    yield
    for number, handler in before:
        signal.signal(number, handler)
    interrupted._asked.clear()


class Last:
    """What a recorder hangs on a tensor's storage, with a signal that arrives while it runs."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # the interpreter looks for signals between two instructions
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_finaliser_swallowed_is_heard_at_the_next_step() -> None:
    interrupted.check()
    thing = Last()
    del thing  # raises nothing
    with pytest.raises(KeyboardInterrupt):
        interrupted.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_elsewhere_it_is_heard_at_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
