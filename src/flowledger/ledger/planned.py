"""Writes the expected rows of a plan into a run's directory: `plan/<table>.parquet`, one file a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import Row, columns

PROCESS = "plan"


def write(path: Path, run: str, rows: Sequence[Row]) -> None:
    """Every row into the Parquet file of its table, written aside and renamed. Raises BadInput where that is impossible."""
    tables: dict[type[Row], list[Row]] = {}
    for row in rows:
        tables.setdefault(type(row), []).append(row)
    try:
        (path / "plan").mkdir(parents=True, exist_ok=True)
        for kind, held in tables.items():
            _write_table(path / "plan" / f"{kind.table}.parquet", run, kind, held)
    except OSError as error:
        raise BadInput(f"cannot write to {path}: {error.strerror or error}") from None


def _write_table(target: Path, run: str, kind: type[Row], rows: Sequence[Row]) -> None:
    """Through newline-delimited JSON, so that columns get the types that the schema gives them and no others."""
    lines = target.with_suffix(".jsonl")
    aside = target.with_suffix(".aside")
    lines.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    types = ", ".join(f"{_text(name)}: {_text(sql)}" for name, sql in columns(kind).items())
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT {_text(run)}::VARCHAR AS run, 'plan' AS source, '{PROCESS}-r' || coalesce(rank, 0) AS process, * "
            f"FROM read_json({_text(lines)}, format = 'newline_delimited', columns = {{{types}}})) TO {_text(aside)} "
            "(FORMAT parquet, COMPRESSION zstd)"
        )
    aside.replace(target)
    lines.unlink()


def _text(value: Any) -> str:
    return "'" + str(value).replace("'", "''") + "'"
