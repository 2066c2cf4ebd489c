"""Where measured lengths come from: a file of samples, or a run's own ledger."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.plan.lengths import Lengths, of_samples, parse

RESPONSE = ("response_length", "response_lengths", "response_len", "completion_length")
PROMPT = ("prompt_length", "prompt_lengths", "prompt_len")


def read_lengths(text: str) -> Lengths:
    """`p50=…,max=…`, a .json/.jsonl/.csv/.parquet file, or a run's directory.

    A file holds plain numbers, or rows with `response_length` and perhaps `prompt_length`. Raises BadInput.
    """
    path = Path(text)
    if path.is_dir():
        return _of_run(path)
    if "=" in text and not path.exists():
        return parse(text)
    if not path.is_file():
        raise BadInput(f"--lengths {text!r}: no such file or run; or give p50=512,p99=4096,max=8192")
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise BadInput(f"--lengths {text!r}: a file is one of {', '.join(readers)}")
    try:
        rows = list(readers[path.suffix](path))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error, duckdb.Error) as error:
        raise BadInput(f"--lengths {text!r}: cannot read it: {str(error).splitlines()[0]}") from None
    return _of_rows(rows, text)


def _of_run(path: Path) -> Lengths:
    with Ledger(path) as ledger:
        rows = ledger.rows(
            "SELECT sample_id, attempt, max(response_length) AS response_length, max(prompt_length) AS prompt_length "
            "FROM samples GROUP BY ALL HAVING max(response_length) IS NOT NULL ORDER BY sample_id, attempt"
        )
    return _of_rows(rows, str(path))


def _of_rows(rows: list[Any], source: str) -> Lengths:
    if not rows:
        raise BadInput(f"--lengths {source!r}: no samples in it")
    if not isinstance(rows[0], Mapping):
        return of_samples([_number(row, source) for row in rows], None, source)
    response = next((name for name in RESPONSE if name in rows[0]), None)
    prompt = next((name for name in PROMPT if rows[0].get(name) is not None), None)
    if response is None:
        raise BadInput(f"--lengths {source!r}: no column response_length; it has {', '.join(map(str, rows[0]))}")
    responses = [_number(row.get(response), source) for row in rows if isinstance(row, Mapping)]
    prompts = [_number(row.get(prompt), source) for row in rows if isinstance(row, Mapping)] if prompt else None
    return of_samples(responses, prompts, source)


def _number(value: object, source: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) else float("nan")
    except ValueError:
        number = float("nan")
    if isinstance(value, bool) or not 0 <= number < 10**9:
        raise BadInput(f"--lengths {source!r}: {value!r} is no number of tokens")
    return number


def _json(path: Path) -> Iterable[Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, Mapping):  # columns: {"response_length": [...], "prompt_length": [...]}
        columns = {name: values for name, values in data.items() if isinstance(values, list)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return data if isinstance(data, list) else [data]


def _jsonl(path: Path) -> Iterable[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _csv(path: Path) -> Iterable[Any]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if rows and len(rows[0]) == 1 and rows[0][0].strip().replace(".", "", 1).isdigit():
        return [row[0] for row in rows if row]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row] if rows else []


def _parquet(path: Path) -> Iterable[Any]:
    relation = duckdb.connect().from_parquet(str(path))
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
