"""Ranks that train together: one run of all, and whatever ends one of them ends all, soon, with one clear reason.

Most ranks here are forked from this process, as torchrun would start them but without its seconds of imports; one test
goes the whole way.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from flowledger import cli
from flowledger.cli import finish, launch, recorded  # noqa: F401  forked ranks find imported what they need
from flowledger.diagnose import laws, shapes  # noqa: F401
from flowledger.flow.lost import lost
from flowledger.ledger import directory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.record import hooks, sampled  # noqa: F401
from flowledger.run import loop  # noqa: F401
from flowledger.run.parallel import torchrun
from flowledger.run.parallel.company import Word
from flowledger.run.parallel.torchrun import Failed, Outcome
from flowledger.show import report  # noqa: F401
from tests.run import worlds

ENDS_WITHIN_S = 30.0
ABORTS = """
import os, signal, time
def fails(sample_id, response_ids):
    if os.environ["RANK"] == "1":
        raise ValueError("no more")
    return False
def killed(sample_id, response_ids):
    if os.environ["RANK"] == "1":
        time.sleep(1.5)  # what is recorded reaches the disk within a second
        os.kill(os.getpid(), signal.SIGKILL)
    return False
def hangs(sample_id, response_ids):
    while os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(0.05)
    return False
"""

STORES: list[dist.TCPStore] = []  # never freed: in a later fork that would wait for a thread that is not there


class Ranks:
    """Forked processes, each with the environment that torchrun gives to a rank, in a folder for what they print."""

    def __init__(self, folder: Path, size: int, words: Sequence[object]) -> None:
        self.folder, self.began = folder, time.monotonic()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has
        STORES.append(store)
        shared = {
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        self.pids = [self._start(rank, words, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(size)]

    def _start(self, rank: int, words: Sequence[object], environment: Mapping[str, object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code: Any = 0
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT, 0o644), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ |= {key: str(value) for key, value in environment.items()}
            faulthandler.dump_traceback_later(ENDS_WITHIN_S, file=2)  # where it stands, if it hangs
            sys.argv = ["flowledger", *map(str, words)]
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
        except BaseException:  # noqa: BLE001  a fork must not go on as a test
            traceback.print_exc()
            code = 70
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def codes(self) -> list[int]:
        """Exit codes, -9 for SIGKILL; all ranks must end in time."""
        codes = []
        for pid in self.pids:
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() - self.began < ENDS_WITHIN_S + 30, (pid, self.printed("err"))
                time.sleep(0.02)
            codes.append(os.waitstatus_to_exitcode(ended[1]))
        return codes

    def printed(self, name: str) -> list[str]:
        return [(self.folder / f"{name}{rank}").read_text() for rank in range(len(self.pids))]

    def errors(self) -> list[str]:
        """All lines that all ranks addressed to the user as errors."""
        text = "".join(self.printed("err"))
        assert "Traceback" not in text, text
        return [line for line in text.splitlines() if line.startswith("flowledger: ")]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start `flowledger run` on two ranks; sections given are merged into the configuration."""
    monkeypatch.setattr("flowledger.run.parallel.company.SILENCE_S", 600.0)
    started: list[Ranks] = []

    def start(words: Sequence[object] = (), **sections: Any) -> Ranks:
        made = ["run", config(tmp_path, **sections), "-o", tmp_path / "run", *words]
        started.append(Ranks(tmp_path, 2, made))
        return started[-1]

    yield start
    for one in started:
        for pid in one.pids:
            if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == os.getpid():
                os.kill(pid, signal.SIGKILL)


def config(folder: Path, **sections: Any) -> Path:
    (folder / "aborts.py").write_text(ABORTS)
    record = {"level": "tensors", "ops_every": 0}
    made = worlds.config(**{"mesh": {"dp": 2}, "record": record, **sections})
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(made.model_dump(mode="json", by_alias=True)))
    return path


def aborting(folder: Path, how: str) -> dict[str, Any]:
    return {
        "steps": 1000,
        "rollout": {
            "samples_per_prompt": 3,
            "max_response_tokens": 8,
            "abort_function": f"{folder / 'aborts.py'}:{how}",
        },
    }


