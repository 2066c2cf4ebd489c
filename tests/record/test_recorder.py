"""What each level writes, and that the recorder states its own cost."""

import subprocess
import sys
import time
from contextlib import suppress

import pytest

from conftest import Job
from flowledger.record import attach, readings, watch
from flowledger.record.host_memory import Reading


def names(rows, table):
    return {row.tensor_name for row in rows.of(table)}


def test_level_steps_writes_spans_metrics_and_memory_only(record, job):
    with record("steps", ops_every=1) as rows:
        job.run()
    assert {row.table for row in rows} == {"spans", "metrics", "memory"}


@pytest.mark.parametrize("fail", [None, "micro_batch"])
def test_a_call_that_is_only_timed_takes_a_short_way_to_the_same_span(record, monkeypatch, fail):
    def spans(quick):
        if not quick:
            monkeypatch.setattr(attach, "Watch", Slow)
        with record("steps") as rows:
            for _ in range(2):
                with suppress(ValueError):
                    Job().run(2, fail=fail)
        return [
            (row.id, row.parent, row.name, row.event, row.step, row.stage, row.phase, row.mini_batch, row.micro_batch, row.policy_version,
             row.tokens_computed, row.start_ns <= (row.end_ns or row.start_ns), row.rank, row.role)
            for row in rows.of("spans")
        ]  # fmt: skip

    class Slow(watch.Watch):
        def __init__(self, *given):
            super().__init__(*given)
            taken.append(self.plain)
            self.plain = False

    taken = []
    assert spans(quick=True) == spans(quick=False)
    assert any(taken)


def test_level_tensors_adds_tensors_storages_and_samples_but_no_token(record, job):
    with record("tensors") as rows:
        job.run()
    assert {row.table for row in rows} == {"spans", "metrics", "memory", "tensors", "storages", "samples"}
    assert all(row.checksum is None for row in rows.of("tensors"))


def test_level_tokens_writes_the_tokens_of_the_first_group_and_checksums(record, job):
    with record("tokens", groups=1) as rows:
        job.run()
    tokens = rows.of("tokens")
    assert {row.sample_id for row in tokens} == {"0", "1"}  # group 0 of two groups of two
    first = [row for row in tokens if row.sample_id == "0" and row.stage == "rollout"]
    assert [row.position for row in first] == [0, 1, 2, 3, 4]
    assert [row.response_mask for row in first] == [None, None, 1, 1, 1]
    padded = [row.position for row in tokens if row.sample_id == "1" and row.stage == "rollout"]
    assert padded == [0, 1, 2, 3]  # its last response column is padding
    assert any(row.new_log_prob is not None for row in tokens)
    assert any(row.checksum for row in rows.of("tensors"))


def test_tokens_of_each_stage_are_logical_valid_and_computed(record, job):
    with record() as rows:
        job.run()
    (update,) = rows.of("spans", name="update_actor", event="end")
    # 4 rows of 2 + 3 columns; prompts of 2, 2, 1, 1 and responses of 3, 2, 1, 3 tokens; the model is fed 4 * 5 ids.
    assert (update.tokens_logical, update.tokens_valid, update.tokens_computed) == (20, 15, 20)


def test_metrics_are_numbers_or_special(record, job):
    with record() as rows:
        job.run()
    (bad,) = rows.of("metrics", name="bad")
    assert (bad.value, bad.special) == (None, "nan")
    assert rows.of("metrics", name="loss")[0].value > 0


def test_the_cost_is_written_at_the_end_of_every_step(record, job):
    with record() as rows:
        job.run(2)
    spent = [row.value for row in rows.of("metrics", name="recorder/cpu_s")]
    counted = [row.value for row in rows.of("metrics", name="recorder/rows")]
    assert len(spent) == len(counted) == 2
    assert 0 < spent[0] < spent[1]
    assert 0 < counted[0] < counted[1] <= len(rows)


def test_the_recorder_needs_no_torch_until_it_sees_a_tensor():
    code = (
        "import sys; import flowledger.record.attach, flowledger.record.adapters.loop;"
        "assert not {'torch', 'duckdb'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_is_read_at_the_boundaries_of_a_watched_step_and_the_peak_is_the_highest_reading(record, job):
    with record(ops_every=1) as rows:
        job.run()
    update = rows.of("memory", stage="update_actor", kind="total")
    assert [row.instant for row in update if row.phase is None] == ["begin", "end"]
    if update[0].allocated is not None:  # glibc
        assert all(row.reserved >= row.allocated for row in update)
        assert update[-1].peak_since_stage == max(row.allocated for row in update)


def test_a_step_is_read_at_its_end_and_the_allocator_at_most_for_a_four_thousandth_of_the_time(
    record, job, monkeypatch
):
    made = []

    def dear():
        time.sleep(0.002)
        made.append(1)
        return Reading(allocated=1)

    monkeypatch.setattr(readings, "host_reading", dear)
    began = time.monotonic()
    with record() as rows:
        job.run(8)
    seconds = time.monotonic() - began
    assert [row.instant for row in rows.of("memory", kind="total", stage=None)].count("end") == 8
    assert all(row.host_used or row.allocated for row in rows.of("memory", kind="total", stage=None))
    assert len(made) <= 2 + seconds / 4000 / 0.002  # one at first, when the price is not known yet


def test_known_kinds_are_counted_exactly(record, job):
    with record() as rows:
        job.run()
    parameters = sum(p.numel() for p in job.model.parameters())
    (param,) = rows.of("memory", stage="update_actor", kind="param")
    (moments,) = rows.of("memory", stage="update_actor", kind="optimizer")
    assert param.allocated == 4 * parameters
    assert moments.allocated == 2 * 4 * parameters  # AdamW: moment and variance in fp32
