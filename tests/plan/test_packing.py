"""Packing conserves samples and tokens, keeps to its bounds, and balances as verl does."""

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.plan.lengths import parse
from flowledger.plan.packing import SCHEMES, bound, expected, micro_batch_count, pack, partition, work, worst_of
from flowledger.run.batching import karmarkar_karp

VERL = json.loads((Path(__file__).parents[1] / "data" / "verl_seqlen_balancing.json").read_text())
lengths = st.lists(st.integers(1, 4000), min_size=1, max_size=50)


@given(lengths, st.integers(1, 9000), st.sampled_from(SCHEMES), st.integers(1, 4))
def test_every_sample_is_in_one_micro_batch_and_no_token_is_lost(tokens, budget, scheme, group) -> None:
    packing = pack(tokens, scheme=scheme, budget=budget, group=group)
    assert sorted(itertools.chain(*packing.parts)) == list(range(len(tokens)))
    assert sum(packing.tokens) == sum(tokens) and sum(packing.samples) == len(tokens)
    assert packing.tokens == [sum(tokens[i] for i in part) for part in packing.parts]


@given(lengths, st.integers(1, 9000))
def test_a_balanced_micro_batch_keeps_to_its_bound_which_may_exceed_the_budget(tokens, budget) -> None:
    packing = pack(tokens, scheme="balanced", budget=budget)
    count = micro_batch_count(tokens, budget)
    assert count == min(len(tokens), -(-sum(tokens) // budget))
    assert packing.count <= count
    assert packing.worst <= bound(tokens, count)


def test_a_balanced_micro_batch_can_exceed_the_budget() -> None:
    tokens = [9000, 1000, 1000, 1000, 1000, 1000, 1000, 1000]  # 16000 tokens, two micro-batches of at most 8000
    packing = pack(tokens, scheme="balanced", budget=8000)
    assert packing.count == 2 and packing.worst > 8000


@given(lengths, st.integers(1, 9000), st.sampled_from(["capped", "in_order", "balanced_capped"]))
def test_a_cap_is_exceeded_by_single_long_samples_only(tokens, cap, scheme) -> None:
    packing = pack(tokens, scheme=scheme, budget=cap)
    over = [part for part, held in zip(packing.parts, packing.tokens, strict=True) if held > cap]
    assert all(len(part) == 1 for part in over)


@given(st.lists(st.integers(1, 400), min_size=2, max_size=7), st.integers(1, 3))
def test_the_bound_holds_for_the_fullest_subset_of_that_work(tokens, count) -> None:
    """Second implementation: of all subsets with no more work than the proof allows, the fullest."""
    weights = [work(t) for t in tokens]
    allowed = sum(weights) / count + (1 - 1 / count) * max(weights)
    subsets = itertools.chain.from_iterable(itertools.combinations(tokens, n) for n in range(len(tokens) + 1))
    fullest = max(sum(subset) for subset in subsets if sum(map(work, subset)) <= allowed * (1 + 1e-12))
    assert fullest <= bound(tokens, count)


@given(lengths, st.integers(1, 9000))
def test_the_bound_from_statistics_covers_the_samples_they_came_from(tokens, budget) -> None:
    mean = sum(tokens) / len(tokens)
    limit = worst_of(len(tokens), budget=budget, longest=max(tokens), shortest=min(tokens), mean=mean)
    assert pack(tokens, scheme="balanced", budget=budget).worst <= limit + 1


@given(st.integers(1, 60), st.integers(1, 4000), st.integers(1, 20000))
def test_equally_long_samples_are_exact(samples, longest, budget) -> None:
    limit = worst_of(samples, budget=budget, longest=longest, shortest=longest, mean=longest)
    assert pack([longest] * samples, scheme="balanced", budget=budget).worst == limit


@pytest.mark.parametrize("name", [name for name in VERL if "equal=False" in name])
def test_the_partition_is_as_even_as_verls(name: str) -> None:
    case = VERL[name]
    made = partition(case["seqlens"], len(case["balanced"]))
    heaviest = [max(sum(case["seqlens"][i] for i in part) for part in parts) for parts in (made, case["balanced"])]
    assert heaviest[0] <= heaviest[1]


def test_the_split_of_a_batch_is_verls_own() -> None:
    """What `rearrange_micro_batches` of verl 0.9.1 (PyPI, torch 2.13.0, CPU) made of these lengths with 40 tokens."""
    tokens = [12, 4, 9, 15, 11, 16, 11, 6, 5, 6, 13, 15]
    made = pack(tokens, scheme="balanced_capped", budget=40)
    theirs = [[0, 9, 10], [2, 5, 7], [3, 6, 8], [1, 4, 11]]
    assert sorted(made.tokens) == sorted(sum(tokens[i] for i in part) for part in theirs)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_the_partition_spreads_as_the_loops_own_does(weights, parts) -> None:
    ours, theirs = (sorted(sum(weights[i] for i in part) for part in made)
                    for made in (partition(weights, parts), karmarkar_karp(weights, parts)))  # fmt: skip
    assert max(ours) - min(ours) <= max(weights)
    assert ours[-1] <= theirs[-1] + max(weights) // 2


def test_what_is_expected_is_repeated_by_its_seed_and_keeps_the_counts_of_verl() -> None:
    stats = parse("min=64,p50=512,p99=4096,max=8192")
    asked = {"scheme": "balanced", "budget": 16384, "samples": 64, "ranks": 8, "prompt_tokens": 512, "limit": 8704}
    found = expected(stats, **asked)
    assert expected.__wrapped__(stats, **asked) == found
    mean = 512 + stats.response.mean
    assert found.micro_batches == pytest.approx(64 * mean / 16384, rel=0.35)
    assert found.worst_tokens <= found.bound_tokens and found.mean_worst_tokens <= found.worst_tokens
    capped = expected(stats, **{**asked, "scheme": "balanced_capped"})
    assert capped.worst_tokens <= 16384 and capped.micro_batches >= found.micro_batches


def test_a_thousand_samples_are_packed_in_a_moment() -> None:
    started = time.process_time()
    pack([1 + (7919 * n) % 8000 for n in range(1000)], scheme="balanced", budget=32768)
    assert time.process_time() - started < 0.5
