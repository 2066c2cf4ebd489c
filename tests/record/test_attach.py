"""Attaching watches and changes nothing: results, random state, exceptions, functions."""

import pytest
import stage_functions
import torch

from conftest import PROBES, Job
from flowledger.flow.seams import Probe
from flowledger.record.attach import attach
from flowledger.record.recorder import Recorder


@pytest.mark.parametrize("level", ["steps", "tensors", "tokens"])
def test_recording_changes_no_weight_and_no_random_state(record, level):
    plain, watched = Job(), None
    torch.manual_seed(1)
    plain.run(2)
    after_plain = torch.get_rng_state()
    watched = Job()
    torch.manual_seed(1)
    with record(level, ops_every=2):
        watched.run(2)
    assert torch.equal(torch.get_rng_state(), after_plain)
    for ours, theirs in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_function_is_put_back(record):
    before = stage_functions.rollout
    with record():
        assert stage_functions.rollout is not before
        assert stage_functions.rollout.__wrapped__ is before
    assert stage_functions.rollout is before


def test_an_exception_passes_untouched_and_every_span_is_closed(record, job):
    with record(ops_every=1) as rows:
        with pytest.raises(ValueError, match="as asked"):
            job.run(fail="micro_batch")
        stage_functions.rollout(
            sample_id=torch.arange(4), group_id=torch.arange(4) // 2, prompt_length=torch.tensor([1, 1])
        )
    spans = rows.of("spans")
    begun = {row.id for row in spans if row.event == "begin"}
    ended = {row.id for row in spans if row.event == "end"}
    assert begun == ended
    assert {row.name for row in spans if row.event == "whole"} == {"forward", "micro_batch", "mini_batch"}
    last = [row for row in spans if row.name == "rollout"][-1]
    assert (last.stage, last.phase, last.micro_batch, last.parent) == ("rollout", None, None, None)
    (finding,) = rows.of("findings")
    assert (finding.id, finding.stage, finding.micro_batch) == ("call_failed", "update_actor", 0)
    assert finding.message == "update_actor raised ValueError: as asked"


def test_an_exception_that_a_stage_catches_is_no_finding(record, job, monkeypatch):
    mini_batch = stage_functions.mini_batch

    def caught(*args):
        try:
            return mini_batch(*args)
        except ValueError:
            return 0.0

    with record() as rows:
        monkeypatch.setattr(stage_functions, "mini_batch", caught)  # around what is watched from within
        job.run(fail="micro_batch")
    assert not rows.of("findings")


def test_a_step_that_fails_outside_of_its_stages_is_one_finding(record, job):
    with record() as rows, pytest.raises(TypeError):
        stage_functions.step(step="0", model=job.model, optimizer=job.optimizer)
    (finding,) = rows.of("findings", id="call_failed")
    assert (finding.stage, finding.verdict) == (None, "fail")
    assert finding.message.startswith("step raised TypeError: ")


def test_stages_write_their_begin_at_once(record, job):
    seen = []
    with record() as rows:
        original = stage_functions.forward
        stage_functions.forward = lambda *args: (
            seen.append([row.name for row in rows.of("spans", event="begin")]),
            original(*args),
        )[1]
        job.run()
        stage_functions.forward = original
    assert seen[0] == ["step", "rollout", "update_actor"]


def test_a_missing_target_is_a_finding_and_the_others_are_watched(record, job):
    probes = (*PROBES, Probe(stage="reward", target="stage_functions:no_such_function", versions=">=2"))
    with record(probes=probes) as rows:
        job.run()
    (missed,) = rows.of("findings")
    assert (missed.id, missed.verdict, missed.needs) == ("probe_missed", "warn", ["stage_functions:no_such_function"])
    assert rows.of("spans", name="rollout")


def test_an_error_of_the_recorder_is_one_row_and_never_an_exception(record, job):
    wrong = Probe(stage="rollout", target="stage_functions:rollout", args={"sample_id": "no_such_tensor"})
    with record(probes=(wrong,)) as rows:
        job.run(2)
    (finding,) = rows.of("findings")
    assert finding.id == "recorder_error"
    assert "no tensor is called 'no_such_tensor'" in finding.message
    assert len(rows.of("spans", event="end")) == 2


def test_arguments_are_found_by_position_too(record, job):
    with record() as rows:
        job.run()
    reads = rows.of("tensors", tensor_name="full_sequence", access="read", phase="forward")
    assert len(reads) == 4  # forward(model, full_sequence) is called by position, once for each of 4 micro-batches


def test_a_sink_that_raises_is_not_noticed(job):
    class Broken:
        def put(self, row):
            raise OSError("no room")

    recorder = Recorder(Broken(), level="tensors", ops_every=1)
    with attach(PROBES, recorder):
        job.run()
    assert recorder.cost()["errors"] > 0
