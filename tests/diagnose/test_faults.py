"""Faults are put in and noticed, clean runs are passed over, and the judgement between them is right by hand."""

from collections import Counter

import pytest

from flowledger.cli.injection import run_clean, run_fault
from flowledger.diagnose import faults
from flowledger.diagnose.faults import Fault
from flowledger.flow.errors import BadInput
from flowledger.flow.seams import locate
from flowledger.ledger.rows import FindingRow
from flowledger.run.faults.changes import from_step, named, results, words

ALL, CLEAN = faults.table()
# One for each file of checks, so that each is seen to fail.
PUT_IN = (  # one of each kind of detector; `flowledger selftest` puts in all
    "response_mask_left", "old_log_prob_permuted_later", "truncated_is_finished", "rewards_swapped_across_groups",
    "advantages_on_wrong_axis", "normaliser_of_micro_batch", "kl_sign",
)  # fmt: skip
PASSED_OVER = ("grpo", "gae with a critic")


@pytest.mark.parametrize("name", PUT_IN)
def test_a_fault_is_caught_within_two_steps(name: str) -> None:
    (fault,) = (one for one in ALL if one.id == name)
    made = run_fault(fault)
    assert (made.status, made.after) in (("caught", 0), ("caught", 1)), made
    assert set(made.caught_by) <= set(fault.expects)


@pytest.mark.parametrize("name", PASSED_OVER)
def test_nothing_is_said_of_a_clean_run(name: str) -> None:
    (clean,) = (one for one in CLEAN if one.name == name)
    made = run_clean(clean, seed=7)
    assert made.status == "silent", made.message


def test_the_table_has_forty_faults_of_all_goals_and_twenty_clean_runs() -> None:
    assert {one.goal for one in ALL} == set(faults.GOALS)
    assert len(ALL) >= 40
    assert len(CLEAN) >= 20
    assert not [name for name, times in Counter(one.id for one in ALL).items() if times > 1]
    assert all(one.zh for one in ALL)
    assert all(one.expects or one.needs or one.blind for one in ALL)
    assert sum(one.quick for one in ALL) >= 10


@pytest.mark.parametrize("fault", [one for one in ALL if one.patch and not one.needs], ids=lambda one: one.id)
def test_what_a_fault_changes_is_there(fault: Fault) -> None:
    assert isinstance(fault.patch, str)
    for target in named(fault.patch):
        locate(target)


# ------------------------------------------------------------------ judgement


def found(name: str, step: int | None = None, verdict: str = "fail", severity: str = "error") -> FindingRow:
    return FindingRow(id=name, step=step, verdict=verdict, severity=severity, message=name)


FAULT = Fault(id="x", what="", patch="masks:loss_mask_left", starts=2, expects=("right", "also"))
JUDGED = {
    "in its step": ([found("right", 2)], 3, ("caught", 2, 0)),
    "in the next": ([found("right", 3)], 4, ("caught", 3, 1)),
    "too late": ([found("right", 4)], 5, ("missed", 4, 2)),
    "before it began": ([found("right", 1)], 3, ("missed", None, None)),
    "a finding without a step stands for the last": ([found("right")], 3, ("caught", 2, 0)),
    "a warning counts": ([found("also", 2, "warn", "warning")], 3, ("caught", 2, 0)),
    "another name does not": ([found("wrong", 2)], 3, ("missed", None, None)),
    "nor what passed": ([found("right", 2, "pass", "info")], 3, ("missed", None, None)),
    "nor what was not looked at": ([found("right", 2, "skipped", "info")], 3, ("missed", None, None)),
    "the first counts": ([found("right", 3), found("also", 2)], 4, ("caught", 2, 0)),
}


@pytest.mark.parametrize("name", list(JUDGED))
def test_judgement_by_hand(name: str) -> None:
    rows, steps, (status, step, after) = JUDGED[name]
    made = faults.judged(FAULT, rows, steps=steps)
    assert (made.status, made.step, made.after) == (status, step, after)


def test_where_nobody_is_expected_any_error_counts_and_no_warning() -> None:
    anyone = Fault(id="x", what="", patch="masks:loss_mask_left")
    assert faults.judged(anyone, [found("whatever", 2)], steps=3).status == "caught"
    assert faults.judged(anyone, [found("whatever", 2, "warn", "warning")], steps=3).status == "missed"


def test_a_clean_run_with_a_finding_is_a_false_alarm() -> None:
    assert faults.silent("c", [found("a", 1, "pass", "info"), found("b", 1, "skipped", "info")]).status == "silent"
    assert faults.silent("c", [found("a", 1, "warn", "warning")]).status == "false_alarm"
    assert faults.silent("c", [], ended="it crashed").status == "false_alarm"


def test_sums_leave_out_what_waits() -> None:
    made = [
        faults.judged(FAULT, [found("right", 2)], steps=3), faults.judged(FAULT, [], steps=3),
        faults.waiting(Fault(id="w", what="", needs=("async",))),
    ]  # fmt: skip
    assert faults.summary(made, [faults.silent("c", [found("a")])]) == {
        "faults": 2, "caught": 1, "clean_runs": 1, "false_alarms": 1, "missed": ["x"], "waiting": ["w"],
    }  # fmt: skip


WRONG = {
    "no fault": (3, "3 is no Fault"),
    "an unknown field": ({"id": "a", "what": "b", "expect": []}, "did you mean expects"),
    "no id": ({"what": "b"}, "lacks 'id'"),
    "a goal": (Fault(id="a", what="b", goal="speed", patch={"m:f": len}), "goal = 'speed' is none of correctness"),
    "nothing to do": (Fault(id="a", what="b"), "neither a patch nor a config"),
    "steps in the wrong order": (Fault(id="a", what="b", patch={"m:f": len}, starts=3, takes_effect=2), "use 3"),
    "a step that is none": (Fault(id="a", what="b", patch={"m:f": len}, starts=-1), "should be a step from 0"),
    "expects as text": (Fault(id="a", what="b", patch={"m:f": len}, expects="nan"), "use ['nan']"),
    "a target without a function": (Fault(id="a", what="b", patch={"module": len}), "package.module:function"),
    "a maker that is none": (Fault(id="a", what="b", patch={"m:f": 3}), "cannot be called"),
    "a patch that raises": (Fault(id="a", what="b", patch=lambda: 1 / 0), "ZeroDivisionError"),
    "a patch that is no mapping": (Fault(id="a", what="b", patch=lambda: None), "should map 'module:function'"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_no_fault_is_refused_with_its_reason(name: str) -> None:
    given, text = WRONG[name]
    with pytest.raises(BadInput, match=r"mine\.py") as refused:
        faults.checked(given, "mine.py")
    assert text in str(refused.value)


def test_a_change_begins_at_its_step_and_touches_only_what_it_names() -> None:
    plan = dict(from_step({"m:double": words(x=lambda x: 10 * x)}, 2))
    step, sick = plan["flowledger.run.loop:rl_step"], plan["m:double"](lambda *, x, y=0: (x, y))
    seen = []
    loop = step(lambda *, step: seen.append(sick(x=step, y=step)))
    for number in range(4):
        loop(step=number)
    assert seen == [(0, 0), (1, 1), (20, 2), (30, 3)]


def test_a_field_that_is_none_stays_none() -> None:
    made = faults.silent("c", [])
    assert results(step=lambda step: step + 1)(lambda: made)().step is None


def test_a_patch_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean loss_mask_left"):
        named("masks:loss_mask_lef")
    with pytest.raises(BadInput, match=r"no run/faults/nothing\.py"):
        named("nothing:x")
