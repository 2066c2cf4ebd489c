"""Lifetimes: a bar for each row of `show RUN lifetimes`, where and when the ledger has it born, read and freed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowledger.ledger.reader import Ledger
from flowledger.show import plain
from flowledger.show.page import lifetimes
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from flowledger.show.page.flow import AS_PLANNED
from flowledger.show.tables import TABLES, table
from tests.ledger.synthetic import STAGE_MS, synthetic_run

Open = Callable[..., Any]
Made = Callable[..., Path]
COLUMNS = [column.name for column in TABLES["lifetimes"].columns]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("lifetimes") / "a")


@pytest.fixture(params=("recorded", "planned", "by_hand"))
def book(request: pytest.FixtureRequest) -> Iterator[Book]:
    with Ledger(request.getfixturevalue(request.param)) as ledger:
        yield Book(ledger=ledger)


def first(book: Book) -> dict[str, Any]:
    return lifetimes.data(book, lifetimes.choices(book)[0])


def test_rows_are_those_of_the_lifetime_table(book: Book) -> None:
    for choice in lifetimes.choices(book):
        wanted = json.loads(plain.table_json(table(book.ledger, "lifetimes", step=choice.step)))["rows"]
        shown = plain.clean([{name: row[name] for name in COLUMNS} for row in lifetimes.data(book, choice)["rows"]])
        assert sorted(map(whole, shown)) == sorted(map(whole, wanted))
        assert [row["born_at"] for row in shown] == [row["born_at"] for row in wanted]


def whole(row: dict[str, Any]) -> str:
    """A row as text; a mean is the same to nine digits, in whatever order it was added up."""
    return json.dumps(
        {name: float(f"{value:.9g}") if isinstance(value, float) else value for name, value in row.items()}
    )


def test_a_bar_begins_before_it_ends_and_its_readings_lie_between(book: Book) -> None:
    told = first(book)
    for row in told["rows"]:
        if row["freed"] is not None:
            assert row["born"] <= row["freed"] <= len(told["columns"])
        if row["born_ms"] is not None and row["freed_ms"] is not None:
            assert row["born_ms"] <= row["freed_ms"]
        assert len(row["reads"]) == len(row["readers"])
        for at, stage in zip(row["reads"], row["readers"], strict=True):
            assert told["columns"][at]["stage"] == stage


def test_times_are_counted_from_where_the_step_began(by_hand: Path) -> None:
    with Ledger(by_hand) as ledger:
        told = lifetimes.data(Book(ledger=ledger), Choice(step=1))
    rows = {row["tensor_name"]: row for row in told["rows"]}
    prompt = rows[
        "prompt_ids"
    ]  # the first access, 1 µs into the step; the second is rollout's, freed 1 ns before its end
    assert prompt["born_ms"] == pytest.approx(0.001)
    assert prompt["reads_ms"] == [pytest.approx(STAGE_MS["prompt"] + 0.002)]
    assert prompt["freed_ms"] == pytest.approx(STAGE_MS["prompt"] + STAGE_MS["rollout"] - 1e-6)
    ends = {one["stage"]: one["end_ms"] for one in told["intervals"]}
    assert ends["rollout"] == STAGE_MS["prompt"] + STAGE_MS["rollout"] and ends["weight_sync"] == sum(STAGE_MS.values())


def test_the_plan_stands_beside_what_was_measured(recorded: Path, planned: Path) -> None:
    with Ledger(recorded) as ledger, Ledger(planned) as plan:
        told = first(Book(ledger=ledger, planned=plan))
        rows = {
            row["tensor_name"]: row["plan"] for row in told["rows"] if row.get("plan") and row["born_at"] == "rollout"
        }
        wanted = plan.rows("SELECT tensor_name, born_at, freed_at FROM lifetimes_at(NULL) WHERE born_at = 'rollout'")
    assert wanted
    for row in wanted:
        assert (rows[row["tensor_name"]]["born_at"], rows[row["tensor_name"]]["freed_at"]) == (
            row["born_at"],
            row["freed_at"],
        )


def test_what_stays_without_a_storage_is_told_too(recorded: Path) -> None:
    with Ledger(recorded) as ledger:
        told = first(Book(ledger=ledger))
        named = {row["tensor_name"] for row in told["rows"]}
        seen = ledger.rows("SELECT DISTINCT tensor_name FROM shapes WHERE lifetime = 'persistent'")
    assert {row["tensor_name"] for row in told["persistent"]} | named >= {row["tensor_name"] for row in seen}


def test_where_nothing_is_known_it_says_why(imported: Path, planned: Path) -> None:
    with Ledger(imported) as ledger, Ledger(planned) as plan:
        assert lifetimes.data(Book(ledger=ledger), Choice())["absent"]
        told = lifetimes.data(Book(ledger=ledger, planned=plan), Choice())
    assert told["missing"] == [AS_PLANNED] and told["planned"]


def test_bars_are_filtered_by_link_and_by_hand(opened: Open, made: Made, by_hand: Path) -> None:
    with Ledger(by_hand) as ledger:
        told = first(Book(ledger=ledger))
    page = opened(made(by_hand), "#lifetimes?outliving=1")
    flagged = [row["tensor_name"] for row in told["rows"] if row["outlives"]]
    drawn = "all => all.map((one) => one.dataset.tensor)"
    assert page.eval_on_selector_all("#lifetimes .strand", drawn) == flagged == ["reward"]
    assert "dict in loop" in page.locator("#lifetimes .flag").text_content()
    page.locator("#lifetimes input[type=checkbox]").uncheck()
    page.wait_for_function("() => location.hash === '#lifetimes'")
    everything = [row["tensor_name"] for row in told["rows"]] + [row["tensor_name"] for row in told["persistent"]]
    assert sorted(page.eval_on_selector_all("#lifetimes .strand", drawn)) == sorted(everything)


def test_what_outlives_its_need_is_counted_drawn_and_said_alike(
    opened: Open, made: Made, by_hand: Path, recorded: Path
) -> None:
    for run in (by_hand, recorded):
        page = opened(made(run), "#lifetimes")
        many = page.locator("#lifetimes .strands .over.outlives").count()
        assert f"only those that outlive their need ({many})" in page.locator("#lifetimes .controls").inner_text()
        legend = page.locator("#lifetimes .legend").text_content()
        assert ("outlives its need" in legend) is (many > 0) and "still held" not in legend
        assert "is not counted" in page.locator("#lifetimes .body > .note").inner_text()


def test_bars_stand_at_their_times(opened: Open, made: Made, by_hand: Path) -> None:
    page = opened(made(by_hand), "#lifetimes?axis=time", dark=True, lang="zh")
    assert page.locator("#lifetimes input[value=time]").is_checked()
    box = page.locator("#lifetimes [data-tensor=prompt_ids] .body").bounding_box()
    rollout = page.locator("#lifetimes .column").nth(1).bounding_box()  # the second stage
    assert box["x"] + box["width"] == pytest.approx(rollout["x"] + rollout["width"], abs=1.5)
    bar = page.locator("#lifetimes [data-tensor=prompt_ids]")
    bar.focus()
    assert "rollout" in page.locator(".flow-card").inner_text() and "rollout" in bar.get_attribute("aria-label")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.includes('tensor=prompt_ids')")
    assert page.evaluate("document.activeElement.dataset.tensor") == "prompt_ids"
