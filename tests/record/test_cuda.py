"""A GPU's memory and time by stage, on a played GPU: nothing here has run on a real one."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_gpu import GIB, MIB, Allocator, Gpu, Nvml, Rows, played_job

from flowledger.flow.seams import Probe
from flowledger.ledger import directory, manifest, writer
from flowledger.ledger.reader import Ledger
from flowledger.record.attach import attach
from flowledger.record.gpu import nvml
from flowledger.record.gpu.cuda import InUse, OnDevice, TorchGpu, found
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.gpu.device_spans import AT_ONCE, DeviceSpans
from flowledger.record.gpu.peaks import Peaks
from flowledger.record.layers import Layers
from flowledger.record.position import Frame
from flowledger.record.recorder import Recorder

JOB = "played_job"
PROBES = (
    Probe(stage=None, target=f"{JOB}:step", scope="step"),
    Probe(stage="rollout", target=f"{JOB}:rollout"),
    Probe(stage="update_actor", target=f"{JOB}:update"),
    Probe(stage=None, target=f"{JOB}:forward", scope="call", phase="forward"),
)


def plain(work, *args):
    return work(*args)


@pytest.fixture
def job(monkeypatch):
    return played_job(monkeypatch, JOB)


def recorded(work, level="steps"):
    rows = Rows()
    with attach(PROBES, Recorder(rows, level=level, ops_every=0)):
        work()
    return rows


# ---------------------------------------------------------------- who is asked, and when


def test_a_process_that_has_not_initialised_cuda_has_no_gpu():
    assert not torch.cuda.is_initialized()
    assert found() is None
    assert not torch.cuda.is_initialized()


def test_torch_is_asked_only_once_it_has_cuda_and_never_while_it_captures(monkeypatch):
    state = SimpleNamespace(initialised=False, capturing=False)
    played = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: state.initialised, is_current_stream_capturing=lambda: state.capturing
        )
    )
    monkeypatch.setitem(sys.modules, "torch", played)
    assert found() is None
    state.initialised = True
    assert isinstance(found(), TorchGpu)
    state.capturing = True
    assert found() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert found() is None
    assert "torch" not in sys.modules


def test_torchs_own_functions_are_called_as_torch_has_them():
    asked = []
    played = SimpleNamespace(
        _C=SimpleNamespace(_cuda_isHistoryEnabled=lambda: True),
        cuda=SimpleNamespace(
            current_device=lambda: 3, mem_get_info=lambda device: (30, 80),
            get_device_properties=lambda device: SimpleNamespace(uuid="ab-cd"),
            Event=lambda *, enable_timing: ("event", enable_timing),
            memory=SimpleNamespace(
                _snapshot=lambda: {"segments": []}, _record_memory_history=lambda **how: asked.append(how)
            ),
        ),
    )  # fmt: skip
    gpu = TorchGpu(played)
    assert (gpu.device(), gpu.memory(3), gpu.uuid(3)) == (3, OnDevice(used=50, total=80), "GPU-ab-cd")
    assert (gpu.event(), gpu.keeps_history(), gpu.snapshot()) == (("event", True), True, {"segments": []})
    gpu.keep_history(1000)
    gpu.keep_history(None)
    assert asked == [
        {"enabled": "all", "context": "state", "stacks": "python", "max_entries": 1000},
        {"enabled": None},
    ]
    known = torch.cuda.memory._record_memory_history.__signature__.parameters  # of the torch that is here
    assert set(asked[0]) <= set(known)


def test_a_device_on_which_nothing_was_allocated_is_not_asked_for_its_memory():
    """cudaMemGetInfo and the first event of a device would make a context there."""
    gpu = Gpu(devices=2)
    memory = DeviceMemory(plain, InUse(gpu.find))
    gpu.allocator.take(GIB, device=1)
    assert memory.reading() is None
    assert gpu.memory_asked == gpu.events == 0
    gpu.current = 1
    assert memory.reading().allocated == GIB


def test_a_reading_is_the_allocators_and_the_devices():
    gpu = Gpu(foreign=3 * GIB)
    gone = gpu.allocator.take(GIB)
    gpu.allocator.take(3 * GIB)
    gpu.allocator.give_back(gone)
    seen = DeviceMemory(plain, InUse(gpu.find)).reading()
    assert (seen.allocated, seen.reserved, seen.device_used) == (3 * GIB, 4 * GIB, 7 * GIB)
    assert seen.fragmentation == 0.25
    assert seen.host_used is None or seen.host_used > 10 * MIB


# ---------------------------------------------------------------- peaks


def test_peaks_of_nested_stages_are_each_ones_own():
    allocator = Allocator()
    peaks = Peaks(allocator.module, plain)
    take, back = allocator.take, allocator.give_back
    back(take(9 * GIB))  # before anything is counted
    outer = peaks.begin(0)
    back(take(5 * GIB))
    inner = peaks.begin(0)
    back(take(2 * GIB))
    assert peaks.peak(inner).allocated == 2 * GIB
    peaks.end(inner)
    later = peaks.begin(0)
    assert peaks.peak(later).allocated == 0
    assert peaks.peak(outer).allocated == 5 * GIB
    back(take(7 * GIB))
    assert [peaks.peak(one).allocated for one in (later, outer)] == [7 * GIB, 7 * GIB]
    allocator.empty_cache()
    assert peaks.peak(outer).reserved == 9 * GIB + 5 * GIB + 2 * GIB + 7 * GIB  # the played allocator reuses nothing


def test_each_device_has_counters_of_its_own():
    allocator = Allocator(devices=2)
    peaks = Peaks(allocator.module, plain)
    zero, one = peaks.begin(0), peaks.begin(1)
    allocator.take(GIB, device=1)
    assert (peaks.peak(zero).allocated, peaks.peak(one).allocated) == (0, GIB)


class Told:
    """The second implementation: a list of totals, from which everybody's peak is the highest since their begin."""

    def __init__(self):
        self.totals = [0]
        self.since_job = 0
        self.since = []

    def peak(self, since):
        return max(self.totals[since:])

    def now(self):
        return len(self.totals) - 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 100)),
            st.tuples(
                st.sampled_from(["give", "begin", "end", "reset", "reset accelerator", "look"]), st.integers(0, 9)
            ),
        ),
        max_size=40,
    )
)
def test_whoever_resets_when_every_peak_is_the_highest_since_its_own_begin(program):
    allocator, told = Allocator(), Told()
    module, peaks, alive, counted = allocator.module, None, [], []
    peaks = Peaks(module, plain)
    for act, number in program:
        if act == "take":
            alive.append((allocator.take(number), number))
            told.totals.append(told.totals[-1] + number)
        elif act == "give" and alive:
            address, size = alive.pop(number % len(alive))
            allocator.give_back(address)
            told.totals.append(told.totals[-1] - size)
        elif act == "begin":
            counted.append((peaks.begin(0), told.now()))
        elif act == "end" and counted:
            peaks.end(counted.pop()[0])
        elif act.startswith("reset"):
            name = "_accelerator_resetPeakStats" if "accelerator" in act else "_cuda_resetPeakMemoryStats"
            getattr(module, name)(0)
            told.since_job = told.now()
        for since, began in counted:
            assert peaks.peak(since).allocated == told.peak(began)
        for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
            assert getattr(module, name)(0)["allocated_bytes"]["all"]["peak"] == told.peak(told.since_job)
    peaks.close()
    assert module._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == told.peak(told.since_job)


