"""The memory view: the rows of the memory ledger, a peak whose parts add up, what was planned beside, and links that restore it."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from flowledger.flow.kinds import KINDS
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MemoryRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show import tables
from flowledger.show.page import memory, memory_charts, memory_course, memory_peak, memory_ranks, memory_stage_charts
from flowledger.show.page.book import Book
from flowledger.show.page.choice import Choice
from flowledger.show.page.packed import packed, unpacked
from flowledger.show.page.theme import colours, dressed
from flowledger.show.plain import clean
from tests.ledger import synthetic

Open = Callable[..., Any]
Made = Callable[..., Path]
Data = dict[str, Any]
MIB = 2**20


@contextmanager
def book(run: Path, plan: Path | None = None) -> Iterator[Book]:
    with Ledger(run) as ledger:
        if plan is None:
            yield Book(ledger=ledger)
            return
        with Ledger(plan) as planned:
            yield Book(ledger=ledger, planned=planned)


def shown(run: Path, at: Choice | None = None, plan: Path | None = None) -> Data:
    with book(run, plan) as opened:
        data = memory.data(opened, at or memory.choices(opened)[0])
    json.dumps(clean(data), allow_nan=False)
    return data


@pytest.fixture(scope="module")
def first(recorded: Path) -> Data:
    """What is shown first of a recorded run."""
    return shown(recorded)


def written(path: Path, by_rank: Sequence[Sequence[Any]]) -> Path:
    """A run with these rows of each rank."""
    directory = create(path, Manifest(run=path.name))
    for rank, rows in enumerate(by_rank):
        ink = Writer(directory.part("actor", rank))
        for row in rows:
            ink.put(row)
        ink.close()
    directory.close("closed")
    return path


def reading(
    at: int, stage: str | None, instant: str, *, rank: int = 0, step: int = 0, total: Any = None, **kinds: int
) -> list[MemoryRow]:
    """One reading, in MiB: the kinds that live, and `total` of the allocator (allocated, reserved, limit)."""
    place: Data = {"t_ns": at, "step": step, "rank": rank, "stage": stage, "instant": instant}
    rows = [MemoryRow(**place, kind=kind, allocated=size * MIB) for kind, size in kinds.items()]
    if total is not None:
        allocated, reserved, limit = (size if size is None else size * MIB for size in total)
        rows.append(MemoryRow(**place, kind="total", allocated=allocated, reserved=reserved, limit=limit))
    return rows


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 has more in each stage: 30 and 80 MiB on rank 0, 40 and 90 on rank 1, of devices with 100."""
    return written(
        tmp_path_factory.mktemp("two") / "run",
        [
            [
                *reading(1, "rollout", "end", rank=rank, total=(30 + more, 50, 100)),
                *reading(2, "update_actor", "peak", rank=rank, param=30, grad=20, activation=20 + more),
                *reading(3, "update_actor", "end", rank=rank, param=30, grad=0, total=(80 + more, 95, 100)),
            ]
            for rank, more in ((0, 0), (1, 10))
        ],
    )


# ---------------------------------------------------------------------------------------------------------------- its numbers


def test_its_table_is_the_one_of_show(recorded: Path) -> None:
    with book(recorded) as opened:
        data = memory.data(opened, Choice(step=0, rank=0))
        told = [row for row in tables.table(opened.ledger, "memory", step=0).rows if row["rank"] == 0]
    listed = [row for row in unpacked(data["processes"][0]["readings"]) if row.get("listed") is not None]
    names = (
        "stage",
        "phase",
        "micro_batch",
        "instant",
        *KINDS,
        "known",
        "allocated",
        "reserved",
        "host_used",
        "fragmentation",
    )
    view = {tuple(row.get(name) for name in names) for row in listed}
    assert len(listed) == len(told) > 20
    assert view == {tuple(row[name] for name in names) for row in told}


def test_the_first_choice_is_a_watched_step_with_the_highest_peak(recorded: Path) -> None:
    with book(recorded) as opened:
        first = memory.choices(opened)[0]
        highest = tables.table(opened.ledger, "memory").summary["peak"]
        data = memory.data(opened, first)
    assert first == Choice(step=highest["step"], rank=highest["rank"])
    assert data["processes"][0]["peak"]["bytes"] == highest["peak"]
    assert not data["missing"]


