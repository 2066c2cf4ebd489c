"""`flowledger selftest` as a user types it: which faults, faults from a file, the matrix, and one clear line for bad input."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowledger.cli import injection, injection_checks, injections
from flowledger.diagnose.faults import table

Call = Callable[..., tuple[int, str, str]]

OWN = """
from dataclasses import replace
from flowledger.diagnose.faults import Fault

def half(original):
    def reward(**words):
        made = original(**words)
        return replace(made, reward=made.reward / 2)
    return reward

def quit(original):
    def reward(**words):
        raise SystemExit(0)
    return reward

FAULTS = [
    Fault(id="quits", what="the job ends itself", patch={"flowledger.run.stages:reward": quit}, expects=["call_failed"], starts=1),
    Fault(id="half_reward", what="rewards are halved", patch={"flowledger.run.stages:reward": half}, starts=1),
    {"id": "nothing", "what": "the loop as it is", "config": {"optim.lr": 1e-4}, "expects": ["masks_nest"], "starts": 0},
]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def test_faults_of_a_file_are_put_in_and_those_that_nobody_notices_are_missed(call: Call, own: Path) -> None:
    code, out, _ = call("selftest", "--faults", own, "--jobs", 1, "--json")
    told = json.loads(out)
    assert code == 1  # two of three are no 95 %
    assert told["summary"] == {
        "faults": 3, "caught": 2, "clean_runs": 0, "false_alarms": 0, "missed": ["nothing"], "waiting": [],
    }  # fmt: skip
    quits, half, nothing = told["rows"]
    assert (quits["status"], quits["caught_by"]) == ("caught", ["call_failed"])
    assert (half["id"], half["status"], half["step"], half["after"]) == ("half_reward", "caught", 1, 0)
    assert "reward_sum_wrong" in half["caught_by"]
    assert nothing["fired"] == []


def test_the_matrix_and_a_ledger_that_is_kept(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call("selftest", "loss_mask_left", "--clean", 0, "--keep", tmp_path / "kept")
    assert code == 0
    assert "1 of 1 faults caught within two steps" in out
    row = next(line for line in out.splitlines() if "loss_mask_left" in line)
    assert "loss_mask_wrong" in row
    assert "(+0)" in row
    code, out, _ = call("sql", tmp_path / "kept" / "loss_mask_left", "select max(step) as last from tokens")
    assert (code, "2" in out) == (0, True)


def test_of_a_fault_that_is_run_for_a_step_more_only_the_longer_run_is_kept(tmp_path: Path) -> None:
    for steps in (1, 2):
        run = tmp_path / f"run{steps}"
        (run / "parts" / f"actor-r0-host-{steps}").mkdir(parents=True)
        (run / "manifest.json").write_text("{}")
        injection.keep_only(run, tmp_path / "kept")
    assert [part.name for part in (tmp_path / "kept" / "parts").iterdir()] == ["actor-r0-host-2"]


def test_the_list_runs_nothing(call: Call) -> None:
    code, out, _ = call("selftest", "--list", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["id"] for row in rows] == [one.id for one in table()[0]]
    _, quick, _ = call("selftest", "--list", "--quick")
    assert 10 <= len(quick.splitlines()) < len(rows)


def test_faults_that_wait_are_listed_and_not_counted(call: Call) -> None:
    waits = [one for one in table()[0] if one.needs]
    code, out, _ = call("selftest", waits[0].id, "--jobs", 1, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["summary"]["faults"] == 0
    assert told["summary"]["waiting"] == [waits[0].id]


BAD = {
    "an id that is none": ((), ("masks_shifted",), "'masks_shifted' is no fault"),
    "no file": ((), ("--faults", "nothing.py"), "nothing.py: there is no such file"),
    "no FAULTS": ("x = 1", (), "it needs FAULTS"),
    "a file that raises": ("1 / 0", (), "it raised ZeroDivisionError"),
    "no Python": ("FAULTS = [", (), "it raised SyntaxError"),
    "an id of ours": (
        "from flowledger.diagnose.faults import Fault\nFAULTS = [Fault(id='loss_mask_left', what='', config={'seed': 2})]",
        (), "has the id of one of ours",
    ),
    "an id twice": ("FAULTS = [{'id': 'a', 'what': '', 'config': {'seed': 1}}] * 2", (), "two faults have the id 'a'"),
    "a setting that is none": (
        "FAULTS = [{'id': 'a', 'what': '', 'config': {'optim.rate': 1}}]", (), "unknown key optim.rate",
    ),
    "a function that is not there": (
        "FAULTS = [{'id': 'a', 'what': '', 'patch': {'flowledger.run.stages:rewrd': lambda f: f}}]", (),
        "there is no function flowledger.run.stages:rewrd to be replaced; did you mean reward?",
    ),
    "a module that is not there": (
        "FAULTS = [{'id': 'a', 'what': '', 'patch': {'flowledger.run.stage:reward': lambda f: f}}]", (), "did you mean flowledger.run.stages?",
    ),
    "a finding that is none": (
        "FAULTS = [{'id': 'a', 'what': '', 'config': {'optim.lr': 1}, 'expects': ['reward_sum_wrnog']}]", (),
        "no finding has the id 'reward_sum_wrnog'; did you mean reward_sum_wrong?",
    ),
    "an id that is a path": (
        "FAULTS = [{'id': '../a/b', 'what': '', 'config': {'optim.lr': 1}}]", ("--keep", "kept"), "such as 'a_b'",
    ),
    "a step far away": (
        "FAULTS = [{'id': 'a', 'what': '', 'config': {'optim.lr': 1}, 'starts': 90}]", (), "starts = 90 should be a step from 0 to 30",
    ),
    "a setting that counts for nothing": (
        "FAULTS = [{'id': 'a', 'what': '', 'config': {'steps': 500}}]", (), "config: steps: a run is as long as",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_line(call: Call, tmp_path: Path, name: str) -> None:
    text, options, said = BAD[name]
    if text:
        (tmp_path / "own.py").write_text(text)
        options = ("--faults", tmp_path / "own.py", *options)
    code, out, err = call("selftest", *options, "--jobs", 1)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_every_fault_of_a_file_is_looked_at_before_one_is_put_in(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injections, "outcomes", lambda *_, **__: pytest.fail("a run began"))
    good = "{'id': 'good', 'what': '', 'config': {'optim.lr': 1e-2}, 'expects': ['grad_norm_spike', 'kl_wrong', 'rank_died']}"
    bad = "{'id': 'bad', 'what': '', 'config': {'optim.rate': 1}}, {'id': 'worse', 'what': '', 'patch': {'flowledger.run.loop:rl_stp': len}}"
    (tmp_path / "own.py").write_text(f"FAULTS = [{good}, {bad}]")
    code, _, err = call("selftest", "--faults", tmp_path / "own.py")
    assert code == 2
    assert [line.partition("fault ")[2][:5] for line in err.splitlines()] == ["'bad'", "'wors"]


def test_every_finding_that_our_own_faults_expect_is_known() -> None:
    asked = {name for fault in table()[0] for name in fault.expects}
    assert asked <= injection_checks.findings_known()
    assert not {"unheard_of", "reward_sum_wrnog"} & injection_checks.findings_known()
