"""A run as Parquet or CSV: a file a table, and one a view, for pandas, polars, DuckDB, R or a spreadsheet.

DuckDB writes them itself, so that no row passes through Python; CSV has lists and maps as JSON.
"""

import os
import re
from pathlib import Path

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import ROWS
from flowledger.show.export_files import directory, mark, refused
from flowledger.show.export_rows import reason

FORMS = {"parquet": "FORMAT parquet, COMPRESSION zstd", "csv": "FORMAT csv, HEADER true"}
TABLES = {**{row.table: row.table for row in ROWS}, "processes": "processes"}
# What people look at: name of the file -> the view that `show` reads.
VIEWS = {
    "shapes": "shapes", "memory": "memory_by_stage", "peaks": "peaks", "lifetimes": "lifetime_table", "stages": "stages",
    "phases": "phases", "balance": "balance_at(NULL)", "metrics_by_step": "metrics_by_step", "samples": "samples_merged",
    "tokens": "tokens_merged", "requests": "requests", "findings": "findings_view", "log": "log",
}  # fmt: skip
NESTED = ("[]", "MAP(", "STRUCT(")  # types that CSV has no form for


def write(ledger: Ledger, form: str, out: Path | None) -> list[str]:
    """Write DIR/tables/*.FORM and DIR/views/*.FORM; what is left out of them, a line. `ledger` needs `external_access`."""
    place = directory(out, form)
    files: list[str] = []
    empty: list[str] = []
    unmade: list[str] = []
    try:
        for folder, sources in (("tables", TABLES), ("views", VIEWS)):
            (place / folder).mkdir(exist_ok=True)
            for name, source in sources.items():
                files.append(f"{folder}/{name}.{form}")
                try:
                    if ledger.rows(f"SELECT 1 FROM {source} LIMIT 1"):
                        _copy(ledger, source, form, place / files[-1])
                        continue
                    empty.append(f"{folder}/{name}")
                except BadInput as error:
                    unmade.append(f"{folder}/{name} of {ledger.run} cannot be made, {reason(error)}: left out")
                (place / files.pop()).unlink(missing_ok=True)
        mark(place, form, ledger.run, files)
    except BaseException as error:
        for file in files:
            (place / file).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refused(place, error) from None
        raise
    return [*unmade, *([f"{ledger.run} has no rows for {', '.join(empty)}: left out"] if empty else [])]


def _copy(ledger: Ledger, source: str, form: str, to: Path) -> None:
    """Raises BadInput where the rows cannot be made, OSError where they cannot be written."""
    rows = f"SELECT * FROM {source}"
    if form == "csv":
        nested = [
            row["column_name"]
            for row in ledger.rows(f"DESCRIBE {rows}")
            if row["column_type"].endswith(NESTED[0]) or row["column_type"].startswith(NESTED[1:])
        ]
        if nested:
            rows = f"SELECT * REPLACE ({', '.join(f'to_json({_quoted(name)}) AS {_quoted(name)}' for name in nested)}) FROM {source}"
    try:
        ledger.rows(f"COPY ({rows}) TO '{str(to).replace(chr(39), chr(39) * 2)}' ({FORMS[form]})")
    except BadInput as error:
        if number := re.search(r'"errno":"(\d+)"', str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        if str(error).startswith("IO Error"):
            raise OSError(str(error)) from None
        raise


def _quoted(name: str) -> str:
    return f'"{name}"'
