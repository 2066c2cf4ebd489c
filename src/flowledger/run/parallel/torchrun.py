"""Start the ranks of one machine through torchrun's agent, in this process, and wait until they have ended."""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flowledger.run.parallel.company import Word

WORD = "flowledger"  # key of an error file
SHUTDOWN_S = 15  # for ranks that are asked to end; longer than their own grace


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank that did not end well: its exit code, or the signal that killed it."""

    rank: int
    pid: int
    code: int  # negative: killed by that signal
    said: Word | None = None  # why the run ended, where it knew

    @property
    def described(self) -> str:
        how = (
            f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        )
        return f"rank {self.rank} ({socket.gethostname()}, pid {self.pid}) {how}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: fine where nothing failed and nobody asked it to stop."""

    failed: tuple[Failed, ...] = ()
    interrupted: bool = False


def launched(nproc: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Outcome:
    """Run `python ARGUMENTS` as `nproc` ranks. When one fails the others are asked to end; there is no restart.

    Takes the handlers of SIGTERM, SIGINT, SIGHUP and SIGQUIT, and passes a signal on to the ranks. From the main thread.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what a user must hear, the ranks and the caller say
    os.environ |= environment
    with tempfile.TemporaryDirectory(prefix="flowledger-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost", metrics_cfg={},
            logs_specs=DefaultLogsSpecs(log_dir=folder), shutdown_timeout=SHUTDOWN_S,
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            failures = sorted(error.failures.items())
            return Outcome(tuple(_failed(rank, failure) for rank, failure in failures))
        except (SignalException, KeyboardInterrupt):
            return Outcome(interrupted=True)
    return Outcome()


def _failed(rank: int, failure: ProcessFailure) -> Failed:
    said = failure.error_file_data.get(WORD)
    return Failed(rank, failure.pid, failure.exitcode, Word(**said) if said else None)


def leave_word(word: Word) -> None:
    """Write why the run ends where torchrun looks for it, and shows it as the reason why this rank does."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": word.text, "timestamp": str(int(time.time()))}  # as torch's own `record` writes it
        with suppress(OSError):
            left = {"message": {"message": word.text, "extraInfo": shown}, WORD: asdict(word)}
            Path(file).write_text(json.dumps(left), encoding="utf-8")
