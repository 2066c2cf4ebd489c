"""Lives of storages: lifetimes close, numbers are never used twice, nothing is kept alive."""

import gc
import weakref

import stage_functions
import torch


def test_every_storage_is_born_before_it_is_read_and_freed_after(record, job):
    with record() as rows:
        job.run(3)
    lives: dict[int, list] = {}
    for row in rows.of("storages"):
        lives.setdefault(row.storage, []).append(row)
    assert lives
    for events in lives.values():
        when = {row.event: row.t_ns for row in events}
        assert len(when) == len(events)  # each event once
        assert when.get("born", 0) <= when.get("last_read", 1 << 62)
        assert when.get("last_read", 0) <= when.get("freed", 1 << 62)
    step_tensors = {row.storage for row in rows.of("tensors", lifetime="step", access="write")}
    assert step_tensors <= {row.storage for row in rows.of("storages", event="freed")}


def test_a_tensor_leaked_into_a_list_is_held_and_its_holder_is_named(record, job, monkeypatch):
    monkeypatch.setattr("flowledger.record.holders.SECONDS", 30.0)  # a loaded machine finds it late, and finds it
    with record() as rows:
        job.run(leak=True)
    held = rows.of("storages", event="held")
    assert len(held) == 4  # one for each micro-batch, once
    assert {row.holder for row in held} == {f"stage_functions: KEPT[{n}]['log_probs'][0]" for n in range(4)}
    assert {row.stage for row in held} == {"update_actor"}


def test_without_a_leak_nothing_is_held(record, job):
    with record() as rows:
        job.run(2)
    assert rows.of("storages", event="held") == []


def test_the_recorder_keeps_nothing_alive(record):
    for options in ({}, {"ops_every": 1}, {"level": "tokens", "ops_every": 1}):
        with record(**options):
            rolled = stage_functions.rollout(
                sample_id=torch.arange(4), group_id=torch.arange(4) // 2, prompt_length=torch.tensor([1, 1])
            )
            alive = weakref.ref(rolled.full_sequence.untyped_storage())
            del rolled
            assert alive() is None
    gc.collect()


def test_looking_for_a_holder_does_not_make_one():
    from flowledger.record.holders import holders

    def inner():
        value = torch.zeros(3)
        alive = weakref.ref(value.untyped_storage())
        pointer = value.untyped_storage()._cdata
        found = holders([pointer])[pointer]
        del value
        return found, alive()

    found, alive = inner()
    assert found.endswith("inner: value")
    assert alive is None
