import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowledger.flow.errors import BadInput
from flowledger.flow.rank_classes import count_of, spans
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, Row, TensorRow
from flowledger.ledger.writer import Writer
from flowledger.show import memory_lines, metric_lines, plain, terminal
from flowledger.show.allocator import held_back, most_reserved
from flowledger.show.page import memory_peak
from flowledger.show.shortage import shortages
from flowledger.show.tables import TABLES, table
from flowledger.show.words import human_bytes, human_number, human_shape, visible, written
from tests.ledger.synthetic import BINDINGS, slow_run, synthetic_run

EIGHT = [
    "stage",
    "tensor",
    "logical shape",
    "local shard shape",
    "mask / broadcast",
    "owner rank",
    "lifetime",
    "common bug",
]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(synthetic_run(tmp_path_factory.mktemp("tables") / "a")) as opened:
        yield opened


def drawn(ledger: Ledger, name: str, *, width: int = 100, wide: bool = False) -> str:
    screen = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    terminal.draw(table(ledger, name), screen, wide=wide)
    return screen.export_text()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_a_hundred_columns_and_a_run_without_rows(ledger: Ledger, tmp_path: Path, name: str) -> None:
    assert max(len(line) for line in drawn(ledger, name).splitlines()) <= 100
    create(tmp_path / "empty", Manifest(run="empty"))
    with Ledger(tmp_path / "empty") as empty:
        assert table(empty, name).rows == []
        assert "nothing recorded" in drawn(empty, name)


@pytest.mark.parametrize("name", TABLES)
def test_json_and_csv_have_the_same_columns_and_rows(ledger: Ledger, name: str) -> None:
    found = table(ledger, name)
    document = json.loads(plain.table_json(found), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (document["schema"], document["verb"], document["run"]) == (1, "show", "a")
    lines = list(csv.reader(io.StringIO(plain.table_csv(found))))
    assert lines[0] == [column.name for column in TABLES[name].columns]
    assert len(lines) - 1 == len(document["rows"]) == len(found.rows)
    assert all(list(row) == lines[0] for row in document["rows"])


def test_the_shape_table_has_the_eight_columns_in_their_order(ledger: Ledger) -> None:
    assert [column.heading for column in TABLES["shapes"].columns if not column.wide] == EIGHT
    row = json.loads(plain.table_json(table(ledger, "shapes", stage="prompt")))["rows"][0]
    assert row["logical_shape"] == [2, 4] and row["local_shape"] == [2, 4] and row["mask"] == "attention_mask"


def test_shapes_are_shown_as_symbols_and_numbers_and_bugs_whole(ledger: Ledger) -> None:
    text = drawn(ledger, "shapes")
    assert (
        "[B_prompt*G," in text
        and "S_prompt +" in text
        and "[4, 7]" in text
        and "common bug" in text
        and "…" not in text
    )
    assert "mask shape" in drawn(ledger, "shapes", width=200, wide=True)


def test_the_log_is_the_thirteen_fields(ledger: Ledger) -> None:
    with_view = ledger.query("FROM log")[0]
    assert [column.name for column in TABLES["log"].columns] == with_view


def test_memory_names_the_peak_what_it_is_made_of_and_the_estimates(ledger: Ledger) -> None:
    text = drawn(ledger, "memory")
    assert "peak 20K allocated in update_actor/backward, step 0, micro-batch 1 (at peak)" in text
    assert "made of optimizer 7.8K (40%)" in text and "at most 24K reserved when asked" in text
    assert "4.9K of that were not allocated then" in " ".join(text.split())
    summary = json.loads(plain.table_json(table(ledger, "memory")))["summary"]
    activations, cache, peak = summary["estimates"]
    assert activations["estimate"] == 2 * 28 * 8 * 4 * 17  # L * tokens computed * H * fp32 * factor
    assert cache["estimate"] == 2 * 4 * 7 * 2 * 4 * 2 * 4  # L * B * S * K * D * (keys, values) * fp32
    assert peak["estimate"] == 4000 + 4000 + 8000 + activations["estimate"] + cache["estimate"]
    assert peak["measured"] == 20_000 and peak["deviation"] == pytest.approx(peak["estimate"] / 20_000 - 1)
    assert cache["measured"] is None and cache["deviation"] is None and summary["peak"]["residue"] == 500


def test_the_balance_says_who_waited_for_whom_and_where_that_one_was(ledger: Ledger, tmp_path: Path) -> None:
    with Ledger(slow_run(tmp_path / "slow")) as several:
        text, stages = drawn(several, "balance"), drawn(several, "stages")
        found, same = (
            json.loads(plain.table_json(table(several, "balance", step=0, stage=stage)))["summary"]["waits"]
            for stage in ("filter", "reward")  # where it waited, and where the other was
        )
    said = [line for line in text.splitlines() if " waited " in line and ":" in line]
    assert said == [
        "step 0: rank 0 waited 20.0 s for rank 1 in filter (all_reduce over dp); rank 1 was in reward",
        "step 0: rank 0 waited 4.00 s for rank 1 in update_actor (all_gather over dp); rank 1 was in update_actor",
        "step 0: rank 0 waited 1.50 s for rank 1 in no stage (barrier over dp)",
    ]
    assert found == same == [{
        "step": 0, "stage": "filter", "comm_type": "all_reduce", "group": "dp", "last_rank": 1, "last_stage": "reward",
        "ranks": [0], "seconds": 20.0,
    }]  # fmt: skip
    assert "slowest" in stages and max(len(line) for line in stages.splitlines()) <= 100
    assert table(ledger, "balance").summary == {} and "slowest" not in drawn(ledger, "stages")


def test_an_estimate_without_its_inputs_is_skipped_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BINDINGS, "L", None)
    monkeypatch.delitem(BINDINGS, "L")
    with Ledger(synthetic_run(tmp_path / "b", steps=1)) as ledger:
        rows = table(ledger, "memory").summary["estimates"]
        assert [row["estimate"] for row in rows] == [None, None, None] and rows[0]["needs"] == ["L"]
        assert "left out: they need L\n" in drawn(ledger, "memory")


