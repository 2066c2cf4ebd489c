"""Planned shards against what every rank recorded, against the loop's own packing, and against the laws of sharding."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.diagnose import laws
from flowledger.flow.mesh import mesh
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import TensorRow
from flowledger.plan.rows_of_tokens import Micro, Sample, Sharing, TokenRow, alike
from flowledger.plan.shards import Shards
from flowledger.plan.weights import count, weights
from flowledger.run.packing import pack
from flowledger.run.parallel.ranks import GROUPS, Group, Ranks
from flowledger.tables.models import Architecture, Moe
from tests.plan.conftest import planned
from tests.plan.spread_runs import CASES, config, module, recorded

# ------------------------------------------------------------------------------------------------------------ ranks


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_what_was_planned_for_it(name: str) -> None:
    ranks = recorded(name)
    rows = [[row for row in part if isinstance(row, TensorRow)] for part in ranks]
    assert all(len(part) > 100 for part in rows)
    assert module("shapes_agree").wrong(config(name), ranks) == []


@pytest.mark.parametrize(
    ("name", "tensor", "dims"), [("dp2", "grads", "P"), ("tp2", "logits", "T_logit, V"), ("cp2", "values", "B_micro, S_resp")]
)  # fmt: skip
def test_a_shape_that_is_not_as_planned_is_found(name: str, tensor: str, dims: str) -> None:
    ranks = [list(part) for part in recorded(name)]
    at, row = next(
        (at, row)
        for at, row in enumerate(ranks[1])
        if isinstance(row, TensorRow) and (row.tensor_name, row.dims) == (tensor, dims) and row.stage != "rollout"
    )
    ranks[1][at] = other = row.__copy__()  # type: ignore[attr-defined]  # as a struct has it
    other.local_shape = [*row.local_shape[:-1], row.local_shape[-1] + 1]
    (line,) = module("shapes_agree").wrong(config(name), ranks)
    assert line.startswith(f"rank 1 {row.stage}") and f"recorded {other.local_shape}" in line


def test_owners_on_a_later_stage_of_a_pipeline_are_those_that_were_recorded_there() -> None:
    agree, named = module("shapes_agree"), 0
    step = agree.Step(config("pp2"), recorded("pp2"))
    micros = step.micro_batches(1)
    for row in recorded("pp2")[1]:
        if isinstance(row, TensorRow) and agree._compared(row, step.config) and row.micro_batch is None:
            micro = agree._micros(row, micros, pipeline=True)[0]
            due = {one.owner_rank for one in step.planned(1, micro) if agree._same(one, row)}
            assert row.owner_rank in due, (row.stage, row.phase, row.tensor_name, row.dims, due)
            named += due == {"1"}
    assert named > 10


def test_parameters_of_a_rank_by_hand() -> None:
    # K, V [12, 24], the MLP's [20, 24]; FSDP over 3: a norm of 24 is 8 each, 20 rows are 7, 7, 6
    small = Architecture(
        name="small", layers=1, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=20, vocab=10, tied=True, source="here"
    )
    one = Shards(weights=weights(small), on=mesh(dp=3), stages=((0,),), tied=True)
    last = 24 * 24 // 3 * 2 + 12 * 24 // 3 * 2 + 6 * 24 * 2 + 24 // 3 * 20 + 2 * 8  # q o, k v, gate up, down, norms
    assert [one.local(rank, 0) for rank in range(3)] == [last + 2 * 24, last + 2 * 24, last]
    assert [one.local(rank, None) for rank in range(3)] == [4 * 24 + 8, 4 * 24 + 8, 2 * 24 + 8]
    assert one.classes(0, 0) == ((0, 2), (2, 1))


@settings(max_examples=25, deadline=None)
@given(
    degrees=st.fixed_dictionaries({axis: st.integers(1, 2) for axis in ("tp", "pp", "sp", "cp")}),
    dp=st.sampled_from([1, 2, 4]), dealt=st.booleans(), mixed=st.booleans(), tied=st.booleans(), hidden=st.integers(2, 9),
)  # fmt: skip
def test_the_pieces_of_all_ranks_are_the_model(
    degrees: dict[str, int], dp: int, dealt: bool, mixed: bool, tied: bool, hidden: int
) -> None:
    moe = Moe(experts=4, topk=2, ffn=5) if mixed else None
    model = Architecture(
        name="small", layers=2, hidden=2 * hidden, heads=2, kv_heads=2, head_dim=hidden, ffn=10, vocab=11, tied=tied,
        moe=moe, source="here",
    )  # fmt: skip
    on = mesh(**degrees, dp=dp, ep=dp if dealt and mixed else 1)
    stages = ((0, 1),) if on.degree("pp") == 1 else ((0,), (1,))
    shards = Shards(weights=weights(model), on=on, stages=stages, tied=tied)
    held = sum(
        shards.piece(cut, rank)
        for rank in range(on.size)
        for layer in (*stages[on.at(rank, "pp")], None)
        for cut in shards.held(rank, layer)
        if "tp" in cut.placements or on.at(rank, "tp") == 0  # the others have copies
    )
    copied = tied and on.degree("pp") > 1
    assert held == count(model) + (11 * model.hidden if copied else 0)


def test_a_run_that_was_written_down_is_compared_too(tmp_path: Path) -> None:
    module("forked").ranks(2, module("shapes_agree").record, config("pp2"), tmp_path / "run")
    with Ledger(tmp_path / "run") as ledger:  # three prompts on two ranks
        (law,) = [one for one in laws.check(ledger) if one.id == "shapes_conserved"]
    assert law.verdict == "pass", law.message
    agreement = module("shapes_agree").compare(tmp_path / "run")
    assert agreement.compared > 200
    assert (agreement.wrong, agreement.bytes_wrong) == ([], [])


# ------------------------------------------------------------------------------------------------------------ rows

lengths = st.lists(
    st.builds(Sample, prompt=st.integers(1, 5), response=st.integers(1, 6), group=st.integers(0, 1)), max_size=5
).map(tuple)


def as_seen_by(sharing: Sharing, cp: int, sp: int, tp: int) -> Ranks:
    """One rank of a group that talks to nobody."""
    sizes = {"cp": (sharing.cp, cp), "sp": (sharing.sp, sp), "tp": (tp, 0)}
    found = {name: Group(name) for name in GROUPS}
    found |= {name: Group(name, tuple(range(size)), at) for name, (size, at) in sizes.items()}
    found["tokens"] = Group("tokens", tuple(range(sharing.cp * sharing.sp)), cp * sharing.sp + sp)
    return Ranks(groups=found)


@settings(max_examples=40, deadline=None)
@given(
    micro=lengths, shared_prompts=st.booleans(), cp=st.integers(1, 3), sp=st.integers(1, 2), tp=st.integers(1, 2),
)  # fmt: skip
def test_a_row_is_as_long_as_the_loop_packs_it(micro: Micro, shared_prompts: bool, cp: int, sp: int, tp: int) -> None:
    micro = tuple(replace(one, prompt=2 + one.group) for one in micro)  # one prompt a group
    sharing = Sharing(cp=cp, sp=sp, tp=tp, shared_prompts=shared_prompts)
    row = TokenRow(micro, sharing)
    mask = torch.zeros(len(micro), 12, dtype=torch.int64)
    for at, one in enumerate(micro):
        mask[at, 4 - one.prompt : 4 + one.response] = 1
    ids = torch.tensor([[one.group] * 12 for one in micro], dtype=torch.int64).reshape(len(micro), 12)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for rank in range(cp * sp):
        at = {"cp": rank // sp, "sp": rank % sp}
        packed = pack(
            ids, mask, positions, mask[:, 4:], shared_prompts=shared_prompts,
            ranks=as_seen_by(sharing, **at, tp=tp), sequence_parallel=tp > 1,
        )  # fmt: skip
        assert packed.ids.shape == (1, row.local_tokens)
        assert len(packed.before) == row.wanted(**at)


def test_filling_by_hand() -> None:
    two = alike(2, prompt=3, response=4, group=2)
    assert TokenRow(two, Sharing()).tokens == 3 + 4 + 4
    assert TokenRow(two, Sharing(sp=2)).tokens == 12
    assert TokenRow(two, Sharing(cp=2)).tokens == 8 + 8  # each sample stands alone, filled to a multiple of 4
    assert TokenRow(two, Sharing(cp=2, sp=2, tp=4)).tokens == 16
    assert TokenRow((), Sharing(cp=2, sp=3)).tokens == 12
    assert [TokenRow(two, Sharing(cp=2)).wanted(cp=at) for at in (0, 1)] == [
        0,
        8,
    ]  # tokens 2 to 5 of each, chunks 1 and 2


# ------------------------------------------------------------------------------------------------------------ plans


def test_rows_of_one_rank_and_of_its_class_agree() -> None:
    overrides = ("mesh.dp=2", "mesh.tp=2", "data.prompts_per_step=6", "actor.mini_batch_prompts=6")
    plan = planned("tiny.yaml", *overrides)
    shapes: Any = module("shapes_agree").shapes
    for rank in range(4):
        for row in shapes(plan.setting, plan.classes, rank=rank):
            assert (row.rank, row.rank_count) == (rank, 1) and row.numel == prod(row.local_shape)
    params = [row for row in plan.shapes if row.tensor_name == "params" and row.stage == "weight_sync"]
    assert sum(row.rank_count for row in params if row.layer == 0) == 4


def test_what_was_sampled_is_written_again_where_it_is_trained_on() -> None:
    plan = planned("tiny.yaml", "mesh.dp=2", "mesh.tp=2", "data.prompts_per_step=4", "actor.mini_batch_prompts=4")
    moved = {row.tensor_name: row for row in plan.shapes if (row.stage, row.access) == ("balance", "write")}
    assert set(moved) == {
        "full_sequence", "attention_mask", "position_ids", "response_mask", "loss_mask", "rollout_log_prob",
        "token_level_reward", "reward_components", "sample_id", "group_id",
    }  # fmt: skip
    samples = plan.config.samples_per_step
    assert {row.local_shape[0] for row in moved.values()} == {samples // 2}
    read = {row.local_shape[0] for row in plan.shapes if (row.stage, row.access) == ("balance", "read")}
    assert read == {samples // 4}
