"""The shape ledger in the page: the rows of `show RUN shapes`, what was planned beside them, and how it is searched."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowledger.cli.beside import beside
from flowledger.cli.page import write_html
from flowledger.diagnose import diff as comparison
from flowledger.diagnose.orders.kept import planned_of
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SpanRow, TensorRow
from flowledger.ledger.writer import Writer
from flowledger.show import plain, tables
from flowledger.show.page import shapes
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from tests.show.page.conftest import plan

Open = Callable[..., Any]
Made = Callable[..., Path]
Data = dict[str, Any]
HOSTILE = "<b onclick=alert(1)>mine</b>"
BINDINGS = {"B_prompt": 4, "G": 4, "B": 16, "dp": 1}


@cache
def data_of(run: Path, plan: Path | None = None) -> Data:
    with Ledger(run) as ledger, ExitStack() as stack:
        planned = None if plan is None else stack.enter_context(Ledger(plan))
        rows, _ = beside(ledger, planned)
        return shapes.data(Book(ledger=ledger, planned=planned, agreement=rows), Choice())


def seen(name: str, stage: str, dims: str, shape: list[int], **more: Any) -> TensorRow:
    return TensorRow(
        t_ns=1, step=0, role="actor", stage=stage, tensor_name=name, dims=dims, logical_shape=shape, local_shape=shape, dtype="int64",
        numel=1, bytes=8 * len(shape), access="write", **more,
    )  # fmt: skip


ROWS = (
    seen("prompt_ids", "prompt", "B_prompt, S_prompt", [4, 7]),  # shorter than its limit
    seen("prompt_length", "prompt", "B_prompt", [4]),  # as planned
    seen("sample_id", "prompt", "B_prompt*G", [15]),  # one is lost
    seen(
        "advantages",
        "advantage",
        "B_prompt*G, S_resp",
        [16, 5],
        mask="response_mask",
        mask_shape=[16, 4],
        mask_ratio=0.5,
    ),
    seen(HOSTILE, "update_actor", "B_micro", [3], kind="temporary"),
)


def by_hand(path: Path, rows: tuple[TensorRow, ...] = ROWS, level: str = "tensors") -> Path:
    """A run of flowledger's own loop that recorded these accesses in one step."""
    book = create(path, Manifest(run=path.name, level=level, bindings=BINDINGS))
    ink = Writer(book.part("actor", 0))
    ink.put(SpanRow(t_ns=1, step=0, id=1, event="whole", name="step", span_kind="stage", start_ns=0, end_ns=9))
    for row in rows:
        ink.put(row)
    ink.close()
    book.close("closed")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_hand(tmp_path_factory.mktemp("shapes") / "run")


@pytest.fixture(scope="module")
def its_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan(Path("examples") / "tiny.yaml", tmp_path_factory.mktemp("shapes") / "plan")


# ------------------------------------------------------------------------------------------------------------------- the rows


def test_the_rows_are_those_of_the_table(run: Path, recorded: Path, planned: Path) -> None:
    for path in (run, recorded, planned):
        made = data_of(path)
        with Ledger(path) as ledger:
            told = plain.picked(tables.table(ledger, "shapes"))
        assert len(made["rows"]) == len(told) > 0
        for row, other in zip(made["rows"], told, strict=True):
            bugs = {name: other.pop(name) for name in ("common_bug", "common_bug_zh")}
            assert {name: row[name] for name in other} == other
            known = made["tensors"].get(row["tensor_name"])
            assert bugs == ({"common_bug": None, "common_bug_zh": None} if known is None
                            else {"common_bug": known["common_bug"]["en"], "common_bug_zh": known["common_bug"]["zh"]})  # fmt: skip


def test_every_tensor_of_the_flow_is_explained_in_both_languages(recorded: Path) -> None:
    known = data_of(recorded)["tensors"]
    assert {"advantages", "old_log_prob", "response_mask", "kv_cache"} <= known.keys()
    for name, row in known.items():
        assert row["purpose"]["en"] and row["purpose"]["zh"] and row["common_bug"]["zh"] and row["forms"], name


@pytest.mark.parametrize("level", ["steps", "tensors", "import"])
def test_what_has_no_tensors_says_why(tmp_path: Path, level: str) -> None:
    made = data_of(by_hand(tmp_path / "run", (), level))
    (why,) = made["missing"]
    assert made["absent"] and why == {"steps": shapes.NO_TENSORS, "import": shapes.IMPORTED}.get(level, shapes.NOTHING)


