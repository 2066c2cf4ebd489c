"""A run killed with SIGKILL stays readable, and lacks at most its last second."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from flowledger.ledger.reader import Ledger

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_killed_run_is_readable_and_lacks_at_most_the_last_second(tmp_path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "flowledger.cli", "run", EXAMPLES / "tiny.yaml", "steps=10000", "-o", run, "-q"]
    child = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while sum(file.stat().st_size for file in run.glob("parts/*/spans-*.jsonl")) < 50_000:
            assert time.monotonic() < deadline, "the run wrote nothing"
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        killed_ns = time.monotonic_ns()
        child.wait()
    with Ledger(run) as ledger:
        assert ledger.directory.state == "crashed"
        last = ledger.rows("SELECT max(t_ns) AS t FROM spans")[0]["t"]
        steps = ledger.rows(
            "SELECT count(DISTINCT step) AS n FROM spans WHERE stage = 'update_actor' AND event = 'end'"
        )
    assert (killed_ns - last) / 1e9 < 1.0
    assert steps[0]["n"] >= 1
    assert ledger.torn <= len(list(run.glob("parts/*/*.jsonl")))  # the last line of each file at most