def test_torchs_own_answers_to_the_job_are_the_same_with_and_without(monkeypatch):
    """`torch.cuda.max_memory_allocated` and its like, over played counters."""
    allocator = Allocator()
    for name, function in vars(allocator.module).items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr("torch.cuda.memory.is_initialized", lambda: True)
    before = torch._C._cuda_memoryStats
    peaks = Peaks(torch._C, plain)
    allocator.give_back(allocator.take(4 * GIB))
    stage = peaks.begin(0)
    allocator.take(GIB)
    assert torch.cuda.max_memory_allocated(0) == torch.cuda.max_memory_reserved(0) - GIB == 4 * GIB
    assert torch.cuda.memory_stats(0)["allocated_bytes.all.peak"] == 4 * GIB
    assert torch.cuda.memory_allocated(0) == peaks.peak(stage).allocated == GIB
    allocator.give_back(allocator.take(2 * GIB))
    torch.cuda.reset_peak_memory_stats(0)  # the job's own
    assert torch.cuda.max_memory_allocated(0) == GIB
    assert peaks.peak(stage).allocated == 3 * GIB
    peaks.close()
    assert torch._C._cuda_memoryStats is before


def test_what_only_the_recorder_knows_of_the_jobs_peak_outlives_it_until_the_job_resets():
    allocator = Allocator()
    originals = dict(vars(allocator.module))
    peaks = Peaks(allocator.module, plain)
    allocator.give_back(allocator.take(4 * GIB))
    peaks.begin(0)
    peaks.close()
    assert allocator.module._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 4 * GIB
    allocator.module._cuda_resetPeakMemoryStats(0)
    assert allocator.module._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 0
    assert vars(allocator.module) == originals


