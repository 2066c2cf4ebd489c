"""Operator by operator: live bytes agree with torch's own profiler, kinds add up, the peak is placed."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from conftest import Job
from flowledger.record.operators import Operators
from flowledger.record.position import Frame


def profiled_peak(prof):
    """The highest running sum of the allocations that the profiler saw."""
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def train(model, ids, optimizer, recompute):
    for _ in range(2):
        hidden = model.embed(ids)
        for layer in model.layers:
            hidden = hidden + (checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden))
        loss = model.head(hidden).log_softmax(-1).gather(-1, ids[..., None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_training_step_is_the_profilers_to_64_bytes(recompute):
    job = Job()
    ids = torch.randint(0, 16, (8, 64))
    train(job.model, ids, job.optimizer, recompute)
    watch = Operators(Frame("step", "step"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, watch.watching():
        train(job.model, ids, job.optimizer, recompute)
    truth = profiled_peak(prof)
    assert truth > 100_000  # it is a measurement, not an empty trace
    assert abs(watch.peak_growth - truth) <= 64


def test_live_bytes_return_to_where_they_were():
    job, ids = Job(), torch.randint(0, 16, (8, 64))
    train(job.model, ids, job.optimizer, recompute=False)
    watch = Operators(Frame("step", "step"))
    with watch.watching():
        train(job.model, ids, job.optimizer, recompute=False)
    instants = [seen for seen in watch.replay() if hasattr(seen, "live")]
    changes = sum(change for _, change, _ in watch._events)
    assert changes == 0
    assert instants[-1].label == "peak"


def test_resizing_a_storage_and_views_are_seen():
    watch = Operators(Frame("step", "step"))
    resize = torch.UntypedStorage.resize_
    with watch.watching():
        value = torch.zeros(1000)
        view = value[10:]
        value.untyped_storage().resize_(0)
        emptied = sum(change for _, change, _ in watch._events)
        value.untyped_storage().resize_(2000)
        view.add_(0) if False else None
        del value, view
    assert (emptied, watch.peak_growth) == (0, 4000)
    assert sum(change for _, change, _ in watch._events) == 0
    assert torch.UntypedStorage.resize_ is resize


def test_a_sampled_step_writes_kinds_at_boundaries_and_places_its_peak(record, job):
    job.run()
    with record(ops_every=1) as rows:
        job.run()
    peaks: dict[str | None, int] = {}
    for row in rows.of("memory", instant="peak"):
        peaks[row.stage] = peaks.get(row.stage, 0) + row.allocated
    assert (
        max(peaks, key=lambda stage: peaks[stage]) == "update_actor"
    )  # every stage has its own; the step's is the highest
    peak = rows.of("memory", instant="peak", stage="update_actor")
    kinds = {row.kind: row.allocated for row in peak}
    size = sum(p.numel() * 4 for p in job.model.parameters())
    assert kinds["param"] >= size
    assert {"param", "grad", "optimizer", "activation", "batch"} <= set(kinds)
    after_backward = rows.of("memory", instant="end", phase="backward", kind="grad")
    assert {row.allocated for row in after_backward} == {size}
    inside = rows.of("tensors", tensor_name="hidden_states")
    assert [(row.layer, row.logical_shape) for row in inside] == [(0, [1, 5, 8]), (1, [1, 5, 8])]
    saved = {row.layer: row.bytes for row in rows.of("tensors", tensor_name="activations")}
    # Linear saves its input [5, 8], GELU its input [5, 32], the second Linear its input [5, 32], in fp32.
    assert saved[0] == saved[1] == 4 * 5 * (8 + 32 + 32)


def test_steps_in_between_are_not_watched(record, job):
    with record(ops_every=2) as rows:
        job.run(3)
    assert {row.step for row in rows.of("memory", instant="peak")} == {0, 2}


def test_an_error_within_a_watched_step_leaves_nothing_behind(record, job):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with record(ops_every=1), pytest.raises(ValueError, match="as asked"):
        job.run(fail="micro_batch")
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)


def test_live_bytes_of_a_real_rl_step_equal_torchs_profiler_to_64_bytes(monkeypatch) -> None:
    """From prompt to weight sync: what the storages add up to at the peak is what the allocator handed out."""
    from torch.profiler import ProfilerActivity, profile

    from flowledger.record import sampled
    from flowledger.record.adapters.loop import PROBES
    from flowledger.record.attach import attach
    from flowledger.record.recorder import Recorder
    from flowledger.run import loop
    from tests.run.worlds import config

    class Nowhere:
        def put(self, row: object) -> None: ...

    peaks: list[int] = []
    write = sampled.SampledStep.write

    def noting(step: sampled.SampledStep) -> None:
        peaks.append(step.mode.peak_growth)
        write(step)

    monkeypatch.setattr(sampled.SampledStep, "write", noting)
    with loop.prepared(config(ref={"path": "start"}, algorithm={"kl_coef": 0.1})) as world:
        recorder = Recorder(Nowhere(), level="tensors", bindings=world.bindings, ops_every=1)
        with attach(PROBES, recorder), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as audit:
            loop.rl_step(step=0, world=world)
    live = highest = 0
    events = (e for e in audit.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    assert abs(highest - peaks[0]) <= 64
    assert highest > 100_000
