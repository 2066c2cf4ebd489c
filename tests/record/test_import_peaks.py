"""verl's own peaks of memory, metrics of a step in GiB, are the peaks of an imported run."""

import json
from pathlib import Path

import pytest

from flowledger.diagnose.measures import series_of
from flowledger.ledger.reader import Ledger
from flowledger.record.importers.imported import import_into
from flowledger.show import tables

GIB = 1024**3
BUILDING = (
    "(WorkerDict pid=9) Before building vllm rollout, memory allocated (GB): 3.61, memory reserved (GB): 5.27, "
    "device memory used/total (GB): 7.11/79.11\n"
)


def step(number: int, allocated: float, reserved: float, head: str = "") -> str:
    return (
        f"(TaskRunner pid=8) step:{number} - actor/pg_loss:0.1 - {head}perf/max_memory_allocated_gb:{allocated} - "
        f"{head}perf/max_memory_reserved_gb:{reserved}\n"
    )


def imported(folder: Path, text: str, name: str = "my.log") -> Ledger:
    source = folder / name
    source.write_text(text)
    import_into([source], folder / "run")
    return Ledger(folder / "run")


@pytest.mark.parametrize("head", ["", "actor/"])
def test_the_peak_is_verl_s_and_no_reading_of_the_start(tmp_path, head):
    with imported(tmp_path, BUILDING + step(1, 58.01, 66.5, head) + step(2, 58.24, 66.5, head)) as ledger:
        assert [(row["step"], row["peak"]) for row in ledger.rows("FROM peaks ORDER BY step NULLS LAST")] == [
            (1, round(58.01 * GIB)), (2, round(58.24 * GIB)), (None, round(3.61 * GIB)),
        ]  # fmt: skip
        summary = tables.table(ledger, "memory").summary
        assert (summary["peak"]["step"], summary["allocator"]["reserved"]) == (2, round(66.5 * GIB))
        made = series_of(ledger)
        assert made.by_step("memory/allocated_peak") == pytest.approx({1: 58.01 * GIB, 2: 58.24 * GIB}, abs=1)
        assert made.by_step("memory/reserved_peak") == {1: 66.5 * GIB, 2: 66.5 * GIB}
        left = pytest.approx(1 - 66.5 / 79.11, rel=1e-6)
        assert made.by_step("memory/headroom") == {1: left, 2: left}
        assert made.by_step("memory/fragmentation") == {}  # two maxima of different moments tell of none


def test_a_reading_of_the_start_belongs_to_no_step_and_no_stage(tmp_path):
    text = BUILDING + BUILDING.replace("Before building vllm rollout", "After generate_sequences") + step(1, 58.0, 66.5)
    with imported(tmp_path, text) as ledger:
        found = {row["instant"]: (row["step"], row["stage"]) for row in ledger.rows("FROM memory")}
    assert found["Before building vllm rollout"] == (None, None)
    assert found["After generate_sequences"] == (1, "rollout")


def test_verl_s_file_logger_tells_the_same_and_a_number_that_is_none_tells_nothing(tmp_path):
    names = ("perf/max_memory_allocated_gb", "critic/perf/max_memory_allocated_gb")
    lines = [{"step": 1, "data": dict(zip(names, (40.5, 41.5), strict=True))}, {"step": 2, "data": {names[0]: None}}]
    with imported(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "metrics.jsonl") as ledger:
        assert series_of(ledger).by_step("memory/allocated_peak") == {1: 41.5 * GIB}


def test_beneath_the_table_stands_what_was_reserved_though_nothing_tells_what_was_allocated_then(tmp_path, capsys):
    from flowledger.show import terminal

    with imported(tmp_path, step(1, 58.0, 64.0)) as ledger:
        terminal.draw(tables.table(ledger, "memory"), terminal.console())
    assert "at most 64G reserved when asked, in step 1" in " ".join(capsys.readouterr().out.split())