def run_of(
    path: Path, rows: Mapping[int, Sequence[Row]], *, mesh: Mapping[str, int] | None = None, level: str = "tensors"
) -> Path:
    """A run with these rows, rank by rank."""
    directory = create(
        path,
        Manifest(run=path.name, level=level, bindings={} if level == "import" else BINDINGS, mesh=dict(mesh or {})),
    )
    for rank, own in rows.items():
        part = directory.part("actor", rank, source="import" if level == "import" else "record")
        writer = Writer(part, capacity=1000)
        for row in own:
            writer.put(row)
        writer.close()
    directory.close("closed")
    return path


def cache(layer: int, slots: int, heads: int, positions: int, *, rank: int, step: int = 0) -> TensorRow:
    """The keys of a layer, of head size 4 in float32."""
    shape = [slots, heads, positions, 4]
    return TensorRow(
        step=step, stage="rollout", role="actor", rank=rank, t_ns=1, tensor_name="kv_cache", dims="B_slot, K, S_cache, D", layer=layer,
        local_shape=shape, dtype="float32", numel=slots * heads * positions * 4, bytes=slots * heads * positions * 16, access="write",
        kind="kv_cache",
    )  # fmt: skip


def total(allocated: int, reserved: int, *, t_ns: int, rank: int = 0, **where: Any) -> MemoryRow:
    return MemoryRow(step=0, rank=rank, t_ns=t_ns, kind="total", allocated=allocated, reserved=reserved, **where)


