"""Who holds sample i, token j, head h, layer l: answered at once, and by asking every rank what it has."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.flow.layers import stage_layers
from flowledger.flow.layout import Asked, Layout, find
from flowledger.flow.mesh import mesh
from flowledger.flow.slices import Slices


@st.composite
def layouts(draw):
    dp, tp, pp, sp, cp = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(5))
    ep = draw(st.sampled_from([n for n in (1, 2, 3) if dp % n == 0]))
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    sizes = [draw(st.integers(1, 2)) for _ in range(pp * chunks)]
    kv_heads = draw(st.sampled_from([1, 2]))
    samples = draw(st.integers(1, 7))
    recorded = draw(st.booleans())
    return Layout(
        on=mesh(dp=dp, tp=tp, pp=pp, sp=sp, cp=cp, ep=ep), samples=samples, heads=tp * sp * cp * kv_heads * 2,
        kv_heads=kv_heads, experts=ep * 2, stages=stage_layers(sum(sizes), pp, chunks, explicit=sizes),
        dealt={sample: draw(st.integers(0, dp - 1)) for sample in range(samples)} if recorded else {},
        sequence_parallel=draw(st.booleans()), cp_kind=draw(st.sampled_from(["ring", "all_to_all"])),
    )  # fmt: skip


@given(layouts(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_answer_is_what_every_rank_says_of_itself(layout, data):
    on = layout.on
    ask = {
        "sample": data.draw(st.none() | st.integers(0, layout.samples - 1)),
        "head": data.draw(st.none() | st.integers(0, layout.heads - 1)),
        "layer": data.draw(st.none() | st.integers(0, layout.layers - 1)),
    }
    says = {
        "sample": lambda rank: ask["sample"] in layout.samples_of(rank),
        "head": lambda rank: ask["head"] in layout.heads_of(rank),
        "layer": lambda rank: ask["layer"] in layout.layers_of(rank),
    }
    given_ = [name for name, value in ask.items() if value is not None]
    expected = tuple(rank for rank in range(on.size) if all(says[name](rank) for name in given_))
    assert find(layout, Asked(**ask))[0].ranks == expected
    expert = data.draw(st.integers(0, layout.experts - 1))
    assert find(layout, Asked(expert=expert))[0].ranks == tuple(
        rank for rank in range(on.size) if expert in layout.experts_of(rank)
    )


@given(layouts(), st.lists(st.integers(1, 20), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_every_token_of_a_row_is_with_one_rank_of_its_sequence_group(layout, lengths):
    on, row = layout.on, Slices(lengths=tuple(lengths))
    apart = on.degree("cp") * on.degree("sp") * (on.degree("tp") if layout.sequence_parallel else 1)
    seen = set()
    for place, length in enumerate(lengths):
        for token in range(length):
            (found,) = find(layout, Asked(token=token, row=row, place=place))
            assert len(found.ranks) == on.size // apart
            spots = {
                (on.at(r, "cp"), on.at(r, "sp"), on.at(r, "tp") * layout.sequence_parallel, found.index)
                for r in found.ranks
            }
            assert len(spots) == 1 and not spots & seen
            seen |= spots


@given(layouts(), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_attention_has_each_head_of_each_token_on_one_rank_of_a_replica(layout, length):
    on, row = layout.on, Slices(lengths=(length,))
    for head, token in itertools.product((0, layout.heads - 1), (0, length - 1)):
        found = find(layout, Asked(head=head, token=token, row=row))
        for one in found:
            assert len(one.ranks) == on.size // (on.degree("tp") * on.degree("tokens"))


def test_a_head_moves_between_projection_and_attention_by_hand():
    # 8 ranks: tp 2 (heads 0-7 and 8-15), Ulysses 4 (two heads each in attention); 16 tokens, four a rank
    layout = Layout(on=mesh(tp=2, sp=4), heads=16, kv_heads=4)
    asked = Asked(head=11, token=6, row=Slices(lengths=(16,)))
    first, second = find(layout, asked)
    assert (first.where, first.ranks, first.index) == ("projections", (3,), 2)  # sp 1, tp 1
    assert (second.where, second.ranks) == ("attention", (3,))  # the heads 10 and 11 of tp 1 are those of sp 1
    assert find(layout, Asked(head=15, token=6, row=asked.row))[1].ranks == (7,)
    assert list(layout.kv_heads_of(0)) == [0, 1] and list(layout.kv_heads_of(1)) == [2, 3]


def test_key_value_heads_are_repeated_where_more_ranks_read_them_than_there_are():
    layout = Layout(on=mesh(tp=8), heads=16, kv_heads=4)  # two query heads a rank; four read one key/value head
    assert [list(layout.kv_heads_of(rank)) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]


def test_an_expert_of_a_sample_is_on_another_rank_of_its_ep_group_by_hand():
    layout = Layout(on=mesh(dp=4, ep=2), samples=8, experts=6)
    assert find(layout, Asked(sample=5))[0].ranks == (2,)
    assert find(layout, Asked(expert=4))[0].ranks == (1, 3)
    assert find(layout, Asked(sample=5, expert=4))[0].ranks == (3,)  # of the group 2, 3 that shares its experts


def test_interleaved_stages_and_what_a_recording_dealt():
    layout = Layout(on=mesh(pp=2, dp=2), stages=stage_layers(8, 2, 2), dealt={0: 1, 1: 0, 2: 1})
    assert layout.layers_of(0) == (0, 1, 4, 5)
    assert find(layout, Asked(layer=6))[0].ranks == (2, 3)
    assert layout.samples_of(1) == (0, 2)
    assert find(layout, Asked(sample=2, layer=6))[0].ranks == (3,)


def test_questions_without_an_answer_say_what_there_is():
    layout = Layout(on=mesh(dp=2), samples=4, heads=4, stages=stage_layers(4, 1))
    for asked, text in (
        (Asked(sample=4), "sample 4 is not there; they run from 0 to 3"),
        (Asked(layer=9), "layer 9 is not there; they run from 0 to 3"),
        (Asked(head=4), "head 4 is not there; they run from 0 to 3"),
        (Asked(expert=0), "expert 0: how many there are is not known here"),
        (Asked(token=3), "a token is found in its sample: say which sample"),
        (Asked(token=5, row=Slices(lengths=(5,))), "token 5 is not there; they run from 0 to 4"),
    ):
        with pytest.raises(BadInput, match=text):
            find(layout, asked)
    with pytest.raises(BadInput, match="sample 7 was not trained on; 0 to 3 were"):
        find(Layout(on=mesh(), dealt={0: 0, 3: 0}), Asked(sample=7))
