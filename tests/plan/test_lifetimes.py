"""The planned lifetimes against those that a recording of the loop shows, and that every life closes."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.mesh import mesh
from flowledger.flow.stages import order
from flowledger.flow.tensors import stage_of, tensor
from flowledger.plan.lifetimes import Fate, lifetimes, storages, surviving
from flowledger.plan.shapes import RankClass, Setting, shapes
from tests.plan.conftest import WATCHED, Witnesses, planned
from tests.plan.test_shapes import SIZES, STAGES

# Readers that are declared and not seen in this loop.
NOT_READ_HERE = {
    "rollout_log_prob": {"update_actor"},  # its loss does not correct for the rollout's policy
    "entropy": {"update_actor"},  # the update computes its own
    "reward": {"filter", "advantage"},  # the filter keeps everything; the advantage reads a reshaped copy
    "position_ids": {"rollout"},  # counted there
}
LONE = RankClass(name="all", first=0, count=1, layers=(0, 1), layer_elements={0: 10, 1: 10}, outer_elements=5)


def of_the_step(fates: list[Fate]) -> list[Fate]:
    """Data tensors that stages hand to each other: what a recording shows storage by storage."""
    return [fate for fate in fates if fate["lifetime"] == "step" and fate["kind"] == "batch"]


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_tensors_of_the_step_are_born_and_read_where_the_recording_says(
    witnesses: Callable[[str], Witnesses], name: str
) -> None:
    witness = witnesses(name)
    fates = of_the_step(witness.plan.fates)
    assert len(fates) > 12
    for fate in fates:
        tensor_name = fate["tensor_name"]
        seen = witness.ledger.rows("FROM lifetimes_at(?) WHERE tensor_name = ?", [WATCHED, tensor_name])
        writers = {stage_of(place) for place in tensor(tensor_name).written_by}
        made = [row for row in seen if stage_of(row["born_at"]) in writers]
        assert stage_of(fate["born_at"]) in {stage_of(row["born_at"]) for row in made}, tensor_name
        readers = {reader for row in seen for reader in row["readers"]}
        assert readers <= set(fate["readers"]), tensor_name
        assert set(fate["readers"]) - readers <= NOT_READ_HERE.get(tensor_name, set()), tensor_name


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_nothing_is_planned_to_die_before_its_last_recorded_read(
    witnesses: Callable[[str], Witnesses], name: str
) -> None:
    witness = witnesses(name)
    places = list(order())
    for fate in of_the_step(witness.plan.fates):
        last = witness.ledger.rows(
            "SELECT last_read_at FROM lifetimes_at(?) WHERE tensor_name = ? AND last_read_at IS NOT NULL",
            [WATCHED, fate["tensor_name"]],
        )
        assert all(
            places.index(stage_of(row["last_read_at"])) <= places.index(stage_of(fate["freed_at"])) for row in last
        ), fate


@pytest.mark.parametrize("name", ["usual", "variant"])
def test_what_a_micro_batch_makes_is_gone_in_the_stage_that_made_it(
    witnesses: Callable[[str], Witnesses], name: str
) -> None:
    """Planned and recorded alike: logits and hidden states of each stage never leave it."""
    witness = witnesses(name)
    for fate in witness.plan.fates:
        if fate["tensor_name"] in ("logits", "hidden_states"):
            assert stage_of(fate["freed_at"]) == stage_of(fate["born_at"])
    seen = witness.ledger.rows(
        "FROM lifetimes_at(?) WHERE tensor_name IN ('logits', 'hidden_states') AND born_at IS NOT NULL", [WATCHED]
    )
    assert {stage_of(row["born_at"]) for row in seen} >= {"rollout", "old_log_prob", "ref_log_prob", "update_actor"}
    assert all(stage_of(row["freed_at"]) == stage_of(row["born_at"]) for row in seen)


@settings(max_examples=40, deadline=None)
@given(left_out=st.sets(st.sampled_from(STAGES), max_size=6), dp=st.integers(1, 2), packed=st.booleans())
def test_lives_close(left_out: set[str], dp: int, packed: bool) -> None:
    """Born before every reader of the step, dead after the last, and only where stages run; what persists never dies."""
    stages = tuple(name for name in STAGES if name not in left_out)
    rows = shapes(Setting(stages=stages, bindings=SIZES, mesh=mesh(dp=dp), dtypes={}, packed=packed), [LONE])
    fates = lifetimes(rows, stages)
    at = {name: index for index, name in enumerate(name for name in order() if name in stages)}
    for fate in fates:
        born = at[stage_of(fate["born_at"])]
        if fate["lifetime"] == "persistent":
            assert fate["freed_at"] is None
            continue
        freed = at[stage_of(fate["freed_at"])]
        assert born <= freed
        assert all(born <= at[reader] <= freed for reader in fate["readers"]), fate
    assert {(row.tensor_name) for row in rows} == {fate["tensor_name"] for fate in fates}


@settings(max_examples=20, deadline=None)
@given(left_out=st.sets(st.sampled_from(STAGES), max_size=4))
def test_every_storage_is_born_once_and_freed_at_most_once_and_rows_name_one(left_out: set[str]) -> None:
    stages = tuple(name for name in STAGES if name not in left_out)
    rows = shapes(Setting(stages=stages, bindings=SIZES, mesh=mesh(dp=2), dtypes={}), [LONE])
    fates = lifetimes(rows, stages)
    events = storages(rows, fates)
    for number, fate in enumerate(fates, 1):
        of = [event.event for event in events if event.storage == number]  # one kind of rank
        assert of == (["born"] if fate["freed_at"] is None else ["born", "freed"])
    assert {row.storage for row in rows} == set(range(1, len(fates) + 1))


def test_what_survives_a_stage_is_what_a_later_one_reads_or_what_stays() -> None:
    fates: list[Fate] = [
        {"tensor_name": "a", "born_at": "prompt", "freed_at": "reward"},
        {"tensor_name": "b", "born_at": "rollout/forward", "freed_at": "rollout"},
        {"tensor_name": "c", "born_at": "update_actor/step", "freed_at": None},
    ]
    assert surviving(fates, ("prompt", "rollout", "reward", "update_actor")) == {
        "prompt": ["a"], "rollout": ["a"], "reward": [], "update_actor": ["c"],
    }  # fmt: skip


def test_a_stage_that_does_not_run_frees_nothing() -> None:
    """Without the update the last reader lets go; with it, the place that is declared."""
    for stages, freed in ((("prompt", "rollout", "reward"), "reward"), (STAGES, "update_actor")):
        rows = shapes(Setting(stages=stages, bindings=SIZES, mesh=mesh(), dtypes={}), [LONE])
        (fate,) = [one for one in lifetimes(rows, stages) if one["tensor_name"] == "full_sequence"]
        assert fate["freed_at"] == freed


def test_bytes_are_those_of_the_largest_form_of_the_stage_that_made_it() -> None:
    fates = {(fate["tensor_name"], stage_of(fate["born_at"])): fate for fate in planned("tiny.yaml").fates}
    assert fates["logits", "rollout"]["bytes"] == 12 * 264 * 4  # 12 slots, the vocabulary, float32
    assert fates["logits", "update_actor"]["bytes"] == 4 * 16 * 264 * 4  # 4 samples of 16 response tokens
    assert fates["attention_mask", "prompt"]["bytes"] == 16 * (32 + 16) * 8
