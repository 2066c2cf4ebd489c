"""Experts folded over dp, cp and tp: against Megatron's rule for its groups, stated anew, and against each rank's own shares."""

import itertools
import math
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.flow.layout import Asked, Layout, find
from flowledger.flow.mesh import authoritative, elements, holders, local_box, local_shape, mesh
from flowledger.flow.rank_classes import rank_classes
from flowledger.flow.slices import Slices

AXES = ("pp", "dp", "cp", "sp", "tp", "edp", "ep", "etp")


def megatron(order: str, **sizes: int) -> dict[str, list[list[int]]]:
    """Kind of group -> its groups. The first word of `order` varies fastest from rank to rank, as with --use-tp-pp-dp-mapping off.

    Megatron-Core makes two such countings of one world: tp-cp-dp-pp, and for experts tp-ep-dp-pp with
    tp = expert_tensor_parallel_size, ep = expert_model_parallel_size and dp = world / (tp*ep*pp).
    """
    words = order.split("-")[::-1]
    ranks = torch.arange(math.prod(sizes.values())).reshape([sizes[word] for word in words])
    return {word: ranks.movedim(at, -1).reshape(-1, sizes[word]).tolist() for at, word in enumerate(words)}


@st.composite
def folded(draw, most=3, sp=False):
    """Degrees of a mesh whose ep*etp is any divisor of a pipeline stage, beyond dp too, and of no axis else."""
    degrees = {axis: draw(st.integers(1, most)) for axis in ("tp", "cp", "dp", *(("sp",) if sp else ()))}
    stage = math.prod(degrees.values())
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return {**degrees, "pp": draw(st.integers(1, 2)), "ep": ep, "etp": etp}


def test_the_rule_gives_the_groups_of_megatron_s_own_example():
    """Of initialize_model_parallel: 16 GPUs, tp 2, pp 4."""
    found = megatron("tp-cp-dp-pp", tp=2, cp=1, dp=2, pp=4)
    assert found["tp"] == [[at, at + 1] for at in range(0, 16, 2)]
    assert sorted(found["dp"]) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert sorted(found["pp"]) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(folded(most=4))
@example({"tp": 2, "cp": 3, "dp": 4, "pp": 2, "ep": 4, "etp": 1})  # ep ends within cp
@example({"tp": 4, "cp": 2, "dp": 16, "pp": 8, "ep": 32, "etp": 1})
@example({"tp": 2, "cp": 1, "dp": 4, "pp": 1, "ep": 2, "etp": 4})  # etp beyond tp
@settings(max_examples=40, deadline=None)
def test_groups_are_megatron_s(degrees):
    on, of = mesh(**degrees), degrees
    edp = on.size // (of["etp"] * of["ep"] * of["pp"])
    dense = megatron("tp-cp-dp-pp", tp=of["tp"], cp=of["cp"], dp=of["dp"], pp=of["pp"])
    expert = megatron("tp-ep-dp-pp", tp=of["etp"], ep=of["ep"], dp=edp, pp=of["pp"])
    named = {**dense, "etp": expert["tp"], "ep": expert["ep"], "edp": expert["dp"]}
    assert sorted(expert["pp"]) == sorted(dense["pp"])
    for axis, groups in named.items():
        for group in groups:
            for at, rank in enumerate(group):
                assert (on.group(axis, rank), on.at(rank, axis)) == (tuple(group), at)
                assert on.beside(rank, [axis]) == group[0]


@given(folded(sp=True), st.data())
@example({"tp": 2, "cp": 3, "dp": 4, "sp": 1, "pp": 2, "ep": 4, "etp": 1}, None)
@settings(max_examples=40, deadline=None)
def test_ranks_are_found_along_both_countings_at_once(degrees, data):
    on = mesh(**degrees)
    axes = data.draw(st.sets(st.sampled_from(AXES))) if data else {"cp", "ep", "pp"}
    asked = {
        axis: data.draw(st.sets(st.integers(0, on.degree(axis) - 1), min_size=1)) if data else {0} for axis in axes
    }
    due = [rank for rank in range(on.size) if all(on.at(rank, axis) in places for axis, places in asked.items())]
    assert list(on.ranks(asked)) == due


