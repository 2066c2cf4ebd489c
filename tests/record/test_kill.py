"""A run killed with SIGKILL stays readable, and lacks at most its last second."""

import os
import signal
import time
from pathlib import Path

from flowledger.ledger.reader import Ledger
from tests.cli.forked import forked, in_step

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_killed_run_is_readable_and_lacks_at_most_the_last_second(tmp_path) -> None:
    run = tmp_path / "run"
    with forked(tmp_path, "run", EXAMPLES / "tiny.yaml", "steps=10000", "-o", run, "-q") as child:
        child.until(lambda: in_step(run, 5))
        child.send(signal.SIGKILL)
        killed_ns = time.monotonic_ns()
        assert child.ended() == -signal.SIGKILL
    with Ledger(run) as ledger:
        assert ledger.directory.state == "crashed"
        last = ledger.rows("SELECT max(t_ns) AS t FROM spans")[0]["t"]
        steps = ledger.rows(
            "SELECT count(DISTINCT step) AS n FROM spans WHERE stage = 'update_actor' AND event = 'end'"
        )
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)  # processes for each core: above 1, a second takes longer
    assert (killed_ns - last) / 1e9 < max(1.0, waiting)
    assert steps[0]["n"] >= 1
    assert ledger.torn <= len(list(run.glob("parts/*/*.jsonl")))  # the last line of each file at most
