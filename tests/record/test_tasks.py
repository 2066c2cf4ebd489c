"""Spans of generators and coroutines last until these are done, and know what they were begun from."""

import asyncio
import threading

import numpy
import pytest
import stage_tasks

from flowledger.flow.seams import Probe

JOB = "stage_tasks"
TIMERS = (
    Probe(stage=None, target=f"{JOB}:_timer", scope="step", only_if={"name": "=step"}),
    Probe(stage="rollout", target=f"{JOB}:_timer", only_if={"name": "=gen"}),
    Probe(stage="update_actor", target=f"{JOB}:_timer", only_if={"name": "=update"}),
)
TASKS = (
    Probe(stage=None, target=f"{JOB}:answer", scope="call"),
    Probe(stage=None, target=f"{JOB}:inner", scope="call"),
)
WORKER = (
    *(
        Probe(stage=name, target=f"{JOB}:{name}", opens_step=True)
        for name in ("old_log_prob", "ref_log_prob", "update_actor")
    ),
    Probe(stage="weight_sync", target=f"{JOB}:update_weights", args={"global_steps": "@done_step"}),
)


def test_what_a_timer_is_around_is_its_stage_and_its_step(record):
    with record(probes=TIMERS) as rows:
        for _ in range(2):
            with stage_tasks.timer("step", spent := {}), stage_tasks.timer("gen", spent):
                pass
            with stage_tasks.timer("other", spent):
                pass
    assert spent == {"gen": 1.0, "step": 1.0, "other": 1.0}
    ended = [(row.name, row.step, row.stage) for row in rows.of("spans") if row.event == "end"]
    assert ended == [("rollout", 0, "rollout"), ("step", 0, None), ("rollout", 1, "rollout"), ("step", 1, None)]


def test_what_is_raised_within_a_timer_ends_its_span_and_goes_on(record):
    with record(probes=TIMERS) as rows:
        with pytest.raises(KeyError), stage_tasks.timer("step", {}), stage_tasks.timer("gen", {}):
            raise KeyError("gone")
        with stage_tasks.timer("step", {}):
            pass
    spans = rows.of("spans")
    assert [row.name for row in spans if row.event == "begin"] == ["step", "rollout", "step"]
    assert [(row.name, row.step) for row in spans if row.event == "end"] == [("rollout", 0), ("step", 0), ("step", 1)]


def test_tasks_that_go_on_in_turns_each_have_their_own_calls(record):
    with record(probes=(*TIMERS, *TASKS)) as rows, stage_tasks.timer("gen", {}):
        assert asyncio.run(stage_tasks.answers()) == [0, 1, 4]
    spans = {row.id: row for row in rows.of("spans") if row.event in ("whole", "end")}
    (stage,) = (row for row in spans.values() if row.name == "rollout")
    outer, inner = ([row for row in spans.values() if row.name == name] for name in ("answer", "inner"))
    assert {row.parent for row in outer} == {stage.id}
    assert {row.parent for row in inner} == {row.id for row in outer}
    assert all(spans[row.parent].start_ns <= row.start_ns <= row.end_ns <= spans[row.parent].end_ns for row in inner)


def test_a_task_that_fails_ends_its_spans(record):
    with record(probes=TASKS) as rows, pytest.raises(ValueError, match="no such sample"):
        asyncio.run(stage_tasks.answer(-1))
    assert [row.name for row in rows.of("spans", event="whole")] == ["inner", "answer"]


def test_a_worker_takes_its_steps_from_the_order_of_its_stages_and_from_the_weights_it_sends(record):
    with record(probes=WORKER) as rows:
        stage_tasks.update_weights(6)  # resumed after step 6
        for step in (7, 8):
            stage_tasks.old_log_prob()
            stage_tasks.ref_log_prob()
            stage_tasks.update_actor()
            stage_tasks.update_actor()  # in parts
            if step == 7:
                stage_tasks.update_weights(7)
        stage_tasks.old_log_prob()  # no weights were sent: the order tells
    spans = [(row.name, row.step) for row in rows.of("spans") if row.event == "end" and row.name != "step"]
    one = ["old_log_prob", "ref_log_prob", "update_actor", "update_actor"]
    assert spans == [
        ("weight_sync", None), *((name, 7) for name in one), ("weight_sync", 7), *((name, 8) for name in one),
        ("old_log_prob", 9),
    ]  # fmt: skip
    assert [row.step for row in rows.of("spans", name="step", event="end")] == [7, 8, 9]


