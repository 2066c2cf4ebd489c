"""A job is recorded from outside, in a process of its own, without a line of it changed; and never at its cost.

The framework is a stand-in that calls what TRL's trainer calls. The real one is recorded where it is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowledger.ledger.reader import Ledger

STAND_IN = Path(__file__).parent / "stand_in"
TRAIN = (
    "from trl.trainer.grpo_trainer import GRPOTrainer; t = GRPOTrainer(); t.train(); print(t.model.weight.sum().item())"
)
CALL = (
    "from trl.trainer.grpo_trainer import GRPOTrainer; GRPOTrainer._save_checkpoint(None, None, None); print('goes on')"
)


def job(code: str = TRAIN, **environment: str) -> subprocess.CompletedProcess[str]:
    """The job in a process of its own, as a user would start it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLOWLEDGER")}
    own |= {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False, timeout=120
    )


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with Ledger(path) as ledger:
        return ledger.query(query)[1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "run"
    done = job(FLOWLEDGER_RUN=str(path))
    assert (done.returncode, done.stderr) == (0, "")
    return path, done.stdout


def test_it_changes_nothing(recorded):
    plain = job()
    assert (plain.returncode, plain.stderr) == (0, "")
    assert recorded[1] == plain.stdout


def test_the_steps_of_a_trainer_are_those_of_the_ledger(recorded):
    spans = rows(
        recorded[0],
        "SELECT step, coalesce(phase, name), stage, micro_batch FROM spans WHERE event <> 'begin' AND step IS NOT NULL"
        " ORDER BY seq",
    )
    one = [
        ("rollout", "rollout", None), ("old_log_prob", "old_log_prob", None), ("ref_log_prob", "ref_log_prob", None),
        ("reward", "reward", None), ("_generate_and_score_completions", None, None),
        *(
            (name, "update_actor", i)
            for i in (0, 1)
            for name in ("forward", "backward", *(("step",) if i else ()), "compute_loss")
        ),
        ("update_actor", "update_actor", None), ("step", None, None),
    ]  # fmt: skip
    in_order = [(step, *span) for step in (0, 1) for span in one]
    assert sorted(map(str, spans)) == sorted(map(str, in_order))
    begun = rows(recorded[0], "SELECT count(*) FILTER (event = 'begin'), count(*) FILTER (event = 'end') FROM spans")
    assert begun[0][0] == begun[0][1]


def test_its_tensors_have_the_flows_names_and_their_own_shapes(recorded):
    found = rows(
        recorded[0],
        "SELECT DISTINCT stage, tensor_name, dims, local_shape, micro_batch FROM tensors WHERE step = 1",
    )
    assert {
        ("rollout", "response_ids", "B_prompt*G, S_resp", (8, 5), None),
        ("old_log_prob", "old_log_prob", "B_prompt*G, S_resp", (8, 5), None),
        ("ref_log_prob", "full_sequence", "B_prompt*G, S_prompt + S_resp", (8, 11), None),
        ("reward", "reward_components", "B_prompt*G, N_reward", (8, 1), None),
        ("advantage", "advantage", "B_prompt*G", (8,), None),
        ("update_actor", "new_log_prob", "B_micro, S_resp", (4, 5), 1),
    } <= {(stage, name, dims, tuple(shape), micro) for stage, name, dims, shape, micro in found}


def test_its_metrics_are_kept_under_its_own_names(recorded):
    assert rows(recorded[0], "SELECT DISTINCT raw_name, value FROM metrics WHERE raw_name = 'reward'") == [
        ("reward", 0.5)
    ]


def test_the_manifest_says_what_was_recorded(recorded):
    manifest = json.loads((recorded[0] / "manifest.json").read_text())
    assert (manifest["state"], manifest["framework"], manifest["framework_version"]) == ("closed", "trl", "1.16.0")


def test_who_only_imports_a_framework_leaves_no_trace(tmp_path):
    done = job("import trl.trainer.grpo_trainer", FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "run").exists()


def test_without_the_variable_nothing_of_the_recorder_is_imported():
    code = "import sys, trl.trainer.grpo_trainer; print([m for m in sys.modules if m.startswith('flowledger')])"
    assert job(code).stdout.strip() == "[]"


def test_a_name_that_another_version_lacks_is_a_finding(tmp_path):
    source = (STAND_IN / "trl/trainer/grpo_trainer.py").read_text().replace("_save_checkpoint", "_save")
    package = tmp_path / "trl" / "trainer"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "grpo_trainer.py").write_text(source)
    code = CALL.replace("_save_checkpoint(None, None, None)", "log(None, {})")
    done = job(code, PYTHONPATH=f"{tmp_path}:{STAND_IN}", FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    found = rows(tmp_path / "run", "SELECT message FROM findings WHERE id = 'probe_missed'")
    assert found == [
        (
            "trl.trainer.grpo_trainer:GRPOTrainer._save_checkpoint is not there (wanted versions >=1.16,<1.17); "
            "what it does is not recorded",
        )
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FLOWLEDGER_LEVEL": "all"}, "level = 'all' must be one of steps, tensors, tokens"),
        ({"FLOWLEDGER_GROUPS": "many"}, "FLOWLEDGER_GROUPS = 'many' must be a whole number, such as 1"),
        ({"FLOWLEDGER_RUN": "/proc/run"}, "cannot make run /proc/run"),
    ],
)
def test_bad_settings_are_one_line_and_the_training_goes_on(tmp_path, settings, said):
    done = job(CALL, **{"FLOWLEDGER_RUN": str(tmp_path / "run")} | settings)
    (line,) = done.stderr.splitlines()
    assert said in line and "this process is not recorded" in line
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_a_run_of_another_job_is_not_written_to(tmp_path, recorded):
    before = sorted(path.name for path in recorded[0].rglob("*"))
    done = job(CALL, FLOWLEDGER_RUN=str(recorded[0]))
    (line,) = done.stderr.splitlines()
    assert "belongs to another job" in line
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert sorted(path.name for path in recorded[0].rglob("*")) == before


