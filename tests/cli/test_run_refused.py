"""What is refused before any rank is started or waited for: a left-over environment, a place where no run can be made."""

import sys

import pytest

from flowledger import cli
from tests.cli.test_launch import config


@pytest.mark.parametrize(
    ("given", "words", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, (), "RANK = 0 and WORLD_SIZE = 2 are set but MASTER_ADDR is not: unset both, or start with --nproc 2"),
        ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE = 2 is set but RANK is not: unset it, or start with --nproc 2"),
        ({"WORLD_SIZE": "abc"}, (), "WORLD_SIZE = 'abc' in the environment is no whole number from 1"),
        ({"WORLD_SIZE": ""}, (), "WORLD_SIZE = '' in the environment is no whole number from 1"),
        ({"WORLD_SIZE": "4", "RANK": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, (), "RANK = '4' in the environment is no whole number from 0 to 3"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("--nproc", "2"), "leave it out, or unset WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, (), "there are 4 processes"),  # nobody is waited for
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("--nproc", "2", "-o", "/proc/x"), "cannot make run /proc/x in /proc"),  # what is left there does not count
    ],
)  # fmt: skip
def test_an_environment_that_is_no_rank_s_is_refused(given, words, told, monkeypatch, capsys, tmp_path) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["flowledger", "run", str(config(tmp_path)), "--dir", str(tmp_path), *words])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    assert leave.value.code == 2
    assert told in capsys.readouterr().err


def test_where_no_run_can_be_made_is_said_before_anything_starts(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "afile").write_text("")
    asked = ["run", str(config(tmp_path)), "--nproc", "2", "-o", str(tmp_path / "afile" / "x")]
    monkeypatch.setattr(sys, "argv", ["flowledger", *asked])
    monkeypatch.setattr("flowledger.cli.launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit):
        cli.main()
    assert "that is a file; choose another place with -o" in capsys.readouterr().err
