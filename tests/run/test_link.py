"""A ring over a link that takes its time: hidden where the plan says so, exposed where it says so, and by how much."""

import time

import pytest
import torch

from flowledger.plan.overlap import Ring
from flowledger.run.parallel.link import Link, ring

STEPS = 4


def test_transfers_take_latency_and_bytes_and_follow_one_another() -> None:
    with Link(latency_s=0.02, bytes_per_s=1e6) as link:
        assert link.seconds(30_000) == pytest.approx(0.05)
        begun = time.perf_counter()
        both = [link.start(30_000), link.start(0)]
        for transfer in both:
            transfer.result()
        assert 0.07 <= time.perf_counter() - begun < 0.7


def test_a_ring_computes_each_piece_once_in_order_and_waits_for_all_but_the_first() -> None:
    seen: list[int] = []
    with Link(latency_s=0.01, bytes_per_s=1e9) as link:
        pace = ring(range(5), 0, seen.append, link)
    assert seen == [0, 1, 2, 3, 4] and len(pace.computed) == 5
    assert 4 * 0.009 <= pace.waited <= pace.total
    with Link(latency_s=1.0, bytes_per_s=1e9) as link:
        assert ring([0], 0, seen.append, link).waited == 0


@pytest.mark.parametrize("comm_s", [0.002, 0.12], ids=["hidden", "exposed"])
def test_what_is_predicted_hidden_is_hidden_and_what_is_predicted_exposed_is_exposed(comm_s: float) -> None:
    """Real work beside a sleeping transfer. The prediction takes the work as it was timed, for neighbours slow it down."""
    weight = torch.randn(256, 512)

    def work(_: object) -> None:
        until = time.perf_counter() + 0.03
        while time.perf_counter() < until:
            torch.randn(256, 256) @ weight

    with Link(latency_s=comm_s / 2, bytes_per_s=2e6 / comm_s) as link:
        pace = ring(range(STEPS + 1), 1e6, work, link)
        plan = [Ring(compute_s=lambda _, took=took: took, comm_s=lambda _: link.seconds(1e6), steps=1) for took in pace.computed[:STEPS]]  # type: ignore[misc]  # a default binds the loop's value  # fmt: skip
    predicted = sum(step.exposed_s(1) for step in plan)
    assert all(step.hides(1) for step in plan) == (comm_s < 0.03)
    if comm_s < 0.03:
        assert predicted == 0 and pace.waited < 0.5 * sum(pace.computed)
    else:
        assert 0.9 * predicted <= pace.waited <= 2 * predicted + 0.1