def test_a_run_without_tensors_shows_its_plan(tmp_path: Path, its_plan: Path) -> None:
    made = data_of(by_hand(tmp_path / "run", (), "steps"), its_plan)
    with Ledger(its_plan) as ledger:
        assert len(made["rows"]) == len(tables.table(ledger, "shapes").rows)
    assert made["missing"] == [shapes.ONLY_THE_PLAN] and not made["beside"]


# ---------------------------------------------------------------------------------------------------------------- plan and run


def test_each_row_has_beside_it_what_was_planned(run: Path, its_plan: Path) -> None:
    made = data_of(run, its_plan)
    rows = {row["tensor_name"]: row for row in made["rows"] if row.get("source") == "record"}
    shown = {
        name: (row["outcome"], row["planned"][0]["logical_shape"]) for name, row in rows.items() if "outcome" in row
    }
    assert shown == {
        "prompt_ids": ("explained", [4, 32]), "prompt_length": ("equal", [4]), "sample_id": ("unequal", [16]),
        "advantages": ("explained", [16, 16]), HOSTILE: ("only_recorded", None),
    }  # fmt: skip
    assert "7 tokens" in rows["prompt_ids"]["planned"][0]["why"][0]


def test_nothing_that_diff_says_is_lost(run: Path, its_plan: Path) -> None:
    with Ledger(run) as ledger, Ledger(its_plan) as planned:
        told = planned_of(planned)
        assert told is not None
        found = comparison.document(comparison.diff(told, ledger))
    rows = data_of(run, its_plan)["rows"]
    said = Counter((one["outcome"], *one["why"]) for row in rows for one in row.get("planned", ()))
    expected = Counter((row["outcome"], *row["why"]) for row in found["rows"])
    expected += Counter(
        (outcome, row["why"]) for outcome in ("only_planned", "only_recorded") for row in found[outcome]
    )
    assert said == expected
    assert sum(row.get("outcome") == "unequal" for row in rows) == found["summary"]["unequal"] == 1


def test_rows_of_the_plan_alone_stand_in_their_stage(run: Path, its_plan: Path) -> None:
    stages = [row["stage"] for row in data_of(run, its_plan)["rows"]]
    assert [stage for at, stage in enumerate(stages) if at == 0 or stages[at - 1] != stage] == list(
        dict.fromkeys(stages)
    )


def test_a_tensor_with_another_name_in_the_plan_is_found_by_its_sizes() -> None:
    row: Data = {
        "stage": "old_log_prob",
        "tensor_name": "new_log_prob",
        "dims": "B_micro, S_resp",
        "local_shape": [4, 16],
    }
    said: Data = {"stage": "old_log_prob", "tensor_name": "old_log_prob", "dims": "B_micro, S_resp", "local_shape": [4, 16],
            "planned_logical_shape": [4, 16], "outcome": "equal", "why": []}  # fmt: skip
    assert shapes._judged([row], [said]) == []
    assert (row["outcome"], row["planned"][0]["name"]) == ("equal", "old_log_prob")


def test_the_worst_of_several_ranks_counts() -> None:
    row: Data = {"stage": "prompt", "tensor_name": "sample_id", "dims": "B", "local_shape": [8]}
    said: list[Data] = [
        {"stage": "prompt", "tensor_name": "sample_id", "dims": "B", "outcome": outcome, "why": []}
        for outcome in ("equal", "unequal", "explained")
    ]
    shapes._judged([row], said)
    assert row["outcome"] == "unequal"
    assert [one["outcome"] for one in row["planned"]] == ["unequal", "explained", "equal"]


def test_the_finding_of_the_two_says_whether_they_agree(run: Path, its_plan: Path) -> None:
    with Ledger(run) as ledger, Ledger(its_plan) as planned:
        _, (found,) = beside(ledger, planned)
    assert (found["verdict"], found["scope"]) == ("fail", "diff")
    assert found["evidence"][0].startswith("sample_id in prompt: ")


def test_what_cannot_be_compared_is_laid_side_by_side_and_says_why(run: Path, planned: Path) -> None:
    made = data_of(run, planned)
    rows = {row["tensor_name"]: row for row in made["rows"]}
    assert rows["prompt_ids"]["planned"][0]["logical_shape"] == [256, 1024]
    assert made["beside"] and not made["judged"]
    with Ledger(run) as ledger, Ledger(planned) as other:
        _, (found,) = beside(ledger, other)
    assert found["verdict"] == "skipped" and "verl" in found["needs"][0]


