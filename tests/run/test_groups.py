"""Groups as rows: uneven ones, scattered ones, dropped samples."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.run.algorithms.groups import by_group, each_group, groups_of


def test_groups_are_rows_in_the_order_of_samples() -> None:
    groups = groups_of(group_id=torch.tensor([0, 0, 0, 1, 1, 1]), kept=torch.ones(6, dtype=torch.bool))
    assert by_group(reward=torch.arange(6.0), groups=groups).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert groups.present.all()


def test_a_smaller_group_leaves_places_empty_and_a_dropped_sample_too() -> None:
    kept = torch.tensor([True, True, False, True])
    groups = groups_of(group_id=torch.tensor([7, 3, 7, 7]), kept=kept)
    assert groups.present.tolist() == [[True, False, False], [True, False, True]]
    assert groups.members[0, 0] == 1 and groups.members[1].tolist() == [0, 2, 3]


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.integers(-50, 50)), min_size=1, max_size=20
    )
)  # fmt: skip
def test_a_statistic_sees_the_kept_samples_of_its_group_and_no_others(samples: list[tuple[int, bool, int]]) -> None:
    group_id = torch.tensor([group for group, _, _ in samples])
    kept = torch.tensor([keep for _, keep, _ in samples])
    reward = torch.tensor([float(value) for _, _, value in samples], dtype=torch.float64)
    groups = groups_of(group_id=group_id, kept=kept)
    made = each_group(
        groups, lambda rows: rows - rows.max(1, keepdim=True).values, by_group(reward=reward, groups=groups)
    )
    for index, (group, keep, value) in enumerate(samples):
        others = [other for number, present, other in samples if number == group and present]
        assert float(made[index]) == (value - max(others) if keep else 0.0)


def test_a_statistic_of_two_columns_gets_them_side_by_side_and_may_give_one_number_a_group() -> None:
    groups = groups_of(group_id=torch.tensor([0, 1, 0]), kept=torch.ones(3, dtype=torch.bool))
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    made = each_group(
        groups, lambda x, y: (x * y).sum(1, keepdim=True), by_group(reward=a, groups=groups), b[groups.members]
    )
    assert made.tolist() == [100.0, 40.0, 100.0]
