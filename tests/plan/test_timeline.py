"""The peak of a timeline equals what a plain sum over every instant finds."""

from hypothesis import given
from hypothesis import strategies as st

from flowledger.plan.timeline import BLOCK, Clock, Live, Timeline

LIVES = st.lists(
    st.builds(
        lambda size, count, born, span, kind: Live(
            name="activations", kind=kind, bytes=size, count=count, born=born, dies=born + span
        ),
        st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12),
        st.sampled_from(["param", "activation", "temporary"]),
    ),
    max_size=20,
)  # fmt: skip
INSTANTS = tuple(f"instant {number}" for number in range(10))


@given(LIVES)
def test_the_peak_is_the_largest_of_the_sums_over_all_instants(lives: list[Live]) -> None:
    timeline = Timeline(INSTANTS, tuple(lives))
    sums = [sum(one.bytes * one.count for one in lives if one.born <= at <= one.dies) for at in range(len(INSTANTS))]
    peak = timeline.peak()
    assert timeline.totals() == sums
    assert peak.bytes == max(sums)
    assert peak.instant == INSTANTS[sums.index(max(sums))]
    assert sum(peak.by_kind().values()) == peak.bytes


@given(LIVES)
def test_rounding_to_blocks_adds_less_than_a_block_a_tensor(lives: list[Live]) -> None:
    timeline = Timeline(INSTANTS, tuple(lives))
    tensors = sum(one.count for one in lives)
    for plain, rounded in zip(timeline.totals(), timeline.totals(block=BLOCK), strict=True):
        assert plain <= rounded <= plain + BLOCK * tensors
        assert rounded % BLOCK == 0


@given(LIVES, LIVES)
def test_what_rests_beside_a_stage_is_there_at_every_instant(lives: list[Live], resting: list[Live]) -> None:
    alone = Timeline(INSTANTS, tuple(lives))
    beside = alone.beside(resting)
    extra = sum(one.total for one in resting)
    assert beside.totals() == [total + extra for total in alone.totals()]


def test_host_and_device_are_summed_apart() -> None:
    lives = (Live(name="params", kind="param", bytes=7), Live(name="params", kind="param", bytes=5, host=True))
    timeline = Timeline(("only",), lives)
    assert (timeline.totals(), timeline.totals(host=True)) == ([7], [5])


def test_a_clock_numbers_instants_in_order() -> None:
    clock = Clock()
    assert [clock.tick(name) for name in ("forward", "loss", "backward")] == [0, 1, 2]
    assert clock.names == ("forward", "loss", "backward")
