"""Tokens of packed rows over cp, sp and Megatron's sequence parallelism: each on one rank, evenly, and found again."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.flow.slices import Slices, Spot, zigzag

rows = st.builds(
    lambda lengths, cp, sp, tp: Slices(lengths=tuple(lengths), cp=cp, sp=sp, tp=tp),
    st.lists(st.integers(0, 30), max_size=5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip
quick = settings(max_examples=40, deadline=None)


def ranks(row):
    return [(cp, sp, tp) for cp in range(row.cp) for sp in range(row.sp) for tp in range(row.tp)]


def tokens_of(row, cp, sp, tp):
    return [
        (piece.sample, token)
        for piece in row.of_rank(cp=cp, sp=sp, tp=tp)
        for token in range(piece.start, piece.stop)
    ]  # fmt: skip


@given(rows)
@quick
def test_every_token_is_on_one_rank_and_all_ranks_have_equally_many(row):
    held = {place: tokens_of(row, *place) for place in ranks(row)}
    every = {(sample, token) for sample, length in enumerate(row.filled) for token in range(length)}
    assert Counter(token for mine in held.values() for token in mine) == Counter(every)
    assert {len(mine) for mine in held.values()} == {row.local_tokens}
    assert row.tokens % row.multiple == 0 < row.tokens


@given(rows)
@quick
def test_filling_is_less_than_one_multiple_a_sample_and_one_for_the_row(row):
    assert all(0 <= full - length < 2 * row.cp for full, length in zip(row.filled, row.lengths, strict=False))
    assert row.filled[-1] < row.multiple or not any(row.lengths)
    assert sum(row.filled) == row.tokens
    if row.cp * row.sp * row.tp == 1 and any(row.lengths):
        assert row.filled == (*row.lengths, 0)


@given(rows)
@quick
def test_a_token_is_found_where_it_is_and_a_place_says_its_token(row):
    for cp, sp, tp in ranks(row):
        for index, (sample, token) in enumerate(tokens_of(row, cp, sp, tp)):
            spot = Spot(cp=cp, sp=sp, tp=tp, index=index)
            assert row.spot(sample, token) == spot
            assert row.token(spot) == (sample, token)


@given(rows)
@quick
def test_causal_work_is_equal_on_all_cp_ranks(row):
    assert len({row.pairs(cp) for cp in range(row.cp)}) == 1
    assert sum(row.pairs(cp) for cp in range(row.cp)) == sum(n * (n + 1) // 2 for n in row.filled)


@given(rows)
@quick
def test_pieces_are_what_lists_of_tokens_give_when_they_are_cut(row):
    """The slow obvious way: lists, cut in 2*cp, dealt from both ends, joined, and cut again for sp and tp."""
    held = [[] for _ in range(row.cp)]
    for sample, length in enumerate(row.filled):
        tokens = [(sample, token) for token in range(length)]
        chunks = _parts(tokens, 2 * row.cp) if row.cp > 1 else [tokens, []]
        for cp in range(row.cp):
            held[cp] += chunks[cp] + chunks[-1 - cp]
    for cp, sp, tp in ranks(row):
        assert tokens_of(row, cp, sp, tp) == _parts(_parts(held[cp], row.sp)[sp], row.tp)[tp]


def _parts(tokens, number):
    assert len(tokens) % number == 0
    each = len(tokens) // number
    return [tokens[part * each : (part + 1) * each] for part in range(number)]


def test_a_row_is_filled_up_to_the_longest_of_a_pipeline():
    assert Slices(lengths=(5,), sp=2, at_least=9).filled == (5, 5)
    assert Slices(lengths=(5,), sp=2, at_least=4).filled == (5, 1)
    assert Slices(lengths=(), cp=2, at_least=6).filled == (8,)


def test_a_row_of_two_samples_over_cp_two_by_hand():
    row = Slices(lengths=(6, 4), cp=2)
    assert row.filled == (8, 4, 0)  # to multiples of 4: chunks of 2 and of 1
    assert tokens_of(row, 0, 0, 0) == [(0, 0), (0, 1), (0, 6), (0, 7), (1, 0), (1, 3)]
    assert tokens_of(row, 1, 0, 0) == [(0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]
    assert row.spot(1, 2) == Spot(cp=1, sp=0, tp=0, index=5)


def test_ulysses_and_megatron_cut_what_a_rank_has_in_its_order_by_hand():
    row = Slices(lengths=(5, 2), sp=2, tp=2)  # 7 tokens filled to 8, two a rank
    assert row.filled == (5, 2, 1)
    assert [tokens_of(row, 0, sp, tp) for sp in (0, 1) for tp in (0, 1)] == [
        [(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (1, 0)], [(1, 1), (2, 0)],
    ]  # fmt: skip


def test_zigzag_takes_from_both_ends():
    assert [zigzag(12, 3, rank) for rank in range(3)] == [((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 6), (6, 8))]


def test_tokens_and_places_that_are_not_there_are_refused():
    row = Slices(lengths=(3,), cp=2)
    with pytest.raises(BadInput, match=r"token 4 of sample 0 is not in a row of samples \[4, 0\]"):
        row.spot(0, 4)
    with pytest.raises(BadInput, match="index 2 is outside a piece of 2 tokens"):
        row.token(Spot(cp=0, sp=0, tp=0, index=2))
    with pytest.raises(BadInput, match="cp 0"):
        Slices(lengths=(3,), cp=0)
