"""`watch --serve`: the page beside the alarms, how it is asked for, and how both end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowledger.cli.serve import filled
from flowledger.ledger.rows import MetricRow
from tests.show.page.live_server import Browser, Written, ready


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["watch", "R", "--serve"], ["watch", "R", "--serve="]),
        (["watch", "--serve", "R"], ["watch", "--serve=", "R"]),
        (["R", "--serve", "--json"], ["R", "--serve=", "--json"]),
        (["R", "--serve", "8765"], ["R", "--serve", "8765"]),
        (["R", "--serve", "0.0.0.0:8765", "--every", "1"], ["R", "--serve", "0.0.0.0:8765", "--every", "1"]),
        (["R", "--serve=8765"], ["R", "--serve=8765"]),
    ],
)
def test_the_option_may_stand_alone(words: list[str], expected: list[str]) -> None:
    assert filled(words) == expected


def started(*words: object) -> "subprocess.Popen[str]":
    """The verb in a process group of its own, in which Ctrl-C is heard."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from flowledger.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "watch", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Ctrl-C, as a terminal sends it to all in the foreground: (code, stdout, stderr). Nothing is left behind."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    return process.returncode, out, err


def test_alarms_go_on_beside_it_and_ctrl_c_ends_both(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "--serve", "--every", "0.2")
    assert process.stderr and process.stdout
    port = int(process.stderr.readline().rstrip("/\n").rpartition(":")[2])
    assert process.stderr.readline() == f"flowledger: there is no run at {tmp_path / 'run'} yet; waiting for it\n"
    book = Written(tmp_path / "run")
    for step in range(5):
        book.append(
            book.parts[0],
            "metrics",
            [MetricRow(step=step, name="grad_norm", raw_name="grad_norm", value=0.5 if step < 2 else 0.0, t_ns=step)],
        )
        book.step(step)
    book.run.close()
    assert process.stdout.readline() == "error     step 3: dead_gradient: the gradient norm is 0: nothing is learnt\n"
    while not (line := process.stdout.readline()).endswith("run closed\n"):
        assert line
    assert process.stderr.readline() == "flowledger: the page stays; Ctrl-C ends it\n"
    assert ready(Browser(port))["about"]["run"] == "run"
    code, _, err = interrupted(process)
    assert (code, err) == (1, "")  # an alarm fired; the run was over


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "--serve")
    assert process.stderr and process.stdout
    process.stderr.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    process.communicate(timeout=10)
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_what_cannot_be_is_one_clear_line(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("step 1\n")
    for words, expected in (
        ((tmp_path / "run", "--serve", "--once"), "--once looks once and ends"),
        ((tmp_path / "run", "--plan", tmp_path), "--plan is for the page"),
        ((tmp_path / "run", "--serve=no"), "give a PORT, or HOST:PORT"),
        ((log, "--serve"), "is no run (a file)"),
        ((tmp_path / "run", "--serve", "--plan", tmp_path / "none"), "no run at"),
    ):
        code, out, err = call("watch", *words)
        assert (code, out) == (2, "")
        assert expected in err and "Traceback" not in err