def test_the_parts_of_a_peak_add_up(first: Data) -> None:
    peak = first["processes"][0]["peak"]
    assert sum(part["bytes"] for part in peak["parts"]) == peak["bytes"]
    assert sum(part["share"] for part in peak["parts"]) == pytest.approx(1)
    assert [part["bytes"] for part in peak["parts"]] == sorted((part["bytes"] for part in peak["parts"]), reverse=True)


def test_a_peak_that_was_worked_out_by_hand(tmp_path: Path) -> None:
    data = shown(synthetic.synthetic_run(tmp_path / "run"))
    peak = data["processes"][0]["peak"]
    residue = synthetic.PEAK_ALLOCATED - sum(synthetic.KINDS.values())
    assert {part["kind"]: part["bytes"] for part in peak["parts"]} == {**synthetic.KINDS, "residue": residue}
    said = " ".join(sentence["en"] for sentence in peak["says"])
    assert "Peak: 20K allocated, in update_actor/backward (micro-batch 1)." in said
    assert "optimizer 7.8K (40%)" in said  # 8000 of 20,000 bytes
    assert (
        "reserved at most 24K, of which 4.9K (20.0%)" in said
    )  # 25,000 throughout; the fullest reading has 20,000 of them
    assert all(set(sentence) == {"en", "zh"} for sentence in peak["says"])


def test_the_largest_tensors_are_those_that_live_at_the_peak(recorded: Path, first: Data) -> None:
    """What lives by its births and deaths is at least what the kinds say, for a storage may have been counted under two names."""
    with book(recorded) as opened:
        data = first
        (peak,) = [
            row for row in opened.seen("FROM peaks") if (row["step"], row["rank"]) == (data["step"], data["rank"])
        ]
        everything = opened.ledger.rows(
            "SELECT kind, sum(bytes)::BIGINT AS bytes FROM (SELECT storage, any_value(kind) AS kind, max(bytes) AS bytes, min(t_ns) FILTER (event = 'born') AS born, "
            "max(t_ns) FILTER (event = 'freed') AS freed FROM storages GROUP BY storage) WHERE born <= $at AND (freed IS NULL OR freed > $at) GROUP BY kind",
            {"at": opened.ledger.rows("SELECT max(t_ns) AS at FROM memory_readings WHERE instant = 'peak' AND stage = ? AND known = ?", [peak["stage"], peak["known"]])[0]["at"]},
        )  # fmt: skip
    named = data["processes"][0]["peak"]["tensors"]
    most = {row["kind"]: row["bytes"] for row in everything}
    for kind in ("activation", "optimizer", "grad"):
        mine = sum(row["bytes"] for row in named if row["kind"] == kind)
        assert 0 < mine <= most[kind]
        assert most[kind] == pytest.approx(peak[kind], rel=0.05)  # the kind of a storage may become known later


