"""Parquet and CSV have the ledger's rows and views, and stand nowhere that is not theirs."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.show import export_tables
from flowledger.show.export_files import MARK
from flowledger.show.tables import table
from tests.ledger.synthetic import synthetic_run

EMPTY = {"tables/findings", "views/requests", "views/findings"}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(synthetic_run(tmp_path_factory.mktemp("tables") / "a"), external_access=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def places(ledger: Ledger, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All of it as Parquet, and some views as CSV."""
    found = {form: tmp_path_factory.mktemp("export") / form for form in export_tables.FORMS}
    (said,) = export_tables.write(ledger, "parquet", found["parquet"])
    assert all(name in said for name in EMPTY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export_tables, "VIEWS", {name: export_tables.VIEWS[name] for name in ("samples", "shapes")})
        export_tables.write(ledger, "csv", found["csv"])
    return found


def parquet(file: Path, sql: str = "SELECT *") -> list[tuple[Any, ...]]:
    return duckdb.sql(f"{sql} FROM read_parquet('{file}')").fetchall()


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def test_a_file_a_table_and_one_a_view(places: dict[str, Path]) -> None:
    expected = {f"tables/{name}" for name in export_tables.TABLES} | {f"views/{name}" for name in export_tables.VIEWS}
    place = places["parquet"]
    assert {str(path.relative_to(place).with_suffix("")) for path in place.rglob("*.parquet")} == expected - EMPTY


def test_rows_are_those_of_the_ledger_in_their_order(ledger: Ledger, places: dict[str, Path]) -> None:
    for name in ("spans", "tensors", "tokens", "memory"):
        rows = [tuple(row.values()) for row in ledger.rows(f"FROM {name}")]
        assert parquet(places["parquet"] / "tables" / f"{name}.parquet") == rows
        assert len(read(places["csv"] / "tables" / f"{name}.csv")) == len(rows)
    codec = duckdb.sql(
        f"SELECT DISTINCT compression FROM parquet_metadata('{places['parquet'] / 'tables' / 'spans.parquet'}')"
    ).fetchall()
    assert codec == [("ZSTD",)]


@pytest.mark.parametrize("name", ["stages", "shapes"])
def test_views_are_what_show_prints(ledger: Ledger, places: dict[str, Path], name: str) -> None:
    shown = table(ledger, name)
    columns = [column.name for column in shown.columns]
    listed = ", ".join(f'"{column}"' for column in columns)
    rows = parquet(places["parquet"] / "views" / f"{name}.parquet", f"SELECT {listed}")
    assert rows == [tuple(row[column] for column in columns) for row in shown.rows]


def test_csv_has_lists_and_maps_as_json(ledger: Ledger, places: dict[str, Path]) -> None:
    samples = {row["sample_id"]: row for row in read(places["csv"] / "views" / "samples.csv")}
    assert json.loads(samples["1"]["rewards"]) == {"task": 0.0} and json.loads(samples["5"]["versions"]) == [1]
    assert json.loads(samples["2"]["trained"])[0]["micro_batch"] == 1
    shapes = read(places["csv"] / "views" / "shapes.csv")
    assert json.loads(shapes[0]["logical_shape"]) == [2, 4] and shapes[0]["layers"] == "0"


def test_an_export_of_ours_is_written_anew_and_nothing_else_is_touched(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_tables, "VIEWS", {"log": "log"})
    place = tmp_path / "it's here"
    export_tables.write(ledger, "csv", place)
    export_tables.write(ledger, "parquet", place)
    assert not list(place.rglob("*.csv")) and len(list(place.rglob("*.parquet"))) == 9
    (place / "mine.txt").write_text("kept")
    with pytest.raises(BadInput, match=r"not all of it is an export of ours \(mine.txt\)"):
        export_tables.write(ledger, "csv", place)
    assert (place / "mine.txt").read_text() == "kept" and list(place.rglob("*.parquet"))
    told = json.loads((place / MARK).read_text())
    (place / MARK).write_text(json.dumps(told | {"files": ["../victim", "/etc/hostname", "mine.txt"]}))
    (tmp_path / "victim").write_text("kept")
    with pytest.raises(BadInput, match="not empty"):
        export_tables.write(ledger, "csv", place)
    assert (tmp_path / "victim").exists() and (place / "mine.txt").exists()


def test_a_place_that_cannot_be_is_one_clear_line(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for place, said in (
        (None, "name a directory for them with -o DIR"),
        (tmp_path / "full", "not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "inside", "cannot write"),
    ):
        with pytest.raises(BadInput, match=said) as error:
            export_tables.write(ledger, "parquet", place)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", export_tables.FORMS)
def test_a_view_that_cannot_be_made_is_left_out_and_named(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    large = "(SELECT unnest([9223372036854775807, 1]) + 1 AS bytes)"
    monkeypatch.setattr(export_tables, "VIEWS", {"large": large, "stages": "stages"})
    said = export_tables.write(ledger, form, tmp_path / form)
    assert said[0] == "views/large of a cannot be made, a number in its rows is too large: left out"
    assert [path.name for path in (tmp_path / form / "views").iterdir()] == [f"stages.{form}"]
    noted = json.loads((tmp_path / form / MARK).read_text())["files"]
    assert f"views/stages.{form}" in noted and f"views/large.{form}" not in noted
