"""The mesh: parts that give the whole, heat as `balance` has it, the way of a sample; worked out by hand, and element by element."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import SampleRow, SpanRow, TensorRow, Trained
from flowledger.ledger.writer import Writer
from flowledger.show import mesh as map_of_ranks
from flowledger.show import plain
from flowledger.show.page import mesh
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from flowledger.show.tables import table
from tests.ledger.synthetic import synthetic_run

Open = Callable[..., Any]
Made = Callable[..., Path]
MS = 1_000_000
HOSTILE = "<img src=x onerror=alert(1)>"
BINDINGS = {"B": 4, "B_prompt": 2, "G": 2, "A": 4, "K": 2, "L": 2, "H": 4, "V": 10, "S_prompt": 4, "S_resp": 4}
# Tensor, dims, where, placement and what each of the four ranks holds of it. dp 2, tp 2: rank = 2*dp + tp.
TENSORS: tuple[tuple[str, str, str, list[str], list[list[int]]], ...] = (
    ("full_sequence", "B_prompt*G, S_prompt + S_resp", "balance", ["dp: Shard(0)"], [[2, 8]] * 4),
    ("logits", "T_logit, V", "update_actor", ["dp: Shard(0)", "tp: Shard(1)"], [[5, 5], [5, 5], [3, 5], [3, 5]]),
    ("hidden_states", "1, T, H", "update_actor", ["dp: Shard(1)"], [[1, 9, 4], [1, 9, 4], [1, 7, 4], [1, 7, 4]]),
    ("policy_loss", "", "update_actor", ["dp: Partial()"], [[]] * 4),
    ("params", "P", "update_actor", ["dp: Shard(0)", "tp: Shard(0)"], [[13]] * 4),
)
SAMPLED_BY = {"0": 0, "1": 0, "2": 2, "3": 3}
TRAINED_BY = {"0": 1, "1": 0, "2": 0, "3": 1}  # sample -> dp rank


def four_ranks(path: Path, *, tensors: Any = TENSORS, mesh: Mapping[str, int] | None = None) -> Path:
    """Two steps of four ranks, of which rank r takes 10*(r + 1) ms for the update."""
    degrees = mesh or {"dp": 2, "tp": 2}
    axes = list(degrees)
    book = create(
        path, Manifest(run=path.name, mesh=dict(degrees), level="tensors", config={"name": "x"}, bindings=BINDINGS)
    )
    for rank in range(4):
        place = {axes[0]: rank // 2, axes[1]: rank % 2} if len(axes) == 2 else {axes[0]: rank}
        ink = Writer(book.part("actor", rank, coordinates=place), capacity=100_000)
        for step in range(2):
            _put_step(ink, step, rank, tensors, degrees)
        ink.close()
    book.close("closed")
    return path


def _put_step(ink: Writer, step: int, rank: int, tensors: Any, degrees: Mapping[str, int]) -> None:
    start = step * 1000 * MS
    for number, (stage, milliseconds) in enumerate(
        (("rollout", 20), ("balance", 1), ("update_actor", 10 * (rank + 1)))
    ):
        ink.put(SpanRow(
            id=100 * step + number, step=step, stage=stage, rank=rank, t_ns=start, event="whole", name=stage, span_kind="stage",
            start_ns=start + number * 50 * MS, end_ns=start + (number * 50 + milliseconds) * MS, latency_ms=float(milliseconds),
        ))  # fmt: skip
    for name, dims, stage, placement, locals_ in tensors:
        ink.put(TensorRow(
            step=step, stage=stage, rank=rank, rank_count=4, t_ns=start, tensor_name=name, dims=dims, local_shape=locals_[rank],
            placement=placement, dtype="float32", numel=prod(locals_[rank]), bytes=4 * prod(locals_[rank]), access="write",
        ))  # fmt: skip
    for sample, sampler in SAMPLED_BY.items():
        told = {"step": step, "sample_id": str(int(sample) + 4 * step), "t_ns": start}
        if rank == sampler:
            ink.put(
                SampleRow(
                    **told, stage="rollout", group_id=HOSTILE, prompt_length=3, response_length=5, finish_reason="stop"
                )
            )
        if "tp" not in degrees or rank // 2 == TRAINED_BY[sample]:
            trained = [Trained(epoch=0, mini_batch=1, rank=rank, micro_batch=0, start=0, stop=8)]
            ink.put(SampleRow(**told, stage="update_actor", trained=trained))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_ranks(tmp_path_factory.mktemp("mesh") / "four")


@pytest.fixture(scope="module")
def book(run: Path) -> Iterator[Book]:
    with Ledger(run) as ledger:
        yield Book(ledger=ledger)


def first(book: Book) -> dict[str, Any]:
    return mesh.data(book, mesh.choices(book)[0])


def entry(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in told["tensors"] if one["tensor_name"] == name)
    return found


def box(told: Mapping[str, Any], name: str, rank: int) -> list[list[tuple[int, int]]]:
    part = next(part for part in entry(told, name)["parts"] if rank in part["members"])
    return [[(start, stop) for start, stop in intervals] for intervals in part["box"]]


# ------------------------------------------------------------------------------------------------------------ parts


def test_parts_worked_out_by_hand(book: Book) -> None:
    told = first(book)
    assert box(told, "full_sequence", 1) == [[(0, 2)], [(0, 8)]]  # as it was dealt to the ranks that train
    assert box(told, "logits", 3) == [[(5, 8)], [(5, 10)]]  # uneven rows of dp, halves of the vocabulary
    assert box(told, "hidden_states", 2) == [[(0, 1)], [(9, 16)], [(0, 4)]]
    assert tuple(entry(told, "logits")["logical_shape"]) == (8, 10)
    uneven = {name: entry(told, name)["as_held"] for name in ("full_sequence", "logits", "hidden_states")}
    assert uneven == {"full_sequence": False, "logits": True, "hidden_states": True}  # 5 and 3 of 8, 9 and 7 of 16


def covered(one: Mapping[str, Any]) -> dict[tuple[int, ...], int]:
    """Element -> how many different parts have it, counted one by one."""
    found = dict.fromkeys(itertools.product(*(range(size) for size in one["logical_shape"])), 0)
    for part in one["parts"]:
        sides = [[at for start, stop in intervals for at in range(start, stop)] for intervals in part["box"]]
        for index in itertools.product(*sides):
            found[index] = found.get(index, 0) + 1
    return found


def test_the_first_law_element_by_element(book: Book) -> None:
    for one in first(book)["tensors"]:
        counts = covered(one)
        missing, twice = sum(not n for n in counts.values()), sum(max(0, n - 1) for n in counts.values())
        if one["dims"] != ["P"]:
            assert (one["law"]["missing"], one["law"]["twice"], one["law"]["elements"]) == (
                missing,
                twice,
                len(counts),
            ), one["tensor_name"]
            assert one["law"]["holds"] is (missing == twice == 0)


def test_copies_and_summands_are_said(book: Book) -> None:
    told = first(book)
    law = entry(told, "hidden_states")["law"]
    assert (law["parts"], law["copies"], law["replicated"]) == (2, 2, ["tp"])
    assert entry(told, "policy_loss")["partial"] == ["dp"]
    assert entry(told, "logits")["law"]["copies"] == 1


def test_a_shard_that_does_not_fit_breaks_the_law(tmp_path: Path) -> None:
    """Rank 1 holds a row less than its neighbour, who shares the rows with it."""
    odd = [("logits", "T_logit, V", "update_actor", ["dp: Shard(0)", "tp: Shard(1)"], [[5, 5], [4, 5], [3, 5], [3, 5]])]
    with Ledger(four_ranks(tmp_path / "odd", tensors=odd)) as ledger:
        one = entry(first(Book(ledger=ledger)), "logits")
    assert one["law"]["holds"] is False and one["law"]["missing"] == sum(not n for n in covered(one).values()) > 0


def test_packed_tokens_under_cp_lie_in_a_zigzag(tmp_path: Path) -> None:
    """8 tokens over cp 2: rank 0 has 0, 1, 6, 7, rank 1 has 2 to 5 (docs/shards.md); of a sample of 8 tokens as well."""
    dealt = [("hidden_states", "1, T, H", "update_actor", ["dp: Shard(1)", "cp: Shard(1)"], [[1, 4, 4]] * 4)]
    with Ledger(four_ranks(tmp_path / "cp", tensors=dealt, mesh={"dp": 2, "cp": 2})) as ledger:
        told = first(Book(ledger=ledger))
    assert box(told, "hidden_states", 0)[1] == [(0, 2), (6, 8)] and box(told, "hidden_states", 1)[1] in (
        [(2, 6)],
        [(2, 4), (4, 6)],
    )
    assert box(told, "hidden_states", 2)[1] == [(8, 10), (14, 16)]
    assert entry(told, "hidden_states")["law"]["holds"]


def test_a_plan_s_parts_are_as_large_as_its_rows_say(planned: Path) -> None:
    with Ledger(planned) as ledger:
        told = first(Book(ledger=ledger))
        rows = ledger.rows(
            "SELECT DISTINCT tensor_name, dims, local_shape FROM accesses WHERE local_shape IS NOT NULL AND rank = 0"
        )
    sizes = {(row["tensor_name"], row["dims"], tuple(row["local_shape"])) for row in rows}
    for one in told["tensors"]:
        part = next(part for part in one["parts"] if 0 in part["members"])
        assert (one["tensor_name"], ", ".join(one["dims"]), tuple(part["local_shape"])) in sizes
        assert one["law"]["holds"], one["tensor_name"]


# ------------------------------------------------------------------------------------------------------------ ranks


def test_cells_are_the_rows_of_the_map(book: Book) -> None:
    told = first(book)
    rows = json.loads(plain.table_json(map_of_ranks.mesh_table(book.ledger, step=told["step"])))["rows"]
    assert [cell["first"] for cell in told["cells"]] == [int(row["ranks"]) for row in rows]
    for cell, row in zip(told["cells"], rows, strict=True):
        assert {axis: places for axis, (_, places) in cell["at"].items()} == {axis: row[axis] for axis in ("dp", "tp")}
        assert (cell["layers"]["which"], cell["heads"]["which"], cell["kv_heads"]["which"]) == (
            row["layers"],
            row["heads"],
            row["kv_heads"],
        )
        assert (cell["samples"]["count"], cell["share"]) == (row["samples"], row["share"])


def test_heat_is_what_balance_says(book: Book) -> None:
    told = first(book)
    rows = json.loads(plain.table_json(table(book.ledger, "balance", step=told["step"])))["rows"]
    seconds = {(row["stage"], row["rank"]): row["seconds"] for row in rows}
    assert (
        told["heat"]["seconds"]["update_actor"]
        == [seconds["update_actor", rank] for rank in range(4)]
        == [0.01, 0.02, 0.03, 0.04]
    )
    assert told["heat"]["seconds"][""] == pytest.approx([0.021 + 0.01 * (rank + 1) for rank in range(4)])
    assert told["heat"]["tokens"]["rollout"] == [16, None, 8, 8]  # samples of 8 tokens, by who sampled them


def test_many_ranks_are_few_cells_and_each_is_in_one(tmp_path: Path) -> None:
    path = tmp_path / "many"
    create(
        path,
        Manifest(
            run="many",
            mesh={"pp": 8, "dp": 16, "tp": 8},
            bindings={**BINDINGS, "B": 1000, "L": 80, "A": 64},
            level="plan",
        ),
    )
    with Ledger(path) as ledger:
        told = first(Book(ledger=ledger))
    assert told["size"] == 1024 and len(told["cells"]) <= 64 and told["classes"]
    assert sum(cell["count"] for cell in told["cells"]) == 1024
    ends = {cell["name"].split(",")[0] for cell in told["cells"]}
    assert {"first stage", "last stage"} <= ends


def test_of_many_ranks_a_few_are_drawn_and_all_are_counted(tmp_path: Path) -> None:
    """1,000 rows over dp 128: 8 on each of the first 125 ranks, and none on the rest. Two classes, two cells."""
    book = create(tmp_path / "a", Manifest(run="a", mesh={"dp": 128}, bindings={**BINDINGS, "B": 1000}))
    for rank in range(128):
        ink = Writer(book.part("actor", rank, coordinates={"dp": rank}))
        held = [8, 4] if rank < 125 else [0, 4]
        ink.put(TensorRow(
            step=0, stage="update_actor", rank=rank, t_ns=0, tensor_name="advantages", dims="B_prompt*G, S_resp", local_shape=held,
            placement=["dp: Shard(0)"], dtype="float32", numel=prod(held), bytes=4 * prod(held), access="write",
        ))  # fmt: skip
        ink.close()
    with Ledger(tmp_path / "a") as ledger:
        told = first(Book(ledger=ledger))
    assert [(cell["first"], cell["count"]) for cell in told["cells"]] == [(0, 125), (125, 3)]
    one = entry(told, "advantages")
    assert one["law"]["holds"] and one["law"]["elements"] == 4000
    assert one["lines"][0]["axes"] == ["dp"] and one["lines"][0]["pieces"][77] == ((616, 624),)


# ---------------------------------------------------------------------------------------------------------- samples


def test_the_way_of_a_sample(book: Book) -> None:
    ways = {one["sample_id"]: one for one in mesh.data(book, Choice(step=0))["samples"]}
    assert list(ways) == ["0", "1", "2", "3"]
    for sample, sampler in SAMPLED_BY.items():
        hops = {hop["stage"]: hop["ranks"] for hop in ways[sample]["hops"]}
        ranks = [2 * TRAINED_BY[sample], 2 * TRAINED_BY[sample] + 1]
        assert hops == {"rollout": [sampler], "update_actor": ranks}
        assert [
            (part["rank"], part["mini_batch"], part["start"], part["stop"]) for part in ways[sample]["trained"]
        ] == [(rank, 1, 0, 8) for rank in ranks]


def test_a_sample_without_its_step_is_found(book: Book) -> None:
    told = mesh.data(book, Choice(sample="1"))
    assert told["step"] == 0 and "1" in {one["sample_id"] for one in told["samples"]}


# ----------------------------------------------------------------------------------------------------- what lacks


def test_a_log_has_no_mesh_and_the_view_says_so(imported: Path) -> None:
    with Ledger(imported) as ledger:
        told = first(Book(ledger=ledger))
    assert told["absent"] and all(one["en"] and one["zh"] for one in told["missing"])


def test_a_plan_has_ranks_and_parts_and_says_what_only_a_run_has(planned: Path) -> None:
    with Ledger(planned) as ledger:
        told = first(Book(ledger=ledger))
    assert len(told["cells"]) == 8 and told["tensors"] and told["samples"] == []
    assert told["cells"][1]["samples"] == {"count": 256, "which": "256-511"}
    assert ["this is a plan" in one["en"] for one in told["missing"]] == [True, True]
    assert set(told["heat"]) == {"peak"}


def test_one_rank_without_tensors_or_samples_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a", steps=1)) as ledger:
        told = first(Book(ledger=ledger))
    assert len(told["cells"]) == 1 and told["axes"] == []
    create(tmp_path / "empty", Manifest(run="empty"))
    with Ledger(tmp_path / "empty") as ledger:
        assert first(Book(ledger=ledger))["absent"]


def test_a_file_holds_few_steps(book: Book) -> None:
    assert [choice.step for choice in mesh.choices(book)] == [1, 0]


# ---------------------------------------------------------------------------------------------------- in a browser


def test_links_restore_what_was_chosen_and_choices_change_the_link(opened: Open, made: Made, run: Path) -> None:
    page = opened(made(run), "#mesh?heat=seconds&rank=3&sample=2&stage=update_actor&step=0&tensor=logits")
    assert page.get_attribute('#mesh [data-rank="3"]', "aria-pressed") == "true"
    assert page.text_content('#mesh [data-rank="3"] .mesh-number') == "40 ms"
    assert "Rank 3 holds [5:8, 5:10], that is [3, 5], 15 elements." in page.text_content("#mesh")
    assert page.get_attribute("#mesh .mesh-law", "data-law") == "holds"
    assert page.locator("#mesh .mesh-arrow").count() == 2  # from rank 2, which sampled it, to ranks 0 and 1
    page.focus('#mesh [data-rank="3"]')
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_selector('#mesh [data-rank="2"][aria-pressed="true"]')
    assert "rank=2" in page.url and page.evaluate("document.activeElement.dataset.rank") == "2"
    page.select_option('#mesh [data-focus="mesh-tensor"]', "hidden_states")
    page.wait_for_selector("#mesh .mesh-picture")
    assert "[1, 16, 4]" in page.text_content("#mesh") and "tensor=hidden_states" in page.url
    page.go_back()
    page.wait_for_function("document.querySelector('#mesh').textContent.includes('[8, 10]')")


def test_one_part_is_said_to_be_one(opened: Open, made: Made, recorded: Path) -> None:
    page = opened(made(recorded), "#mesh")
    assert "One part is the whole of" in page.locator("#mesh .mesh-law").inner_text()


def test_a_plan_is_drawn_in_chinese_and_dark(opened: Open, made: Made, planned: Path) -> None:
    page = opened(
        made(planned), "#mesh?across=zz&heat=waited&rank=99&sample=zz&stage=zz&tensor=zz&at=zz", dark=True, lang="zh"
    )
    assert page.locator("#mesh .mesh-cell[aria-pressed=true]").count() == 0  # nothing of that is there, and all else is
    page.evaluate("location.hash = '#mesh?rank=5&tensor=advantages'")
    page.wait_for_selector('#mesh [data-rank="5"][aria-pressed="true"]')
    assert "rank：8 个" in page.text_content("#mesh") and page.locator("#mesh .mesh-cell").count() == 8
    assert page.get_attribute("#mesh .mesh-law", "data-law") == "holds"
    untold = page.evaluate(
        "[...document.querySelectorAll('#mesh *')].flatMap((e) => [...e.childNodes]).filter((n) => n.nodeType === 3 && /^mesh_/.test(n.data)).map((n) => n.data)"
    )
    assert untold == []


def test_a_page_is_the_same_each_time(planned: Path) -> None:
    """Rows of a database have no order of their own; what is made of them must have one."""
    told = []
    for _ in range(4):
        with Ledger(planned) as ledger:
            book = Book(ledger=ledger)
            told.append([mesh.data(book, choice) for choice in mesh.choices(book)])
    assert all(one == told[0] for one in told)
