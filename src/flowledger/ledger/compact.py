"""Compaction: the rows of a finished run's parts become one Parquet file a table.

A kill at any moment neither loses a row nor counts one twice, by one rule that the reader keeps too: where
`<table>.parquet` exists, the parts' rows of that table are in it. The file appears by a rename, whole or not at all;
only when every table has one are the parts moved to `compacted/`.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import duckdb

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import open_run
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import ROWS


def compact(path: Path | str, opened: Ledger | None = None) -> Path:
    """Compact a run, or finish an interrupted compaction. Raises BadInput for a run that is still being written.

    `opened`: its ledger, where somebody has it open with `external_access` and all that was written in it.
    """
    directory = open_run(path)
    if directory.state == "open":
        raise BadInput(f"{directory.path} is still being written (state open); compact it when the run has ended")
    try:
        with nullcontext(opened) if opened is not None else Ledger(path, external_access=True) as ledger:
            for row in ROWS:
                if not (directory.path / f"{row.table}.parquet").exists():
                    _write_table(ledger, row.table, directory.path)
        _set_parts_aside(directory.path)
    except (OSError, duckdb.IOException) as error:
        raise BadInput(f"cannot compact {directory.path}: {str(error).splitlines()[0]}") from None
    return directory.path


def _write_table(ledger: Ledger, table: str, path: Path) -> None:
    target, aside = path / f"{table}.parquet", path / f".{table}.parquet.{os.getpid()}"
    try:
        ledger.copy_table(table, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _set_parts_aside(path: Path) -> None:
    (path / "compacted").mkdir(exist_ok=True)
    for part in sorted((path / "parts").glob("*")):
        part.rename(path / "compacted" / part.name)
