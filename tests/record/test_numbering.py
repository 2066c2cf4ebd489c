"""Samples without names: every rank gives them the same numbers, and finds them again in shuffled parts of a batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.record.numbering import Numbering
from flowledger.record.position import Frame

KEYS = "prompt,response"


def told(numbering: Numbering, fact: str, value: object, group_size: int = 2) -> Frame:
    frame = Frame("call", "call")
    numbering.take(frame, fact, value, group_size)
    return frame


@given(
    ranks=st.integers(1, 3),
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    parts=st.integers(1, 4),
    passes=st.integers(1, 3),
)
def test_each_row_of_a_shuffled_batch_is_a_sample_that_says_the_same_and_each_sample_comes_once_a_pass(
    ranks, rows, seed, parts, passes
):
    made = []
    for rank in range(ranks):
        numbering = Numbering(rank, ranks, level="tensors")
        told(numbering, "new_samples", rows)  # an earlier batch, which is forgotten
        ids = told(numbering, "new_samples", rows).sample_ids
        batch = {"prompt": torch.tensor(rows)[:, :1], "response": torch.tensor(rows)[:, 1:]}
        told(numbering, f"samples_made:{KEYS}", batch)
        says = dict(zip(ids, rows, strict=True))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        for _ in range(passes):
            seen = []
            for part in order.chunk(parts):
                found = told(
                    numbering, f"samples_among:{KEYS}", {name: x[part] for name, x in batch.items()}
                ).sample_ids
                assert [says[one] for one in found] == [rows[at] for at in part.tolist()]
                seen += found
            assert sorted(seen) == sorted(ids)
        made += ids
    assert made == [str(len(rows) * ranks + n) for n in range(len(rows) * ranks)]


def test_groups_go_across_ranks_and_a_gathered_batch_is_that_of_all():
    first, second = (Numbering(rank, 2, level="tensors") for rank in (0, 1))
    assert told(first, "new_samples", [0] * 3).groups == ["0", "0", "1"]
    assert told(second, "new_samples", [0] * 3).groups == ["1", "2", "2"]
    assert told(second, "samples", torch.zeros(6, 1)).sample_ids == ["0", "1", "2", "3", "4", "5"]
    assert told(second, "samples", torch.zeros(3, 9)).sample_ids == ["3", "4", "5"]
    assert told(second, "samples", torch.zeros(4)).sample_ids is None  # of another size: nobody knows


def test_what_nobody_has_made_or_what_would_wait_for_a_device_has_no_samples():
    numbering = Numbering(0, 1, level="tensors")
    told(numbering, "new_samples", [0, 0])
    batch = {"prompt": torch.zeros(2, 1), "response": torch.ones(2, 1)}
    told(numbering, f"samples_made:{KEYS}", batch)
    assert told(numbering, f"samples_among:{KEYS}", {**batch, "prompt": torch.ones(2, 1)}).sample_ids is None
    assert told(numbering, f"samples_among:{KEYS}", {"prompt": batch["prompt"]}).sample_ids is None
    elsewhere = {**batch, "prompt": torch.zeros(2, 1, device="meta")}
    assert told(numbering, f"samples_among:{KEYS}", elsewhere).sample_ids is None
    assert told(numbering, f"samples_among:{KEYS}", batch).sample_ids == ["0", "1"]
