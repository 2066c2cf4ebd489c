"""TRL's own trainer, recorded: nothing of it changes, and the ledger has every tensor and stage of its two steps."""

import sys
from collections.abc import Sequence
from pathlib import Path

import launch
import metrics
import pytest

from flowledger.ledger.reader import Ledger

RECORD = (sys.executable, "-m", "flowledger", "record")
B, G, MICRO, S_RESP = 16, 4, 8, launch.RESPONSE_TOKENS  # samples of a process, of a prompt, of a micro-batch
TENSORS = {
    ("prompt", "prompt_ids"), ("rollout", "response_ids"), ("rollout", "response_mask"),
    ("reward", "reward_components"), ("ref_log_prob", "full_sequence"), ("ref_log_prob", "ref_log_prob"),
    ("advantage", "advantage"), ("update_actor", "full_sequence"), ("update_actor", "advantage"),
    ("update_actor", "response_mask"), ("update_actor", "new_log_prob"), ("update_actor", "entropy"),
    ("update_actor", "policy_loss"),
}  # fmt: skip


@pytest.mark.timeout(3 * launch.TIMEOUT_S)
@pytest.mark.parametrize("processes", [1, 2])
def test_recording_changes_nothing_and_the_ledger_has_all_of_it(folder: Path, tmp_path: Path, processes: int) -> None:
    job = launch.trl(folder, processes=processes)
    plain = metrics.timeless(launch.run(job, tmp_path / "plain.txt"))
    for level in ("tensors", "tokens"):
        run = tmp_path / level
        printed = launch.run(
            job, tmp_path / f"{level}.txt", prefix=(*RECORD, "-o", str(run), "--level", level, "--ops-every", "1", "--")
        )
        assert metrics.timeless(printed) == plain and len(plain) == launch.STEPS
        with Ledger(run) as ledger:
            _is_whole(ledger, processes, plain)


def _is_whole(ledger: Ledger, processes: int, plain: Sequence[dict[str, float]]) -> None:
    def rows(query: str) -> list[tuple[object, ...]]:
        return ledger.query(query)[1]

    assert rows("SELECT message FROM findings WHERE verdict IN ('fail', 'warn')") == []
    for rank in range(processes):
        for step in range(launch.STEPS):
            here = f"rank = {rank} AND step = {step}"
            assert set(rows(f"SELECT DISTINCT stage, tensor_name FROM tensors WHERE {here}")) >= TENSORS
            stages = rows(f"SELECT stage FROM spans WHERE event = 'end' AND stage IS NOT NULL AND {here} ORDER BY seq")
            assert stages == [("rollout",), ("ref_log_prob",), ("reward",), ("update_actor",)]
            micro = rows(
                f"SELECT micro_batch, phase FROM spans WHERE phase IS NOT NULL AND event <> 'begin' AND {here} ORDER BY seq"
            )
            assert micro == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward"), (1, "step")]
            shapes = dict(
                rows(f"SELECT tensor_name, max(local_shape) FROM tensors WHERE stage = 'rollout' AND {here} GROUP BY 1")
            )
            assert shapes["response_ids"][0] == B and shapes["response_ids"][1] <= S_RESP  # type: ignore[index]
            new = rows(f"SELECT DISTINCT local_shape[1] FROM tensors WHERE tensor_name = 'new_log_prob' AND {here}")
            assert new == [(MICRO,)]
    told = rows("SELECT value FROM metrics WHERE raw_name = 'loss' AND rank = 0 ORDER BY seq")
    assert [round(value, 3) for (value,) in told] == [round(step["loss"], 3) for step in plain]  # type: ignore[call-overload]
    if processes > 1:
        assert rows("SELECT count(*) > 0 FROM spans WHERE span_kind = 'comm'") == [(True,)]