def test_two_recorders_in_one_process_do_not_disturb_each_other():
    allocator = Allocator()
    one, two = Peaks(allocator.module, plain), Peaks(allocator.module, plain)
    first = one.begin(0)
    allocator.give_back(allocator.take(4 * GIB))
    second = two.begin(0)
    allocator.give_back(allocator.take(GIB))
    assert (one.peak(first).allocated, two.peak(second).allocated) == (4 * GIB, GIB)
    one.close()
    assert two.peak(second).allocated == GIB
    assert allocator.module._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 4 * GIB


def test_where_the_jobs_readings_could_not_be_kept_right_nothing_is_reset():
    allocator = Allocator()
    del allocator.module._cuda_memoryStats  # another torch
    assert Peaks(allocator.module, plain).begin(0) is None
    assert allocator.resets == 0


def test_a_stage_that_has_ended_costs_nothing_any_more():
    gpu = Gpu()
    gpu.allocator.take(GIB)
    memory = DeviceMemory(plain, InUse(gpu.find))
    for number in range(5):
        stage = frame(number)
        memory.begin(stage)
        assert len(memory._peaks._open) == 1
        memory.end(stage)
    assert not memory._peaks._open and not memory._since


# ---------------------------------------------------------------- rows


def test_a_peak_belongs_to_its_stage_and_the_steps_is_the_highest(gpu, job):
    take, back = gpu.allocator.take, gpu.allocator.give_back
    take(GIB)
    job.rollout = lambda: back(take(6 * GIB))
    job.update = lambda: (back(take(2 * GIB)), gpu.allocator.empty_cache())
    rows = recorded(lambda: job.step())
    assert not rows.of("findings")
    ends = {row.stage: row for row in rows.of("memory", instant="end", kind="total")}
    assert {stage: row.peak_since_stage for stage, row in ends.items()} == {
        "rollout": 7 * GIB, "update_actor": 3 * GIB, None: 7 * GIB
    }  # fmt: skip
    assert {stage: row.reserved_peak_since_stage for stage, row in ends.items()} == {
        "rollout": 7 * GIB, "update_actor": 9 * GIB, None: 9 * GIB
    }  # fmt: skip
    assert (ends["update_actor"].allocated, ends["update_actor"].reserved) == (GIB, GIB)
    assert gpu.stats(0)["allocated_bytes"]["all"]["peak"] == 7 * GIB  # what the job would read


def test_a_stage_that_raises_leaves_the_peaks_of_others_right(gpu, job):
    take, back = gpu.allocator.take, gpu.allocator.give_back

    def broken():
        back(take(5 * GIB))
        raise ValueError("no")

    take(GIB)
    job.rollout = broken
    job.update = lambda: back(take(2 * GIB))

    def work():
        with pytest.raises(ValueError, match="no"):
            job.rollout()
        job.update()

    rows = recorded(work)
    peaks = [row.peak_since_stage for row in rows.of("memory", instant="end", kind="total")]
    assert peaks == [6 * GIB, 3 * GIB]


