"""The position in a step comes from nesting."""

from flowledger.record.position import Frame, inner


def enter(parent, scope, stage=None, phase=None):
    return inner(parent, name=scope, scope=scope, stage=stage, phase=phase, role=None)


def test_counts_follow_the_nesting_and_start_anew_within_each_parent(record, job):
    with record("steps") as rows:
        job.run()
    places = [(row.mini_batch, row.micro_batch) for row in rows.of("spans", name="micro_batch")]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_micro_batches_of_a_stage_without_mini_batches_are_counted_within_the_stage():
    step = enter(Frame("process", "process"), "step")
    for _ in range(2):
        stage = enter(step, "stage", "old_log_prob")
        assert [enter(stage, "micro_batch").micro_batch for _ in range(3)] == [0, 1, 2]


def test_epochs_restart_mini_batches_and_a_phase_does_not_count():
    stage = enter(enter(Frame("process", "process"), "step"), "stage", "update_actor")
    for number in range(2):
        epoch = enter(stage, "epoch")
        within = enter(epoch, "call", phase="forward")
        assert (epoch.epoch, enter(within, "mini_batch").mini_batch, enter(within, "mini_batch").mini_batch) == (
            number,
            0,
            1,
        )


def test_a_new_stage_forgets_phase_and_micro_batch():
    stage = enter(enter(Frame("process", "process"), "step"), "stage", "update_actor")
    deep = enter(enter(stage, "micro_batch"), "call", phase="forward")
    again = enter(deep, "stage", "reward")
    assert (again.stage, again.phase, again.micro_batch) == ("reward", None, None)
