"""`flowledger record -- COMMAND`: the command is launched as it is, its exit code is the verb's, and its run is finished."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parents[1] / "record" / "stand_in"
CALL = "from trl.trainer.grpo_trainer import GRPOTrainer; GRPOTrainer._save_checkpoint(None, None, None); "


def record(out: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "flowledger", "record", "-o", str(out), *options, "--", *command]
    environment = os.environ | {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_launch_is_recorded_checked_and_shown(tmp_path):
    done = record(tmp_path / "run", sys.executable, "-c", CALL + "print('trained')")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trained\n") and "run closed" in done.stdout and "report.html" in done.stdout
    assert (tmp_path / "run" / "spans.parquet").exists() and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("ending", "code", "state"),
    [("raise SystemExit(3)", 3, "crashed"), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "crashed")],
)
def test_a_failure_is_the_commands_own_and_what_was_recorded_is_kept(tmp_path, ending, code, state):
    done = record(tmp_path / "run", sys.executable, "-c", CALL + "import time; time.sleep(1.5); " + ending)
    assert done.returncode == code
    assert f"run {state}" in done.stdout
    assert (tmp_path / "run" / "spans.parquet").exists()


def test_a_command_that_uses_no_known_framework_says_so(tmp_path):
    done = record(tmp_path / "run", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("flowledger: nothing was recorded: ")
    assert not (tmp_path / "run").exists()


def test_the_words_of_the_command_are_its_own_also_without_two_dashes(tmp_path):
    words = [
        sys.executable,
        "-m",
        "flowledger",
        "record",
        "-o",
        str(tmp_path / "run"),
        sys.executable,
        "-c",
        "print(1)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_what_cannot_be_launched_and_a_place_that_is_taken_are_one_line(tmp_path):
    done = record(tmp_path / "run", "no-such-command")
    assert (done.returncode, done.stderr) == (
        2,
        "flowledger: cannot launch 'no-such-command': there is no such command\n",
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    done = record(tmp_path / "taken", sys.executable, "-c", "print(1)")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "never overwritten" in line


def test_ctrl_c_ends_the_command_and_the_run_is_finished(tmp_path):
    words = [sys.executable, "-m", "flowledger", "record", "-o", str(tmp_path / "run"), "--"]
    waits = CALL + "import time; print('up', flush=True); time.sleep(30)"
    environment = os.environ | {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    with subprocess.Popen(
        [*words, sys.executable, "-c", waits], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the job
        said, _ = process.communicate(timeout=60)
    assert process.returncode in (1, 128 + signal.SIGINT)
    assert "run interrupted" in said
