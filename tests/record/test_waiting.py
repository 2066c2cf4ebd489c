"""What does not end is seen before it ends: in rows of its begin, and by whoever is to look for ranks that hang."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stage_functions
import torch
import torch.distributed as dist

from flowledger.flow.seams import Probe
from flowledger.ledger.rows import FindingRow, SpanRow
from flowledger.record import waiting
from flowledger.record.adapters import collectives
from flowledger.record.attach import attach
from flowledger.record.position import Frame, inner
from flowledger.record.recorder import Recorder
from flowledger.record.waiting import Alarm, Waiting
from tests.record.conftest import Rows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GROUPS = [probe for probe in collectives.PROBES if "ProcessGroup" in probe.target]
SLOW_S, LATE_S = 0.2, 1.5
HANG = FindingRow(id="hang", verdict="fail", message="they hang")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.02)
    monkeypatch.setattr(waiting, "SLOW_NS", int(SLOW_S * 1e9))
    monkeypatch.setattr(waiting, "AGAIN_NS", int(0.3e9))


# -------------------------------------------------------------------- on real ranks


def late() -> tuple[Rows, list[FindingRow]]:
    """Rank 1 is in a micro-batch for a while, and rank 0 in a collective."""
    rows, told, rank = Rows(), list[FindingRow](), dist.get_rank()
    stage_functions.slow = lambda: time.sleep(LATE_S)  # type: ignore[attr-defined]  # a function that is not in the job
    probes = (Probe(stage=None, target="stage_functions:slow", scope="micro_batch"), *GROUPS)
    recorder = Recorder(rows, level="steps", rank=rank, alarm=Alarm(0.8, lambda: HANG, told.append))
    with attach(probes, recorder):
        dist.barrier()
        if rank == 1:
            stage_functions.slow()  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(2))
    assert recorder.cost()["errors"] == 0, rows.of("findings")
    return rows, told


def test_a_collective_is_written_again_and_again_and_a_slow_call_once(forked: ModuleType) -> None:
    (waits, told), (works, nothing) = forked.ranks(2, late)
    *begins, end = waits.of("spans", name="allreduce")
    assert len(begins) >= 3 and {row.event for row in begins} == {"begin"} and end.event == "end"
    assert {(row.id, row.start_ns) for row in begins} == {(end.id, end.start_ns)}
    heard = [row.t_ns - row.start_ns for row in begins]  # how long it had been open, as far as the row knows
    assert heard == sorted(heard) and heard[0] > SLOW_S * 1e9 and heard[-1] > 0.8e9
    begin, whole = works.of("spans", name="slow")
    assert (begin.event, begin.end_ns, begin.micro_batch, whole.event) == ("begin", None, 0, "whole")
    assert (begin.id, begin.start_ns) == (whole.id, whole.start_ns)
    assert (len(told) >= 1, nothing) == (True, [])


# -------------------------------------------------------------------- without ranks


class Host(Rows):
    """A recorder that is inside of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = inner(
            Frame("process", "process"), name="reward", scope="stage", stage="reward", phase=None, role=None
        )
        self.latest.id, self.latest.start_ns = 1, 1

    def put(self, row: Any, frame: Any = None, now: int = 0, write: bool = True) -> None:
        if write:
            self.append(row)
        else:
            row.stage = frame.stage

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


class Opened:
    def __init__(self, span: int, age_s: float) -> None:
        start = time.monotonic_ns() - int(age_s * 1e9)
        self.row = SpanRow(id=span, event="whole", name="allreduce", span_kind="comm", start_ns=start)
        self.frame = Host().latest


@pytest.fixture
def watched() -> Iterator[Callable[..., tuple[Host, list[FindingRow]]]]:
    """Watch what is open for 0.2 s; returns what was written, and what was told."""
    started: list[Waiting] = []

    def watch(
        opened: dict[int, Any], look: Callable[[], FindingRow | None] = lambda: HANG
    ) -> tuple[Host, list[FindingRow]]:
        host, told = Host(), list[FindingRow]()
        started.append(Waiting(host, opened, Alarm(10.0, look, told.append)))
        started[-1].start()
        time.sleep(0.2)
        started[-1].close()
        return host, told

    yield watch
    for one in started:
        one.close()


def test_what_is_told_is_of_the_oldest_and_only_after_its_time(watched: Any) -> None:
    assert watched({2: Opened(2, 11.0), 3: Opened(3, 0.1)})[1] == [HANG]
    assert watched({2: Opened(2, 9.0), 3: Opened(3, 0.1)})[1] == []
    assert watched({2: Opened(2, 11.0)}, lambda: None)[1] == []


def test_a_collective_that_ends_while_others_are_read_hangs_no_more(watched: Any) -> None:
    opened = {2: Opened(2, 11.0)}
    assert watched(opened, lambda: opened.clear() or HANG)[1] == []


def test_the_begin_of_a_stage_is_not_written_twice_nor_that_of_a_quick_call(watched: Any) -> None:
    host, _ = watched({2: Opened(2, 1.0), 3: Opened(3, -9.0)})
    assert {(row.id, row.stage) for row in host} == {(2, "reward")}
