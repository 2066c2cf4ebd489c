"""A job is recorded from outside, in a process of its own, without a line of it changed; and never at its cost.

The framework is a stand-in that calls what TRL's trainer calls. The real one is recorded where it is installed.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from flowledger.flow.seams import Probe
from flowledger.ledger.directory import open_run
from flowledger.ledger.reader import Ledger
from flowledger.record.adapters import trl
from flowledger.record.attach import wants
from flowledger.record.watch import Watch
from flowledger.tables.metrics import find

STAND_IN = Path(__file__).parent / "stand_in"
TRAIN = (
    "from trl.trainer.grpo_trainer import GRPOTrainer; t = GRPOTrainer(); t.train(); print(t.model.weight.sum().item())"
)
OTHERS = """
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
def broken(*_): raise ValueError("broken")
def train(step, t, **changed):
    t.state.global_step = step
    for name, value in changed.items(): setattr(t, name, value)
    try: t.train()
    except ValueError:
        if step == 60: raise
    return t
train(10, GRPOTrainer(adapter=True))
train(20, RLOOTrainer())
train(30, GRPOTrainer(evaluates=True))
t = GRPOTrainer()
forward = t.model.forward
t.model.forward = lambda ids: broken() if torch.is_grad_enabled() else forward(ids)
train(40, t)
t = GRPOTrainer()
t.accelerator.clip_grad_norm_ = broken
train(50, t)
train(60, GRPOTrainer(), _prepare_inputs=broken)
"""
CALL = (
    "from trl.trainer.grpo_trainer import GRPOTrainer; GRPOTrainer._save_checkpoint(None, None, None); print('goes on')"
)


def job(code: str = TRAIN, **environment: str) -> subprocess.CompletedProcess[str]:
    """The job in a process of its own, as a user would start it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLOWLEDGER")}
    # A process that was forked has none of its parent's threads, and would wait for them in an operator.
    own |= {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False, timeout=120
    )


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with Ledger(path) as ledger:
        return ledger.query(query)[1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "run"
    done = job(FLOWLEDGER_RUN=str(path), FLOWLEDGER_LEVEL="tokens", FLOWLEDGER_GROUPS="2")
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
        *((name, "update_actor", i) for i in (0, 1) for name in ("forward", "backward", "compute_loss")),
        *((name, "update_actor", None) for name in ("clip_grad_norm_", "step", "update_actor")),
        ("log", None, None), ("step", None, None),
    ]  # fmt: skip
    assert spans == [(step, *span) for step in (0, 1) for span in one]
    begun = rows(recorded[0], "SELECT count(*) FILTER (event = 'begin'), count(*) FILTER (event = 'end') FROM spans")
    assert begun[0][0] == begun[0][1]


def test_its_tensors_have_the_flows_names_and_their_own_shapes(recorded):
    found = rows(
        recorded[0],
        "SELECT DISTINCT stage, tensor_name, dims, local_shape, micro_batch FROM tensors WHERE step = 1",
    )
    assert {
        ("prompt", "prompt_ids", "B_prompt*G, S_prompt", (8, 6), None),
        ("prompt", "attention_mask", "B_prompt*G, S_prompt", (8, 6), None),
        ("rollout", "response_ids", "B_prompt*G, S_resp", (8, 5), None),
        ("old_log_prob", "old_log_prob", "B_prompt*G, S_resp", (8, 5), None),
        ("ref_log_prob", "full_sequence", "B_prompt*G, S_prompt + S_resp", (8, 11), None),
        ("reward", "reward_components", "B_prompt*G, N_reward", (8, 2), None),
        ("advantage", "advantage", "B_prompt*G", (8,), None),
        ("update_actor", "prompt_ids", "B_micro, S_prompt", (4, 6), 1),
        ("update_actor", "response_ids", "B_micro, S_resp", (4, 5), 1),
        ("update_actor", "advantage", "B_micro", (4,), 1),
        ("update_actor", "attention_mask", "B_micro, S_prompt + S_resp", (4, 11), 1),
        ("update_actor", "new_log_prob", "B_micro, S_resp", (4, 5), 1),
        ("update_actor", "grad_norm", "", (), None),
    } <= {(stage, name, dims, tuple(shape), micro) for stage, name, dims, shape, micro in found}


