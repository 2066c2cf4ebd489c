"""Classes of ranks in a manifest: by hand, and against each rank's own shares."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.mesh import cut
from flowledger.ledger.layout import layout, rank_classes

SIZES = {"B": 16, "B_prompt": 4, "A": 4, "K": 2, "L": 4, "V": 264}


def test_equal_shares_are_one_class_and_pipeline_stages_two() -> None:
    assert rank_classes("flowledger", {}, {"dp": 2, "tp": 2}, SIZES) == {"all": [0, 1, 2, 3]}
    assert rank_classes("flowledger", {}, {"dp": 2, "pp": 2}, SIZES) == {"first stage": [0, 1], "last stage": [2, 3]}


def test_uneven_shares_of_prompts_and_of_the_vocabulary_are_classes() -> None:
    """6 prompts on 4 ranks are 2, 2, 2, none: and of them the first two are the first stage. 265 words are 133 and 132."""
    found = rank_classes("flowledger", {}, {"dp": 2, "pp": 2}, {**SIZES, "B": 24, "B_prompt": 6})
    assert found == {"first stage, 2 prompts": [0, 1], "last stage, 2 prompts": [2], "last stage, 0 prompts": [3]}
    assert rank_classes("flowledger", {}, {"tp": 2, "dp": 2}, {**SIZES, "V": 265}) == {"tp 0": [0, 2], "tp 1": [1, 3]}
    assert rank_classes("verl", {}, {"dp": 2, "pp": 2}, {**SIZES, "B_prompt": 6}) == {
        "first stage": [0, 1], "last stage": [2, 3],
    }  # fmt: skip


def test_layers_that_do_not_divide_give_no_classes() -> None:
    assert rank_classes("verl", {}, {"pp": 3}, SIZES) == {}


@given(
    dp=st.integers(1, 4), tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2, 4]), prompts=st.integers(1, 9),
    words=st.integers(1, 9),
)  # fmt: skip
@settings(deadline=None)
def test_classes_are_the_ranks_with_equal_shares(dp: int, tp: int, pp: int, prompts: int, words: int) -> None:
    degrees, sizes = {"dp": dp, "tp": tp, "pp": pp}, {**SIZES, "B": 2 * prompts, "B_prompt": prompts, "V": words}
    made = layout({}, degrees, sizes)

    def share(rank: int) -> tuple[object, ...]:
        sampled, vocabulary = cut((0, prompts), made.on.size, rank), cut((0, words), tp, made.on.at(rank, "tp"))
        layers, stage = made.layers_of(rank), made.on.at(rank, "pp")
        mine = (len(made.samples_of(rank)), len(made.heads_of(rank)), len(layers), stage == 0, stage == pp - 1)
        return *mine, sampled[1] - sampled[0], vocabulary[1] - vocabulary[0]

    ordered = sorted(range(made.on.size), key=lambda rank: (share(rank), rank))
    due = sorted(list(ranks) for _, ranks in groupby(ordered, share))
    assert sorted(rank_classes("flowledger", {}, degrees, sizes).values()) == due


def test_ten_thousand_ranks() -> None:
    found = rank_classes(
        "flowledger", {}, {"dp": 1280, "tp": 2, "pp": 4}, {**SIZES, "B": 20480, "B_prompt": 5000, "V": 151936}
    )
    assert sorted(rank for ranks in found.values() for rank in ranks) == list(range(10240))
    assert list(found) == [
        "first stage, 1 prompt",
        "stage 1-2, 1 prompt",
        "stage 1-2, 0 prompts",
        "last stage, 0 prompts",
    ]


def test_experts_that_are_folded_over_dp_cp_and_tp() -> None:
    """16 ranks, ep 8 = dp 4 * cp 2 * tp 2 / edp 2: rank 5 has the sixth of eight shares; of 9 experts ranks have 2 or 1 or none."""
    degrees = {"dp": 4, "cp": 2, "tp": 2, "ep": 8, "etp": 1}
    config = {"mesh": {**degrees, "pp": 1, "sp": 1}}
    made = layout(config, degrees, {**SIZES, "E": 16})
    assert [list(made.experts_of(rank)) for rank in (0, 5, 8, 15)] == [[0, 1], [10, 11], [0, 1], [14, 15]]
    assert rank_classes("verl", config, degrees, {**SIZES, "E": 16}) == {"all": list(range(16))}
    uneven = rank_classes("verl", config, degrees, {**SIZES, "E": 9})
    assert sorted(uneven.values()) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 12], [5, 6, 7, 13, 14, 15]]
    # halves of each expert on two tp ranks: ep 4 is every second rank
    halves = layout({}, {**degrees, "ep": 4, "etp": 2}, {**SIZES, "E": 4})
    assert [list(halves.experts_of(rank)) for rank in range(9)] == [[0], [0], [1], [1], [2], [2], [3], [3], [0]]


def test_experts_dealt_in_a_way_that_is_not_known_are_none() -> None:
    assert layout({"mesh": {"ep": 3}}, {"dp": 4}, {**SIZES, "E": 6}).experts == 0
