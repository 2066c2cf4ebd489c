"""Problems from JSONL and Parquet files; every complaint names the file and the line or row."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from flowledger.config.schema import Data
from flowledger.flow.errors import BadInput, nearest
from flowledger.run.problems import Problem

Record = dict[str, Any]


def read(settings: Data) -> tuple[Problem, ...]:
    """Every problem of `data.path`. Raises BadInput for a file that is missing, empty or malformed."""
    path = Path(settings.path or "").expanduser()
    if not path.is_file():
        raise BadInput(f"data.path = {settings.path!r}: there is no such file (seen from {Path.cwd()})")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise BadInput(f"data.path = {settings.path!r} ends in {path.suffix!r}; it must be .jsonl or .parquet")
    records = readers[path.suffix](path)
    problems = tuple(_problem(record, where, index, settings) for index, (where, record) in enumerate(records))
    if not problems:
        raise BadInput(f"data.path = {settings.path!r} holds no prompts; it must have at least one")
    return problems


def _jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start}; write the file as UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{path}:{number}: not JSON at column {error.colno} ({error.msg}); one object a line"
            ) from None
        if not isinstance(record, dict):
            raise BadInput(f'{path}:{number}: a {type(record).__name__}, must be an object such as {{"prompt": "…"}}')
        yield f"{path}:{number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    with duckdb.connect() as connection:
        try:
            found = connection.execute("select * from read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description or ()]
            rows = found.fetchall()
        except duckdb.Error as error:
            raise BadInput(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}:row {number}", dict(zip(names, row, strict=True))


def _problem(record: Record, where: str, index: int, settings: Data) -> Problem:
    prompt = _lookup(record, settings.prompt_key)
    if prompt is None:
        near = nearest(settings.prompt_key, record)
        raise BadInput(f"{where}: no key {settings.prompt_key!r} (data.prompt_key); it has {', '.join(record)}{near}")
    messages = _messages(prompt, where) if isinstance(prompt, list) else None
    if messages is None and not isinstance(prompt, str):
        raise BadInput(f"{where}: the prompt is a {type(prompt).__name__}; it must be a text or a list of messages")
    text = "\n\n".join(message["content"] for message in messages) if messages else prompt
    if not text.strip():
        raise BadInput(f"{where}: the prompt is empty; remove the line or give it a text")
    answer = _lookup(record, settings.answer_key)
    if answer is None and settings.answer_key != Data.model_fields["answer_key"].default:
        near = nearest(settings.answer_key, record)
        raise BadInput(f"{where}: no key {settings.answer_key!r} (data.answer_key); it has {', '.join(record)}{near}")
    extra = {key: value for key, value in record.items() if key not in (settings.prompt_key, settings.answer_key)}
    return Problem(text=text, answer=answer, index=index, extra=extra, messages=messages, where=where)


def _messages(prompt: list[Any], where: str) -> tuple[dict[str, str], ...]:
    for message in prompt:
        fine = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
        if not fine:
            raise BadInput(f'{where}: {str(message)[:80]!r} is no message; write {{"role": "user", "content": "…"}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _lookup(record: Record, key: str) -> Any:
    """The value of a key; `reward_model.ground_truth` goes one level down where no key is spelled so."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    return _lookup(record[outer], inner) if dot and isinstance(record.get(outer), dict) else None
