"""A command line run in the tests' own process."""

import sys
from collections.abc import Callable

import pytest

from flowledger import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flowledger", *map(str, words)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err  # type: ignore[call-overload]

    return run
