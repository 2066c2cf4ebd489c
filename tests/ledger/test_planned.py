"""Expected rows written into a run's directory and read back: the views say the same figures as the plan."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowledger.flow.errors import BadInput
from flowledger.flow.kinds import KINDS
from flowledger.flow.tensors import tensor
from flowledger.ledger import planned
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, TensorRow
from flowledger.plan.plan import Plan
from tests.plan.conftest import planned as plan_of

PLANS = {"tiny": ("tiny.yaml", {}), "megatron": ("verl_qwen3_235b_megatron.sh", {"gpu": "h100-80g"})}


@pytest.fixture(scope="module", params=list(PLANS))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, Ledger]]:
    source, question = PLANS[request.param]
    plan = plan_of(source, **question)
    book = create(tmp_path_factory.mktemp("planned") / "a", Manifest(run="a", level="plan"))
    planned.write(book.path, "a", plan.rows())
    book.close("closed")
    with Ledger(book.path) as ledger:
        yield plan, ledger


def test_every_row_comes_back_as_planned(both: tuple[Plan, Ledger]) -> None:
    plan, ledger = both
    for kind in (TensorRow, MemoryRow, FindingRow):
        due = [row for row in plan.rows() if isinstance(row, kind)]
        rows = ledger.rows(f"FROM {kind.table}")
        assert len(rows) == len(due)
        assert {(row["run"], row["source"]) for row in rows} == {("a", "plan")}
    assert ledger.torn == 0


def test_shapes_are_those_of_the_plan(both: tuple[Plan, Ledger]) -> None:
    plan, ledger = both
    shown = {(row["stage"], row["phase"], row["tensor_name"], row["dims"]): row for row in ledger.rows("FROM shapes")}
    for row in plan.shapes:
        seen = shown[(row.stage, row.phase, row.tensor_name, (row.dims or "").strip("[] "))]
        assert len(seen["logical_shape"]) == len(row.logical_shape or [])
        assert all(
            a <= b <= c
            for a, b, c in zip(seen["logical_shape_min"], row.logical_shape or [], seen["logical_shape"], strict=True)
        )
        assert row.access in seen["access"].split("+")
        assert (seen["kind"], seen["owner"]) == (row.kind, row.owner)
    assert not ledger.rows("FROM shapes WHERE mask_fits = false")


def test_memory_of_every_stage_is_that_of_the_plan(both: tuple[Plan, Ledger]) -> None:
    plan, ledger = both
    shown = {
        (row["step"], row["stage"], row["rank"]): row
        for row in ledger.rows("FROM memory_readings WHERE instant = 'peak' AND source = 'plan'")
    }
    assert len(shown) == len(plan.memory)
    for one in plan.memory:
        row = shown[(one.step, one.stage, one.ranks.first)]
        assert {kind: row[kind] for kind in KINDS} == {kind: one.kinds.get(kind, 0) for kind in KINDS}
        assert (row["allocated"], row["reserved"], row["limit"]) == (one.peak.bytes, one.reserved, one.limit)
        assert row["host_used"] == one.host
    worst = ledger.rows("SELECT max(peak) AS peak FROM peaks")[0]["peak"]
    assert worst == max(one.peak.bytes for one in plan.memory)
    assert {row["stage"] for row in ledger.rows("FROM memory_by_stage")} == set(plan.stages)


def test_lifetimes_are_those_of_the_plan(both: tuple[Plan, Ledger]) -> None:
    plan, ledger = both
    shown = {(row["tensor_name"], row["born_at"]): row for row in ledger.rows("FROM lifetimes_at(1)")}
    for fate in plan.fates:
        row = shown[(fate["tensor_name"], fate["born_at"])]
        assert row["freed_at"] == fate["freed_at"]
        assert set(row["readers"] or ()) == set(fate["readers"])
        assert row["lifetime"] == fate["lifetime"]
        if fate["freed_at"] == tensor(fate["tensor_name"]).freed_by:  # the view knows one place of death a tensor
            assert not row["outlives"], row


def test_findings_are_those_of_the_plan(both: tuple[Plan, Ledger]) -> None:
    plan, ledger = both
    shown = ledger.rows("FROM findings_view")
    assert sorted((row["id"], row["verdict"], row["message"]) for row in shown) == sorted(
        (one.id, one.verdict, one.message) for one in plan.findings
    )
    assert {row["scope"] for row in shown} == {"plan"}


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("in the way")
    with pytest.raises(BadInput, match="cannot write to"):
        planned.write(tmp_path, "a", [FindingRow(id="x", verdict="pass", message='it\'s "fine"')])


def test_text_with_quotes_comes_back_as_it_was(tmp_path: Path) -> None:
    book = create(tmp_path / "o'brien", Manifest(run="o'brien"))
    planned.write(
        book.path,
        "o'brien",
        [FindingRow(id="x", verdict="pass", message='it\'s "fine"\n', evidence=["a'b"], fix={"k": "v'"})],
    )
    with Ledger(book.path) as ledger:
        (row,) = ledger.rows("FROM findings")
    assert (row["message"], row["evidence"], row["fix"], row["run"]) == (
        'it\'s "fine"\n',
        ["a'b"],
        {"k": "v'"},
        "o'brien",
    )
