"""Rank classes against the slow obvious way: the shares of every rank, one by one."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flow.test_mesh import meshes

from flowledger.flow.mesh import local_shape, mesh
from flowledger.flow.rank_classes import rank_classes

AXES = ("dp", "tp", "sp", "cp", "ep", "shards", "tokens", "expert_shards")


@st.composite
def jobs(draw):
    """A mesh, a few tensors cut along some axis, and the layers of its pipeline ranks."""
    on = draw(meshes())
    tensors = [
        ((draw(st.integers(0, 30)), 4), {draw(st.sampled_from(AXES)): draw(st.sampled_from(["Shard(0)", "Shard(1)"]))})
        for _ in range(draw(st.integers(0, 3)))
    ]
    if draw(st.booleans()):
        tensors.append(((draw(st.integers(0, 30)),), {"shards": "_StridedShard(0)", "tp": "Shard(0)"}))
    sizes = [draw(st.integers(1, 2)) for _ in range(on.degree("pp"))]
    return on, tensors, [range(size) for size in sizes] if draw(st.booleans()) else []


@given(jobs())
@settings(max_examples=50, deadline=None)
def test_classes_are_the_ranks_with_equal_shares(job):
    on, tensors, stages = job
    by_share = {}
    for rank in range(on.size):
        at = on.at(rank, "pp")
        stage = (len(stages[at]), at == 0, at == len(stages) - 1) if stages else None
        share = (stage, *(local_shape(shape, placements, on, rank) for shape, placements in tensors))
        by_share.setdefault(share, []).append(rank)
    found = rank_classes(on, tensors, stages)
    assert [list(one.ranks(on)) for one in found] == sorted(by_share.values())
    for one in found:
        assert (one.first, one.count) == (one.ranks(on)[0], len(one.ranks(on)))
        assert [rank for rank in range(on.size) if one.holds(on, rank)] == list(one.ranks(on))
    assert len({one.name for one in found}) == len(found)


def test_classes_are_named_by_what_differs():
    on = mesh(dp=4, pp=3)
    # 10 samples over dp 4: 3, 3, 3, 1
    found = rank_classes(on, [((10,), {"dp": "Shard(0)"})], [range(2)] * 3)
    assert [(one.name, one.first, one.count) for one in found] == [
        ("first stage, dp 0-2", 0, 3), ("first stage, dp 3", 3, 1), ("stage 1, dp 0-2", 4, 3), ("stage 1, dp 3", 7, 1),
        ("last stage, dp 0-2", 8, 3), ("last stage, dp 3", 11, 1),
    ]  # fmt: skip
    assert [one.name for one in rank_classes(on, [((12,), {"dp": "Shard(0)"})])] == ["all"]


def test_ten_thousand_ranks_take_less_than_a_twentieth_of_a_second():
    on = mesh(dp=80, pp=8, tp=8, cp=2)
    assert on.size == 10_240
    tensors = [((rows, 4096), {"shards": "_StridedShard(0)", "tp": "Shard(0)"}) for rows in (4096, 12288, 151936, 1025)]
    tensors += [((500, 8192), {"dp": "Shard(0)"}), ((128,), {"ep": "Shard(0)"})]
    times = []
    for _ in range(5):
        started = time.process_time()
        found = rank_classes(on, tensors, [range(10)] * 8)
        times.append(time.process_time() - started)
    assert sum(one.count for one in found) == on.size
    assert min(times) < 0.05
