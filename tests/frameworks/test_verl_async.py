"""verl's colocated asynchronous trainer, recorded: samples are learnt of in a later step than they were sampled in."""

import sys
from pathlib import Path

import launch
import metrics
import pytest

from flowledger.ledger.reader import Ledger

RECORD = (sys.executable, "-m", "flowledger", "record")
STEPS, B = 3, 16
SETTINGS = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.resume_mode=disable",
)
STALE = "training/off_policy/trajectory_staleness_worst/max"


@pytest.mark.timeout(2 * launch.TIMEOUT_S)
def test_samples_are_accounted_to_the_step_that_learns_of_them(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed = launch.run(
        launch.verl_v1(folder, settings=SETTINGS), tmp_path / "recorded.txt",
        prefix=(*RECORD, "-o", str(run), "--level", "tokens", "--"),
    )  # fmt: skip
    told = metrics.of_verl(printed)
    assert len(told) == STEPS
    with Ledger(run) as ledger:
        assert ledger.rows("SELECT id, message FROM findings WHERE verdict IN ('fail', 'warn')") == []
        laws = ledger.rows("SELECT id, verdict FROM findings WHERE \"order\" = 'laws'")
        assert [law["verdict"] for law in laws] == ["pass"] * 6
        samples = ledger.rows("SELECT step, trained_in, versions, trained FROM samples_merged")
        stale = ledger.rows(
            "SELECT trained_in, max(trained_in - 1 - list_min(versions)) AS most FROM samples_merged "
            "WHERE trained_in IS NOT NULL GROUP BY trained_in ORDER BY trained_in"
        )
    assert sum(len(sample["trained"] or ()) for sample in samples) == B * STEPS
    assert any(sample["trained_in"] is not None and sample["trained_in"] > sample["step"] for sample in samples)
    assert [row["most"] for row in stale] == [step[STALE] for step in told]  # verl's own count of versions
