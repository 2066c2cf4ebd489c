"""The flow: every tensor one strand, whose rows are those of `show RUN shapes`; drawn so that nothing crosses."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flowledger.flow.tensors import tensors
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import StorageRow, TensorRow
from flowledger.ledger.writer import Writer
from flowledger.show import plain
from flowledger.show.page import flow
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from flowledger.show.page.flow_columns import Columns
from flowledger.show.page.flow_strands import strand
from flowledger.show.tables import table
from tests.ledger.synthetic import STAGE_MS, synthetic_run

Open = Callable[..., Any]
Made = Callable[..., Path]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(recorded: Path) -> Iterator[Book]:
    with Ledger(recorded) as ledger:
        yield Book(ledger=ledger)


@pytest.fixture(scope="module")
def plan(planned: Path) -> Iterator[Book]:
    with Ledger(planned) as ledger:
        yield Book(ledger=ledger)


def first(book: Book) -> dict[str, Any]:
    return flow.data(book, flow.choices(book)[0])


def strands(book: Book) -> dict[str, dict[str, Any]]:
    return {one["tensor_name"]: one for one in first(book)["strands"]}


@pytest.fixture(params=("run", "plan"))
def book(request: pytest.FixtureRequest) -> Book:
    found: Book = request.getfixturevalue(request.param)
    return found


# ------------------------------------------------------------------------------------------------------------ rows


def test_uses_are_the_rows_of_the_shape_table(book: Book) -> None:
    for choice in flow.choices(book):
        told = json.loads(plain.table_json(table(book.ledger, "shapes", step=choice.step)))["rows"]
        wanted = sorted(
            json.dumps({"tensor_name": row["tensor_name"]} | {name: row[name] for name in flow.USE}) for row in told
        )
        shown = [
            json.dumps({"tensor_name": one["tensor_name"]} | {name: use[name] for name in flow.USE})
            for one in flow.data(book, choice)["strands"] for use in one["uses"]
        ]  # fmt: skip
        assert sorted(shown) == wanted


def test_every_tensor_is_one_strand_and_is_explained_in_both_languages(book: Book) -> None:
    told = first(book)
    names = [one["tensor_name"] for one in told["strands"]]
    seen = book.ledger.rows(
        "SELECT DISTINCT tensor_name FROM tensors WHERE ?::BIGINT IS NULL OR step = ?", [told["step"]] * 2
    )
    assert sorted(names) == sorted(row["tensor_name"] for row in seen)
    for name in names:
        if name in tensors():
            assert told["texts"][name]["common_bug"] == {
                "en": tensors()[name].common_bug,
                "zh": tensors()[name].common_bug_zh,
            }


# ----------------------------------------------------------------------------------------------------------- fates


def test_a_piece_is_born_before_it_is_freed_and_pieces_follow_one_another(book: Book) -> None:
    told = first(book)
    after = len(told["columns"])
    for one in told["strands"]:
        last = -1
        for piece in one["pieces"]:
            born = 0 if piece["born"] is None else piece["born"]
            assert last < born <= piece["until"] <= piece["freed"] <= after, one["tensor_name"]
            assert all(born <= at <= piece["freed"] for at, _ in piece["made"])
            last = piece["freed"]


def test_what_is_read_is_there(book: Book) -> None:
    for one in first(book)["strands"]:
        for at in one["reads"]:
            assert any((piece["born"] or 0) <= at <= piece["freed"] for piece in one["pieces"]), (
                one["tensor_name"],
                at,
            )


def test_a_plan_frees_where_the_flow_declares(plan: Book) -> None:
    told = first(plan)
    places = [one["stage"] if one["phase"] is None else f"{one['stage']}/{one['phase']}" for one in told["columns"]]
    last = {stage.partition("/")[0]: at for at, stage in enumerate(places)}
    for one in told["strands"]:
        row, piece = tensors()[one["tensor_name"]], one["pieces"][-1]
        if row.lifetime == "persistent":
            assert (piece["born"], piece["freed"], piece["ends"]) == (None, len(places), "stays")
        elif one["tensor_name"] != "comm_buffer":  # which several stages make for themselves
            assert piece["freed"] == (places.index(row.freed_by) if row.freed_by in places else last[row.freed_by]), (
                row.name
            )


def test_a_step_worked_out_by_hand(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a")) as ledger:
        told = strands(Book(ledger=ledger))
    piece = told["prompt_ids"]["pieces"][0]  # made in prompt, read by rollout and freed there
    assert (piece["born"], piece["until"], piece["freed"], piece["ends"]) == (0, 1, 1, "freed")
    assert told["prompt_ids"]["reads"] == [1]
    assert told["full_sequence"]["pieces"][0]["ends"] == "unseen"  # born, and no word of its end
    reward = told["reward"]["pieces"][0]  # needed until advantage, and never freed, for somebody holds it
    assert (reward["freed"], reward["ends"]) == (len(STAGE_MS), "held")
    assert reward["holder"] == "dict in loop" and reward["outlives"] is True


def test_optimizer_state_begins_at_the_first_step_of_the_optimizer(run: Book) -> None:
    born = {}
    for step in (0, 1):
        told = flow.data(run, Choice(step=step))
        state = next(one for one in told["strands"] if one["tensor_name"] == "optimizer_state")
        at = state["pieces"][0]["born"]
        born[step] = None if at is None else (told["columns"][at]["stage"], told["columns"][at]["phase"])
        weights = next(one for one in told["strands"] if one["tensor_name"] == "params")
        assert weights["pieces"][0]["born"] is None
    assert born == {0: ("update_critic", "step"), 1: None}


def test_what_is_made_anew_in_each_stage_is_one_strand_of_several_pieces(plan: Book) -> None:
    told = first(plan)
    logits = next(one for one in told["strands"] if one["tensor_name"] == "logits")
    assert [told["columns"][piece["born"]]["stage"] for piece in logits["pieces"]] == [
        "rollout",
        "old_log_prob",
        "ref_log_prob",
        "update_actor",
    ]


def test_a_tensor_that_nobody_saw_made_begins_where_it_is_read() -> None:
    grid = Columns(places=(("rollout", None), ("reward", None)))
    row: dict[str, Any] = dict.fromkeys(("phase", "kind", "dtype", "mask", "lifetime", "owner", "owner_rank", "bytes"))
    found = strand("own_tensor", [row | {"stage": "reward", "access": "read"}], [], grid)
    assert [(piece["born"], piece["freed"], piece["ends"]) for piece in found["pieces"]] == [(1, 1, "unseen")]


# ---------------------------------------------------------------------------------------------------- what is lacking


def test_where_there_are_no_tensors_it_says_why(imported: Path, tmp_path: Path) -> None:
    with Ledger(imported) as ledger:
        told = flow.data(Book(ledger=ledger), Choice())
        assert told["absent"] and "imported" in told["missing"][0]["en"]
    create(tmp_path / "empty", Manifest(run="empty"))
    with Ledger(tmp_path / "empty") as ledger:
        assert flow.data(Book(ledger=ledger), Choice())["missing"] == [flow.NOTHING]


def test_a_run_without_tensors_shows_its_plan_and_says_so(imported: Path, plan: Book) -> None:
    with Ledger(imported) as ledger:
        told = flow.data(Book(ledger=ledger, planned=plan.ledger), Choice(step=0))
    assert told["strands"] == first(plan)["strands"] and told["missing"] == [flow.AS_PLANNED]


def test_what_was_seen_outside_of_every_stage_is_named(tmp_path: Path) -> None:
    directory = create(tmp_path / "a", Manifest(run="a"))
    writer = Writer(directory.part("actor", 0), capacity=100)
    for stage, name in (("reward", "reward"), (None, "hidden_states")):
        writer.put(TensorRow(step=0, rank=0, stage=stage, t_ns=0, tensor_name=name, local_shape=[2], access="write"))
    writer.close()
    with Ledger(tmp_path / "a") as ledger:
        told = first(Book(ledger=ledger))
    assert [one["tensor_name"] for one in told["strands"]] == ["reward"]
    assert any("hidden_states" in said["en"] and "hidden_states" in said["zh"] for said in told["missing"])


def test_without_storages_strands_end_as_declared(tmp_path: Path) -> None:
    with Ledger(uneven(tmp_path / "a", storages=False)) as ledger:
        told = first(Book(ledger=ledger))
    assert told["missing"] == [flow.AS_DECLARED]
    ends = {one["tensor_name"]: one["pieces"][0]["ends"] for one in told["strands"]}
    assert ends == {"prompt_ids": "declared", HOSTILE: "unseen"}


# ----------------------------------------------------------------------------------------------------------- ranks


def uneven(path: Path, *, storages: bool = True) -> Path:
    """Three ranks of which the last has a row less, and a tensor with a name from hell."""
    directory = create(path, Manifest(run=path.name, mesh={"dp": 3}))
    for rank, rows in enumerate((2, 2, 1)):
        writer = Writer(directory.part("rollout", rank), capacity=100)
        for number, name in enumerate(("prompt_ids", HOSTILE)):
            common: dict[str, Any] = {"step": 0, "role": "rollout", "rank": rank, "stage": "rollout", "t_ns": number}
            if storages:
                writer.put(StorageRow(**common, storage=number, event="born", bytes=8 * rows * 4))
            writer.put(TensorRow(
                **common, tensor_name=name, dims="B_prompt, S_prompt" if number == 0 else None, logical_shape=[5, 4], local_shape=[rows, 4],
                placement=["Shard(0)"], dtype="int64", bytes=8 * rows * 4, access="write", storage=number if storages else None,
            ))  # fmt: skip
        writer.close()
    directory.close("closed")
    return path


def test_ranks_that_hold_the_same_are_one_choice_and_each_has_its_own_shape(tmp_path: Path) -> None:
    with Ledger(uneven(tmp_path / "a")) as ledger:
        told = first(Book(ledger=ledger))
    assert [(one["rank"], one["ranks"]) for one in told["ranks"]] == [(0, [0, 1]), (2, [2])]
    use = told["strands"][0]["uses"][0]
    assert use["local_shape"] == [2, 4] and use["by_rank"] == {"0": [[2, 4], 64], "2": [[1, 4], 32]}


def test_local_shapes_of_a_rank_and_hostile_names_are_text(opened: Open, made: Made, tmp_path: Path) -> None:
    page = opened(made(uneven(tmp_path / "a")), "#flow?rank=2&shape=local")
    labels = page.locator("#flow svg .label").all_text_contents()
    assert any("prompt_ids" in label and "[1, 4]" in label for label in labels)
    assert any(HOSTILE in label for label in labels) and page.locator("#flow img").count() == 0
    page.evaluate("location.hash = '#flow?rank=7&shape=local'")
    page.wait_for_selector("#flow .missing >> text=rank 0")
    page.evaluate("location.hash = '#flow?rank=2&shape=local'")
    page.wait_for_selector("#flow .missing >> text=rank 0", state="detached")
    page.select_option("#flow select", "0")
    page.wait_for_function("() => location.hash.includes('rank=0')")
    assert any("[2, 4]" in label for label in page.locator("#flow svg .label").all_text_contents())


# --------------------------------------------------------------------------------------------------------- drawing

# For each column the strands from top to bottom: [[name, upper edge, lower edge], …].
HEIGHTS = """() => {
  const data = module_store.held?.document ?? JSON.parse(document.getElementById('data').textContent);
  const view = data.views.flow;
  const told = view.at[view.first];
  const laid = module_flow_layout.laidOut(told, {
    width: 1200, measure: (text) => 6 * text.length, heading: (column) => column.phase ?? column.stage, afterwards: 'after the step',
    label: (strand) => [strand.tensor_name, '[B_prompt*G, S_resp]'], form: () => '[1, T]',
  });
  return laid.columns.map((_, at) => laid.strands.flatMap(({ strand, pieces }) => pieces.flatMap(({ piece, runs }) => runs
    .filter((run) => run.from <= at && at <= run.to && (piece.born ?? 0) <= at && at <= piece.freed)
    .map((run) => [strand.tensor_name, run.y - run.w / 2, run.y + run.w / 2]))));
}"""


def test_strands_neither_touch_nor_cross(opened: Open, made: Made, planned: Path) -> None:
    page = opened(made(planned), "#flow")
    above = set()
    for column in page.evaluate(HEIGHTS):
        ordered = sorted(column, key=lambda one: one[1])
        assert all(one[2] < other[1] for one, other in pairwise(ordered))
        above |= {(one[0], other[0]) for at, one in enumerate(ordered) for other in ordered[at + 1 :]}
    assert {(one, other) for one, other in above if (other, one) in above} == set()


# Pairs of labels that lie over one another.
OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll('#flow .label')].map((one) => [one.textContent, one.getBBox()]);
  return boxes.flatMap(([name, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => a.x < b.x + b.width - 1 && b.x < a.x + a.width - 1 && a.y < b.y + b.height - 3 && b.y < a.y + a.height - 3)
    .map(([other]) => [name, other]));
}"""


