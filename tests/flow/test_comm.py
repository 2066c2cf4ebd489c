"""Kinds of communication: closed, sized as NCCL's tests do, and their traffic that of a ring played by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.flow.comm import COMM_TYPES, comm_type, wire_bytes
from flowledger.flow.errors import BadInput


def ring(n: int, chunk: int, passes: int) -> int:
    """What one rank sends: in each pass it hands on a chunk of the tensor, of n, until all others have had it."""
    sent = 0
    for _ in range(passes):
        for _step in range(n - 1):
            sent += chunk
    return sent


@given(n=st.integers(1, 64), chunk=st.integers(0, 1 << 40))
def test_a_ring_that_reduces_and_gathers_sends_what_is_said(n: int, chunk: int) -> None:
    assert wire_bytes("reduce_scatter", n * chunk, n) == ring(n, chunk, 1)
    assert wire_bytes("all_gather", n * chunk, n) == ring(n, chunk, 1)
    assert wire_bytes("all_reduce", n * chunk, n) == ring(n, chunk, 2)
    assert wire_bytes("all_to_all", n * chunk, n) == sum(chunk for other in range(n) if other)


# nccl-tests, doc/PERFORMANCE.md: the factor from algorithm to bus bandwidth, for 8 ranks
BUS_FACTORS = {
    "all_reduce": 2 * 7 / 8, "reduce_scatter": 7 / 8, "all_gather": 7 / 8, "all_to_all": 7 / 8, "broadcast": 1,
    "reduce": 1, "gather": 7 / 8, "scatter": 7 / 8, "send": 1, "recv": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "factor"), BUS_FACTORS.items())
def test_the_factors_are_those_of_nccl_tests(name: str, factor: float) -> None:
    assert wire_bytes(name, 8_000, 8) == 8_000 * factor


@pytest.mark.parametrize("kind", COMM_TYPES, ids=lambda kind: kind.name)
def test_one_rank_sends_nothing_and_every_kind_says_what_its_size_is(kind) -> None:
    assert wire_bytes(kind.name, 4096, 1) == 0
    assert kind.size


def test_no_function_is_of_two_kinds() -> None:
    names = [name for kind in COMM_TYPES for name in (kind.name, *kind.aliases)]
    assert len(names) == len(set(names))
    assert comm_type("_allgather_base").name == comm_type("all_gather_into_tensor").name == "all_gather"


@pytest.mark.parametrize(
    ("name", "size", "n", "said"),
    [
        ("allscatter", 1, 2, "'allscatter' is no kind of communication; known are all_reduce, all_gather"),
        ("all_gather", 1, 0, "all_gather of 1 bytes between 0 ranks: there is at least 1 rank"),
        ("all_gather", -1, 2, "no size below 0"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, size: int, n: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        wire_bytes(name, size, n)
