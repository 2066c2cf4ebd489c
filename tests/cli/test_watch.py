"""The verbs `watch` and `export`: what is printed and posted, how they end, and that they stop nobody but the one."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from flowledger.diagnose.alarms import rules
from flowledger.diagnose.alarms.webhook import checked, where
from flowledger.flow.errors import BadInput
from flowledger.ledger import directory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.manifest import Process as Launcher
from tests.diagnose.alarm_stories import metric, written

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gradient dies at step 2, which is sure at step 3."""
    rows = [(0, metric(step, "grad_norm", 0.5 if step < 2 else 0.0)) for step in range(5)]
    return written(tmp_path_factory.mktemp("runs") / "sick", rows)


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes what is posted to it: its URL, and what came."""
    came: list[dict[str, Any]] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"].startswith("application/json")
            failing = "shaky" in self.path and not came and not getattr(server, "failed", False)
            server.failed = failing or getattr(server, "failed", False)  # type: ignore[attr-defined]
            if not failing:
                came.append(json.loads(body))
            self.send_response(503 if failing else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Taker)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_it_prints_what_fired_posts_it_and_ends_with_1(
    call: Call, sick: Path, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, came = hook
    code, out, err = call("watch", sick, "--webhook", f"{url}/shaky")  # which fails once
    assert code == 1
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "error     step 3: dead_gradient: the gradient norm is 0: nothing is learnt"
    assert lines[1].startswith("          next: see whether all advantages are 0")
    assert lines[-1] == "1 alarm in steps up to 4; run closed"
    (post,) = came
    assert post["event"] == "fired"
    assert (post["id"], post["step"], post["severity"], post["run"]) == ("dead_gradient", 3, "error", "sick")


def test_as_json_in_chinese(call: Call, sick: Path) -> None:
    code, out, _ = call("watch", sick, "--once", "--json", "--lang", "zh")
    document = json.loads(out)
    assert code == 1
    assert [(row["event"], row["id"], row["step"]) for row in document["rows"]] == [("fired", "dead_gradient", 3)]
    assert document["rows"][0]["message"] == "梯度范数为 0：什么也没学到"
    assert document["summary"] == {"fired": 1, "last_step": 4, "state": "closed"}


def test_a_healthy_run_ends_with_0(call: Call, tmp_path: Path) -> None:
    rows = [(0, metric(step, "grad_norm", 0.5)) for step in range(3)]
    assert call("watch", written(tmp_path / "well", rows))[:2] == (0, "no alarms in steps up to 2; run closed\n")


def test_alarms_of_ones_own(call: Call, sick: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "- {id: mine, goal: data, when: 'grad_norm >= 0.5', severity: warning, message: 'g {grad_norm}', next_step: look}\n"
    )
    assert "warning   step 0: mine: g 0.5" in call("watch", sick, "--rules", mine)[1]
    mine.write_text(mine.read_text().replace("grad_norm >=", "grad_nrom >="))
    code, out, err = call("watch", sick, "--rules", mine)
    assert (code, out) == (2, "")
    assert err.startswith("flowledger: alarm mine, when: no metric is called 'grad_nrom'; did you mean grad_norm?")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--webhook", "file:///etc/passwd"],
            "--webhook 'file:///etc/passwd': a URL that begins with http:// or https://",
        ),
        (["--rules", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["--every", "0"], "--every"),
        (["--stop-on", "warning"], "--stop-on"),
    ],
)
def test_bad_input_is_one_clear_line(call: Call, sick: Path, words: list[str], expected: str) -> None:
    code, out, err = call("watch", sick, *words)
    assert (code, out) == (2, "")
    assert expected in err and "Traceback" not in err


def launched(path: Path, process: "subprocess.Popen[bytes]", started: float | None = None) -> Path:
    """The sick run once more, still open, launched by this process."""
    made = written(path, [(0, metric(step, "grad_norm", 0.5 if step < 2 else 0.0)) for step in range(5)], state="open")
    known = Launcher.here(process.pid)
    known = msgspec.structs.replace(known, started=started or known.started)
    (path / directory.MANIFEST).write_bytes(Manifest(run=path.name, launcher=known).encode())
    return made


def test_stop_on_asks_the_launcher_to_end_and_says_so(call: Call, tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        calm = call("watch", launched(tmp_path / "calm", process), "--once", "--stop-on", "critical")
        assert calm[0] == 1 and calm[2] == ""
        assert process.poll() is None  # a dead gradient is an error, and no more
        status, out, err = call("watch", launched(tmp_path / "run", process), "--once", "--stop-on", "error")
        assert status == 1
        assert "dead_gradient" in out
        assert err.startswith(f"flowledger: stopped: sent SIGINT to pid {process.pid}")
        assert process.wait(10) in (1, 130, -signal.SIGINT)


def test_a_run_that_died_is_waited_for_and_nobody_is_stopped(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowledger.cli import watch

    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        path = launched(tmp_path / "run", other, started=1.0)  # the pid belongs to another since
        code, out, err = call("watch", path, "--every", "0.1", "--stop-on", "error")
        assert other.poll() is None
        other.kill()
    assert code == 1
    assert err.startswith("flowledger: the run died without a word; waiting")
    assert out.splitlines()[-1] == "1 alarm in steps up to 4; run died"


def test_export_to_prometheus(call: Call, sick: Path, tmp_path: Path) -> None:
    code, out, _ = call("export", sick, "--to", "prometheus")
    assert code == 0
    assert 'flowledger_grad_norm{run="sick"} 0' in out.splitlines()
    assert call("export", sick, "--to", "prometheus-rules", "-o", tmp_path / "rules.yaml")[:2] == (0, "")
    groups = yaml.safe_load((tmp_path / "rules.yaml").read_text())["groups"]
    assert groups[0]["name"] == "flowledger_correctness"
    code, _, err = call("export", sick, "--to", "promethus")
    assert code == 2
    assert "prometheus-rules (" in err and "did you mean prometheus?" in err
    code, _, err = call("export", sick, "--to", "prometheus", "-o", tmp_path / "rules.yaml" / "where")
    assert code == 2 and "cannot write" in err


def test_a_log_is_no_run_and_what_makes_one_of_it_is_said(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text('{"log_history": [{"step": 1, "loss": 0.5}]}')
    code, out, err = call("watch", path, "--once")
    assert (code, out) == (2, "")
    assert f"flowledger import {path} -o RUN" in err and f"flowledger diagnose {path}" in err


def test_what_stands_behind_the_host_of_a_webhook_is_not_printed() -> None:
    assert where("https://hooks.example.com:8443/T0/B0/hidden") == "https://hooks.example.com:8443/…"
    with pytest.raises(BadInput, match="a name and a password") as told:
        checked("http://me:hidden@example.com/hook")
    assert "hidden" not in str(told.value)


def test_alarms_are_read_from_files_alone() -> None:
    with pytest.raises(BadInput, match="no regular file"):
        rules.read(Path("/dev/zero"))


def test_a_run_that_is_removed_is_said_to_be(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        launched(run, process)
        monkeypatch.setattr(time, "sleep", lambda _: shutil.rmtree(run, ignore_errors=True))
        code, out, err = call("watch", run)
        process.kill()
    assert code == 2 and out.splitlines()[-1].endswith("; run removed")
    assert err == f"flowledger: run {run} was removed while it was watched; nothing more can be said of it\n"
