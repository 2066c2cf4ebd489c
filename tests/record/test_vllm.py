"""An engine is recorded from outside: what its scheduler does and what becomes of requests, in few rows, and never at its cost.

The engine is a stand-in with the names of vLLM's, which counts for itself. The real one is recorded where it is installed.
"""

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SpanRow
from flowledger.ledger.writer import Writer
from flowledger.record import engine as engine_module
from flowledger.record.engine import Engine, Finished, Step
from flowledger.record.recorder import Recorder

STAND_IN = Path(__file__).parent / "stand_in"
LENGTHS = [(6, 5, 0), (9, 9, 4), (3, 3, 0), (12, 12, 8), (5, 2, 0)]  # prompt, response, cached
ANSWER = f"""
from vllm.v1.engine.core import EngineCore
core = EngineCore()
core.set_weight_version(weight_version="7")
print(core.answer({LENGTHS}, abort=["r2"]))
"""
BLOCKS = 10
CHILDREN = """
import multiprocessing, os, signal, sys, time

def serve(ready):
    from vllm.v1.engine.core import EngineCore
    EngineCore().answer([(6, 5, 0)])
    ready.set()
    time.sleep(60)

if __name__ == "__main__":
    from vllm.v1.engine.core import EngineCore
    EngineCore().answer([(1, 2, 0)])
    started = []
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        ready = context.Event()
        started.append((ready, context.Process(target=serve, args=(ready,))))
        started[-1][1].start()
    for ready, _ in started:
        ready.wait(30)
    time.sleep(1.2)
    for _, child in started:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
"""


