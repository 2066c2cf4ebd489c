"""The fullest micro-batch of a rank: by hand, and by packing every set of samples there is."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.schema import MicroBatch
from flowledger.plan.facts import facts
from flowledger.plan.lengths import parse
from flowledger.plan.load import Load, load, prompts_of
from flowledger.plan.roles import Work, works
from flowledger.plan.whatif import changed
from tests.plan.conftest import planned

TINY = planned("tiny.yaml")  # prompts of 32, responses of 16 tokens; 4 prompts * 4 samples; mini-batches of 8
FSDP = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")  # 9216 tokens at most; mini-batches of 64 a rank; budget 18432


def update(plan: object = TINY) -> Work:
    return next(one for one in works(plan.config) if one.stage == "update_actor")  # type: ignore[attr-defined]


def loaded(micro: MicroBatch, dp: int = 1, *, shared: bool = True) -> Load:
    config = changed(changed(TINY.config, "actor.micro_batch", micro), "actor.shared_prompts", shared)
    work = next(one for one in works(config) if one.stage == "update_actor")
    return load(work, config, dp, None, {"scheme": "balanced"})


@pytest.mark.parametrize(
    ("micro", "dp", "due"),
    [
        (MicroBatch(samples=4), 1, Load(32 + 4 * 16, 4, 2)),  # one prompt, and 4 responses to it
        (MicroBatch(samples=3), 1, Load(2 * 32 + 3 * 16, 3, 3)),  # 3, 3, 2: the second is cut across two prompts
        (MicroBatch(samples=64), 1, Load(2 * 32 + 8 * 16, 8, 1)),
        (MicroBatch(samples=4), 4, Load(2 * 48, 2, 1)),  # the 4 of a prompt are dealt to 4 ranks
        (MicroBatch(samples=4), 2, Load(2 * 32 + 4 * 16, 4, 1)),  # 2 and 2 of two prompts
        (MicroBatch(max_tokens=100), 1, Load(2 * 48, 3, 4)),  # ceil(384 / 100) = 4: 2 of the longest each, or 100 of 3
        (MicroBatch(max_tokens=48 * 8), 1, Load(8 * 48, 8, 1)),
        (MicroBatch(max_tokens=10), 1, Load(48, 1, 8)),  # a sample is never cut
    ],
)
def test_by_hand(micro: MicroBatch, dp: int, due: Load) -> None:
    found = loaded(micro, dp)
    assert (found.sequences, found.micro_batches) == (due.sequences, due.micro_batches)
    assert due.tokens <= found.tokens <= max(due.tokens, micro.max_tokens or 0)


def test_a_static_one_is_full_of_the_longest_samples() -> None:
    """Packed with its prompt once, packed sample by sample, or padded."""
    for overrides, tokens in (
        ((), 32 + 4 * 16),
        (("actor.shared_prompts=false",), 4 * 48),
        (("actor.packed=false",), 4 * 48),
    ):
        assert {stage: one.tokens for stage, one in planned("tiny.yaml", *overrides).loads.items()} == dict.fromkeys(
            ("old_log_prob", "update_actor", "ref_log_prob"), tokens
        )


def test_every_sample_but_the_first_of_a_prompt_is_joined_with_it() -> None:
    assert TINY.loads["update_actor"].beside_tokens == 3 * 48
    assert planned("tiny.yaml", "actor.shared_prompts=false").loads["update_actor"].beside_tokens == 0
    assert FSDP.loads["update_actor"].beside_tokens == 0


@given(samples=st.integers(1, 40), group=st.integers(1, 12), start=st.integers(0, 30))
def test_no_cut_of_a_mini_batch_holds_more_prompts_than_planned(samples: int, group: int, start: int) -> None:
    """`start` micro-batches come before, from the first sample of a group on."""
    inside = {index // group for index in range(start * samples, (start + 1) * samples)}
    assert len(inside) <= prompts_of(samples, group) <= samples


def test_a_dynamic_budget_counts_for_a_whole_context_parallel_group() -> None:
    """verl multiplies ppo_max_token_len_per_gpu by the sequence-parallel degree before it cuts micro-batches."""
    assert FSDP.loads["update_actor"] == Load(18432, 2, 32)
    megatron = planned("verl_qwen3_235b_megatron.sh", gpu="h100-80g")
    assert megatron.loads["update_actor"].tokens == 2 * 18432  # cp = 2


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(1, 800), dp=st.sampled_from([1, 2, 4, 8]))
def test_equally_long_samples_are_packed_no_worse_than_planned(budget: int, dp: int) -> None:
    """verl: ceil(tokens / budget) micro-batches, samples as even as they go. The fullest of them has the planned tokens."""
    whole, samples = 48, max(1, -(-8 // dp))
    count = min(samples, -(-samples * whole // budget))
    cuts = [round(index * samples / count) for index in range(count + 1)]
    fullest = max(b - a for a, b in pairwise(cuts)) * whole
    found = loaded(MicroBatch(max_tokens=budget), dp, shared=False)
    assert found.micro_batches == count
    assert fullest <= found.tokens <= max(fullest, min(budget, samples * whole))
    assert found.sequences * whole >= max(fullest, found.tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500))
def test_where_micro_batches_close_at_the_budget_only_a_single_sample_exceeds_it(budget: int) -> None:
    config = changed(TINY.config, "actor.micro_batch", MicroBatch(max_tokens=budget))
    work = next(one for one in works(config) if one.stage == "update_actor")
    found = load(work, config, 1, None, {"scheme": "capped"})
    assert found.tokens <= max(budget, 48)
    assert found.sequences == min(8, -(-budget // 48))  # none of them longer than 48
    assert found.micro_batches * found.sequences >= 8


def test_real_lengths_never_make_a_fuller_one_than_the_limits() -> None:
    for spec in ("p50=300,max=900", "p50=900,p99=7000,max=8192", "p50=8192,max=8192"):
        lengths = parse(spec)
        plan = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g", lengths=spec)
        values = facts(plan.config, plan.architecture, lengths).values
        found = load(update(plan), plan.config, 8, lengths, values)
        assert found == plan.loads["update_actor"]
        assert found.tokens <= 18432 + 9216
        assert found.micro_batches <= 32
    short = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g", lengths="p50=300,max=900").loads["update_actor"]
    assert short.micro_batches < 32 / 3 and short.sequences > 2


def test_where_it_is_padded_short_samples_take_the_greatest_length() -> None:
    # a budget of 100 tokens holds three samples that together have so many; each is a row of 48
    plan = planned("tiny.yaml", "actor.packed=false", "actor.micro_batch={max_tokens: 100}")
    assert (plan.loads["update_actor"].sequences, plan.loads["update_actor"].tokens) == (3, 3 * 48)
    ((micro, *_), *_) = plan.course(0).mini_batches
    assert [(one.prompt, one.response) for one in micro] == [(32, 16)] * 3