def test_an_estimate_of_one_rank_stands_beside_what_one_rank_had(tmp_path: Path) -> None:
    held = {0: (5, 6), 1: (3, 6)}  # slots and positions of each rank: the first is the fullest
    rows: dict[int, list[Row]] = {
        rank: [*(cache(layer, slots, 1, positions, rank=rank) for layer in (0, 1)), total(9000, 9000, t_ns=5, rank=rank, stage="rollout", instant="end")]
        for rank, (slots, positions) in held.items()
    }  # fmt: skip
    rows[0].append(cache(0, 7, 1, 9, rank=0, step=1))
    with Ledger(run_of(tmp_path / "two", rows, mesh={"tp": 2})) as ledger:
        _, kv, _ = table(ledger, "memory", step=0).summary["estimates"]
    assert (
        kv["estimate"] == kv["measured"] == 2 * 5 * 6 * 1 * 4 * 2 * 4
    )  # layers, slots, positions, heads of this rank, D, keys and values, fp32
    assert kv["deviation"] == 0


def test_the_terminal_and_the_page_name_the_same_reading_of_the_allocator(tmp_path: Path) -> None:
    rows = [
        total(1000, 5000, t_ns=1, stage="rollout", instant="begin"),
        total(4000, 8000, t_ns=2, stage="rollout", instant="end"),
        total(6000, 8000, t_ns=3, stage="update_actor", instant="end"),
        total(7000, 7500, t_ns=4, stage="weight_sync", instant="end"),
    ]
    with Ledger(run_of(tmp_path / "held", {0: rows})) as ledger:
        found = table(ledger, "memory")
        text = " ".join(drawn(ledger, "memory").split())
        readings = ledger.rows("FROM memory_readings ORDER BY t_ns")
    assert found.summary["allocator"] == most_reserved(readings)
    assert held_back(found.summary["allocator"]) == 2000  # of the two with the most reserved, the fuller one
    assert (
        "at most 7.8K reserved when asked, in update_actor, step 0 (at end); 2.0K of that were not allocated then"
        in text
    )
    (page,) = memory_peak._held_back(readings)
    assert "at most 7.8K, of which 2.0K (25.0%) were not allocated then" in page["en"]


def test_a_peak_at_the_begin_of_a_step_has_its_row_and_other_begins_have_none(tmp_path: Path) -> None:
    rows = [
        total(9000, 9500, t_ns=1, instant="begin"),
        total(10, 20, t_ns=2, stage="rollout", instant="begin"),
        MemoryRow(step=0, rank=0, t_ns=3, kind="param", allocated=10, instant="peak"),
        total(10, 20, t_ns=4, instant="end"),
        MemoryRow(step=None, rank=0, t_ns=5, kind="total", allocated=5, instant="After init"),
        MemoryRow(step=0, rank=0, t_ns=6, stage="reward", kind="total", host_used=7, instant="end"),  # a row of dots
        MemoryRow(step=1, rank=0, t_ns=7, stage="reward", kind="total", host_used=7, instant="end"),
    ]
    with Ledger(run_of(tmp_path / "begin", {0: rows})) as ledger:
        found, text = table(ledger, "memory"), drawn(ledger, "memory")
    shown = [(memory_lines.place(row).plain, row["instant"]) for row in found.rows if memory_lines.is_shown(found, row)]
    assert ("whole step", "begin") in shown and ("rollout", "begin") not in shown and ("reward", "end") not in shown
    assert ("between stages", "peak") in shown and ("whole step", "end") in shown and ("·", "After init") in shown
    assert "earlier steps are left out" not in text
    assert "in whole step, step 0 (at begin)" in " ".join(text.split()) and "between stages" in text


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.43 GiB. GPU 3 has a total capacity of 79.11 GiB of which 7.62 GiB is free.",
        "rank 0 ran out of GPU memory: 10.43 GiB more were asked for, 7.62 GiB of 79.11 GiB were free; allocated 63.90 GiB of 66.92 GiB reserved",
    ],
)  # fmt: skip
def test_what_was_asked_for_when_memory_ran_out_is_told_with_its_place(tmp_path: Path, message: str) -> None:
    found = FindingRow(
        id="crash",
        verdict="fail",
        message=message,
        step=4,
        stage="update_actor",
        phase="forward",
        t_ns=2,
        order="import",
    )
    other = FindingRow(id="crash", verdict="fail", message="ValueError: 3 is not 4", step=4, t_ns=3, order="import")
    rows: list[Row] = [
        total(1 << 36, 1 << 36, t_ns=1, stage="update_actor", phase="forward", instant="crash"),
        found,
        other,
    ]
    with Ledger(run_of(tmp_path / "oom", {0: rows})) as ledger:
        (shortage,) = table(ledger, "memory").summary["shortages"]
        text = drawn(ledger, "memory")
    assert (shortage["asked"], shortage["free"]) == (round(10.43 * 2**30), round(7.62 * 2**30))
    assert "ran out in update_actor/forward, step 4: 10G more were asked for, 7.6G were free" in text
    page = memory_peak._short(80 << 30, [shortage])
    assert "10G more were asked for, 7.6G were free; the limit is 80G" in page["en"] and "再申请 10G" in page["zh"]


