"""A command line of a page, run in this process: the imports that each start repeats are no part of what a page says."""

import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from flowledger import cli


def typed(words: str | Sequence[str], place: Path, **environment: str) -> CompletedProcess[str]:
    """`flowledger WORDS`, typed in a directory with these variables set, and this environment's commands on the path."""
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"} | environment
    command = ["flowledger", *(shlex.split(words) if isinstance(words, str) else words)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", command), patch.dict(os.environ, environment), chdir(place),
        redirect_stdout(out), redirect_stderr(err),
    ):  # fmt: skip
        try:
            cli.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
