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
    try:
        for folder, sources in (("tables", TABLES), ("views", VIEWS)):
            (place / folder).mkdir(exist_ok=True)
            for name, source in sources.items():
                if ledger.rows(f"SELECT 1 FROM {source} LIMIT 1"):
                    files.append(f"{folder}/{name}.{form}")
                    _copy(ledger, source, form, place / files[-1])
                else:
                    empty.append(f"{folder}/{name}")
        mark(place, form, ledger.run, files)
    except OSError as error:
        raise refused(place, error) from None
    except BaseException:
        for file in files:
            (place / file).unlink(missing_ok=True)
        raise
    return [f"{ledger.run} has no rows for {', '.join(empty)}: left out"] if empty else []


def _copy(ledger: Ledger, source: str, form: str, to: Path) -> None:
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
        number = re.search(r'"errno":"(\d+)"', str(error))
        why = os.strerror(int(number[1])) if number else str(error)
        raise BadInput(f"cannot write {to}: {why}; choose another place with -o") from None


def _quoted(name: str) -> str:
    return f'"{name}"'
