"""Law 1, conservation of shape: the local shards of all ranks give the logical tensor, each element once."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.axes import AXES, DENSE, EXPERT, JOINED
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import (
    authoritative,
    buffer_shape,
    cut,
    elements,
    holders,
    local_box,
    local_shape,
    local_slices,
    logical_shape,
    mesh,
)
from flowledger.flow.placements import parse_placement
from flowledger.run.parallel import ranks

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
def meshes(draw, most=3):
    """Any product of degrees, ep dividing dp."""
    degrees = {axis: draw(st.integers(1, most)) for axis in draw(st.sets(st.sampled_from(DENSE), max_size=3))}
    ep = draw(st.integers(1, 2))
    return mesh(**{**degrees, "dp": degrees.get("dp", 1) * ep, "ep": ep})


@st.composite
def cases(draw):
    """A mesh, a shape, and placements along axes that do not overlap: dense ones, expert ones, joined ones."""
    on = draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    dims = range(len(shape))
    kinds = st.sampled_from(
        ["Replicate()", "Partial()", *(f"{kind}({dim})" for kind in ("Shard", "_StridedShard") for dim in dims)]
    )
    axes = draw(st.sampled_from([DENSE, EXPERT, ("shards", "tp"), ("dp", "tokens"), ("expert_shards", "ep", "tp")]))
    return on, shape, {axis: draw(kinds) for axis in axes}


@given(cases())
@settings(max_examples=50, deadline=None)
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
@settings(max_examples=50, deadline=None)
def test_every_element_is_held_once_for_each_position_on_the_axes_that_do_not_shard(case):
    on, shape, placements = case
    cutting = {one for axis, text in placements.items() if "Shard" in text for one in JOINED.get(axis, (axis,))}
    copies = math.prod(on.degree(axis) for axis in EXPERT if axis not in cutting)
    for index in elements(shape):
        assert len(holders(index, shape, placements, on)) == copies


@given(cases())
@settings(max_examples=50, deadline=None)
def test_local_shapes_add_up_to_the_logical_shape(case):
    on, shape, placements = case
    locals_ = {rank: local_shape(shape, placements, on, rank) for rank in range(on.size)}
    assert logical_shape(locals_, placements, on) == shape


@given(cases())
@settings(max_examples=50, deadline=None)
def test_an_element_is_held_by_the_ranks_in_whose_box_it_is(case):
    on, shape, placements = case
    boxes = {rank: local_box(shape, placements, on, rank) for rank in range(on.size)}
    for index in elements(shape):
        inside = [r for r, box in boxes.items() if all(a <= at < b for at, (a, b) in zip(index, box, strict=True))]
        assert list(holders(index, shape, placements, on)) == inside


@given(meshes())
@settings(max_examples=50, deadline=None)
def test_ranks_and_coordinates_are_one_to_one_in_both_factorisations(on):
    assert [on.rank(on.coordinates(rank)) for rank in range(on.size)] == list(range(on.size))
    assert [on.rank(on.expert_coordinates(rank)) for rank in range(on.size)] == list(range(on.size))
    assert on.size == math.prod(degree for axis, degree in on.degrees if axis != "ep")


@given(meshes(most=2))
@settings(max_examples=15, deadline=None)
def test_ranks_are_numbered_as_the_loop_numbers_its_processes(on):
    degrees = {axis: on.degree(axis) for axis in ranks.AXES}
    for rank in range(on.size):
        here = ranks.coordinates(degrees, rank)
        assert on.expert_coordinates(rank) == here
        for name, axes in ranks.GROUPS.items():
            alike = [
                other
                for other in range(on.size)
                if all(at == here[axis] for axis, at in ranks.coordinates(degrees, other).items() if axis not in axes)
            ]
            if name in AXES or name in ("tokens", "shards", "expert_shards"):
                assert list(on.group(name, rank)) == alike
                assert alike[on.at(rank, name)] == rank
                assert [r for r in range(on.size) if on.beside(r, [name]) == on.beside(rank, [name])] == alike


def test_experts_ride_on_dp_by_hand():
    on = mesh(dp=4, ep=2, tp=2)  # 8 ranks, not 16
    assert on.size == 8
    assert on.degrees == (("pp", 1), ("dp", 4), ("cp", 1), ("sp", 1), ("tp", 2), ("ep", 2))
    # dp 0-3 stand at ranks 0, 2, 4, 6; of neighbours one holds the experts of ep 0, one those of ep 1
    assert [on.at(rank, "ep") for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert on.group("ep", 0) == (0, 2)
    assert on.group("expert_shards", 0) == (0, 4)
    assert on.group("shards", 0) == (0, 2, 4, 6)
    assert local_shape((8, 3), {"ep": "Shard(0)", "expert_shards": "Shard(1)"}, on, 4) == (4, 1)


def test_fsdp_cuts_what_tensor_parallelism_has_left_by_hand():
    on = mesh(dp=2, tp=2)
    # 10 -> 5 + 5 over tp; then 5 -> 3 + 2 over dp. Without the stride dp would cut first: 5 + 5, then 3 + 2 over tp.
    both = {"shards": "_StridedShard(0)", "tp": "Shard(0)"}
    assert [local_box((10,), both, on, rank)[0] for rank in range(4)] == [(0, 3), (5, 8), (3, 5), (8, 10)]
    assert [buffer_shape((10,), both, on, rank, axis="shards") for rank in range(4)] == [(3,)] * 4
    plain = {"shards": "Shard(0)", "tp": "Shard(0)"}
    assert [local_box((10,), plain, on, rank)[0] for rank in range(4)] == [(0, 3), (3, 5), (5, 8), (8, 10)]


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
    on = mesh(dp=2, tp=2)
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


@pytest.mark.parametrize("text", ["Shard(1)", "_StridedShard(0)", "_StridedShard(0, 2)", "Replicate()", "Partial()"])
def test_placements_are_spelled_back_as_read(text):
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize(
    ("torch_repr", "ours"),
    [
        ("S(0)", "Shard(0)"),
        ("R", "Replicate()"),
        ("P(sum)", "Partial()"),
        ("Shard(dim=2)", "Shard(2)"),
        ("_S(0, 4)", "_StridedShard(0, 4)"),
        ("_StridedShard(dim=1, sf=2)", "_StridedShard(1, 2)"),
    ],
)
def test_spellings_of_torch_are_understood(torch_repr, ours):
    assert str(parse_placement(torch_repr)) == ours


@pytest.mark.parametrize("text", ["shard(0)", "Shard()", "Shard", "Split(0)", "Shard(0, 2)", ""])
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
    with pytest.raises(BadInput, match=r"ep = 2 does not divide mesh\.dp = 3; nearest: ep = 1"):
        mesh(dp=3, ep=2)
    with pytest.raises(BadInput, match="mesh axis 'xp' is none of dp"):
        local_shape((4,), {"xp": "Shard(0)"}, on, 0)
    with pytest.raises(BadInput, match="along dp and shards: both are counted over the same ranks"):
        local_shape((4, 4), {"dp": "Shard(0)", "shards": "Shard(1)"}, on, 0)
    with pytest.raises(BadInput, match="cut that dimension into 1 pieces"):
        local_shape((4,), {"dp": "_StridedShard(0, 2)"}, on, 0)


def test_shards_that_do_not_fit_together_are_refused_by_rank():
    on = mesh(dp=2)
    with pytest.raises(BadInput, match=r"rank 1 holds \[3, 6\]; of a whole \[5, 6\] it should hold \[2, 6\]|rank 0"):
        logical_shape({0: (2, 6), 1: (3, 6)}, {"dp": "Shard(0)"}, on)
    with pytest.raises(BadInput, match="rank 1"):
        logical_shape({0: (4, 6), 1: (4, 5)}, {"dp": "Replicate()"}, on)