def test_plan_takes_a_plan_and_nothing_else(run: Path, its_plan: Path, planned: Path, tmp_path: Path) -> None:
    for path, other, told in (
        (run, run, "no planned rows"),
        (planned, its_plan, "is a plan itself"),
        (run, tmp_path / "gone", "gone"),
    ):
        with pytest.raises(BadInput, match=told):
            write_html(path, tmp_path / "page.html", plan=other, lang="en")


# ------------------------------------------------------------------------------------------------------------------ in a browser


def cells(page: Any, at: int) -> list[str]:
    found: list[str] = page.locator(f"#shapes .table tbody tr td:nth-child({at})").all_inner_texts()
    return found


def test_a_link_restores_what_was_looked_for(opened: Open, made: Made, run: Path, its_plan: Path) -> None:
    file = made(run, its_plan)
    page = opened(file, "#shapes?mismatch=1&sort=bytes&down=1")
    assert cells(page, 2) == ["advantages", "sample_id"]  # 16 bytes, 8 bytes
    assert page.locator("#shapes .outcome.unequal").count() == 1
    assert "does not fit: [16, 4]" in page.locator("#shapes tbody tr").first.inner_text()
    page = opened(file, "#shapes?stage=prompt&find=ids&as=symbols")
    assert "prompt_ids" in cells(page, 2) and all("ids" in name for name in cells(page, 2))
    assert cells(page, 3)[0] == "[B_prompt, S_prompt]"
    page.fill("#shapes input[type=search]", "length")
    page.wait_for_function("location.hash.includes('find=length')")
    assert cells(page, 2) == ["prompt_length"]
    assert page.evaluate("document.activeElement.type") == "search"  # typing goes on


def test_the_columns_of_a_shape_ledger_come_first(opened: Open, made: Made, run: Path) -> None:
    page = opened(made(run), "#shapes")
    heads = page.locator("#shapes thead th").all_inner_texts()
    assert heads[:8] == [
        "stage",
        "tensor",
        "logical shape",
        "local shard shape",
        "mask / broadcast",
        "owner rank",
        "lifetime",
        "common bug",
    ]
    assert HOSTILE in cells(page, 2) and page.locator("#shapes tbody b[onclick]").count() == 0


def test_a_row_opens_what_its_tensor_is_for(opened: Open, made: Made, run: Path) -> None:
    page = opened(made(run), "#shapes", lang="zh")
    page.locator("#shapes tbody tr", has_text="advantages").click()
    page.wait_for_selector("#shapes .panel")
    assert "tensor=advantages" in page.evaluate("location.hash")
    panel = page.locator("#shapes .panel").inner_text()
    known = data_of(run)["tensors"]["advantages"]
    assert known["common_bug"]["zh"] in panel and known["purpose"]["zh"] in panel and "[16, 5]" in panel
    for form in known["forms"]:
        assert form["shape"] in panel
    page.keyboard.press("Escape")
    page.wait_for_selector("#shapes .panel", state="detached")
    assert "tensor" not in page.evaluate("location.hash")
    page.go_back()  # to where it was open
    page.wait_for_selector("#shapes .panel")


def test_a_tensor_that_is_not_there_is_said(opened: Open, made: Made, run: Path) -> None:
    page = opened(made(run), "#shapes?tensor=advantage_of_mine")
    assert "No tensor here is called advantage_of_mine" in page.locator("#shapes .panel").inner_text()


def test_nothing_is_cut_off_on_a_phone_or_a_desk(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#shapes", width=390)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    out = page.evaluate(
        "[...document.querySelectorAll('#shapes tbody td')].filter((e) => e.offsetParent && e.getBoundingClientRect().right > innerWidth).length"
    )
    assert out == 0
    row = page.locator("#shapes tbody tr").first
    assert [cell.get_attribute("data-title") for cell in row.locator("td").all()][2:4] == [
        "logical shape",
        "local shard shape",
    ]
    page = opened(made(recorded), "#shapes", width=1280)
    box = page.evaluate(
        "(({ bottom }) => ({ bottom, tall: innerHeight }))(document.querySelector('#shapes .table > .scroll').getBoundingClientRect())"
    )
    assert box["bottom"] <= box["tall"] * 1.25  # the bar that moves it sideways is at hand
    page.evaluate("document.querySelector('#shapes .table > .scroll').scrollBy(9999, 400)")
    head, name = (
        page.locator(f"#shapes {part}").first.bounding_box() for part in ("thead th >> nth=2", "tbody td:nth-child(2)")
    )
    around = page.locator("#shapes .table > .scroll").bounding_box()
    assert head["y"] == pytest.approx(around["y"], abs=1) and name["x"] == pytest.approx(around["x"], abs=1)
