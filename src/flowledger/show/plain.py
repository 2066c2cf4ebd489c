"""Tables as JSON and CSV: the ledger's column names, shapes as lists, bytes as integers, null for absent, never NaN."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flowledger.show.columns import Table


def as_json(verb: str, run: str, rows: Iterable[Mapping[str, Any]], **more: Any) -> str:
    """`{"schema": 1, "verb": …, "run": …, "rows": […]}`, and what `more` adds beside the rows."""
    document = {"schema": 1, "verb": verb, "run": run, "rows": list(rows), **more}
    return json.dumps(clean(document), ensure_ascii=False, allow_nan=False)


def table_json(table: Table) -> str:
    """A table, all its columns."""
    more = {"summary": table.summary} if table.summary else {}
    return as_json("show", table.run, picked(table), table=table.name, **more)


def as_csv(names: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Lines with a header; lists and maps as JSON, absent values empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(clean(row.get(name))) for name in names] for row in rows)
    return text.getvalue()


def table_csv(table: Table) -> str:
    """A table, all its columns."""
    return as_csv([column.name for column in table.columns], table.rows)


def picked(table: Table) -> list[dict[str, Any]]:
    """The rows with the table's columns in their order, and nothing else."""
    return [{column.name: row.get(column.name) for column in table.columns} for row in table.rows]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value


_CLEAN = frozenset({str, int, bool, type(None)})  # most values: a call for each would take as long as all the rest


def clean(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [inner if type(inner) in _CLEAN else clean(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): inner if type(inner) in _CLEAN else clean(inner) for key, inner in value.items()}
    return str(value)
