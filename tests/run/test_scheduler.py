"""Slots against a plain simulation: who runs where, and which tokens each slot holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.run.scheduler import Scheduler, Turnover


def follow(turnover: Turnover, holds: dict[int, tuple[int, int | None]], samples: list[int], group_size: int) -> None:
    """Do what the scheduler asked for on a table slot -> (prompt, sample that wrote behind it)."""
    for row, prompt in turnover.prefill:
        holds[row] = (prompt, None)
    for row, source, prompt in turnover.shares:
        assert holds[source][0] == prompt, "the source slot lost the prompt"
        holds[row] = (prompt, None)
    for row, source in turnover.moves:
        assert row < source
        holds[row] = holds[source]
    for row, sample in enumerate(samples):
        prompt, owner = holds[row]
        assert prompt == sample // group_size
        assert owner in (None, sample), "a slot holds the tokens of another sample"
        holds[row] = (prompt, sample)


@settings(deadline=None)
@given(
    prompts=st.integers(1, 5),
    group_size=st.integers(1, 5),
    slots=st.integers(1, 12),
    choices=st.randoms(use_true_random=False),
)
def test_every_sample_runs_once_in_order_on_its_own_prompt(prompts, group_size, slots, choices):
    total = prompts * group_size
    scheduler = Scheduler(slots=min(slots, total), total=total, group_size=group_size)
    holds: dict[int, tuple[int, int | None]] = {}
    admitted, prefilled, ended = [], [], []
    freed: list[int] = []
    while True:
        ended += [scheduler.samples[row] for row in freed]
        turnover = scheduler.turn_over(freed)
        follow(turnover, holds, scheduler.samples, group_size)
        admitted += turnover.admitted
        prefilled += [prompt for _, prompt in turnover.prefill]
        assert sorted(scheduler.samples + ended) == admitted
        assert scheduler.waiting == total - len(admitted)
        assert scheduler.waiting == 0 or scheduler.running == scheduler.slots, "a slot stays empty while samples wait"
        if not scheduler.running:
            break
        freed = choices.sample(range(scheduler.running), choices.randint(1, scheduler.running))
    assert admitted == list(range(total))
    assert prefilled == list(range(prompts)), "each prompt is prefilled exactly once"
    assert sorted(ended) == admitted


def test_two_slots_and_three_responses_by_hand():
    scheduler = Scheduler(slots=2, total=6, group_size=3)
    first = scheduler.turn_over(())
    assert (first.prefill, first.shares, scheduler.samples) == (((0, 0),), ((1, 0, 0),), [0, 1])
    # Slot 0 holds prompt 0 and is freed: sample 2 goes on from the prompt that lies there.
    second = scheduler.turn_over([0])
    assert (second.prefill, second.shares, scheduler.samples) == ((), ((0, 0, 0),), [2, 1])
    third = scheduler.turn_over([1, 0])
    assert (third.prefill, third.shares, scheduler.samples) == (((0, 1),), ((1, 0, 1),), [3, 4])
    # Nobody waits after sample 5, so the last running sample moves down.
    fourth = scheduler.turn_over([0, 1])
    assert (fourth.shares, fourth.moves, scheduler.samples, scheduler.waiting) == (((0, 0, 1),), (), [5], 0)
