"""A sample has one name in every process that meets it, in whatever order its batch lies."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.record import lineage
from flowledger.record.position import Frame


def names(groups: list[str], responses: list[list[int]], sessions: list[int] | None = None) -> list[str]:
    frame = Frame("call", "call", Frame("process", "process"))
    lineage.take(frame, "group_ids", groups)
    if sessions is not None:
        lineage.take(frame, "sessions", sessions)
    lineage.identify(frame, torch.tensor(responses))
    assert frame.sample_ids is not None
    return frame.sample_ids


batches = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=3, max_size=3)), min_size=1)


@given(batches, st.randoms())
def test_names_are_distinct_and_do_not_depend_on_the_order(batch, random):
    here = names([group for group, _ in batch], [row for _, row in batch])
    assert len(set(here)) == len(batch)
    shuffled = random.sample(batch, len(batch))
    there = names([group for group, _ in shuffled], [row for _, row in shuffled])
    said = dict(zip(here, batch, strict=True))
    assert all(said[name] == sample for name, sample in zip(there, shuffled, strict=True))


def test_a_session_names_a_sample_where_a_framework_counts_them():
    assert names(["u", "u", "v"], [[1], [1], [1]], [0, 1, 0]) == ["u_0", "u_1", "v_0"]


def test_keys_of_a_queue_hold_group_and_session_and_others_are_no_samples():
    frame = Frame("call", "call", Frame("process", "process"))
    lineage.take(frame, "sample_keys", ["9f-1_0_0", "9f-1_1_0"])
    assert (frame.groups, frame.sample_ids) == (["9f-1", "9f-1"], ["9f-1_0", "9f-1_1"])
    prompts = Frame("call", "call", Frame("process", "process"))
    lineage.take(prompts, "sample_keys", ["9f-1", "9f-2"])
    assert (prompts.groups, prompts.sample_ids) == (None, None)


def test_without_groups_or_with_another_number_of_rows_nobody_is_named():
    frame = Frame("call", "call", Frame("process", "process"))
    lineage.identify(frame, torch.tensor([[1]]))
    lineage.take(frame, "group_ids", ["a", "a"])
    lineage.identify(frame, torch.tensor([[1]]))
    lineage.identify(frame, None)
    assert frame.sample_ids is None


class Stack:
    """Single values one after another, as tensordict stacks them; to ask for one goes through `tolist`."""

    def __init__(self, values, dims=1, kept=True):
        self.batch_dims, self.asked = dims, 0
        self.tensordicts = [SimpleNamespace(**({"_non_tensordict": {"data": one}} if kept else {})) for one in values]
        self._values = values

    def tolist(self):
        self.asked += 1
        return self._values


@pytest.mark.parametrize(("dims", "kept", "asked"), [(1, True, 0), (2, True, 1), (1, False, 1)])
def test_a_stack_of_values_is_read_where_it_keeps_them_if_that_can_be_seen(dims, kept, asked):
    frame, stack = Frame("call", "call", Frame("process", "process")), Stack(["u", "v"], dims, kept)
    lineage.take(frame, "group_ids", stack)
    assert (frame.groups, stack.asked) == (["u", "v"], asked)