def state(run: Path) -> str:
    return str(json.loads((run / "manifest.json").read_text())["state"])


def test_all_ranks_record_into_one_run_and_one_of_them_speaks(ranks, tmp_path) -> None:
    started = ranks(steps=2)
    assert started.codes() == [0, 0]
    out, err = started.printed("out"), started.printed("err")
    assert "step 1 (2 of 2)" in err[0]
    assert "run closed" in out[0]
    assert (out[1], err[1]) == ("", "")
    run = tmp_path / "run"
    manifest = json.loads((run / "manifest.json").read_text())
    with Ledger(run) as ledger:
        parts = ledger.rows(
            "SELECT rank, coordinates FROM processes WHERE len(map_keys(coordinates)) > 0 ORDER BY rank"
        )
        updates = ledger.rows(
            "SELECT DISTINCT rank, step, rank_count FROM spans WHERE stage = 'update_actor' ORDER BY ALL"
        )
        total = sum(
            ledger.rows(f"SELECT count(*) AS n FROM {table}")[0]["n"]
            for table in ("spans", "tensors", "metrics", "memory", "samples", "storages", "tokens")
        )
    rest = dict.fromkeys(("pp", "ep", "cp", "sp", "tp"), 0)
    assert [(part["rank"], dict(part["coordinates"])) for part in parts] == [(n, {**rest, "dp": n}) for n in (0, 1)]
    assert [tuple(row.values()) for row in updates] == [(r, s, 2) for r in (0, 1) for s in (0, 1)]
    assert (manifest["state"], manifest["mesh"]["dp"]) == ("closed", 2)
    assert manifest["recorder"]["rows"] >= total > 100


def test_what_is_wrong_for_every_rank_is_said_once(ranks, tmp_path) -> None:
    started = ranks(model={"path": "/no/such/model"})
    assert started.codes() == [2, 2]
    (line,) = started.errors()
    assert "/no/such/model" in line


def test_a_mesh_that_does_not_fit_the_processes_is_refused(ranks, monkeypatch) -> None:
    monkeypatch.setattr("flowledger.cli.ranks.SPEAKS_S", 0.1)
    started = ranks(mesh={"dp": 4})
    assert started.codes() == [2, 2]
    (line,) = started.errors()
    assert "mesh.dp = 4" in line and line.endswith("there are 2 processes; use mesh.dp = 2")


def test_an_exception_of_one_rank_ends_all_and_is_told_with_its_place(ranks, tmp_path) -> None:
    started = ranks(**aborting(tmp_path, "fails"))
    assert set(started.codes()) <= {1, 2}
    (line,) = started.errors()
    who = f"rank 1 ({socket.gethostname()}, pid {started.pids[1]}) in rollout, step 0"
    assert line.startswith(f"flowledger: {who}: ") and "ValueError: no more" in line
    with Ledger(tmp_path / "run") as ledger:
        said = ledger.rows("SELECT rank, verdict FROM findings WHERE id = 'call_failed' ORDER BY rank")
    assert [tuple(row.values()) for row in said] == [(0, "warn"), (1, "fail")]
    assert state(tmp_path / "run") == "crashed"


def test_a_rank_that_is_killed_ends_the_others_who_name_it(ranks, tmp_path) -> None:
    started = ranks(**aborting(tmp_path, "killed"))
    codes = started.codes()
    assert time.monotonic() - started.began < ENDS_WITHIN_S
    assert codes == [1, -signal.SIGKILL]
    told = f"rank 1 ({socket.gethostname()}, pid {started.pids[1]}) died without a word in rollout, step 0"
    assert started.errors() == [f"flowledger: {told}"]
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.directory.state == "crashed"
        findings = ledger.rows("SELECT id, verdict, message FROM findings WHERE id IN ('rank_died', 'call_failed')")
        assert [row["message"] for row in findings if row["verdict"] == "fail"] == [told]
        (victim,) = (row["message"] for row in findings if row["id"] == "call_failed")
        assert victim.startswith("rank 0: rollout was ")
        assert {row["rank"] for row in ledger.rows("SELECT DISTINCT rank FROM spans")} >= {0}