def job(code: str = ANSWER, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLOWLEDGER")}
    own |= {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False, timeout=60
    )


class Read:
    """What a run holds, opened once."""

    def __init__(self, path: Path) -> None:
        with Ledger(path, only=("metrics", "spans", "findings")) as ledger:
            self.metrics = {
                name.removeprefix("rollout/"): value
                for name, value in ledger.query("SELECT name, value FROM metrics_by_step WHERE name LIKE 'rollout/%'")[
                    1
                ]
            }
            self.requests = ledger.rows("FROM requests ORDER BY request")
            self.spans = ledger.rows("SELECT name, role, rank, stage, event FROM spans ORDER BY seq")
            self.findings = ledger.rows("SELECT id, verdict, message FROM findings ORDER BY seq")
            self.cost = dict(
                ledger.query("SELECT name, max(value) FROM metrics WHERE name LIKE 'recorder/%' GROUP BY name")[1]
            )
            self.processes = ledger.rows("SELECT role, rank FROM processes")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "run"
    done = job(FLOWLEDGER_RUN=str(path))
    assert (done.returncode, done.stderr) == (0, "")
    return Read(path), done.stdout


def test_it_changes_nothing(recorded):
    plain = job()
    assert (plain.returncode, plain.stderr) == (0, "")
    assert recorded[1] == plain.stdout


def test_the_ledger_has_what_the_scheduler_counts_itself(recorded):
    told = ast.literal_eval(recorded[1])
    running, waiting, used, prefill, decode = (sum(column) for column in zip(*told, strict=True))
    found, steps = recorded[0].metrics, len(told)
    assert found["engine_steps"] == steps
    assert (found["running"], found["waiting"]) == (running / steps, waiting / steps)
    assert (found["kv_blocks_used"], found["kv_blocks"]) == (used / steps, BLOCKS)
    assert (found["prefill_tokens"], found["decode_tokens"]) == (prefill, decode)
    assert found["cached_tokens"] == 4 + 8
    assert (
        found["preemptions"] == 1
    )  # the fourth request, when it had said 3 of its 12 tokens: 12 + 3 are computed again
    assert prefill == sum(prompt - cached for prompt, _, cached in LENGTHS) + 12 + 3
    assert [found[f"finished/{why}"] for why in ("stop", "length", "abort")] == [2, 2, 1]
    assert 0 < found["queue_time_s"] < found["request_time_s"] < 10


def test_every_request_is_there_with_its_tokens_and_the_version_of_its_weights(recorded):
    reasons = ("stop", "length", "abort", "length", "stop")
    columns = ("request", "finish_reason", "prompt_tokens", "response_tokens", "cached_tokens", "policy_version")
    assert [tuple(row[name] for name in columns) for row in recorded[0].requests] == [
        (f"r{i}", why, prompt, 1 if why == "abort" else response, cached, 7)
        for i, (why, (prompt, response, cached)) in enumerate(zip(reasons, LENGTHS, strict=True))
    ]
    assert all(0 <= row["queued_seconds"] <= row["seconds"] for row in recorded[0].requests)


def test_the_process_has_a_part_of_its_own_and_says_what_recording_cost(recorded):
    assert {(row["role"], row["rank"], row["stage"]) for row in recorded[0].spans} == {("rollout", None, "rollout")}
    assert recorded[0].processes == [{"role": "rollout", "rank": None}]
    assert recorded[0].cost["recorder/cpu_s"] > 0 and recorded[0].cost["recorder/errors"] == 0


def test_a_child_that_is_killed_when_it_has_nothing_left_to_do_has_told_everything(tmp_path):
    """As vLLM's own parent does with its engine."""
    (tmp_path / "job.py").write_text(CHILDREN)
    code = f"import runpy; runpy.run_path({str(tmp_path / 'job.py')!r}, run_name='__main__')"
    done = job(code, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    found = Read(tmp_path / "run")
    assert sorted((row["prompt_tokens"], row["finish_reason"]) for row in found.requests) == [
        (1, "stop"), (6, "stop"), (6, "stop"),
    ]  # fmt: skip
    assert len({row["process"] for row in found.requests}) == 3
    assert found.metrics["finished/stop"] == 3


def test_level_steps_has_the_numbers_and_no_row_a_request(tmp_path, recorded):
    done = job(FLOWLEDGER_RUN=str(tmp_path / "run"), FLOWLEDGER_LEVEL="steps")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", recorded[1])
    found = Read(tmp_path / "run")
    assert [row["name"] for row in found.spans] == ["engine_steps"]
    without_times = [
        {name: value for name, value in one.metrics.items() if not name.endswith("_s")} for one in (found, recorded[0])
    ]
    assert without_times[0] == without_times[1] and len(without_times[0]) == 12


def test_workers_say_when_they_are_given_weights(tmp_path):
    code = "from vllm.v1.worker.gpu_worker import Worker; Worker().update_weights({}); Worker().reload_weights()"
    done = job(code, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    spans = [tuple(row.values()) for row in Read(tmp_path / "run").spans if row["event"] == "end"]
    assert spans == [("weight_sync", "rollout", None, "weight_sync", "end")] * 2


def test_names_that_another_version_lacks_are_findings_and_the_rest_is_recorded(tmp_path, recorded):
    """A function is missed when it is to be watched, an attribute when it is read."""
    folder = tmp_path / "vllm"
    shutil.copytree(STAND_IN / "vllm", folder)
    path = folder / "v1/core/sched/scheduler.py"
    text = path.read_text().replace("_preempt_request", "_evict").replace("get_num_free_blocks", "free")
    path.write_text(text)
    done = job(PYTHONPATH=f"{tmp_path}:{STAND_IN}", FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", recorded[1])
    found = Read(tmp_path / "run")
    missed, trouble = found.findings
    assert (missed["id"], trouble["id"]) == ("probe_missed", "recorder_error")
    assert "Scheduler._preempt_request is not there (wanted versions >=0.32,<0.33)" in missed["message"]
    assert trouble["message"] == "AttributeError in scheduled: 'Pool' object has no attribute 'get_num_free_blocks'"
    assert len(found.requests) == len(LENGTHS) and found.metrics["finished/abort"] == 1


def test_an_exception_of_the_engine_passes(tmp_path):
    code = "from vllm.v1.core.sched.scheduler import Scheduler; s = Scheduler(); s.running = [1]; s.schedule()"
    done = job(code, FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert done.returncode == 1 and "AttributeError: 'int' object" in done.stderr


def test_what_an_engine_beside_the_trainer_does_belongs_to_the_step_that_had_begun(tmp_path, monkeypatch):
    """Two steps of the trainer, from 100 s and from 200 s on; the engine answers before, in the first and in the second."""
    now = [0]
    monkeypatch.setattr(engine_module, "clock", lambda: now[0] * 10**9)
    book = create(tmp_path / "run", Manifest(run="run"))
    trainer, other = Writer(book.part("driver", None)), Writer(book.part("rollout", None))
    for step in (0, 1):
        start = (step + 1) * 100 * 10**9
        span = SpanRow(id=step + 1, event="whole", name="step", span_kind="stage", start_ns=start, end_ns=start + 10**9)
        span.step, span.t_ns = step, start
        trainer.put(span)
    engine = Engine(Recorder(other, level="tensors", role="rollout"))
    for second, preemptions in ((90, 1), (110, 2), (150, 4), (250, 8)):
        now[0] = second
        for _ in range(preemptions):
            engine.preempted()
        engine.finished(
            Finished(name="r", reason="stop", prompt_tokens=1, response_tokens=second, computed_tokens=2, seconds=1.0)
        )
        engine.rest()
    trainer.close()
    other.close()
    with Ledger(tmp_path / "run") as ledger:
        counts = "SELECT step, value FROM metrics_by_step WHERE name = 'rollout/preemptions' ORDER BY step NULLS FIRST"
        assert ledger.query(counts)[1] == [(None, 1), (0, 2 + 4), (1, 8)]
        requests = "SELECT step, response_tokens FROM requests ORDER BY response_tokens"
        assert ledger.query(requests)[1] == [(None, 90), (0, 110), (0, 150), (1, 250)]


# ------------------------------------------------------------------------------------------------------------ in one process


class Ink:
    def __init__(self) -> None:
        self.rows: list[object] = []

    def put(self, row: object) -> None:
        self.rows.append(row)


@pytest.fixture
def told(monkeypatch):
    """An engine on a clock that the test sets, in ms, and what it has written."""
    now = [0]
    monkeypatch.setattr(engine_module, "clock", lambda: now[0] * 1_000_000)
    ink = Ink()
    return Engine(Recorder(ink, level="tensors", role="rollout")), ink.rows, now


def test_steps_of_a_millisecond_are_four_windows_a_second(told):
    engine, found, now = told
    for i in range(10_000):
        now[0] = i
        engine.stepped(Step(running=i % 3, waiting=i % 2, blocks_used=5, blocks=10, prefill_tokens=0, decode_tokens=2))
    engine.rest()
    tokens = [row.value for row in found if row.table == "metrics" and row.name == "rollout/decode_tokens"]
    assert sum(tokens) == 20_000 and len(tokens) == 40
    running = [row for row in found if row.table == "metrics" and row.name == "rollout/running"]
    assert sum(row.value * row.weight for row in running) == sum(i % 3 for i in range(10_000))
    assert len(found) < 600


def test_rows_keep_what_was_when_their_window_began(told):
    engine, found, now = told
    step = Step(running=1, waiting=0, blocks_used=1, blocks=2, prefill_tokens=4, decode_tokens=0)
    for version in (1, None, 2):
        engine.version(version)
        engine.stepped(step)
        now[0] += 10
    engine.write()
    assert [row.policy_version for row in found if row.table == "spans"] == [1, None, 2]


def test_a_request_that_was_never_scheduled_has_waited_all_its_life(told):
    engine, found, now = told
    now[0] = 5_000
    engine.finished(
        Finished(name="r", reason="abort", prompt_tokens=7, response_tokens=0, computed_tokens=0, seconds=2.0)
    )
    request, queued = found
    assert (request.name, request.start_ns, request.end_ns) == ("request/abort", 3_000_000_000, 5_000_000_000)
    assert (queued.parent, queued.start_ns, queued.end_ns) == (request.id, 3_000_000_000, 5_000_000_000)
    assert (queued.tokens_valid, queued.tokens_computed) == (7, None)


def test_what_is_remembered_of_requests_that_never_end_is_bounded(told, monkeypatch):
    engine, _, _ = told
    monkeypatch.setattr(engine_module, "STARTED", 100)
    for i in range(1_000):
        engine.started(str(i), cached_tokens=0, waited_s=0.0)
    assert len(engine._started) <= 100


def test_a_step_costs_the_engine_microseconds():
    """Twenty times what it takes here, or a test would fail with its machine."""
    engine = Engine(Recorder(Ink(), level="tensors", role="rollout"))
    step = Step(running=3, waiting=1, blocks_used=5, blocks=10, prefill_tokens=0, decode_tokens=2)
    began = time.process_time()
    for _ in range(20_000):
        engine.stepped(step)
    assert (time.process_time() - began) / 20_000 < 50e-6