def test_its_samples_are_numbered_and_followed_into_their_micro_batches(recorded):
    found = rows(
        recorded[0],
        "SELECT sample_id, group_id, step, versions, prompt_length, response_length, finish_reason, rewards, reward,"
        " [(one.micro_batch, one.stop) FOR one IN trained] FROM samples_merged",
    )
    assert [row[:9] for row in found] == [
        (
            str(n), str(n // 4), n // 8, [n // 8], 5, 1 + n % 8 % 5, "stop" if n % 8 % 5 < 4 else "length",
            {"length": n % 8, "style": None}, n % 8,
        )
        for n in range(16)
    ]  # fmt: skip
    assert [len(row[9]) for row in found] == [1] * 16  # each once, with the 11 tokens of its row
    assert sorted(str(row[9]) for row in found) == [str([(i, 11)]) for i in (0, 1) for _ in range(8)]


def test_a_sample_keeps_its_own_tokens_when_the_batch_is_shuffled(recorded):
    # In the first step the policy is that of before the update: what was scored in order is what the update computes anew.
    found = rows(
        recorded[0],
        "SELECT count(*), count(DISTINCT sample_id), max(abs(new_log_prob - old_log_prob)), count(DISTINCT old_log_prob) > 9"
        " FROM tokens_merged WHERE step = 0 AND response_mask = 1",
    )
    assert found == [(1 + 2 + 3 + 4 + 5 + 1 + 2 + 3, 8, 0.0, True)]
    columns = rows(
        recorded[0],
        "SELECT position, bool_or(attention_mask = 1), count(DISTINCT token_id) FROM tokens_merged WHERE sample_id = '4' GROUP BY 1 ORDER BY 1",
    )
    assert columns == [(position, True, 1) for position in range(1, 11)]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """One job of many trainers, each at steps of its own; the last dies of what the others survive."""
    path = tmp_path_factory.mktemp("others") / "run"
    done = job(OTHERS, FLOWLEDGER_RUN=str(path), FLOWLEDGER_LEVEL="tensors")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: broken")
    return path


def stages_of(path: Path, step: int) -> list[object]:
    query = f"SELECT stage FROM spans WHERE event = 'end' AND step = {step} AND stage IS NOT NULL ORDER BY seq"
    return [stage for (stage,) in rows(path, query)]


def test_the_other_trainer_has_the_same_table(others):
    assert stages_of(others, 21) == ["rollout", "old_log_prob", "ref_log_prob", "reward", "update_actor"]
    shapes = rows(
        others,
        "SELECT DISTINCT stage, dims, mask, local_shape FROM tensors WHERE tensor_name = 'old_log_prob' AND step = 21"
        " ORDER BY ALL",
    )
    assert shapes == [
        ("old_log_prob", "B_prompt*G", None, [8]),
        ("old_log_prob", "B_prompt*G, S_resp", "response_mask", [8, 5]),
        ("update_actor", "B_micro", None, [4]),
    ]
    followed = rows(others, "SELECT count(*), sum(len(trained)) FROM samples_merged WHERE step = 21")
    assert followed == [(8, 8)]


def test_an_adapter_that_is_off_is_the_reference_and_not_the_old_policy(others):
    assert stages_of(others, 11) == ["rollout", "old_log_prob", "ref_log_prob", "reward", "update_actor"]


def test_what_is_generated_to_evaluate_is_none_of_the_steps_samples(others):
    assert stages_of(others, 31) == ["rollout", "old_log_prob", "ref_log_prob", "reward", "update_actor", "validate"]
    assert rows(others, "SELECT count(*) FROM samples_merged WHERE step = 31") == [(8,)]


@pytest.mark.parametrize(
    ("step", "message"),
    [(40, "update_actor/forward raised ValueError: broken"), (50, "update_actor raised ValueError: broken"),
     (60, "step raised ValueError: broken")],
)  # fmt: skip
def test_an_exception_between_two_calls_is_a_finding_and_closes_what_was_open(others, step, message):
    assert rows(others, f"SELECT message FROM findings WHERE id = 'call_failed' AND step = {step}") == [(message,)]
    assert rows(others, f"FROM open_spans WHERE step = {step}") == []


def test_an_exception_that_ends_the_job_is_how_the_run_ended(others):
    assert json.loads((others / "manifest.json").read_text())["state"] == "crashed"


def test_its_metrics_have_canonical_names_beside_its_own(recorded):
    found = rows(
        recorded[0],
        "SELECT DISTINCT name, raw_name, value FROM metrics WHERE step = 1 AND name NOT LIKE 'recorder/%' AND name <> 'loss'",
    )
    assert sorted(found) == [
        ("lr", "learning_rate", 0.1),
        ("num_items_in_batch", "num_items_in_batch", 21.0),
        ("response_length/mean", "completions/mean_length", 2.625),
        ("reward/mean", "reward", 3.5),
    ]


def test_every_canonical_name_that_a_framework_is_given_is_one():
    known = tomllib.loads((files("flowledger.tables") / "metric_names.toml").read_text(encoding="utf-8"))
    assert {name: find(name) for table in known.values() for name in table.values() if find(name) is None} == {}


def test_numbers_and_sizes_are_told_at_every_level():
    told = {probe.target.rpartition(".")[2] for probe in trl.PROBES if wants("steps", probe)}
    assert {"log", "train", "_maybe_log_save_evaluate", "compute_loss"} <= told
    assert "_generate_and_score_completions" not in told  # a call between stages, which has no number of its own


def test_two_paths_that_lead_nowhere_do_not_lead_to_the_same():
    watch = Watch(Probe(stage=None, target="", only_if={"model": "self.ref_model"}), print, "tensors")
    assert not watch.concerns({}, None)
    assert not watch.concerns({"model": None}, None)
    assert watch.concerns({"model": print, "self": {"ref_model": print}}, None)


def test_the_manifest_says_what_was_recorded(recorded):
    manifest = json.loads((recorded[0] / "manifest.json").read_text())
    assert (manifest["state"], manifest["framework"], manifest["framework_version"]) == ("closed", "trl", "1.16.0")
    assert manifest["bindings"] == {"G": 4, "B": 8, "V": 11, "H": 11, "B_prompt": 2}


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
    code = CALL.replace("_save_checkpoint(None, None, None)", "log(GRPOTrainer.__new__(GRPOTrainer), {})")
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


CHILD = f"""
import os, time
{CALL}
open(os.environ["HERE"] + "/joined", "w")
while not os.path.exists(os.environ["HERE"] + "/go"): time.sleep(0.05)
"""
LEAVES_FIRST = f"""
import os, subprocess, sys, time
{CALL}
subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not os.path.exists(os.environ["HERE"] + "/joined"): time.sleep(0.05)
"""


@pytest.mark.parametrize(("end", "state"), [("", "closed"), ("raise ValueError", "crashed")])
def test_the_last_to_leave_closes_the_run(tmp_path, end, state):
    code = LEAVES_FIRST.replace("CHILD", repr(CHILD + end))
    done = job(code, FLOWLEDGER_RUN=str(tmp_path / "run"), HERE=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(tmp_path / "run").state == "open"  # though who has made it is gone
    (tmp_path / "go").touch()
    until = time.monotonic() + 20
    while open_run(tmp_path / "run").manifest.state == "open" and time.monotonic() < until:
        time.sleep(0.05)
    assert open_run(tmp_path / "run").manifest.state == state
    parts = [json.loads(file.read_text()) for file in (tmp_path / "run").glob("parts/*/process.json")]
    assert sorted(part["ended"] for part in parts) == ["closed", state]


def test_processes_that_leave_at_once_leave_a_closed_run(tmp_path):
    many = f"""
import os, signal
{CALL}
for n in range(6):
    if os.fork() == 0:
        GRPOTrainer._save_checkpoint(None, None, None)
        if n == 0: os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit
while True:
    try: os.wait()
    except ChildProcessError: break
"""
    done = job(many, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(tmp_path / "run").manifest.state == "closed"  # one was killed, and is not waited for
    assert len(list((tmp_path / "run/parts").iterdir())) == 7