@given(folded(), st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_the_shards_of_experts_hold_every_element_once(degrees, experts, rows):
    on, shape = mesh(**degrees), (experts, rows)
    placements = {"ep": "Shard(0)", "etp": "Shard(1)", "edp": "_StridedShard(1)"}
    counted = authoritative(placements, on)
    assert counted == tuple(range(on.size // on.degree("pp")))
    for index in elements(shape):
        inside = [
            rank
            for rank in range(on.size)
            if all(a <= at < b for at, (a, b) in zip(index, local_box(shape, placements, on, rank), strict=True))
        ]
        assert len(set(inside) & set(counted)) == 1 and list(holders(index, shape, placements, on)) == inside


@given(folded(sp=True), st.tuples(*[st.integers(0, 9)] * 3), st.booleans())
@example({"tp": 2, "cp": 3, "dp": 4, "sp": 1, "pp": 2, "ep": 4, "etp": 1}, (4, 6, 7), True)
@settings(max_examples=40, deadline=None)
def test_classes_are_the_ranks_with_equal_shares(degrees, sizes, piped):
    on, cut = (
        mesh(**degrees),
        [((size,), {axis: "Shard(0)"}) for size, axis in zip(sizes, ("tp", "ep", "dp"), strict=True)],
    )
    stages = [range(1 + at) for at in range(on.degree("pp"))] if piped else []
    by_share = {}
    for rank in range(on.size):
        share = (piped and on.at(rank, "pp"), *(local_shape(shape, placements, on, rank) for shape, placements in cut))
        by_share.setdefault(share, []).append(rank)
    found = rank_classes(on, cut, stages)
    assert [list(one.ranks(on)) for one in found] == sorted(by_share.values())
    assert len({one.name for one in found}) == len(found)
    assert all([rank for rank in range(on.size) if one.holds(on, rank)] == list(one.ranks(on)) for one in found)


@given(folded(sp=True), st.data())
@settings(max_examples=40, deadline=None)
def test_an_expert_is_with_the_ranks_that_say_so_and_a_sample_meets_it_in_their_ep_groups(degrees, data):
    on = mesh(**degrees)
    made = Layout(
        on=on, samples=on.degree("dp") * 2, experts=on.degree("ep") * 2, sequence_parallel=data.draw(st.booleans())
    )
    expert, sample = data.draw(st.integers(0, made.experts - 1)), data.draw(st.integers(0, made.samples - 1))
    has_expert = {rank for rank in range(on.size) if expert in made.experts_of(rank)}
    (found,) = find(made, Asked(expert=expert))
    assert (found.where, set(found.ranks)) == ("experts", has_expert)
    token = {"token": 3, "row": Slices(lengths=(16,))} if data.draw(st.booleans()) else {}
    (from_,) = find(made, Asked(sample=sample, **token))
    (met,) = find(made, Asked(sample=sample, expert=expert, **token))
    dealt = {other for rank in from_.ranks for other in on.group("ep", rank)} & has_expert
    assert set(met.ranks) == {other for rank in dealt for other in on.group("etp", rank)} and met.index is None


def test_experts_of_the_largest_example_by_hand():
    """235B on 1,024 GPUs: tp 4, cp 2, pp 8, ep 32, etp 1. A stage has 128 ranks, of which every 32 have the 128 experts."""
    on = mesh(dp=16, tp=4, cp=2, pp=8, ep=32, etp=1)
    made = Layout(on=on, samples=64, heads=64, experts=128, stages=[[at] for at in range(8)])
    assert list(made.experts_of(4)) == [16, 17, 18, 19] and on.group("ep", 4) == tuple(range(32))
    assert find(made, Asked(expert=17, layer=0))[0].ranks == (4, 36, 68, 100)
    # sample 5 of 64 is with dp 1, ranks 8-15, all of the first 32: its tokens for expert 17 go to rank 4, which is dp 0
    assert find(made, Asked(sample=5, layer=0))[0].ranks == tuple(range(8, 16))
    assert find(made, Asked(sample=5, expert=17, layer=0))[0].ranks == (4,)
    assert on.degrees[-2:] == (("ep", 32), ("etp", 1)) and mesh(**dict(on.degrees)) == on


def test_an_expert_that_is_cut_is_met_on_all_its_ranks():
    """tp 4 = etp: ranks 0-3 have half of the experts, cut in four, ranks 4-7 the others."""
    on = mesh(dp=2, tp=4, ep=2, etp=4)
    made = Layout(on=on, samples=2, experts=4, sequence_parallel=True)
    assert [list(made.experts_of(rank)) for rank in (0, 3, 4, 7)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    asked = Asked(sample=0, token=0, row=Slices(lengths=(8,)))
    assert find(made, asked)[0].ranks == (0,)  # of tp's slices of the row the first
    assert find(made, Asked(sample=0, token=0, row=asked.row, expert=3))[0].ranks == (4, 5, 6, 7)


def test_without_etp_ep_rides_on_dp():
    """The same degrees: of neighbouring dp ranks, which are tp apart, each has other experts."""
    rides, folds = mesh(dp=4, tp=2, ep=2), mesh(dp=4, tp=2, ep=2, etp=1)
    assert rides.group("ep", 0) == (0, 2) and folds.group("ep", 0) == (0, 1)
    assert rides.group("edp", 0) == (0, 4) and folds.group("edp", 0) == (0, 2, 4, 6)
    assert rides == mesh(dp=4, tp=2, ep=2) != mesh(dp=4, tp=2, ep=2, etp=2)
    assert rides.group("ep", 0) == mesh(dp=4, tp=2, ep=2, etp=2).group("ep", 0)  # alike where etp is all that is inside


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp": 4, "ep": 3, "etp": 1}, r"mesh\.ep\*mesh\.etp = 3\*1 does not divide the 4 ranks .*; nearest: ep = "),
        ({"dp": 4, "tp": 2, "pp": 3, "etp": 3}, r"mesh\.etp = 3 does not divide the 8 ranks .*; nearest: etp = "),
        ({"dp": 2, "ep": 4}, r"mesh\.ep = 4 does not divide mesh\.dp = 2"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused(degrees, words):
    with pytest.raises(BadInput, match=words):
        mesh(**degrees)


def test_ten_thousand_ranks_take_less_than_a_twentieth_of_a_second():
    on = mesh(dp=80, pp=8, tp=8, cp=2, ep=64, etp=2)  # 1,280 = 10 * 64 * 2 ranks a stage
    assert on.size == 10_240
    sizes = itertools.chain([(64, "tp"), (1000, "dp")], [(experts, "ep") for experts in (128, 100)])
    tensors = [((size,), {axis: "Shard(0)"}) for size, axis in sizes]
    made, times = Layout(on=on, samples=1000, experts=128), []
    for _ in range(3):
        started = time.process_time()
        classes = rank_classes(on, tensors, [range(10)] * 8)
        (found,) = find(made, Asked(expert=17))
        times.append(time.process_time() - started)
    assert sum(one.count for one in classes) == on.size and len(found.ranks) == on.size // 64
    assert min(times) < 0.05
