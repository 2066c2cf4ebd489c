"""What stands in the way of a run while it is recorded is one line at its end, and never the job's concern."""

import os
import shutil
from pathlib import Path

import pytest

from flowledger.ledger.directory import open_run
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow
from flowledger.record import outside
from flowledger.record.enrol import Wanted, asked, enrol


def enrolled(path, **environ):
    return enrol(Wanted(path=path), environ=environ)


@pytest.mark.parametrize(
    "harm",
    [
        shutil.rmtree,
        lambda path: (path / "manifest.json").write_text("{"),
        lambda path: (path / "manifest.json").unlink(),
    ],
    ids=["removed", "overwritten", "no manifest"],
)
def test_a_run_that_is_harmed_while_it_is_recorded_is_one_line(tmp_path, capsys, harm):
    process = enrolled(tmp_path / "run")
    harm(tmp_path / "run")
    process.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowledger: run {tmp_path / 'run'} cannot be closed: ")


def test_a_part_that_cannot_be_read_holds_nobody_up(tmp_path, capsys):
    process = enrolled(tmp_path / "run")
    for name, content in (("cut", b'{"role": "act'), ("empty", b"")):
        (tmp_path / "run" / "parts" / name).mkdir()
        (tmp_path / "run" / "parts" / name / "process.json").write_bytes(content)
    process.close()
    assert (open_run(tmp_path / "run").state, capsys.readouterr().err) == ("closed", "")


def test_a_disk_that_fills_up_is_one_line(tmp_path, capsys, monkeypatch):
    process = enrolled(tmp_path / "run")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    process.ink.put(MetricRow(name="loss", raw_name="loss", value=1.0))
    process.close()
    monkeypatch.undo()
    assert capsys.readouterr().err == f"flowledger: run {tmp_path / 'run'} ends early: No space left on device\n"


def test_an_error_after_a_process_has_joined_reaches_no_call(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    for name in ("_check_version", "_watch_collectives"):
        monkeypatch.setattr(outside, name, broken)
    ends = []
    monkeypatch.setattr(outside.atexit, "register", lambda *args: ends.append(args))
    monkeypatch.setenv("FLOWLEDGER_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("FLOWLEDGER_FIRST", "job")
    recorder = outside.Process().recorder("trl", None)
    assert recorder is not None
    ends[-1][1].close()
    with Ledger(tmp_path / "run") as ledger:
        found = ledger.rows("SELECT message FROM findings ORDER BY message")
    assert [row["message"] for row in found] == ["RuntimeError in broken: broken"]


def test_a_place_stays_where_it_was_when_the_job_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = asked("runs/mine")
    assert wanted is not None and wanted.path == tmp_path / "runs/mine"
    monkeypatch.setattr(outside, "_begun", False)
    monkeypatch.setattr(outside.Awaited, "install", lambda _: None)
    monkeypatch.setenv("FLOWLEDGER_RUN", "runs/other")
    monkeypatch.setenv("FLOWLEDGER_FIRST", "job")
    outside.begin()
    assert Path(os.environ["FLOWLEDGER_RUN"]) == tmp_path / "runs/other"
