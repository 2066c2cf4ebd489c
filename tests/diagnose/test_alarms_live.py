"""Alarms while a run goes on: only what is new is read, nothing is lost or told twice, whatever happens to the run."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from flowledger.diagnose.alarms import live, stopping, webhook
from flowledger.diagnose.alarms.live import Event, Watch
from flowledger.diagnose.alarms.tail import Tail
from flowledger.flow.errors import BadInput
from flowledger.ledger import compact, directory, writer
from flowledger.ledger.directory import Process, RunDirectory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.manifest import Process as Launcher
from flowledger.ledger.rows import FindingRow, SpanRow
from tests.diagnose.alarm_stories import MS, metric, rule, step_span

HIGH = rule("grad_norm > 1", id="high", severity="critical")


class Run:
    """A run that goes on: rows appear on disk when `tell` returns."""

    def __init__(self, path: Path, *, ranks: int = 1, rotate_bytes: int = 1 << 20) -> None:
        self.book: RunDirectory = directory.create(path, Manifest(run=path.name))
        self.rotate_bytes = rotate_bytes
        self.inks = [self.ink(rank) for rank in range(ranks)]

    def ink(self, rank: int) -> writer.Writer:
        return writer.Writer(self.book.part("actor", rank), flush_s=0.01, rotate_bytes=self.rotate_bytes)

    def tell(self, step: int, grad_norm: float, *, rank: int = 0, ends: bool = True) -> None:
        ink = self.inks[rank]
        before = ink.stats().rows
        row = metric(step, "grad_norm", grad_norm)
        row.rank = rank
        ink.put(row)
        if ends:
            ink.put(step_span(step, rank))
        self.settle(ink, before + 1 + ends)

    @staticmethod
    def settle(ink: writer.Writer, rows: int) -> None:
        ink.hurry()
        until = time.monotonic() + 10
        while ink.stats().rows < rows and time.monotonic() < until:
            time.sleep(0.002)

    def close(self, state: str = "closed") -> None:
        for ink in self.inks:
            ink.close()
        self.book.close(state)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def told(events: list[Event]) -> list[tuple[str, str, int | None]]:
    return [(event.kind, event.finding.id, event.step) for event in events]


def test_an_alarm_is_told_once_when_it_fires_and_once_when_it_is_over(run: Run) -> None:
    watch = Watch(run.book.path, [HIGH])
    assert watch.look() == []
    run.tell(0, 0.5)
    assert told(watch.look()) == []
    run.tell(1, 2.0)
    assert told(watch.look()) == [("fired", "high", 1)]
    assert watch.look() == []
    run.tell(2, 2.0)
    run.tell(3, 0.5)
    assert told(watch.look()) == [("over", "high", 3)]
    run.close()
    assert told(watch.look()) == []
    assert watch.last_step == 3


def test_what_it_says_live_is_what_it_says_afterwards(run: Run) -> None:
    """With histories: steps in batches and the whole ledger give the same."""
    mine = [rule("grad_norm > 3 * usual(grad_norm)", id="spike"), rule("mean(grad_norm, 3) > 3", id="mean")]
    watch, seen = Watch(run.book.path, mine), []
    for step, value in enumerate([1.0, 1.1, 0.9, 1.0, 1.05, 9.0, 1.0, 8.0, 8.0, 1.0]):
        run.tell(step, value)
        seen += told(watch.look()) if step in (4, 6) else []
    run.close()
    seen += told(watch.look())
    assert seen == told(Watch(run.book.path, mine).look())
    assert [one[1:] for one in seen if one[0] == "fired"] == [("spike", 5), ("mean", 5), ("spike", 7)]


def taken(tail: Tail, *, to_the_end: bool = False) -> dict[tuple[str, int], int]:
    """(table, step of each line) -> lines, of the steps that are finished now."""
    tail.read()
    found: Counter[tuple[str, int]] = Counter()
    for _, table, lines in tail.take(tail.finished(all_of_it=to_the_end)):
        found.update((table, msgspec.json.decode(line)["step"]) for line in lines)
    return dict(found)


def test_a_step_is_finished_when_every_rank_has_ended_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ranks=2)
    tail = Tail(run.book.path)
    run.tell(0, 2.0, rank=0)
    run.tell(0, 2.0, rank=1, ends=False)
    assert taken(tail) == {}
    run.tell(1, 0.5, rank=1)
    assert taken(tail) == {("metrics", 0): 2, ("spans", 0): 1}
    run.close()


def test_rotation_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", rotate_bytes=200)
    tail, found = Tail(run.book.path), Counter()
    for step in range(14):
        run.tell(step, 0.5)
        found.update(taken(tail) if step % 3 == 0 else {})
    run.close()
    found.update(taken(tail))
    assert len(list(run.book.path.glob("parts/*/metrics-*.jsonl"))) > 3
    assert found == {(table, step): 1 for table in ("metrics", "spans") for step in range(14)}


def test_only_new_bytes_are_read_and_a_line_that_is_half_there_waits_for_its_end(run: Run) -> None:
    tail = Tail(run.book.path)
    run.tell(0, 0.5)
    assert taken(tail) == {("metrics", 0): 1, ("spans", 0): 1}
    (file,) = run.book.path.glob("parts/*/metrics-0.jsonl")
    line = msgspec.json.encode(metric(1, "grad_norm", 2.0))
    with file.open("r+b") as opened:
        opened.write(b"#" * 10)  # what was read before is not read again
        opened.seek(0, os.SEEK_END)
        opened.write(line[:20])
    assert taken(tail, to_the_end=True) == {}
    with file.open("ab") as opened:
        opened.write(line[20:] + b"\n{torn\n")
    assert taken(tail, to_the_end=True) == {("metrics", 1): 1}
    run.close()


def test_what_is_compacted_between_two_looks_is_read_where_it_was_set_aside(run: Run) -> None:
    tail = Tail(run.book.path)
    run.tell(0, 0.5)
    assert taken(tail) == {("metrics", 0): 1, ("spans", 0): 1}
    run.tell(1, 2.0)
    run.close()
    compact.compact(run.book.path)
    assert not list(run.book.path.glob("parts/*"))
    assert taken(tail, to_the_end=True) == {("metrics", 1): 1, ("spans", 1): 1}


def test_a_run_that_has_ended_is_read_whole_even_where_only_parquet_is_left(run: Run) -> None:
    run.tell(0, 0.5)
    run.tell(1, 2.0)
    run.close()
    compact.compact(run.book.path)
    shutil.rmtree(run.book.path / "compacted")
    watch = Watch(run.book.path, [HIGH])
    assert told(watch.look()) == [("fired", "high", 1)]
    assert watch.look() == []


def test_a_rank_that_died_and_came_back_goes_on_and_is_in_warm_up(run: Run) -> None:
    watch = Watch(run.book.path, [HIGH, rule("grad_norm > 1", id="warm", warm_up=1)])
    for step in range(3):
        run.tell(step, 0.5)
    run.tell(3, 2.0, ends=False)
    assert watch.look() == []
    run.inks[0].close()
    (part,) = run.book.path.glob("parts/*/process.json")
    died = msgspec.structs.replace(msgspec.json.decode(part.read_bytes(), type=Process), host="elsewhere", wall_ns=1)
    part.write_bytes(msgspec.json.encode(died))  # on a host that nobody can ask
    run.inks = [run.ink(0)]
    run.tell(2, 2.0)  # from its checkpoint
    run.tell(3, 0.5)
    run.tell(4, 2.0)
    assert told(watch.look()) == [("fired", "high", 2), ("over", "high", 3), ("fired", "high", 4), ("fired", "warm", 4)]
    run.close()


def test_a_new_run_at_the_same_place_is_watched_from_its_start(run: Run, tmp_path: Path) -> None:
    watch = Watch(run.book.path, [HIGH])
    run.tell(0, 2.0)
    assert told(watch.look()) == [("fired", "high", 0)]
    run.inks[0].close()
    shutil.rmtree(run.book.path)
    directory.create(run.book.path, Manifest(run="run", created="2031-01-01T00:00:00+00:00"))
    again = Run.__new__(Run)
    again.book, again.rotate_bytes = directory.open_run(run.book.path), 1 << 20
    again.inks = [again.ink(0)]
    again.tell(0, 2.0)
    assert told(watch.look()) == [("fired", "high", 0)]
    again.close()


def test_what_the_recorder_finds_is_told_once_and_its_own_alarms_are_not(run: Run) -> None:
    watch = Watch(run.book.path, [HIGH])
    ink = run.inks[0]
    ink.put(FindingRow(id="hang", verdict="fail", severity="error", message="rank 1 is not there", step=0))
    ink.put(FindingRow(id="high", order="alarms", verdict="fail", severity="error", message="told by alarms", step=0))
    ink.put(FindingRow(id="masks_nest", order="laws", verdict="pass", message="fine", step=0))
    run.tell(0, 0.5)
    assert told(watch.look()) == [("found", "hang", 0)]
    ink.put(FindingRow(id="hang", verdict="fail", severity="error", message="rank 1 is not there", step=1))
    run.tell(1, 0.5)
    assert watch.look() == []
    run.close()


def test_a_rank_that_falls_silent_while_others_write_is_an_alarm_and_a_long_step_of_all_is_none(tmp_path: Path) -> None:
    from flowledger.diagnose.alarms import rules

    run = Run(tmp_path / "run", ranks=2)
    silent = [one for one in rules.built_in() if one.id == "rank_silent"]
    watch = Watch(run.book.path, silent)
    for rank in (0, 1):
        run.tell(0, 0.5, rank=rank)
    now = time.monotonic()
    assert told(watch.look(now)) == []
    assert told(watch.look(now + 1000)) == []  # nobody writes: a long rollout
    run.tell(1, 0.5, rank=0, ends=False)
    assert told(watch.look(now + 1001)) == [("fired", "rank_silent", 1)]
    run.tell(1, 0.5, rank=1)
    assert told(watch.look(now + 1002)) == [("over", "rank_silent", 1)]
    assert told(watch.look(now + 1002 + live.STILL_S + 1)) == [("still", "nothing_recorded", 1)]
    run.close()


def test_a_watch_of_no_run_or_with_a_wrong_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run at"):
        Watch(tmp_path / "nothing", [HIGH])
    run = Run(tmp_path / "run")
    with pytest.raises(BadInput, match="did you mean grad_norm"):
        Watch(run.book.path, [rule("grad_nrom > 1")])
    run.close()


# ------------------------------------------------------------------------------------------------------------ webhook


def test_only_http_and_https_are_posted_to() -> None:
    for url in (
        "file:///etc/passwd",
        "ftp://host/x",
        "http://",
        "nonsense",
        "http://host:99999/",
        "https://a b/",
        "javascript:1",
    ):
        with pytest.raises(BadInput, match="--webhook"):
            webhook.checked(url)
    assert webhook.checked("http://127.0.0.1:8080/hook?a=b") == "http://127.0.0.1:8080/hook?a=b"


def test_a_hook_that_is_not_there_costs_nothing_and_is_told_at_the_end() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hook = webhook.Webhook(f"http://127.0.0.1:{taken.getsockname()[1]}/", timeout_s=0.2, pause_s=0.01)
        before = time.monotonic()
        for _ in range(webhook.WAITING + 50):
            hook.send({"id": "high"})
        assert time.monotonic() - before < 0.5
        hook.close(0.3)
    assert hook.sent == 0
    assert hook.lost > 0
    assert hook.failure


# ----------------------------------------------------------------------------------------------------------- stopping


def test_the_launcher_is_asked_to_end_if_it_is_the_one() -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        launcher = Launcher.here(process.pid)
        another = msgspec.structs.replace(launcher, started=launcher.started - 100)
        assert "has ended already" in stopping.stop(another)  # the pid was given to another since
        assert "another host" in stopping.stop(msgspec.structs.replace(launcher, host="elsewhere"))
        assert process.poll() is None
        assert stopping.stop(launcher).startswith("stopped: sent SIGINT")
        assert process.wait(10) != 0
        assert "has ended already" in stopping.stop(launcher)


def test_one_that_is_deaf_to_sigint_is_asked_by_sigterm_and_this_process_never() -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        launcher = Launcher.here(process.pid)
        assert "sent SIGTERM" in stopping.stop(launcher)
        assert process.wait(10) == -15
    assert "is not a process to end" in stopping.stop(Launcher.this())


def test_a_span_that_is_no_step_ends_none(run: Run) -> None:
    tail = Tail(run.book.path)
    run.inks[0].put(
        SpanRow(
            id=1,
            step=0,
            stage="reward",
            t_ns=MS,
            event="whole",
            name="step",
            span_kind="compute",
            start_ns=0,
            end_ns=MS,
        )
    )
    run.settle(run.inks[0], 1)
    tail.read()
    assert tail.finished() == -1
    run.close()