def test_a_process_beside_the_ranks_has_no_rank(record):
    with record(probes=TIMERS, rank=None, rank_count=None) as rows, stage_tasks.timer("step", {}):
        pass
    assert {(row.rank, row.rank_count) for row in rows} == {(None, None)}


def test_a_second_trainer_in_a_process_is_found_once(record, job):
    with record() as rows:
        job.run(2)
        job.run(2)
    (found,) = rows.of("findings")
    assert (found.id, found.verdict) == ("step_repeated", "warn") and found.message.startswith("step 0 begins again")
    assert [row.step for row in rows.of("spans", name="step", event="end")] == [0, 1, 0, 1]


STREAMS = (
    Probe(stage="rollout", target=f"{JOB}:stream"),
    Probe(stage="reward", target=f"{JOB}:scores"),
    Probe(stage=None, target=f"{JOB}:note", scope="call"),
)


def noted(rows):
    return [(row.stage, row.parent) for row in rows.of("spans", name="note")]


def test_tasks_side_by_side_are_not_within_each_other(record):
    with record(probes=TASKS) as rows:
        asyncio.run(stage_tasks.answers())
    assert {row.parent for row in rows.of("spans", name="answer")} == {None}


def test_a_stream_that_is_closed_in_another_thread_leaves_that_threads_calls_alone(record):
    with record(probes=STREAMS) as rows:
        stream = stage_tasks.stream()
        next(stream)
        thread = threading.Thread(target=lambda: (stage_tasks.note(), stream.close(), stage_tasks.note()))
        thread.start()
        thread.join()
        stage_tasks.note()
    assert [stage for stage, _ in noted(rows)] == ["rollout", None, None]
    assert rows.of("findings") == []  # to give a stream up is no failure


def test_what_ends_before_what_began_after_it_leaves_that_open(record):
    with record(probes=STREAMS) as rows:
        first, second = stage_tasks.stream(), stage_tasks.scores()
        next(first), next(second)
        list(first)
        stage_tasks.note()
        list(second)
        stage_tasks.note()
    assert [stage for stage, _ in noted(rows)] == ["reward", None]


def test_a_task_that_outlives_what_it_was_begun_from_is_no_longer_within_it(record):
    async def job():
        stream = stage_tasks.stream()
        next(stream)
        task = asyncio.create_task(stage_tasks.notes())
        await asyncio.sleep(0)
        list(stream)
        await task

    with record(probes=STREAMS) as rows:
        asyncio.run(job())
    assert [stage for stage, _ in noted(rows)] == ["rollout", None]


class Broken:
    @property
    def word(self):
        raise RuntimeError("not yet")


@pytest.mark.parametrize("value", [Broken(), numpy.array([1, 2]), {"word": numpy.array([1, 2])}, None, 3])
def test_a_call_whose_words_cannot_be_had_goes_on(record, value):
    probe = Probe(stage=None, target=f"{JOB}:note", scope="call", only_if={"value.word": "=yes"})
    with record(probes=(probe,)) as rows:
        assert stage_tasks.note(value) is value
    assert rows == []


def test_what_can_be_gone_through_once_is_left_to_the_call(record):
    facts = ("@group_ids", "@sample_keys", "@received_weights")
    probes = [Probe(stage=None, target=f"{JOB}:note", scope="call", args={"value": fact}) for fact in facts]
    with record(probes=probes):
        assert list(stage_tasks.note(iter(["a", "b"]))) == ["a", "b"]


def test_what_is_no_function_any_more_is_missed_and_left_alone(record):
    with record(probes=(Probe(stage=None, target=f"{JOB}:Holder.value", scope="call"),)) as rows:
        assert stage_tasks.Holder().value == 7
    assert [row.id for row in rows.of("findings")] == ["probe_missed"]