def test_a_gpu_that_the_job_takes_into_use_late_is_read_from_then_on(gpu, job):
    job.update = lambda: gpu.allocator.take(GIB)
    rows = recorded(lambda: (job.step(), job.step()))  # the first step begins before anything is allocated
    (first, second) = rows.of("memory", instant="end", stage="update_actor", kind="total")[-2:]
    assert (first.reserved_peak_since_stage, second.reserved_peak_since_stage) == (None, 2 * GIB)
    assert (first.allocated, first.peak_since_stage) == (GIB, GIB)
    assert (second.allocated, second.peak_since_stage) == (2 * GIB, 2 * GIB)


def test_what_fails_is_a_row_and_the_rest_is_recorded(gpu, job):
    gpu.allocator.take(GIB)
    gpu.memory = lambda device: (_ for _ in ()).throw(RuntimeError("no such figure"))
    rows = recorded(lambda: job.step())
    (trouble,) = rows.of("findings", id="recorder_error")
    assert "no such figure" in trouble.message
    assert [row.name for row in rows.of("spans", event="end")] == ["rollout", "update_actor", "step"]


def test_memory_outside_of_torch_is_residue_at_the_end_of_a_stage(gpu, job, monkeypatch):
    played = Nvml()
    monkeypatch.setattr(nvml, "import_module", lambda _: played)
    gpu.allocator.take(9 * GIB)
    rows = recorded(lambda: job.step())
    (row,) = rows.of("memory", instant="nvml")  # the first stage; the others come within ten seconds
    assert (row.stage, row.kind, row.allocated, row.device_used) == ("rollout", "residue", GIB, 10 * GIB)
    assert played.calls == ["init", "GPU-0", "processes", "shutdown"]


def test_while_a_graph_is_captured_no_figure_of_the_hosts_allocator_stands_in(gpu, job):
    gpu.allocator.take(GIB)
    job.rollout = lambda: setattr(gpu, "capturing", True)
    rows = recorded(lambda: job.rollout())
    (end,) = rows.of("memory", instant="end", kind="total")
    assert (end.allocated, end.reserved, end.device_used) == (None, None, None)


# ---------------------------------------------------------------- the device's time


def test_a_span_has_the_devices_time_beside_the_hosts_without_waiting(gpu, job):
    gpu.allocator.take(GIB)
    job.forward = lambda: gpu.launch(30.0)
    job.rollout = lambda: gpu.launch(100.0)
    job.update = lambda: (gpu.launch(5.0), job.forward(), gpu.launch(15.0))
    rows = Rows()
    recorder = Recorder(rows, level="steps")
    with attach(PROBES, recorder):
        job.step()
        assert not rows.of("spans", event="device")  # the host is done, the device has not begun
        gpu.work()
        job.rollout()  # at its end the times of what has passed are read
        told = {row.name: row.device_ms for row in rows.of("spans", event="device")}
        assert told == {"rollout": 100.0, "forward": 30.0, "update_actor": 50.0, "step": 150.0}
        gpu.work()
    assert [row.device_ms for row in rows.of("spans", event="device", name="rollout")] == [100.0, 100.0]
    for row in rows.of("spans", event="device"):
        (same,) = [one for one in rows.of("spans") if one.id == row.id and one.event in ("end", "whole")]
        assert (same.name, same.step, same.stage, same.phase, same.start_ns) == (
            row.name, row.step, row.stage, row.phase, row.start_ns
        )  # fmt: skip


def test_events_are_used_again(gpu, job):
    gpu.allocator.take(GIB)
    job.rollout = lambda: gpu.launch(1.0)
    rows = recorded(lambda: [(job.rollout(), gpu.work()) for _ in range(50)])
    assert len(rows.of("spans", event="device")) == 50
    assert gpu.events <= 4


def test_nothing_is_marked_or_asked_while_a_graph_is_captured(gpu, job):
    gpu.allocator.take(GIB)

    def capture():
        gpu.capturing = True
        asked = gpu.asked, gpu.events, gpu.memory_asked
        job.forward()
        job.forward()
        assert (gpu.asked, gpu.events, gpu.memory_asked) == asked
        gpu.capturing = False

    def begins_to_capture():
        gpu.capturing = True

    job.rollout, job.update = capture, begins_to_capture
    rows = recorded(lambda: (job.rollout(), gpu.work(), job.update()))
    assert [row.name for row in rows.of("spans", event="device")] == ["rollout"]
    assert not rows.of("findings")


