"""Law 1, conservation of shape: the local shards of all ranks give the logical tensor, each element once."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import (
    ORDER,
    Mesh,
    authoritative,
    cut,
    elements,
    holders,
    local_box,
    local_shape,
    local_slices,
    logical_shape,
    mesh,
    parse_placement,
)

# Worked out by hand from torch.chunk: pieces of ceil(size / pieces), then what is left, then nothing.
CHUNKS = [
    (8, 4, [2, 2, 2, 2]),
    (10, 4, [3, 3, 3, 1]),
    (5, 4, [2, 2, 1, 0]),
    (6, 4, [2, 2, 2, 0]),
    (1, 3, [1, 0, 0]),
    (0, 2, [0, 0]),
    (7, 1, [7]),
    (9, 5, [2, 2, 2, 2, 1]),
]


@st.composite
def cases(draw):
    degrees = {axis: draw(st.integers(1, 3)) for axis in draw(st.sets(st.sampled_from(ORDER), max_size=3))}
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    kinds = st.sampled_from(["Replicate()", "Partial()", *(f"Shard({dim})" for dim in range(len(shape)))])
    return mesh(**degrees), shape, {axis: draw(kinds) for axis in degrees}


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_shards_of_all_ranks_hold_every_element_and_none_twice(case):
    on, shape, placements = case
    seen = Counter(
        index
        for rank in authoritative(placements, on)
        for index in elements(shape)
        if all(
            start <= at < stop for at, (start, stop) in zip(index, local_box(shape, placements, on, rank), strict=True)
        )
    )
    assert seen == Counter(dict.fromkeys(elements(shape), 1))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_element_is_held_once_for_each_position_on_the_axes_that_do_not_shard(case):
    on, shape, placements = case
    copies = math.prod(degree for axis, degree in on.degrees if "Shard" not in placements.get(axis, ""))
    for index in elements(shape):
        assert len(holders(index, shape, placements, on)) == copies


@given(cases())
@settings(max_examples=150, deadline=None)
def test_local_shapes_add_up_to_the_logical_shape(case):
    on, shape, placements = case
    locals_ = {rank: local_shape(shape, placements, on, rank) for rank in range(on.size)}
    assert logical_shape(locals_, placements, on) == shape


@given(cases())
@settings(max_examples=50, deadline=None)
def test_ranks_and_coordinates_are_one_to_one(case):
    on, _, _ = case
    assert [on.rank(on.coordinates(rank)) for rank in range(on.size)] == list(range(on.size))


@pytest.mark.parametrize(("size", "pieces", "expected"), CHUNKS)
def test_uneven_splits_are_those_of_chunk(size, pieces, expected):
    bounds = [cut((0, size), pieces, index) for index in range(pieces)]
    assert [stop - start for start, stop in bounds] == expected


def test_a_batch_of_ten_over_dp_four_by_hand():
    on = mesh(dp=4)
    placements = {"dp": "Shard(0)"}
    assert [local_shape((10, 6), placements, on, rank) for rank in range(4)] == [(3, 6), (3, 6), (3, 6), (1, 6)]
    assert local_slices((10, 6), placements, on, 3) == (slice(9, 10), slice(0, 6))
    assert holders((9, 0), (10, 6), placements, on) == (3,)


def test_two_axes_that_cut_one_dimension_cut_one_after_another():
    on = Mesh((("dp", 2), ("tp", 2)))
    both = {"dp": "Shard(0)", "tp": "Shard(0)"}
    # 5 -> 3 + 2 over dp; then 3 -> 2 + 1 and 2 -> 1 + 1 over tp
    assert [local_box((5,), both, on, rank)[0] for rank in range(4)] == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_batch_split_and_sequence_split_by_hand():
    on = mesh(dp=2, cp=2)
    placements = {"dp": "Shard(0)", "cp": "Shard(1)"}
    assert on.degrees[1:3] == (("dp", 2), ("cp", 2))
    assert local_slices((4, 7), placements, on, 1) == (slice(0, 2), slice(4, 7))
    assert local_shape((4, 7), placements, on, 2) == (2, 4)


def test_a_group_differs_along_one_axis_only():
    on = mesh(dp=2, tp=4)  # tp fastest: ranks 0-3 and 4-7
    assert on.group("tp", 5) == (4, 5, 6, 7)
    assert on.group("dp", 5) == (1, 5)
    assert on.group("cp", 5) == (5,)


@pytest.mark.parametrize("text", ["Shard(1)", "Replicate()", "Partial()"])
def test_placements_are_spelled_back_as_read(text):
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize(
    ("torch_repr", "ours"),
    [("S(0)", "Shard(0)"), ("R", "Replicate()"), ("P(sum)", "Partial()"), ("Shard(dim=2)", "Shard(2)")],
)
def test_spellings_of_torch_are_understood(torch_repr, ours):
    assert str(parse_placement(torch_repr)) == ours


@pytest.mark.parametrize("text", ["shard(0)", "Shard()", "Shard", "Split(0)", ""])
def test_other_placements_are_refused(text):
    with pytest.raises(BadInput, match="none of Shard"):
        parse_placement(text)


def test_what_cannot_be_is_refused():
    on = mesh(dp=2)
    with pytest.raises(BadInput, match="no dimension 2"):
        local_shape((4, 4), {"dp": "Shard(2)"}, on, 0)
    with pytest.raises(BadInput, match="ranks run from 0 to 1"):
        on.coordinates(2)
    with pytest.raises(BadInput, match="at least 1"):
        mesh(dp=0)
    with pytest.raises(BadInput, match="outside a tensor"):
        holders((4, 0), (4, 4), {}, on)


def test_shards_that_do_not_fit_together_are_refused_by_rank():
    on = mesh(dp=2)
    with pytest.raises(BadInput, match=r"rank 1 holds \[3, 6\]; of a whole \[5, 6\] it should hold \[2, 6\]|rank 0"):
        logical_shape({0: (2, 6), 1: (3, 6)}, {"dp": "Shard(0)"}, on)
    with pytest.raises(BadInput, match="rank 1"):
        logical_shape({0: (4, 6), 1: (4, 5)}, {"dp": "Replicate()"}, on)
