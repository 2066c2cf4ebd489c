"""Every sample goes through exactly one micro-batch, and every limit holds."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.schema import MicroBatch
from flowledger.run.batching import fits, karmarkar_karp, split

BALANCED = json.loads((Path(__file__).parents[1] / "data" / "verl_seqlen_balancing.json").read_text())

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=40)
limits = st.builds(
    MicroBatch,
    samples=st.none() | st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 300),
    max_padded_tokens=st.none() | st.integers(1, 300),
    max_bytes=st.none() | st.integers(1, 3000),
    balance=st.booleans(),
)


@given(lengths, limits, st.integers(1, 12), st.randoms(use_true_random=False))
def test_each_kept_sample_is_in_exactly_one_micro_batch_of_its_mini_batch_and_limits_hold(
    lengths, limits, mini, random
) -> None:
    kept = [random.random() < 0.8 for _ in lengths]
    batches = split(lengths=lengths, kept=kept, mini_batch_samples=mini, limits=limits, bytes_per_token=10)
    assert [i for batch in batches.mini_batches for i in batch.samples] == list(range(len(lengths)))
    for batch in batches.mini_batches:
        trained = sorted(i for micro in batch.micro_batches for i in micro)
        assert trained == [i for i in batch.samples if kept[i]]
    for micro in batches.micro_batches:
        assert len(micro) == 1 or fits(micro, lengths, limits, 10)


# The cases that also ask for equal counts are left out: micro-batches do not need them.
@pytest.mark.parametrize("name", [name for name in BALANCED if "equal=False" in name])
def test_karmarkar_karp_is_as_even_as_verls(name: str) -> None:
    case = BALANCED[name]
    parts = len(case["balanced"])

    def heaviest(partition: list[list[int]]) -> int:
        return max(sum(case["seqlens"][i] for i in part) for part in partition)

    assert heaviest(karmarkar_karp(case["seqlens"], parts)) <= heaviest(case["balanced"])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_karmarkar_karp_is_a_partition_no_worse_than_the_largest_first_bound(weights: list[int], parts: int) -> None:
    made = karmarkar_karp(weights, parts)
    assert sorted(i for part in made for i in part) == list(range(len(weights)))
    assert len(made) == parts
    sums = [sum(weights[i] for i in part) for part in made]
    assert max(sums) - min(sums) <= max(weights)


def test_static_micro_batches_take_samples_in_a_row() -> None:
    batches = split(
        lengths=[5] * 6, kept=[True] * 6, mini_batch_samples=6, limits=MicroBatch(samples=4), bytes_per_token=1
    )
    assert batches.micro_batches == ((0, 1, 2, 3), (4, 5))


def test_a_sample_above_the_budget_gets_a_micro_batch_of_its_own() -> None:
    batches = split(
        lengths=[10, 90, 10], kept=[True] * 3, mini_batch_samples=3, limits=MicroBatch(max_tokens=50), bytes_per_token=1
    )
    assert (1,) in batches.micro_batches


def test_the_split_of_a_large_batch_takes_time_in_proportion() -> None:
    limits = MicroBatch(max_tokens=10**9, balance=False)

    def seconds(size: int) -> float:
        started = time.process_time()
        split(lengths=[5] * size, kept=[True] * size, mini_batch_samples=size, limits=limits, bytes_per_token=1)
        return time.process_time() - started

    assert seconds(20_000) < 1.0  # one pass; with sums taken anew for each sample it is half a minute
