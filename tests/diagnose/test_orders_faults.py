"""Orders over runs of the real loop: faults are found at their step, and a run that is well has none and gets advice alone."""

from pathlib import Path

import pytest

from flowledger.diagnose.findings import findings
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.walk import Diagnosis, diagnose
from flowledger.ledger.reader import Ledger
from tests.diagnose.sick import cause, first
from tests.diagnose.test_laws import lost, record
from tests.run.worlds import config

pytestmark = pytest.mark.usefixtures("rewards_here")


EARLY = tuple(range(150))  # many tokens end a response, so that responses differ in length


def told(path: Path) -> Diagnosis:
    with Ledger(path) as ledger:
        return diagnose(Evidence(books=(ledger,), findings=tuple(findings(ledger))))


def small(steps: int = 2):
    return config(
        seed=1, steps=steps, rollout={"max_response_tokens": 6, "stop_token_ids": EARLY, "samples_per_prompt": 2},
        actor={"micro_batch": {"samples": 1}},
    )  # fmt: skip


def test_lost_samples_break_the_identities_first_and_are_the_cause(tmp_path: Path) -> None:
    """No pass has seen them, so their old log-probs are 0: that shows first, and that they were never trained is why."""
    met = told(record(tmp_path / "run", small(steps=1), [("flowledger.run.batching:shares", lost)], ops_every=0))
    assert first(met) == "instability.identities"
    assert met.cause is not None and met.cause[0] is not None and met.cause[0].id == "instability.data"
    assert "was trained 0 times, not 1, and not dropped" in cause(met)


def test_a_run_that_is_well_fails_nowhere(tmp_path: Path) -> None:
    met = told(record(tmp_path / "run", small(), ops_every=0))
    assert first(met) is None, cause(met)
    assert not met.besides
    assert all(one.order == "advice" for one in met.advice)
    assert sum(answer.verdict == "pass" for _, answer in met.steps) >= 15
