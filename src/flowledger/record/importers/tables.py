"""Tables of numbers with a step in each row: what Weights & Biases exports, and what people write themselves."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import MetricRow, Row
from flowledger.record.importers import figures, jsons, trl
from flowledger.record.importers.figures import number
from flowledger.record.importers.names import MOST_NAMES, Names, table_of
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.tables.metrics import name_tables

# Columns that are the step, the best first: what a tracker counts itself is the last choice.
STEPS = (
    "train/global_step", "training/global_step", "trainer/global_step", "rollout/step", "global_step", "train/step",
    "step", "Step", "training_step", "iteration", "iter", "_step",
)  # fmt: skip
OWN = re.compile(r"_(?:runtime|timestamp|step|wandb)\b|.*__(?:MIN|MAX)$")  # a tracker's bookkeeping
TABLES = {"trl": "trl_grpo"}  # framework -> its table of names, where it has more than one
LONGEST_CELL = 1 << 20
FETCH = 2_000
PARQUET = b"PAR1"


def fits_csv(source: Source) -> bool:
    """A header with a column that is a step, and more columns."""
    header = _next(csv.reader([_first_line(source.head)], delimiter=_delimiter(source.head))) or []
    return len(header) > 1 and _step_column(header) is not None


def read_csv(source: Source, notes: Notes) -> Iterator[Row]:
    """One row of numbers a line."""
    csv.field_size_limit(LONGEST_CELL)
    lines = (f"{line}\n" for _, line in source.lines(notes))
    table = csv.reader(lines, delimiter=_delimiter(source.head))
    header = [name.strip() for name in _next(table) or ()]
    yield from _numbers(_dicts(table, header, source, notes), source, notes, header)


def fits_json_lines(source: Source) -> bool:
    return jsons.is_lines(source.head) and _step_column(jsons.first_keys(source.head)) is not None


def read_json_lines(source: Source, notes: Notes) -> Iterator[Row]:
    """One object a line; objects in it are told apart by `/`."""
    yield from _numbers((found for _, found in jsons.objects(source, notes)), source, notes)


def fits_json(source: Source) -> bool:
    """A list of objects with a step."""
    return (
        source.head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        and _step_column(jsons.first_keys(source.head)) is not None
    )


def read_json(source: Source, notes: Notes) -> Iterator[Row]:
    yield from _numbers(jsons.rows_of(jsons.elements(source, notes), notes, source.path.name), source, notes)


def fits_parquet(source: Source) -> bool:
    return source.head.startswith(PARQUET)


def parquet_rows(source: Source) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """(columns, rows) of a Parquet file. Raises BadInput for a damaged one."""
    import duckdb  # noqa: PLC0415  (only for this format)

    try:
        connection = duckdb.connect(
            config={"memory_limit": "400MB", "threads": "1", "autoinstall_known_extensions": "false"}
        )
        cursor = connection.execute("FROM read_parquet(?)", [str(source.path)])
        columns = [column[0] for column in cursor.description or ()]
    except duckdb.Error as error:
        raise BadInput(f"cannot read {source.path}: {str(error).splitlines()[0]}") from None

    def rows() -> Iterator[dict[str, Any]]:
        try:
            while fetched := cursor.fetchmany(FETCH):
                yield from (dict(zip(columns, row, strict=True)) for row in fetched)
        except duckdb.Error as error:
            raise BadInput(f"cannot read {source.path}: {str(error).splitlines()[0]}") from None

    return columns, rows()


def read_parquet(source: Source, notes: Notes) -> Iterator[Row]:
    columns, rows = parquet_rows(source)
    yield from _numbers(rows, source, notes, columns)


def _numbers(
    rows: Iterable[Mapping[str, Any]], source: Source, notes: Notes, columns: Iterable[str] | None = None
) -> Iterator[Row]:
    """The rows of a table as numbers of steps."""
    names: Names | None = None
    own: Own | None = None
    for at, row in enumerate(rows, 1):
        if names is None or own is None:
            listed = list(columns or row)
            if _step_column(listed) is None:
                raise BadInput(
                    f"{source.path}: no column is a step ({', '.join(listed[:8])}); one of {', '.join(STEPS)} is needed"
                )
            prefix = _run_prefix(listed, notes)
            names, own = names_of(listed, prefix, str(source.path), notes), Own(prefix)
        step = _step(row)
        if step is None:
            notes.skip("a row without a step", f"{source.path.name}:{at}")
            continue
        for name, cell in row.items():
            if (raw := own[name]) is None:
                continue
            if (value := cell if type(cell) is float else _number(cell)) is not None:
                yield MetricRow(name=names[raw], raw_name=raw, value=value, step=step)
            elif figures.too_large(cell):
                notes.skip(figures.TOO_LARGE, f"{source.path.name}:{at}: {name}")
    notes.columns |= names or {}


class Own(dict[str, str | None]):
    """Column -> the framework's name of the number in it; None where it is a step, or a tracker's bookkeeping."""

    def __init__(self, prefix: str):
        super().__init__()
        self._prefix = prefix

    def __missing__(self, column: str) -> str | None:
        if len(self) > MOST_NAMES:
            self.clear()
        bare = column.removeprefix(self._prefix)
        name = None if column in STEPS or OWN.fullmatch(bare) else bare
        self[column] = name
        return name


def _known(notes: Notes) -> str | None:
    """The table of the framework that other files, or the user, have named."""
    framework = notes.framework or notes.assumed
    return TABLES.get(framework, framework) if framework in name_tables() or framework in TABLES else None


def names_of(columns: Iterable[str], prefix: str, where: str, notes: Notes) -> Names:
    """The names of the framework whose columns these are; where they do not say, of the one that is known already."""
    table = table_of(name.removeprefix(prefix) for name in columns) or _known(notes)
    if table == "trl_grpo":
        table = trl.table_of(where, notes)
    if table is not None:
        notes.of("trl" if table.startswith("trl") else table)
    return Names(table, strip="train/", plain=True)


def _dicts(table: Iterator[list[str]], header: list[str], source: Source, notes: Notes) -> Iterator[dict[str, str]]:
    while True:
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            notes.skip(f"a line that is no CSV ({error})", source.path.name)
            continue
        if len(cells) > len(header):
            notes.skip("a line with more cells than the header", source.path.name)
        yield dict(zip(header, cells, strict=False))


def _next(table: Iterator[list[str]]) -> list[str] | None:
    try:
        return next(table, None)
    except csv.Error:
        return None


def _step_column(columns: Iterable[str]) -> str | None:
    there = set(columns)
    return next((name for name in STEPS if name in there), None)


def _step(row: Mapping[str, Any]) -> int | None:
    for name in STEPS:
        if (step := figures.step(_number(row.get(name)))) is not None:
            return step
    return None


def _number(cell: Any) -> float | None:
    """A cell as a number; None where it is none."""
    if isinstance(cell, int | float):
        return figures.finite(cell)
    if isinstance(cell, str) and cell and len(cell) < 64:
        try:
            return float(cell)
        except ValueError:
            return _unusual(cell)
    return float(cell) if hasattr(cell, "as_tuple") else None  # Decimal, of Parquet


def _unusual(cell: str) -> float | None:
    """`True`, `tensor(0.5)`; None for text, which most of these are."""
    try:
        return number(cell)
    except ValueError:
        return None


def _run_prefix(columns: Iterable[str], notes: Notes) -> str:
    """`run-name - ` where an export of charts puts it before each of its columns."""
    before = {name.rpartition(" - ")[0] for name in columns if name not in STEPS}
    if len(before) > 1 and "" not in before:
        runs = ", ".join(sorted(before)[:4])
        notes.remark(
            f"{len(before)} runs stand side by side in one table ({runs}): export one of them alone to have its names known"
        )
    return f"{before.pop()} - " if len(before) == 1 and "" not in before else ""


def _first_line(head: bytes) -> str:
    return head.removeprefix(b"\xef\xbb\xbf").replace(b"\r", b"\n").split(b"\n", 1)[0].decode("utf-8", "replace")


def _delimiter(head: bytes) -> str:
    line = _first_line(head)
    return max(",;\t", key=line.count)
