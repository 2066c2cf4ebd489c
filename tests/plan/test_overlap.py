"""When a transfer hides: break-even against its closed form, exposed time against a clock that is moved by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.plan.overlap import Hardware, Ring, failing
from flowledger.tables.gpus import gpu
from flowledger.tables.operators import FAILURES

NAMES = list(FAILURES)

SECONDS = st.floats(1e-6, 1e-2)


def clock(compute_s: float, comm_s: float, steps: int) -> float:
    """When a ring of `steps` transfers ends, moved event by event: one wire, one worker, the first piece at hand."""
    free = 0.0
    for _ in range(steps):
        arrives, done = free + comm_s, free + compute_s
        free = max(arrives, done)
    return free + compute_s


@given(compute_s=SECONDS, comm_s=SECONDS, steps=st.integers(0, 40))
def test_work_and_exposed_time_together_are_the_time_of_the_ring(compute_s: float, comm_s: float, steps: int) -> None:
    ring = Ring(compute_s=lambda _: compute_s, comm_s=lambda _: comm_s, steps=steps)
    assert (steps + 1) * compute_s + ring.exposed_s(1) == pytest.approx(clock(compute_s, comm_s, steps))


def test_a_piece_that_waits_is_exposed_whole() -> None:
    assert Ring(compute_s=lambda _: 5.0, comm_s=lambda _: 2.0, steps=3, waits=1).exposed_s(1) == 2.0


@given(latency=st.floats(1e-6, 1e-3), a_byte=st.floats(1e-9, 1e-6), a_pair=st.floats(1e-12, 1e-8))
def test_where_work_grows_with_the_square_there_is_always_a_break_even(
    latency: float, a_byte: float, a_pair: float
) -> None:
    """a_pair·c² = latency + a_byte·c: the positive root."""
    ring = Ring(compute_s=lambda c: a_pair * c * c, comm_s=lambda c: latency + a_byte * c, steps=1)
    root = (a_byte + math.sqrt(a_byte**2 + 4 * a_pair * latency)) / (2 * a_pair)
    found = ring.break_even()
    assert found is not None and found == pytest.approx(math.ceil(root), rel=1e-6, abs=1)
    assert ring.hides(found) and ring.hides(2 * found) and (found == 1 or not ring.hides(found - 1))


@given(latency=st.floats(1e-6, 1e-3), a_token=st.floats(1e-9, 1e-6), ratio=st.floats(0.1, 10))
def test_where_work_grows_as_the_transfer_does_size_makes_up_for_latency_only(
    latency: float, a_token: float, ratio: float
) -> None:
    """ratio·a·c = latency + a·c has a root for ratio > 1 alone."""
    ring = Ring(compute_s=lambda c: ratio * a_token * c, comm_s=lambda c: latency + a_token * c, steps=1)
    found = ring.break_even()
    if ratio <= 1:
        assert found is None
    elif ratio > 1.001:
        assert found == pytest.approx(math.ceil(latency / (a_token * (ratio - 1))), rel=1e-5, abs=1)


def test_a_link_is_that_of_the_node_only_where_all_ranks_of_the_group_are_in_it() -> None:
    """A100: 600 GB/s both ways, 300 one way, 0.8 of that; L40S: PCIe 4.0, 64 both ways. Network: 400 Gb/s."""
    a100 = Hardware(gpu("a100"), 8)
    assert a100.link(1, 8).bytes_per_s == pytest.approx(240e9)
    assert a100.link(4, 2).name == "node" and a100.link(4, 4).name == "network"
    assert a100.link(8, 2).bytes_per_s == pytest.approx(40e9)
    assert a100.link(1, 8).seconds(240e9, hops=7) == pytest.approx(1 + 8.4e-6 + 7 * 3.4e-6)
    pcie = Hardware(gpu("l40s"), 8).link(1, 2)
    assert (pcie.bytes_per_s, pcie.step_s) == (pytest.approx(25.6e9), 5.7e-6)


def test_the_verdict_takes_all_four_and_names_each_that_fails() -> None:
    assert failing(chunks=True, context="blocks", pipelined=True, holds=True) == []
    assert failing(chunks=True, context="token", pipelined=True, holds=None) == []
    assert failing(chunks=False, context="token", pipelined=True, holds=True) == [NAMES[0]]
    assert failing(chunks=True, context="whole", pipelined=True, holds=True) == [NAMES[1]]
    assert failing(chunks=True, context="token", pipelined=False, holds=True) == [NAMES[2]]
    assert failing(chunks=True, context="token", pipelined=True, holds=False) == [NAMES[3]]
    assert failing(chunks=False, context="whole", pipelined=False, holds=False) == NAMES