@pytest.mark.parametrize("link", ["#flow", "#flow?dims=numbers"])
def test_no_label_lies_over_another(opened: Open, made: Made, recorded: Path, link: str) -> None:
    assert opened(made(recorded), link).evaluate(OVERLAPS) == []


def test_every_strand_is_drawn_once_and_says_what_it_shows(opened: Open, made: Made, recorded: Path, run: Book) -> None:
    page = opened(made(recorded), "#flow", dark=True)
    drawn = page.eval_on_selector_all(
        "#flow .strand", "all => all.map((one) => [one.dataset.tensor, one.getAttribute('aria-label')])"
    )
    told = strands(run)
    assert sorted(name for name, _ in drawn) == sorted(told)
    said = dict(drawn)
    assert "made in prompt [B_prompt, S_prompt]" in said["prompt_ids"] and "read in rollout" in said["prompt_ids"]
    assert page.locator("#flow .strand .read").count() == sum(len(one["reads"]) for one in told.values())


def test_a_link_opens_the_explanation_and_keys_close_it(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#flow?dims=numbers&tensor=advantages", lang="zh")
    assert tensors()["advantages"].common_bug_zh.replace("`", "") in page.locator(".flow-panel").inner_text()
    assert page.locator("#flow input[value=numbers]").is_checked()
    assert "[" in page.locator("[data-tensor=advantages] .shape").first.text_content()
    assert "B_prompt" not in page.locator("#flow svg .strands").text_content()
    page.locator("[data-tensor=advantages]").focus()
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('.flow-panel')")
    assert page.evaluate("[location.hash, document.activeElement.dataset.tensor]") == [
        "#flow?dims=numbers",
        "advantages",
    ]
    page.keyboard.press("ArrowDown")
    below = page.evaluate("document.activeElement.dataset.tensor")
    page.keyboard.press("Enter")
    page.wait_for_function(f"() => document.querySelector('.flow-panel h3')?.innerText === '{below}'")
    assert below != "advantages"


def test_the_drawing_is_saved_with_its_style(opened: Open, made: Made, recorded: Path, tmp_path: Path) -> None:
    page = opened(made(recorded), "#flow?stage=advantage")
    assert page.locator("#flow [data-stage=advantage]").get_attribute("aria-pressed") == "true"
    with page.expect_download() as download:
        page.click("#flow .save")
    download.value.save_as(tmp_path / "flow.svg")
    root = ElementTree.parse(tmp_path / "flow.svg").getroot()
    texts = {"".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")}
    assert "advantage" in texts and any(text.startswith("advantages") for text in texts)
    assert all("class" not in one.attrib and "var(" not in str(one.attrib) for one in root.iter())
    assert root.attrib["font-family"]