def test_a_process_of_the_same_job_joins_and_a_fork_has_a_part_of_its_own(tmp_path):
    forked = f"{TRAIN}\nimport os\npid = os.fork()\nt.train(1)\npid and os.waitpid(pid, 0)"
    done = job(forked, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    steps = rows(
        tmp_path / "run", "SELECT process, list(DISTINCT step ORDER BY step) FROM spans WHERE name = 'step' GROUP BY 1"
    )
    assert sorted(steps for _, steps in steps) == [[0, 1, 2], [2]]


def test_an_error_of_its_own_reaches_no_import_and_no_call(tmp_path):
    broken = "import flowledger.record.attach as a; a.maker = None\n" + CALL
    done = job(broken, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "is not watched: TypeError" in done.stderr and "Traceback" not in done.stderr
    broken = "import flowledger.record.enrol as e; e.enrol = None\n" + CALL
    done = job(broken, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowledger: the recorder failed: TypeError") and "not recorded" in line


def test_processes_that_a_job_starts_belong_to_it_and_so_do_ranks_of_one_torchrun(tmp_path):
    held = CALL.replace("print('goes on')", "import time; time.sleep(2)")
    both = f"""
import os, subprocess, sys
each = [dict({{}}), {{"TORCHELASTIC_RUN_ID": "a"}}]
for more in (each[:1] * 2, each[1:] * 2):
    run = os.environ["FLOWLEDGER_RUN"] + str(len(more[0]))
    for one in [subprocess.Popen([sys.executable, "-c", {held!r}], env=os.environ | e | {{"FLOWLEDGER_RUN": run}}) for e in more]:
        one.wait()
"""
    done = job(both, FLOWLEDGER_RUN=str(tmp_path / "many"))
    assert (done.returncode, done.stderr) == (0, "")
    assert [len(list((tmp_path / f"many{n}" / "parts").iterdir())) for n in (0, 1)] == [2, 2]
