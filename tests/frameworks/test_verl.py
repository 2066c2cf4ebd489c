"""verl's own trainers, recorded: nothing of them changes, and the ledger has every tensor and stage of their two steps."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
import metrics
import pytest

from flowledger.ledger.reader import Ledger

RECORD = (sys.executable, "-m", "flowledger", "record")
B, MICRO, P, R = 16, launch.MICRO_BATCH, 64, launch.RESPONSE_TOKENS
STEPS = range(1, launch.STEPS + 1)
RESUMED = launch.STEPS + 1
KEPT = """SELECT rank, split_part(name, '_', 2) AS what, value FROM metrics
    WHERE starts_with(name, 'checkpoint/' || ? || '_') ORDER BY ALL"""
TRAINERS: dict[str, Callable[..., launch.Launch]] = {"v0": launch.verl_v0, "v1": launch.verl_v1}
IN_WORKER = {
    ("old_log_prob", "full_sequence"), ("old_log_prob", "new_log_prob"), ("old_log_prob", "entropy"),
    ("ref_log_prob", "full_sequence"), ("ref_log_prob", "new_log_prob"),
    *(("update_actor", name) for name in (
        "full_sequence", "position_ids", "prompt_ids", "response_ids", "response_mask", "loss_mask", "rollout_log_prob",
        "old_log_prob", "ref_log_prob", "advantages", "returns", "new_log_prob", "policy_loss",
    )),
}  # fmt: skip
IN_DRIVER = {
    ("old_log_prob", "old_log_prob"), ("ref_log_prob", "ref_log_prob"), ("advantage", "advantages"),
    ("advantage", "returns"), ("advantage", "token_level_reward"), ("advantage", "response_mask"),
}  # fmt: skip


@pytest.mark.timeout(5 * launch.TIMEOUT_S)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_recording_changes_nothing_and_the_ledger_has_all_of_it(trainer: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    kept = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=2")
    job = TRAINERS[trainer](folder, settings=(*kept, "trainer.resume_mode=disable"))
    replay = {
        "REPLAY": str(tmp_path / "rollouts"),
        "VERL_USE_EXTERNAL_MODULES": "replay",
        "PYTHONPATH": str(launch.HERE),
    }
    sampled, again = (
        metrics.timeless_verl(launch.run(job, tmp_path / f"{name}.txt", **replay)) for name in ("sampled", "again")
    )
    assert len(again) == launch.STEPS
    _agree(trainer, sampled, again)  # else nothing could be said of a recorded one
    run = tmp_path / "run"
    printed = launch.run(
        job, tmp_path / "recorded.txt", prefix=(*RECORD, "-o", str(run), "--level", "tokens", "--"), **replay
    )
    _agree(trainer, metrics.timeless_verl(printed), again)
    with Ledger(run) as ledger:
        _is_whole(ledger, trainer, metrics.of_verl(printed))
        written = ledger.rows(KEPT, ["written"])
    more = (*kept, "trainer.resume_mode=auto", f"trainer.total_training_steps={RESUMED}")
    _resume(TRAINERS[trainer](folder, settings=more), tmp_path / "resumed", written)


def _resume(job: launch.Launch, run: Path, written: list[dict[str, Any]]) -> None:
    """One step more, from what was kept: it is what was written, and steps and weights are counted on."""
    launch.run(job, run.with_suffix(".txt"), prefix=(*RECORD, "-o", str(run), "--level", "tokens", "--"))
    with Ledger(run) as ledger:
        assert ledger.rows("SELECT id, message FROM findings WHERE verdict IN ('fail', 'warn')") == []
        assert written and ledger.rows(KEPT, ["restored"]) == written
        assert ledger.rows("SELECT DISTINCT step FROM tensors WHERE role IS NOT NULL") == [{"step": RESUMED}]
        samples = ledger.rows("SELECT step, versions, finish_reason FROM samples_merged")
        ended = ledger.rows("SELECT finish_reason, count(*) AS n FROM requests GROUP BY ALL ORDER BY ALL")
    assert [(row["step"], row["versions"]) for row in samples] == [(RESUMED, [RESUMED - 1])] * B
    told = Counter(row["finish_reason"] for row in samples)
    assert [(row["finish_reason"], row["n"]) for row in ended] == sorted(told.items())  # as the engine says itself


def _agree(trainer: str, one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """V0: digit for digit. V1 takes rows from its queue as they come, and sums of floats know the order: there two runs
    without a recorder differ too, by rounding in the first step and, in bfloat16, by more in the next."""
    if trainer == "v0":
        assert one == other
        return
    for name, value in one[0].items():
        summed = 2e-2 if name.endswith("_seq") else 2e-3  # exponentials of what all tokens of a sample differ by
        assert value == pytest.approx(other[0][name], rel=2e-3, abs=summed), name
    assert one[0].keys() == other[0].keys()
    for mine, theirs in zip(one, other, strict=True):
        sampled = {
            name
            for name in mine
            if name.startswith(("critic/score", "response_length", "prompt_length", "global_seqlen"))
        }
        assert {name: mine[name] for name in sampled} == pytest.approx(
            {name: theirs[name] for name in sampled}, rel=1e-5
        )


def _is_whole(ledger: Ledger, trainer: str, printed: list[dict[str, float]]) -> None:
    def rows(query: str) -> list[tuple[Any, ...]]:
        return ledger.query(query)[1]

    assert rows("SELECT id, message FROM findings WHERE verdict IN ('fail', 'warn')") == []
    assert {"weights_arrived", "metrics_agree"} <= {
        name for (name,) in rows("SELECT id FROM findings WHERE verdict = 'pass'")
    }
    roles = {role for (role,) in rows("SELECT role FROM processes")}
    assert roles == {"launcher", "driver", "actor", "rollout", "reward", *(["agent_loop"] if trainer == "v1" else [])}
    for step in STEPS:
        _step(rows, trainer, step)
    samples = rows("SELECT step, group_id, versions, response_length, reward, trained FROM samples_merged")
    assert len(samples) == B * launch.STEPS
    assert all(versions == [step - 1] and len(trained) == 1 for step, _, versions, _, _, trained in samples)
    assert len({group for _, group, *_ in samples}) == 4 * launch.STEPS
    for step, told in zip(STEPS, printed, strict=True):
        of_step = [(length, reward) for at, _, _, length, reward, _ in samples if at == step]
        assert sum(length for length, _ in of_step) / B == pytest.approx(told["response_length/mean"])
        assert sum(reward for _, reward in of_step) / B == pytest.approx(told["critic/score/mean"], rel=1e-5)
    assert len(rows("SELECT value FROM metrics WHERE name = 'weight_sync/sent_bytes'")) == launch.STEPS + 1
    (written,) = rows("SELECT value FROM metrics WHERE name = 'checkpoint/written_bytes'")
    assert written[0] > 0


def _step(rows: Callable[[str], list[tuple[Any, ...]]], trainer: str, step: int) -> None:
    """One step, in the worker and in the driver."""
    in_worker = f"step = {step} AND process LIKE 'actor-r0-%' AND role IS NOT NULL"
    worker = set(rows(f"SELECT DISTINCT stage, tensor_name FROM tensors WHERE {in_worker}"))
    assert worker >= IN_WORKER, IN_WORKER - worker
    driver = set(
        rows(f"SELECT DISTINCT stage, tensor_name FROM tensors WHERE step = {step} AND process LIKE 'driver-%'")
    )
    assert driver >= IN_DRIVER, IN_DRIVER - driver
    stages = rows(
        f"SELECT stage FROM spans WHERE event = 'end' AND span_kind = 'stage' AND stage IS NOT NULL AND {in_worker} "
        "AND stage <> 'checkpoint' ORDER BY seq"
    )
    assert stages == [("old_log_prob",), ("ref_log_prob",), ("update_actor",), ("weight_sync",)]
    micro = rows(f"SELECT count(*) FROM spans WHERE name = 'forward_step' AND {in_worker} GROUP BY stage")
    assert micro == [(B // MICRO,)] * 3
    shapes = rows(
        "SELECT DISTINCT local_shape[1], padding, mask_ratio < 1 FROM tensors WHERE tensor_name = 'new_log_prob' AND "
        + in_worker
    )
    assert shapes and all(shape[:2] == (MICRO, "jagged") for shape in shapes)
    prompts = rows(
        f"SELECT DISTINCT local_shape[2], padding FROM tensors WHERE tensor_name = 'prompt_ids' AND {in_worker}"
    )
    assert all(
        padding == "left" and width == P if trainer == "v0" else padding == "jagged" for width, padding in prompts
    )