def test_ranks_are_spread_by_what_they_hold(two_ranks: Path) -> None:
    data = shown(two_ranks)
    spread = {(row["stage"], row["rank"]): row["bytes"] // MIB for row in data["ranks_spread"]}
    assert spread == {("rollout", 0): 30, ("rollout", 1): 40, ("update_actor", 0): 80, ("update_actor", 1): 90}
    assert data["ranks"][0] == {"rank": 1, "why": "highest", "alike": None}
    assert data["ranks"][1] == {"rank": 0, "why": "lowest", "alike": None}
    assert "ranks" in data["charts"]


def test_a_limit_is_said_and_drawn(two_ranks: Path) -> None:
    process = shown(two_ranks, Choice(step=0, rank=1))["processes"][0]
    said = " ".join(sentence["en"] for sentence in process["peak"]["says"])
    assert "80% of the limit of 100M; 20M are left" in said  # live tensors at the peak: 30 + 20 + 30
    datums = [
        layer["encoding"]["y"].get("datum") for layer in process["charts"]["kinds"]["layer"] if "y" in layer["encoding"]
    ]
    assert 100.0 in datums


def test_more_than_the_limit_does_not_fit() -> None:
    assert "1.0G more than the limit of 4.0G: it does not fit" in memory_peak._under(5 * 2**30, 4 * 2**30)["en"]


# ---------------------------------------------------------------------------------------------------------------- a plan


def test_a_plan_alone_is_drawn(planned: Path) -> None:
    with book(planned) as opened:
        data = memory.data(opened, memory.choices(opened)[0])
        highest = tables.table(opened.ledger, "memory", step=data["step"]).summary["peak"]
    process = data["processes"][0]
    assert data["source"] == "plan"
    assert process["peak"]["bytes"] == highest["peak"]
    assert process["peak"]["says"][0]["en"].startswith("Planned peak: ")
    assert data["estimates"] == []
    assert "stages" not in process["charts"]


def test_slots_of_a_planned_cache_make_up_its_pool(planned: Path) -> None:
    """Qwen3-8B: 36 layers, 8 heads of 128 for keys and as many for values, over two ranks, 2 bytes each."""
    peak = shown(planned)["processes"][0]["peak"]
    row = next(one for one in peak["tensors"] if one["tensor_name"] == "kv_cache")
    pool = next(one["bytes"] for one in peak["parts"] if one["kind"] == "kv_cache")
    slots, _, positions, _ = row["local_shape"]
    slot = 36 * 2 * 4 * positions * 128 * 2
    assert (row["layers"], row["each"], row["storages"]) == (36, 2, 72)
    assert row["bytes"] * row["storages"] == row["total_bytes"] == slots * slot
    assert 0 <= pool - row["total_bytes"] < slot
    assert f"{slots} slots of {positions:,} positions" in peak["pool"]["en"] and str(slots) in peak["pool"]["zh"]
    weights = next(one for one in peak["tensors"] if one["tensor_name"] == "updated_params")
    assert weights["bytes"] == 2 * weights["local_shape"][0]  # of one and the same layer


@pytest.mark.parametrize(
    ("name", "dims", "many"),
    [
        ("kv_cache", "B_slot, K, S_cache, D", 2),
        ("kv_cache", "L, 2, B_slot, K, S_cache, D", 1),
        ("params", "P", 1),
        ("mine", None, 1),
    ],
)
def test_a_layer_has_as_many_of_a_form_as_the_flow_stacks(name: str, dims: str | None, many: int) -> None:
    assert memory_peak.pieces(name, dims) == many


def test_what_was_planned_stands_beside(recorded: Path, planned: Path) -> None:
    data = shown(recorded, plan=planned)
    with Ledger(planned) as ledger:
        rows = tables.table(ledger, "memory", step=0).rows
    peaks = {row["stage"]: row["allocated"] for row in rows if row["instant"] == "peak"}
    process = data["processes"][0]
    drawn = {row["stage"]: row["planned"] for row in unpacked(process["readings"]) if row.get("planned") is not None}
    assert drawn == {stage: peaks[stage] for stage in drawn}
    assert {"rollout", "update_actor"} <= drawn.keys()
    planned_update = next(row for row in process["stages"] if (row["stage"], row["source"]) == ("update_actor", "plan"))
    (row,) = [row for row in rows if (row["stage"], row["instant"]) == ("update_actor", "peak")]
    assert planned_update["whole"] == row["known"] - (row["residue"] or 0) or planned_update["whole"] == row["known"]


def test_a_rank_of_the_plan_stands_for_those_after_it() -> None:
    """A plan has the first rank of each class: that of rank 5 is the last one that is not after it."""
    rows = [
        {"rank": 0, "step": 0, "stage": "rollout", "allocated": 1, "known": None},
        {"rank": 4, "step": 0, "stage": "rollout", "allocated": 2, "known": None},
        {"rank": 4, "step": 1, "stage": "rollout", "allocated": 3, "known": None},
        {"rank": 8, "step": 0, "stage": "rollout", "allocated": 4, "known": None},
    ]
    empty = dict.fromkeys(KINDS)
    planned = [{**row, **empty, "source": "plan"} for row in rows]

    class Planned:
        def rows(self, *_: Any) -> list[Data]:
            return planned

    made = Book(ledger=Planned())  # type: ignore[arg-type]  # asked for the plan's rows alone
    assert memory_ranks.planned(made, 0, 5)["rollout"]["bytes"] == 2
    assert memory_ranks.planned(made, 7, 5)["rollout"]["bytes"] == 3  # all later steps are like the second
    assert memory_ranks.planned(made, 0, 3)["rollout"]["bytes"] == 1


# ---------------------------------------------------------------------------------------------------------------- what is lacking


def test_without_memory_it_says_so(tmp_path: Path) -> None:
    data = shown(written(tmp_path / "run", [[]]))
    assert data["absent"]
    assert "neither recorded nor planned" in data["missing"][0]["en"]


def test_a_log_has_what_its_report_said(imported: Path) -> None:
    data = shown(imported)
    (process,) = data["processes"]
    assert data["rank"] is None
    assert "untold" in {
        name
        for layer in process["charts"]["kinds"]["layer"]
        for part in layer.get("transform", [])
        for name in part.get("fold", [])
    }
    assert not process["peak"]["parts"]


def test_a_step_nobody_watched_says_so(tmp_path: Path) -> None:
    watched = reading(1, "rollout", "peak", param=3, total=(4, 5, None))
    others = [*reading(2, "rollout", "end", step=1, total=(4, 5, None))]
    run = written(tmp_path / "run", [[*watched, *others]])
    assert shown(run)["missing"] == []
    assert "No operator was watched in this step" in shown(run, Choice(step=1, rank=0))["missing"][0]["en"]
    never = written(tmp_path / "never", [others])
    assert "No operator was watched in this run" in shown(never)["missing"][0]["en"]


def test_what_is_not_there_is_said(recorded: Path) -> None:
    data = shown(recorded, Choice(step=99, rank=0))
    assert data["absent"]
    assert "step 99" in data["missing"][0]["en"]


def test_so_many_readings_that_the_fullest_are_drawn(tmp_path: Path) -> None:
    rows = [row for at in range(300) for row in reading(at, "update_actor", "end", param=10, activation=at)]
    rows = [_at(row, row.t_ns) for row in rows]
    data = shown(written(tmp_path / "run", [rows]))
    assert len(data["processes"][0]["readings"]["rows"]) == 1
    assert any("300 readings" in sentence["en"] for sentence in data["missing"])


def _at(row: MemoryRow, micro_batch: int) -> MemoryRow:
    row.micro_batch = micro_batch
    return row


def test_residue_that_would_hide_the_rest_has_a_chart_of_its_own(first: Data, two_ranks: Path) -> None:
    process = first["processes"][0]  # on a CPU the process itself is a hundred times as much
    assert process["hides"]
    assert {"kinds", "residue"} <= process["charts"].keys()
    assert not shown(two_ranks)["processes"][0]["hides"]


def test_a_peak_of_the_whole_process_is_not_drawn_where_residue_is_left_out() -> None:
    """It would stretch the axis until nothing else were seen."""
    rows = [{"known": 3, "allocated": None}, {"known": 5, "allocated": 900, "peak": 900}]
    assert [row.get("peak") for row in memory_course.drawn(rows, "kinds", hides=True)] == [None, None]
    assert [row.get("peak") for row in memory_course.drawn(rows, "residue", hides=True)] == [900]
    assert [row.get("peak") for row in memory_course.drawn([{"known": 5, "peak": 5}], "kinds", hides=True)] == [5]


# ---------------------------------------------------------------------------------------------------------------- parts


def test_bands_are_stretches_of_one_stage() -> None:
    rows = [
        {
            **dict.fromkeys((*memory_course.PLACE, *KINDS, "known", "allocated")),
            "stage": stage,
            "t_ns": at,
            "instant": str(at),
        }
        for at, stage in enumerate(["rollout", "rollout", None, "rollout"])
    ]
    drawn = memory_course.course([*reversed(rows)], rows[:2])
    assert [row["band"] for row in drawn] == [0, 0, 1, 2]
    assert [row["at"] for row in drawn] == [0, 1, 2, 3]
    assert [row["listed"] for row in drawn] == [0, 1, None, None]


def test_micro_batches_of_equal_size_show_nothing() -> None:
    place = {"stage": "update_actor", "phase": "forward", "epoch": 0, "mini_batch": 0, "allocated": None}
    batches = [{**place, "micro_batch": at, "tokens": tokens} for at, tokens in enumerate((100, 105))]
    rows = [{**place, "micro_batch": at, "known": known} for at, known in ((0, 5), (0, 7), (1, 9))]
    assert memory_ranks.by_tokens(batches, rows) == []
    batches[1]["tokens"] = 150
    found = [(row["tokens"], row["bytes"]) for row in memory_ranks.by_tokens(batches, rows)]
    assert found == [(100, 7), (150, 9)]


def test_micro_batches_are_read_with_their_tokens(tmp_path: Path) -> None:
    span = SpanRow(t_ns=2, step=0, stage="update_actor", epoch=0, mini_batch=0, micro_batch=1, id=3, name="micro_batch", span_kind="compute", event="whole", start_ns=1, end_ns=2, tokens_computed=77)  # fmt: skip
    with book(written(tmp_path / "run", [[span]])) as opened:
        (row,) = memory_ranks.micro_batches(opened, [0])
    assert (row["micro_batch"], row["tokens"]) == (1, 77)


def test_packed_rows_come_back() -> None:
    rows = [{"a": 1, "b": None, "c": "x"}, {"a": None, "b": None}]
    held = packed(rows, ("a", "b", "c"))
    assert held["names"] == ["a", "c"]
    assert unpacked(held) == [{"a": 1, "c": "x"}, {"a": None, "c": None}]


def test_a_rank_whose_peak_is_not_kept_has_that_of_its_readings(two_ranks: Path) -> None:
    """Of a very large run the view `peaks` has the highest of each step alone."""
    with book(two_ranks) as opened:
        peaks = opened.seen("FROM peaks")
        opened.ledger.stand_in("peaks", [row for row in peaks if row["rank"] == 1], [0])
        data = memory.data(opened, Choice(rank=0))
    (of_rank,) = [row["peak"] for row in peaks if row["rank"] == 0]
    assert data["step"] == 0
    assert data["processes"][0]["peak"]["bytes"] == of_rank == 70 * MIB


# ---------------------------------------------------------------------------------------------------------------- charts

SPECS = {
    "kinds": memory_charts.by_kind(["param", "untold"], instants=12, most=3 * MIB, planned=True, limit=4 * MIB, peak_at=3),
    "allocator": memory_charts.allocator(["allocated", "residue"], instants=12, most=3 * MIB, limit=4 * MIB),
    "stages": memory_stage_charts.by_stage(["param"], most=3 * MIB, stages=["rollout"]),
    "ranks": memory_stage_charts.over_ranks(most=3 * MIB, stages=["rollout"]),
    "tokens": memory_stage_charts.by_tokens(most=3 * MIB),
}  # fmt: skip
ROW = {
    "at": 0, "band": 0, "stage": "rollout", "phase": None, "instant": "end", "param": 2 * MIB, "untold": None, "planned": 3 * MIB, "peak": 2 * MIB,
    "allocated": 2 * MIB, "residue": None, "source": "run", "whole": 2 * MIB, "rank": 0, "bytes": MIB, "tokens": 9, "chosen": False,
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_vega_takes_every_chart(name: str) -> None:
    import vl_convert

    spec = dressed(SPECS[name], "zh")
    assert "var(--" not in json.dumps(spec)
    assert '"zh"' not in json.dumps(spec)
    svg = vl_convert.vegalite_to_svg({**spec, "width": 300, "data": {"values": [ROW]}})
    assert svg.count("<path") > 3


def test_kinds_are_stacked_in_their_order_and_have_colours_in_both_lights() -> None:
    for dark in (False, True):
        seen = [colours(dark=dark)[kind] for kind in KINDS]
        assert len(set(seen)) == len(KINDS)
    spec = dressed(memory_charts.by_kind([*KINDS], instants=12, most=MIB))
    (stack,) = [
        layer for layer in spec["layer"] if "color" in layer["encoding"] and "scale" in layer["encoding"]["color"]
    ]
    assert stack["encoding"]["color"]["scale"] == {"domain": [*KINDS], "range": [colours()[kind] for kind in KINDS]}
    assert stack["encoding"]["y"]["stack"] == "zero"
    assert stack["encoding"]["y"]["title"] == "MiB"


@pytest.mark.parametrize(("width", "named"), [(1100, 9), (300, 5), (120, 2)])
def test_names_of_stages_never_lie_on_each_other(width: int, named: int) -> None:
    instants = [1, 2, 1, 2, 3, 9, 9, 3, 24, 3]  # of the stages of a step; the ninth is the longest
    rows = [
        {**ROW, "at": at, "band": band, "stage": f"stage{band}"}
        for at, band in enumerate(band for band, count in enumerate(instants) for _ in range(count))
    ]
    spec = memory_charts.by_kind(["param"], instants=len(rows), most=3 * MIB)
    drawn = vl_convert.vegalite_to_svg(dressed({**spec, "width": width, "data": {"values": rows}}))
    places = [(float(x), name) for x, name in re.findall(r"translate\(([\d.]+),-[\d.]+\)[^>]*>(stage\d)<", drawn)]
    assert len(places) >= named
    assert "stage8" in {name for _, name in places}
    xs = sorted(x for x, _ in places)
    assert all(
        after - before >= 24 for before, after in itertools.pairwise(xs)
    )  # slanted by 32 degrees: 12 px between their lines


def test_a_limit_far_off_is_not_drawn() -> None:
    near, far = (
        len(memory_charts.by_kind(["param"], instants=3, most=MIB, limit=limit)["layer"])
        for limit in (2 * MIB, 900 * MIB)
    )
    assert near == far + 2


@pytest.mark.parametrize(
    ("most", "named"), [(2**40, "TiB"), (2**30, "GiB"), (2**30 - 1, "MiB"), (5000, "KiB"), (7, "B")]
)
def test_sizes_have_the_unit_in_which_they_are_read(most: int, named: str) -> None:
    assert memory_charts.unit(most)[1] == named


# ---------------------------------------------------------------------------------------------------------------- the page


def test_a_link_opens_a_stage_with_the_rows_of_show(made: Made, opened: Open, recorded: Path) -> None:
    with Ledger(recorded) as ledger:
        told = tables.table(ledger, "memory", step=0, stage="update_actor").rows
    from playwright.sync_api import expect

    page = opened(made(recorded), "#memory?stage=update_actor&step=0&rank=0")
    rows = page.locator(".memory-rows tbody tr")
    assert rows.count() == len(told)
    assert page.locator("#memory .controls select").last.input_value() == "update_actor"
    page.wait_for_selector("#memory .chart svg")
    page.locator("#memory .controls select").last.select_option("rollout")
    page.wait_for_url("**stage=rollout**")
    expect(rows.first).to_contain_text("rollout")
    page.go_back()
    expect(rows).to_have_count(len(told))
    page.locator("#memory figure").first.locator("svg path[aria-label*='place: rollout']").last.dispatch_event("click")
    page.wait_for_url("**stage=rollout**")
    expect(rows.first).to_contain_text("rollout")


def test_tensors_without_a_name_say_what_they_are_for(made: Made, opened: Open, recorded: Path) -> None:
    page = opened(made(recorded), "#memory")
    found = page.locator(".memory-apart > div").nth(1)
    unnamed = found.locator("td .absent").all_inner_texts()
    assert unnamed and set(unnamed) <= {english for english, _ in KINDS.values()}
    assert "no stage hands on" in found.inner_text()


def test_it_speaks_chinese_and_fits_a_phone(made: Made, opened: Open, planned: Path) -> None:
    page = opened(made(planned), "#memory", lang="zh", width=390, dark=True)
    page.wait_for_selector("#memory .chart svg")
    assert page.locator(".memory-peak strong").inner_text().startswith("计划峰值：")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
