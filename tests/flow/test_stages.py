"""What a stage reads, writes and frees follows from the tensors, and the order of the step from that."""

import dataclasses

import pytest

from flowledger.flow.errors import BadInput
from flowledger.flow.stages import GRAINS, PHASES, ROLES, mesh_of, order, owner_of, stage, stages
from flowledger.flow.tensors import stage_of, tensors

STEP = [
    "prompt",
    "rollout",
    "reward",
    "filter",
    "balance",
    "old_log_prob",
    "ref_log_prob",
    "values",
    "advantage",
    "update_critic",
    "update_actor",
    "weight_sync",
    "checkpoint",
    "validate",
]


def test_the_stages_stand_in_the_order_of_a_step():
    assert list(stages()) == STEP


def test_the_written_order_is_the_order_that_follows_from_reads_and_writes():
    assert list(order()) == STEP


def test_a_table_in_another_order_is_sorted_back_where_tensors_decide():
    backwards = order(reversed(stages().values()))
    for earlier, later in [
        ("prompt", "rollout"),
        ("rollout", "reward"),
        ("filter", "balance"),
        ("old_log_prob", "advantage"),
        ("advantage", "update_actor"),
        ("update_actor", "weight_sync"),
        ("weight_sync", "validate"),
    ]:
        assert backwards.index(earlier) < backwards.index(later)


def test_a_circle_is_refused():
    reward, advantage = stage("reward"), stage("advantage")
    circle = dataclasses.replace(reward, reads=(*reward.reads, "advantages"))
    with pytest.raises(AssertionError, match=r"circle among.*advantage.*reward"):
        order([circle, advantage])


def test_who_changes_a_tensor_of_the_step_waits_for_its_producer_and_nobody_waits_for_the_change():
    """Rejection takes tokens out of the loss mask that filter made; the update may give the old log-probs itself."""
    backwards = order(reversed(stages().values()))
    assert backwards.index("filter") < backwards.index("advantage") < backwards.index("update_actor")
    assert "loss_mask" in stage("advantage").writes and "old_log_prob" in stage("update_actor").writes
    assert list(order([stage("advantage"), stage("balance")])) == ["advantage", "balance"]


def test_what_is_read_from_the_step_before_makes_no_circle():
    assert "updated_params@previous" in stage("rollout").reads
    assert "updated_params" in stage("weight_sync").writes


def test_reads_writes_and_frees_say_the_same_as_the_tensors():
    for row in tensors().values():
        for name, found in stages().items():
            reads = {read.partition("@")[0] for read in found.reads}
            assert (row.name in reads) == (name in map(stage_of, row.readers))
            assert (row.name in found.writes) == (name in map(stage_of, row.written_by))
            assert (row.name in found.frees) == (name in map(stage_of, row.released_by))


def test_every_tensor_that_is_read_has_been_written_before_in_the_step():
    written: set[str] = set()
    for found in stages().values():
        written |= set(found.writes)
        assert {name for name in found.reads if "@" not in name} <= written, found.name


@pytest.mark.parametrize("row", stages().values(), ids=lambda row: row.name)
def test_every_word_of_a_stage_is_known(row):
    assert row.role in ROLES
    assert set(row.phases) <= set(PHASES)
    assert row.works_on and set(row.works_on) <= set(GRAINS)
    assert row.aggregates and row.aggregates_zh and row.purpose and row.purpose_zh


def test_groups_are_aggregated_by_advantage_and_nowhere_else():
    assert [row.name for row in stages().values() if "group" in row.works_on] == ["advantage"]


@pytest.mark.parametrize(
    ("name", "at", "access", "where"),
    [
        ("full_sequence", "rollout", "write", "rollout"), ("full_sequence", "balance", "read", "rollout"),
        ("full_sequence", "balance", "write", "train"), ("full_sequence", "update_actor", "read", "train"),
        ("updated_params", "weight_sync", "write", "rollout"), ("params", "weight_sync", "read", "train"),
        ("sample_id", None, "read", "train"), ("no_tensor", "no_stage", None, "train"),
    ],
)  # fmt: skip
def test_balance_reads_where_was_sampled_and_writes_where_is_trained(name, at, access, where):
    assert mesh_of(name, at, access) == where


@pytest.mark.parametrize(
    ("name", "at", "owner"),
    [
        ("logits", "rollout", "rollout@rollout"), ("hidden_states", "ref_log_prob", "ref@ref_log_prob"),
        ("grad_norm", "update_critic", "critic@update_critic"), ("grad_norm", "update_actor", "actor@update_actor"),
        ("comm_buffer", "balance", "actor@balance"), ("kl", "advantage", "actor@advantage"),
        ("params", "values", "critic@update_critic"), ("params", "ref_log_prob", "ref@ref_log_prob"),
        ("params", "weight_sync", "actor@update_actor"), ("optimizer_state", "update_critic", "critic@update_critic"),
        ("updated_params", "rollout", "rollout@weight_sync"), ("loss_mask", "filter", "actor@update_actor"),
        ("logits", None, "actor@update_actor"),
    ],
)  # fmt: skip
def test_what_each_stage_makes_for_itself_is_its_own(name, at, owner):
    assert owner_of(name, at) == owner


def test_an_unknown_stage_is_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match="did you mean rollout"):
        stage("rolout")
