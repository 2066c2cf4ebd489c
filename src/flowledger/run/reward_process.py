"""The near end of the reward process: starts it early, sends jobs, keeps the time limit, restarts it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.run.reward_worker import Unsendable, encode, read_frame, write_frame

STARTUP_LIMIT_S = 120.0  # importing what rewards need; not counted against any sample
ENDING_S = 5.0  # for a process that closed its output to end by itself, with its own exit code


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule said of one sample: a number, a number per response token, or why there is none."""

    value: float | list[float] | None
    failed: str | None = None  # reward_error or reward_timeout
    error: str | None = None


class RewardProcess:
    """One process for all rule rewards. It starts at once and is waited for when first needed."""

    def __init__(self, setup: Mapping[str, Any], *, timeout_s: float) -> None:
        self._setup, self._timeout_s = setup, timeout_s
        try:
            encode(setup)
        except Unsendable as error:
            raise BadInput(f"reward.components or data.task_options hold what cannot be sent: {error}") from None
        self._process = self._start()
        self._ready = False

    def wait_ready(self) -> None:
        """Block until it has imported what it needs. Raises BadInput with what it says when it cannot."""
        if self._ready:
            return
        if not self._readable(STARTUP_LIMIT_S):
            self._kill()
            raise BadInput(f"the reward process was not ready after {STARTUP_LIMIT_S:.0f} s; what does its import do?")
        told = read_frame(self._output)
        if told is None:
            raise BadInput(
                f"the reward process ended while it started (exit code {self._kill(ENDING_S)}); see its output above"
            )
        if "error" in told:
            raise BadInput(told["error"])
        self._ready = True

    def ask(self, jobs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict per job, in order. A job that exceeds its time, or ends the process, costs a restart."""
        refused = _unsendable(jobs)
        asked = iter(self._ask([job for number, job in enumerate(jobs) if number not in refused]))
        return [refused[number] if number in refused else next(asked) for number in range(len(jobs))]

    def _ask(self, jobs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while len(verdicts) < len(jobs):
            self.wait_ready()
            with contextlib.suppress(BrokenPipeError):  # it died between two batches: reading says so
                write_frame(self._input, jobs[len(verdicts) :])
            verdicts += self._answers(len(jobs) - len(verdicts))
        return verdicts

    def close(self) -> None:
        """End the process: by closing its input, and by force when it does not listen."""
        if self._process.poll() is None:
            self._input.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        self._kill()

    def _answers(self, count: int) -> list[Verdict]:
        """The answers to the jobs just sent, up to the first that needs a new process."""
        verdicts: list[Verdict] = []
        while len(verdicts) < count:
            if not self._readable(self._timeout_s):
                self._restart()
                text = f"no reward within {self._timeout_s:g} s (reward.timeout_s)"
                return [*verdicts, Verdict(None, "reward_timeout", text)]
            told = read_frame(self._output)
            if told is None:
                code = self._restart(ENDING_S)
                return [*verdicts, Verdict(None, "reward_error", f"the reward ended its process (exit code {code})")]
            error = told.get("error")
            verdicts.append(Verdict(told.get("value"), "reward_error" if error else None, error))
        return verdicts

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "flowledger.run.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C reaches the loop alone, and a kill reaches what a reward has started
        )
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        with contextlib.suppress(BrokenPipeError):  # it could not even start: reading says so
            write_frame(self._input, self._setup)
        return process

    def _restart(self, patience_s: float = 0.0) -> int | None:
        code = self._kill(patience_s)
        self._process, self._ready = self._start(), False
        return code

    def _kill(self, patience_s: float = 0.0) -> int | None:
        """The exit code; afterwards there is no process, no zombie and no open pipe.

        One that closed its output is ending by itself, and its own exit code says more: it gets `patience_s` for it.
        """
        if self._process.poll() is None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def _readable(self, seconds: float) -> bool:
        """Whether a frame, or the end, arrives in time. The pipe is unbuffered, so the kernel knows all that waits."""
        return bool(select.select([self._output], [], [], seconds)[0])


def _unsendable(jobs: Sequence[Mapping[str, Any]]) -> dict[int, Verdict]:
    """Verdicts of the jobs that no frame can carry, by number. All at once first, since as a rule there is none."""
    try:
        encode(jobs)
    except Unsendable:
        pass
    else:
        return {}
    refused = {}
    for number, job in enumerate(jobs):
        try:
            encode(job)
        except Unsendable as error:
            refused[number] = Verdict(None, "reward_error", f"the sample cannot be sent to the reward: {error}")
    return refused
