"""What the recorder does is counted, once, with the step that it belongs to."""

import torch

from flowledger.flow.seams import Probe
from flowledger.record import recorder
from flowledger.record.attach import streamed
from flowledger.record.recorder import Recorder
from flowledger.record.watch import Watch
from flowledger.record.weight_stream import Passed

WORK_NS = 1000


def _called(recorder: Recorder, **probe):
    """One call of a watched function."""
    watch = Watch(Probe(target="job:function", **{"scope": "stage", **probe}), lambda **_: None, recorder.level)
    given = dict.fromkeys(probe.get("args", {}), 7)
    frame, _ = recorder.enter(watch, (), given)
    recorder.leave(watch, frame, (), given, None)


def test_a_step_that_a_call_ends_is_counted_once_and_in_its_own_figures(monkeypatch):
    cpu, rows = [0], []
    monkeypatch.setattr(recorder, "spent", lambda: cpu[0])
    sink = type("Sink", (), {"put": staticmethod(rows.append)})()
    own = Recorder(sink, level="tensors", ops_every=0)

    def works(frame):
        cpu[0] += WORK_NS * (frame.scope == "step")

    monkeypatch.setattr(own._observer.lives, "look_for_holders", works)
    _called(own, stage="update_actor", opens_step=True)
    _called(own, stage="old_log_prob", opens_step=True)  # begins a step, and so ends the one before
    _called(own, stage="weight_sync", args={"global_steps": "@done_step"})  # ends its step
    assert own.own_ns == cpu[0] == 2 * WORK_NS
    said = [row.value for row in rows if row.table == "metrics" and row.name == "recorder/cpu_s"]
    assert said == [WORK_NS / 1e9, 2 * WORK_NS / 1e9]


def test_weights_that_pass_are_looked_at_on_the_recorders_account(monkeypatch):
    cpu = [0]
    monkeypatch.setattr(recorder, "spent", lambda: cpu[0])
    monkeypatch.setattr(Passed, "take", lambda self, weight: cpu.__setitem__(0, cpu[0] + WORK_NS))
    own = Recorder(type("Sink", (), {"put": staticmethod(lambda row: None)})(), level="tensors")
    stream, _ = streamed(own, (iter([("a", torch.ones(1)), ("b", torch.ones(1))]), None))
    assert len(list(stream)) == 2
    assert own.own_ns == 2 * WORK_NS


def test_rows_are_hurried_out_once_a_step_when_all_of_them_are_there():
    rows, hurried = [], []
    own = Recorder(type("Sink", (), {"put": staticmethod(rows.append)})(), level="steps")
    own.hurry = lambda: hurried.append(rows[-1].table)
    _called(own, stage="update_actor", opens_step=True)
    assert hurried == []
    _called(own, stage="weight_sync", args={"global_steps": "@done_step"})
    assert hurried == ["metrics"]  # the figures of the step are the last of its rows
    _called(own, stage="weight_sync", args={"global_steps": "@done_step"})  # where no step is open
    assert len(hurried) == 2
