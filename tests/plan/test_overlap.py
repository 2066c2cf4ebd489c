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
    ring = Ring(compute_s=lambda _: 5.0, comm_s=lambda _: 2.0, steps=3, wait_s=lambda chunk: 4.0 * chunk)
    assert ring.exposed_s(1) == 4.0 and ring.exposed_s(2) == 8.0


def backward_clock(compute_s: float, kv_s: float, grad_s: float, cp: int) -> float:
    """When backward of a ring ends, event by event: gradients follow keys and values a round later, home with the last hop."""
    now, keys_at, grads_at = 0.0, 0.0, 0.0
    for at in range(cp):
        now = max(now, keys_at)
        if at < cp - 1:
            keys_at = now + kv_s  # two directions of the link are two wires
        now = max(now + compute_s, grads_at)
        grads_at = now + grad_s
    return max(now, grads_at)


@given(compute_s=SECONDS, kv_s=SECONDS, grad_s=SECONDS, cp=st.integers(2, 8))
def test_the_backward_of_a_ring_is_never_slower_than_planned_and_leaves_the_last_hop(
    compute_s: float, kv_s: float, grad_s: float, cp: int
) -> None:
    """Keys and values hide behind a round of work, and so do gradients, all but the last; the plan has both on one wire."""
    ring = Ring(compute_s=lambda _: compute_s, comm_s=lambda _: kv_s + grad_s, steps=cp - 1, wait_s=lambda _: grad_s)
    took = backward_clock(compute_s, kv_s, grad_s, cp)
    assert cp * compute_s + grad_s <= took + 1e-12
    assert took <= cp * compute_s + ring.exposed_s(1) + 1e-12
    if ring.hides(1):
        assert took == pytest.approx(cp * compute_s + grad_s)


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


def on(device: str, gpus_per_node: int = 8, world: int = 64, dtype: str = "bfloat16") -> Hardware:
    return Hardware(gpu=gpu(device), gpus_per_node=gpus_per_node, world=world, dtype=dtype)


def test_rates_are_those_of_the_dtype() -> None:
    """H100 SXM: 989 TFLOPS of bfloat16 and 67 of float32, of which 0.7 are reached; L4 121 and 30.3; of Ascend only one is known."""
    assert on("h100").rate("matmul") == pytest.approx(692.3e12)
    assert on("h100", dtype="float32").rate("matmul") == pytest.approx(46.9e12)
    assert on("l4", dtype="float32").rate("matmul") == pytest.approx(21.21e12)
    assert on("910b", dtype="float32").rate("matmul") == on("910b").rate("matmul")
    assert on("h100", dtype="float32").rate("memory") == on("h100").rate("memory")


def test_the_links_of_a_device() -> None:
    """A100: 600 GB/s both ways, 300 one way, 0.8 of that; L40S: PCIe 4.0, 64 both ways. Network: 400 Gb/s."""
    assert on("a100").node.bytes_per_s == pytest.approx(240e9)
    assert on("a100").network.bytes_per_s == pytest.approx(40e9)
    assert on("a100").node.seconds(240e9) == pytest.approx(1 + 8.4e-6 + 3.4e-6)
    pcie = on("l40s").node
    assert (pcie.bytes_per_s, pcie.step_s) == (pytest.approx(25.6e9), 5.7e-6)


@given(
    stride=st.sampled_from([1, 2, 3, 4, 8]),
    ranks=st.integers(2, 16),
    gpus=st.integers(1, 12),
    blocks=st.integers(1, 12),
)
def test_a_route_is_that_of_the_group_that_lies_over_most_nodes(
    stride: int, ranks: int, gpus: int, blocks: int
) -> None:
    """Counted out: every group of the world, the node of each rank."""
    world = stride * ranks * blocks
    route = on("a100", gpus, world).route(stride, ranks)
    groups = [
        [start + offset + stride * at for at in range(ranks)]
        for start in range(0, world, stride * ranks)
        for offset in range(stride)
    ]
    nodes = [[rank // gpus for rank in group] for group in groups]
    if route.name == "node":
        assert all(len(set(one)) == 1 for one in nodes)
    elif blocks >= gpus:  # then all ways to lie occur
        assert any(len(set(one)) > 1 for one in nodes)
    fewest = min(one.count(node) for one in nodes for node in set(one))
    if gpus % stride == 0:
        assert route.together <= max(one.count(node) for one in nodes for node in set(one))
        assert route.together <= fewest or route.name == "node" or blocks < gpus


def test_a_group_across_the_border_of_a_node_goes_over_the_network() -> None:
    """Nodes of 6: of groups of 4 the second lies on two of them. Where there is one node nothing does."""
    assert on("a100", 6, 12).route(1, 4).name == "network" and on("a100", 6, 12).route(1, 4).together == 2
    assert on("a100", 6, 4).route(1, 4).name == "node"
    assert on("a100").route(4, 2).name == "node" and on("a100").route(4, 4).name == "network"


def test_latency_counts_the_hops_of_each_kind() -> None:
    """Once round a ring of n takes n - 1 hops, an all-reduce goes round twice, an exchange posts all its sends at once."""
    inside, outside = on("a100").route(1, 8), on("a100").route(1, 32)
    assert inside.latency_s("all_gather") == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert inside.latency_s("all_reduce") == pytest.approx(8.4e-6 + 14 * 3.4e-6)
    assert inside.latency_s("all_to_all") == inside.latency_s("send") == pytest.approx(8.4e-6 + 3.4e-6)
    assert outside.latency_s("all_to_all") == pytest.approx(8.4e-6 + 14e-6)
    assert outside.latency_s("all_gather") == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6)


def test_an_exchange_over_nodes_keeps_to_the_node_what_stays_there() -> None:
    """32 ranks on nodes of 8: of 31 parts 24 leave, at 40 GB/s; 7 stay, at 240, meanwhile. A ring takes all 8 adapters."""
    route = on("a100").route(1, 32)
    assert route.seconds("all_to_all", 31e9) == pytest.approx(24 / 40, rel=1e-3)
    assert route.bytes_per_s("all_gather") == pytest.approx(240e9)
    assert on("a100").route(8, 4).bytes_per_s("all_gather") == pytest.approx(40e9)
    assert on("a100").route(1, 8).seconds("all_to_all", 7e9) == pytest.approx(7 / 240, rel=1e-3)


def test_the_verdict_takes_all_four_and_names_each_that_fails() -> None:
    assert failing(chunks=True, context="blocks", pipelined=True, holds=True) == []
    assert failing(chunks=True, context="token", pipelined=True, holds=None) == []
    assert failing(chunks=False, context="token", pipelined=True, holds=True) == [NAMES[0]]
    assert failing(chunks=True, context="whole", pipelined=True, holds=True) == [NAMES[1]]
    assert failing(chunks=True, context="token", pipelined=False, holds=True) == [NAMES[2]]
    assert failing(chunks=True, context="token", pipelined=True, holds=False) == [NAMES[3]]
    assert failing(chunks=False, context="whole", pipelined=False, holds=False) == NAMES
