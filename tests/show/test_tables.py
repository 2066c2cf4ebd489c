import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.show import plain, terminal
from flowledger.show.tables import TABLES, table
from flowledger.show.words import human_bytes, human_shape, visible
from tests.ledger.synthetic import BINDINGS, synthetic_run

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
    assert "made of optimizer 7.8K (40%)" in text and "reserved 24K, of which 4.9K were not allocated then" in text
    summary = json.loads(plain.table_json(table(ledger, "memory")))["summary"]
    activations, cache, peak = summary["estimates"]
    assert activations["estimate"] == 2 * 28 * 8 * 4 * 17  # L * tokens computed * H * fp32 * factor
    assert cache["estimate"] == 2 * 4 * 7 * 2 * 4 * 2 * 4  # L * B * S * K * D * (keys, values) * fp32
    assert peak["estimate"] == 4000 + 4000 + 8000 + activations["estimate"] + cache["estimate"]
    assert peak["measured"] == 20_000 and peak["deviation"] == pytest.approx(peak["estimate"] / 20_000 - 1)
    assert cache["measured"] is None and cache["deviation"] is None and summary["peak"]["residue"] == 500


def test_an_estimate_without_its_inputs_is_skipped_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BINDINGS, "L", None)
    monkeypatch.delitem(BINDINGS, "L")
    with Ledger(synthetic_run(tmp_path / "b", steps=1)) as ledger:
        rows = table(ledger, "memory").summary["estimates"]
        assert [row["estimate"] for row in rows] == [None, None, None] and rows[0]["needs"] == ["L"]
        assert "skipped: needs L" in drawn(ledger, "memory")


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


def test_words_for_people() -> None:
    sizes = [0, 523, 1023, 1024, 10_240, 1023 * 1024, 3 << 30, -2048]
    assert [human_bytes(size) for size in sizes] == ["0", "523", "1.0K", "1.0K", "10K", "1.0M", "3.0G", "-2.0K"]
    assert human_shape([4, 32], [4, 24]) == "[4, 24..32]" and human_shape([]) == "[]"
    assert visible("a b\n\x1b[31m") == "a␣b⏎�[31m"
    assert terminal.spark([0.0, None, 1.0]) == "▁×█"