def frame(number):
    one = Frame("call", "call", Frame("root", "process"))
    one.id = number
    return one


@pytest.fixture
def timed():
    gpu = Gpu(devices=2)
    gpu.allocator.take(GIB, device=0)
    gpu.allocator.take(GIB, device=1)
    rows = []
    return gpu, rows, DeviceSpans(lambda row, *_: rows.append(row), InUse(gpu.find))


def test_a_span_that_ends_on_another_device_has_no_time(timed):
    gpu, rows, spans = timed
    spans.begin(frame(1))
    gpu.current = 1
    spans.end(frame(1), "a", "stage", 0)
    gpu.work()
    spans.close()
    assert rows == []


def test_after_an_error_of_cuda_nothing_more_is_timed(timed):
    gpu, rows, spans = timed
    gpu.event = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        spans.begin(frame(1))
    spans.begin(frame(2))
    spans.end(frame(2), "a", "stage", 0)
    spans.close()
    assert rows == []


def test_a_device_that_does_not_come_to_an_end_holds_up_nobody(timed, monkeypatch):
    gpu, rows, spans = timed
    monkeypatch.setattr("flowledger.record.gpu.device_spans.WAIT_S", 0.05)
    monkeypatch.setattr("flowledger.record.gpu.device_spans.MOST", 3)
    for number in range(10):
        spans.begin(frame(number))
        gpu.launch(1.0)
        spans.end(frame(number), "a", "stage", 0)
    assert gpu.events == 2 * 3
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < 5.0
    assert rows == []


def test_times_are_read_in_portions(timed):
    gpu, rows, spans = timed
    for number in range(2 * AT_ONCE):
        spans.begin(frame(number))
        spans.end(frame(number), "a", "stage", 0)
        gpu.launch(1.0)
    before = len(rows)
    gpu.work()
    spans.begin(frame(999))
    spans.end(frame(999), "a", "stage", 0)
    assert 0 < len(rows) - before <= AT_ONCE
    spans.close()
    assert len(rows) == 2 * AT_ONCE + 1


def test_the_view_of_spans_has_both_times_in_one_row(gpu, job, tmp_path):
    gpu.allocator.take(GIB)
    job.rollout = lambda: gpu.launch(100.0)
    book = directory.create(tmp_path / "run", manifest.Manifest(run="run"))
    ink = writer.Writer(book.part("actor", 0))
    with attach(PROBES, Recorder(ink, level="steps")):
        job.step()
        gpu.work()
    ink.close()
    book.close()
    with Ledger(tmp_path / "run") as ledger:
        rows = ledger.rows("SELECT name, device_ms, latency_ms, end_ns - start_ns AS ns FROM spans_view ORDER BY id")
        assert [(row["name"], row["device_ms"]) for row in rows] == [
            ("step", 100.0), ("rollout", 100.0), ("update_actor", 0.0)
        ]  # fmt: skip
        assert all(row["latency_ms"] == row["ns"] / 1e6 < 100.0 for row in rows)
        assert ledger.rows("SELECT count(*) AS n FROM open_spans") == [{"n": 0}]


def test_what_has_been_moved_off_the_device_is_not_counted_there():
    here, away = torch.nn.Linear(8, 4, device="meta"), torch.nn.Linear(16, 4)
    layers = Layers()
    layers.meet(here)
    layers.meet(away)
    optimizer = torch.optim.SGD(away.parameters(), momentum=0.9)
    away(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    layers.parts("optimizer_state", optimizer)
    of_here, of_away = 4 * (8 * 4 + 4), 4 * (16 * 4 + 4)
    assert layers.bytes_by_kind() == {"param": of_here + of_away, "grad": of_away, "optimizer": of_away}
    assert layers.bytes_by_kind("meta") == {"param": of_here, "grad": 0, "optimizer": 0}