def test_of_an_imported_log_no_hint_asks_for_what_an_import_cannot_have(tmp_path: Path) -> None:
    where = {"stage": "update_actor", "instant": "crash"}
    with Ledger(run_of(tmp_path / "log", {0: [total(1 << 36, 1 << 36, t_ns=1, **where)]}, level="import")) as ledger:
        text = drawn(ledger, "memory")
    assert "record.ops_every" not in text and "rough estimate" not in text and "resid:" not in text
    assert "memory snapshot" in text


def test_step_and_stage_narrow_and_wrong_ones_are_named(ledger: Ledger) -> None:
    assert {row["step"] for row in table(ledger, "stages", step=1).rows} == {1}
    assert {row["stage"] for row in table(ledger, "log", stage="reward").rows} == {"reward"}
    assert table(ledger, "shapes", step=1).rows[0]["accesses"] == 1 and table(ledger, "shapes").rows[0]["accesses"] == 2
    with pytest.raises(BadInput, match="has no step 7; it has steps 0 to 1"):
        table(ledger, "stages", step=7)
    with pytest.raises(BadInput, match="did you mean rollout"):
        table(ledger, "shapes", stage="rolout")
    with pytest.raises(BadInput, match="did you mean shapes"):
        table(ledger, "shape")


def test_a_metric_that_is_not_a_number_is_shown_and_null_in_json(ledger: Ledger) -> None:
    rows = json.loads(plain.table_json(table(ledger, "metrics", step=0)))["rows"]
    assert {row["name"]: (row["value"], row["special"]) for row in rows}["kl"] == (None, "nan")
    (line,) = [line for line in drawn(ledger, "metrics").splitlines() if line.strip().startswith("kl")]
    assert "nan" in line and "××" in line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (68_612_102_554, "68,612,102,554"), (6.861e10, "68,610,000,000"), (1986, "1,986"), (1234.56, "1,235"), (0.31416, "0.3142"), (-0.0, "0"),
        (-5e9, "-5,000,000,000"), (2.142e-08, "2.142e-8"), (6.8612e18, "6.861e18"), (1e-6, "1e-6"), (9999.6, "10,000"), (float("nan"), "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_numbers_have_their_thousands_apart_and_an_exponent_only_where_nobody_counts(value: float, text: str) -> None:
    assert human_number(value) == text


def test_times_and_shares_have_no_exponent_and_no_minus_that_says_nothing() -> None:
    assert [written(value, "seconds") for value in (-3.0, 0.9996, 9.996, 0.0123)] == [
        "-3.00 s",
        "1.00 s",
        "10.0 s",
        "12.3 ms",
    ]
    assert written(-0.0, "percent") == "0%"


def test_a_size_that_is_none_is_not_told(tmp_path: Path) -> None:
    said = FindingRow(
        id="crash", verdict="fail", message="CUDA out of memory. Tried to allocate 1.2.3 GiB", t_ns=1, order="import"
    )
    with Ledger(run_of(tmp_path / "oom", {0: [said]})) as ledger:
        assert shortages(ledger) == []


def test_words_for_people() -> None:
    sizes = [0, 523, 1023, 1024, 10_240, 1023 * 1024, 3 << 30, -2048]
    assert [human_bytes(size) for size in sizes] == ["0", "523", "1.0K", "1.0K", "10K", "1.0M", "3.0G", "-2.0K"]
    assert human_shape([4, 32], [4, 24]) == "[4, 24..32]" and human_shape([]) == "[]"
    assert visible("a b\n\x1b[31m") == "a␣b⏎�[31m"
    assert metric_lines.spark([0.0, None, 1.0]) == "▁×█"


def test_findings_stand_by_what_they_ask_for_and_say_what_was_lacking(tmp_path: Path) -> None:
    """First what fails, last what could not be checked; the column of needs is there where something was lacking."""
    said = {"held": "pass", "lacked": "skipped", "broken": "fail", "odd": "warn"}
    for name, verdicts in {"all": said, "whole": {"held": "pass", "odd": "warn"}}.items():
        book = create(tmp_path / name, Manifest(run=name))
        ink = Writer(book.part("actor", 0))
        for identity, verdict in verdicts.items():
            needs = ["record.level = tokens"] if verdict == "skipped" else None
            ink.put(FindingRow(id=identity, verdict=verdict, message=f"{identity}: a sentence", needs=needs))
        ink.close()
        book.close("closed")
    with Ledger(tmp_path / "all") as run:
        assert [row["id"] for row in table(run, "findings").rows] == ["broken", "odd", "held", "lacked"]
        lines = [line.split() for line in drawn(run, "findings").splitlines() if line.strip()]
    assert lines[0] == ["verdict", "id", "message", "needs"]
    assert lines[-1][-3:] == ["record.level", "=", "tokens"] and "·" in lines[-2]
    with Ledger(tmp_path / "whole") as run:
        assert "needs" not in drawn(run, "findings")


def several_ranks(path: Path) -> Path:
    """A step on four ranks: each holds all of a mask of which 0 and 2 make up a copy, and rank 3 has the highest peak."""
    book = create(path, Manifest(run=path.name))
    for rank in (2, 0, 3, 1):
        ink = Writer(book.part("actor", rank))
        at = {"step": 0, "stage": "update_actor", "role": "actor", "rank": rank}
        ink.put(TensorRow(
            t_ns=rank, **at, phase="forward", tensor_name="attention_mask", dims="B_micro, T", logical_shape=[4, 123456789],
            local_shape=[2, 123456789 + rank], owner_rank="0, 2", access="read",
        ))  # fmt: skip
        for instant in ("begin", "end"):
            ink.put(MemoryRow(t_ns=rank, **at, phase="forward", instant=instant, kind="total", allocated=5000 + rank, reserved=9000))  # fmt: skip
        ink.close()
    book.close("closed")
    return path


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(several_ranks(tmp_path_factory.mktemp("four") / "four")) as opened:
        yield opened


@pytest.mark.parametrize("wide", [False, True])
def test_memory_of_several_ranks_says_which_and_the_peak_on_which(four: Ledger, wide: bool) -> None:
    text = drawn(four, "memory", wide=wide)
    ends = [line.split() for line in text.splitlines() if "end" in line.split()]
    heading = next(line.split() for line in text.splitlines() if "stage" in line)
    assert "rank" in heading and [line[2] for line in ends] == ["0", "1", "2", "3"]
    assert "peak 4.9K allocated in update_actor/forward, step 0, rank 3 (at begin)" in text.replace("\n", " ")
    assert text.count("K, M, G, T are KiB, MiB, GiB, TiB") == 1


def test_one_rank_takes_no_column_for_it_and_small_sizes_no_unit(ledger: Ledger) -> None:
    assert " rank " not in drawn(ledger, "memory") and "KiB" in drawn(ledger, "memory")
    assert "KiB" not in drawn(ledger, "samples")


def test_owner_ranks_are_told_from_those_that_hold_a_copy(four: Ledger, ledger: Ledger) -> None:
    text = drawn(four, "shapes", width=200)
    assert "0, 2" in text and "held by 4" in text and "0-12:4 is every fourth rank from 0 to 12" in text
    assert "held by" not in drawn(ledger, "shapes") and "0-12:4" not in drawn(ledger, "shapes")


def test_a_number_of_a_shape_is_never_broken_over_lines(four: Ledger) -> None:
    words = drawn(four, "shapes", width=100).split()
    assert "123456789]" in words and "123456789.." in words and "123456792]" in words


def test_wide_tables_are_as_wide_as_they_need(four: Ledger) -> None:
    lines = drawn(four, "shapes", width=60, wide=True).splitlines()
    assert "local shard shape" in lines[1] and "mask / broadcast" in lines[1] and "owner rank" in lines[1]
    assert any("[2, 123456789..123456792]" in line for line in lines)


@pytest.mark.parametrize("name", ["shapes", "memory"])
def test_a_phase_may_be_named_with_its_stage(four: Ledger, name: str) -> None:
    assert {row["phase"] for row in table(four, name, stage="update_actor/forward").rows} == {"forward"}
    assert table(four, name, stage="update_actor/backward").rows == []


@pytest.mark.parametrize(
    ("name", "stage", "words"),
    [
        ("shapes", "update_actor/forwards", "update_actor has no phase 'forwards'.*did you mean forward"),
        ("shapes", "prompt/forward", "prompt has no phase 'forward'; it has load"),
        ("stages", "update_actor/forward", "stages has whole stages only; use --stage update_actor"),
    ],
)
def test_a_phase_that_is_not_there_is_named(four: Ledger, name: str, stage: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        table(four, name, stage=stage)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_query_names_its_columns_however_many(rows: int) -> None:
    names = [f"column_{number}" for number in range(40)]
    screen = Console(width=60, record=True, file=io.StringIO(), highlight=False)
    terminal.draw_result(names, [list(range(40))] * rows, screen)
    text = screen.export_text().replace("\n", " ")
    assert "…" not in text and all(re.search(rf"\b{name}\b", text) for name in names)
    assert ("no rows; the columns are column_0," in text) == (rows == 0)


@pytest.mark.parametrize(
    ("ranks", "count"),
    [([5], 1), ([0, 2], 2), ([0, 1, 2, 3, 8], 5), (list(range(0, 16, 4)), 4), ([*range(0, 40, 5), 41], 9)],
)
def test_a_list_of_ranks_is_counted_as_it_is_written(ranks: list[int], count: int) -> None:
    assert count_of(spans(ranks)) == (None if "…" in spans(ranks) else count)


def test_the_peaks_that_a_device_counts_are_told_with_their_stage(tmp_path: Path) -> None:
    book = create(tmp_path / "counted", Manifest(run="counted"))
    ink = Writer(book.part("actor", 0))
    for step, stage, allocated, reserved in ((0, "rollout", 2 << 30, 5 << 30), (1, "update_actor", 3 << 30, 4 << 30)):
        ink.put(
            MemoryRow(
                step=step, stage=stage, instant="end", kind="total", allocated=1 << 30, reserved=2 << 30,
                peak_since_stage=allocated, reserved_peak_since_stage=reserved,
            )
        )  # fmt: skip
    ink.close()
    with Ledger(book.path) as ledger:
        told = drawn(ledger, "memory")
    assert "counted by the device: at most 3.0G allocated and 4.0G reserved, in update_actor of step 1" in told
