"""What-if: changes change one thing, the bisection finds the boundary, and advice holds when it is taken."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.stages import stages
from flowledger.plan.whatif import (
    MOST_TOKENS,
    Change,
    advise,
    applied,
    bisect,
    changed,
    changes,
    compare,
    key_of,
    largest,
    together,
    value_at,
    with_config,
)  # fmt: skip
from tests.plan.conftest import planned

TINY = planned("tiny.yaml")
FSDP = planned("verl_qwen3_8b_fsdp.sh", gpu="h100-80g")

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "actor.micro_batch.samples": st.integers(1, 64),
    "actor.engine.offload.optimizer": st.booleans(),
    "actor.engine.recompute.granularity": st.sampled_from(["none", "full", "selective"]),
    "rollout.max_response_tokens": st.integers(1, 4096),
    "rollout.serving.memory_share": st.floats(0.1, 0.9),
    "hardware.gpu": st.sampled_from([None, "H100-SXM5-80GB"]),
    "optim.lr": st.floats(0, 1),
}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf for name, inner in value.items() for key, leaf in leaves(inner, f"{path}.{name}".lstrip(".")).items()
    }


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(VALUES)).flatmap(lambda path: st.tuples(st.just(path), VALUES[path])))
def test_a_change_changes_one_value_and_nothing_else(case: tuple[str, Any]) -> None:
    path, value = case
    before = leaves(TINY.config.model_dump())
    if path not in before:
        path, value = "actor.epochs", 3
    other = changed(TINY.config, path, value)
    after = leaves(other.model_dump())
    assert after.pop(path) == value == value_at(other, path)
    assert {key: leaf for key, leaf in before.items() if key != path} == after
    assert leaves(TINY.config.model_dump()) == before
    assert other.source_of("data.prompts_per_step") == TINY.config.source_of("data.prompts_per_step")


@given(boundary=st.integers(0, 10**6), start=st.integers(0, 10**6))
def test_bisection_finds_the_boundary_of_any_monotone_predicate(boundary: int, start: int) -> None:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= boundary

    assert bisect(fits, start) == (boundary or None)
    assert len(asked) <= 2 * 22 + 2  # a plan each: logarithmic, not linear


def test_bisection_ends_where_nobody_asks_for_more() -> None:
    found = bisect(lambda value: True, 3)
    assert found is not None and MOST_TOKENS / 2 <= found <= MOST_TOKENS


def test_a_change_that_means_nothing_here_is_not_applied() -> None:
    common: dict[str, Any] = {"id": "x", "stage": "update_actor", "costs": "", "costs_zh": ""}
    assert applied(Change(path="critic.epochs", to=2, **common), TINY.config) is None  # there is no critic
    assert applied(Change(path="actor.epochs", to=TINY.config.actor.epochs, **common), TINY.config) is None
    assert applied(Change(path="actor.micro_batch.max_tokens", times=0.5, **common), TINY.config) is None  # static
    assert applied(Change(path="actor.epochs", to=2, when=(("actor.packed", (False,)),), **common), TINY.config) is None
    assert (
        applied(Change(path="actor.micro_batch.samples", times=0.1, **common), TINY.config) is None
    )  # would be none at all
    halved = applied(Change(path="actor.micro_batch.samples", times=0.5, **common), TINY.config)
    assert halved is not None and halved.actor.micro_batch.samples == 2


def test_every_change_of_the_table_names_a_place_that_exists_and_what_it_costs() -> None:
    assert len(changes()) >= 10
    for change in changes():
        assert change.costs and change.costs_zh and (change.to is not None) != (change.times is not None)
        assert change.stage in stages()
        section: Any = type(TINY.config)
        for part in change.path.split("."):
            field = section.model_fields[part].annotation
            section = next(
                (one for one in (*getattr(field, "__args__", ()), field) if hasattr(one, "model_fields")), None
            )


def test_knobs_have_the_names_of_their_framework() -> None:
    change = next(one for one in changes() if one.id == "halve_token_budget")
    assert "ppo_max_token_len_per_gpu" in key_of(change, FSDP.config)
    assert change.path in key_of(change, changed(FSDP.config, "framework", "unknown"))


# An engine that never sleeps lies beside the update.
AWAKE = ("actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3")


def test_where_the_update_does_not_fit_its_own_remedies_come_before_those_of_other_stages() -> None:
    short, fits = (planned("verl_qwen3_8b_fsdp.sh", *AWAKE, gpu=gpu) for gpu in ("a100-40g", "h100-80g"))
    assert (short.worst.stage, short.fits) == ("update_actor", False)
    advice = advise(short)
    names, saves = [one.id for one in advice], {one.id: one.saves for one in advice}
    at = names.index("engine_sleeps")
    assert names.index("halve_token_budget") < at and saves["halve_token_budget"] < saves["engine_sleeps"]
    assert set(names[at:]) <= {"engine_sleeps", "lower_engine_share"}
    for part in (names[:at], names[at:]):
        assert [saves[name] for name in part] == sorted((saves[name] for name in part), reverse=True)
    taken = together(short, advice)  # whichever saves most, for together they have to fit
    assert taken[0].saves == max(saves.values())
    others = advise(fits)
    assert fits.fits and others[0].saves == max(one.saves for one in others)  # where it fits what saves most is first


def test_advice_taken_saves_what_it_says() -> None:
    plan = TINY
    advice = advise(plan)
    assert advice and [one.saves for one in advice] == sorted((one.saves for one in advice), reverse=True)
    by_id = {change.id: change for change in changes()}
    for one in advice[:3]:
        config = applied(by_id[one.id], plan.config)
        assert config is not None
        other = with_config(plan, config)
        needs = [max(p.worst.reserved, p.worst.peak.bytes) for p in (plan, other)]
        assert needs[0] - needs[1] == one.saves > 0
        assert one.peak_stage == other.worst.stage


def test_a_smaller_token_budget_stands_beside_the_larger_one() -> None:
    other = with_config(FSDP, changed(FSDP.config, "actor.micro_batch.max_tokens", 9216))
    rows = {row["stage"]: row for row in compare(FSDP, other)}
    assert list(rows) == list(dict.fromkeys(one.stage for one in FSDP.memory))
    assert rows["update_actor"]["change"] < 0
    assert rows["rollout"]["change"] == 0
    assert all(row["after"] - row["before"] == row["change"] for row in rows.values())


SMALL = planned(
    "tiny.yaml", "actor.micro_batch.samples=null", "actor.micro_batch.max_tokens=100", "memory.limit_bytes=4000000"
)


def test_the_largest_value_fits_and_one_more_does_not() -> None:
    for one, path in zip(largest(SMALL), ("actor.micro_batch.max_tokens", "rollout.max_response_tokens"), strict=True):
        assert one.largest is not None and one.largest > one.now
        assert with_config(SMALL, changed(SMALL.config, path, one.largest)).fits
        beyond = with_config(SMALL, changed(SMALL.config, path, one.largest + 1))
        if one.limited_by == "the token budget, which must hold a sample":  # 100 tokens, 32 of them the prompt's
            assert (one.what, one.largest) == ("response length", SMALL.config.actor.micro_batch.max_tokens - 32)
        else:
            assert not beyond.fits
            assert beyond.worst.stage == one.limited_by


def test_where_nothing_fits_the_largest_is_none() -> None:
    smaller = with_config(SMALL, changed(SMALL.config, "memory.limit_bytes", 2**10))
    assert [one.largest for one in largest(smaller)] == [None, None]


def test_a_share_that_is_scaled_is_written_without_rounding_noise() -> None:
    config = planned("verl_qwen3_8b_fsdp.sh").config
    path = "rollout.serving.memory_fraction"
    change = next(one for one in changes() if one.path == path and one.times is not None)
    found = applied(change, changed(config, path, 0.8))
    assert found is not None and repr(value_at(found, path)) == "0.64"