def test_ranks_that_wait_for_each_other_still_hear_that_they_are_to_end(ranks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flowledger.run.parallel.watch.GRACE_S", 0.5)
    started = ranks(**aborting(tmp_path, "hangs"))
    part = _wait_for(lambda: next(iter((tmp_path / "run" / "parts").glob("*r0*/spans-0.jsonl")), None), started)
    _wait_for(lambda: b'"rollout"' in part.read_bytes(), started)
    time.sleep(0.5)
    os.kill(started.pids[0], signal.SIGTERM)
    asked = time.monotonic()
    assert started.codes() == [130, 130]
    assert time.monotonic() - asked < ENDS_WITHIN_S
    assert state(tmp_path / "run") in (
        "interrupted",
        "open",
    )  # rank 0 sat in a collective, and could not close the book
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.directory.state in ("interrupted", "crashed")
        assert len(ledger.rows("SELECT DISTINCT rank FROM spans")) == 2


def test_level_off_trains_on_two_ranks_and_writes_nothing(ranks, tmp_path) -> None:
    started = ranks(words=["-q"], record={"level": "off"})
    assert started.codes() == [0, 0]
    assert [*started.printed("out"), *started.printed("err")] == [""] * 4
    assert not (tmp_path / "run").exists()


def test_nproc_must_be_what_the_mesh_asks_for_and_says_so_before_anything_starts(monkeypatch, capsys, tmp_path) -> None:
    for words, told in (
        (["--nproc", "3"], "there are 3 processes; use --nproc 2 or mesh.dp = 3"),
        ([], "there is 1 process; use --nproc 2 or mesh.dp = 1"),
    ):
        monkeypatch.setattr(
            sys, "argv", ["flowledger", "run", str(config(tmp_path)), "-o", str(tmp_path / "x"), *words]
        )
        with pytest.raises(SystemExit) as leave:
            cli.main()
        assert leave.value.code == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


HERE = socket.gethostname()
KILLED, OWN = (
    Failed(1, 11, -signal.SIGKILL),
    Word(1, "crashed", "rank 1 (h, pid 11) in update_actor, step 3: ValueError: bad"),
)
DEAD = Word(0, "died", "rank 1 (h, pid 11) died without a word", about=1)
STOPPED = Word(
    0, "silent", "rank 1 (h, pid 11) has given no sign of life for 20 s (it was stopped by SIGSTOP)", about=1
)


@pytest.mark.parametrize(
    ("failed", "code", "told"),
    [
        ((), 0, None),
        ((Failed(0, 10, 1, OWN), Failed(1, 11, 1, OWN)), 1, OWN.text),
        ((Failed(0, 10, 1, DEAD), KILLED), 1, f"rank 1 ({HERE}, pid 11) was killed by SIGKILL"),
        ((Failed(0, 10, 1, DEAD), Failed(1, 11, 3)), 1, f"rank 1 ({HERE}, pid 11) ended with exit code 3"),
        ((Failed(0, 10, 1, DEAD),), 1, DEAD.text),  # the dead one ended as if all were well
        ((Failed(0, 10, 1, STOPPED), KILLED), 1, STOPPED.text),  # it was torchrun's agent that killed it, at the end
        (
            (Failed(0, 10, -signal.SIGKILL), Failed(1, 11, -signal.SIGSEGV)),
            1,
            f"rank 1 ({HERE}, pid 11) was killed by SIGSEGV",
        ),
        ((Failed(0, 10, -signal.SIGTERM), KILLED), 1, f"rank 1 ({HERE}, pid 11) was killed by SIGKILL"),
        ((Failed(0, 10, -signal.SIGTERM), Failed(1, 11, 130)), 130, None),
        ((Failed(0, 10, 2, Word(1, "bad_input", "no")), Failed(1, 11, 2)), 2, "no"),
    ],
)
def test_who_is_named_is_the_one_that_began_it(failed: tuple[Failed, ...], code: int, told: str | None) -> None:
    outcome = Outcome(failed)
    reason = launch._reason(outcome, None)
    assert (launch._exit_code(outcome), reason and reason.text) == (code, told)


@pytest.mark.parametrize(("ours", "ends"), [(True, "crashed"), (False, "open")])
def test_a_run_that_another_launch_has_made_there_meanwhile_is_left_alone(ours, ends, monkeypatch, tmp_path) -> None:
    run, nproc = tmp_path / "run", os.getpid() if ours else os.getppid()

    def launched(*_: Any) -> Outcome:
        monkeypatch.setenv("FLOWLEDGER_LAUNCHER", str(nproc))  # as a rank of that launch would find it
        directory.create(run, Manifest(run="run", launcher=recorded._launcher()))
        return Outcome((Failed(0, 1, 2, Word(0, "bad_input", "taken")),))

    monkeypatch.setattr(torchrun, "launched", launched)
    with pytest.raises(SystemExit):
        launch.launch(tmp_path / "two.yaml", [], 2, run, tables=False, quiet=True)
    assert (state(run), any(run.glob("*.parquet"))) == (ends, ours)


def test_a_hang_that_is_seen_only_afterwards_says_more_than_silence(monkeypatch) -> None:
    said = (Failed(0, 10, 1, STOPPED), KILLED)
    monkeypatch.setattr("flowledger.cli.hang.seen_in", lambda path: "rank 0 has waited 22 s")
    monkeypatch.setattr("flowledger.cli.hang.recorded_in", lambda path: "")
    told = launch._reason(Outcome(said), Path("run"))
    assert told is not None and (told.kind, told.text) == ("hung", "rank 0 has waited 22 s")


def test_rows_are_counted_on_disk_where_ranks_could_not_say_how_many(tmp_path) -> None:
    for rank, lines in ((0, 3), (1, 2)):
        part = tmp_path / "parts" / f"actor-r{rank}"
        part.mkdir(parents=True)
        (part / "spans-0.jsonl").write_text("{}\n" * lines)
        (part / "process.json").write_text("{}")
    assert recorded.on_disk(tmp_path) == {"rows": 5, "bytes": 15}


def test_what_a_rank_leaves_behind_is_what_torchrun_shows_and_the_launcher_reads(tmp_path, monkeypatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    torchrun.leave_word(DEAD)
    failure = ProcessFailure(local_rank=0, pid=10, exitcode=1, error_file=str(file))
    assert torchrun._failed(0, failure) == Failed(0, 10, 1, DEAD)
    assert f"traceback : {DEAD.text}" in ChildFailedError("flowledger", {0: failure}).format_msg()
    gone = ProcessFailure(local_rank=1, pid=11, exitcode=-9, error_file=str(tmp_path / "none"))
    assert torchrun._failed(1, gone) == KILLED


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55. This is …"), "Connection closed by peer [127.0.0.1]:55"),
        (dist.DistBackendError("NCCL communicator was aborted"), "NCCL communicator was aborted"),
        (dist.DistNetworkError(""), "DistNetworkError"),
        (RuntimeError("shape mismatch"), None),
        (ValueError("gloo"), None),
    ],
)  # fmt: skip
def test_a_rank_that_lost_another_is_told_from_one_that_failed(error: Exception, said: str | None) -> None:
    assert lost(error) == said
    outer = RuntimeError("a stage failed")
    outer.__cause__, error.__context__ = error, outer  # a ring
    assert lost(outer) == said


def test_nproc_starts_ranks_through_torchrun_and_tells_which_of_them_was_killed(tmp_path) -> None:
    run = tmp_path / "run"
    path = config(tmp_path, **aborting(tmp_path, "killed"))
    command = [sys.executable, "-m", "flowledger", "run", path, "--nproc", "2", "-o", run, "-q"]
    child = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=200)
    pid = json.loads(next(run.glob("*/actor-r1-*/process.json")).read_text())["pid"]
    (line,) = child.stderr.strip().splitlines()
    assert line == f"flowledger: rank 1 ({socket.gethostname()}, pid {pid}) was killed by SIGKILL in rollout, step 0"
    assert child.returncode == 1
    assert state(run) == "crashed"
    assert (run / "spans.parquet").exists()


def _wait_for(found: Callable[[], Any], started: Ranks) -> Any:
    until = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until, started.printed("err")
        time.sleep(0.05)
    return value
